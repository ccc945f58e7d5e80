"""What the console shows of the rank logs."""

import contextlib
import os
import signal
import subprocess
import sys
from datetime import datetime, timezone

import pytest

from ddp_runner.config import from_flat
from ddp_runner.observe.console import (
    LINES_PER_POLL_MAX,
    REPEAT_WINDOW_S,
    LogTail,
    Shown,
    hidden_levels,
)
from ddp_runner.observe.logger import HELD_BACK, LEVELS, format_record, new_seal
from ddp_runner.observe.tail import BACKLOG_BYTES_MAX, LINE_BYTES_MAX
from tests.processes import open_files_in

AT = datetime(2026, 11, 20, 19, 47, 20, tzinfo=timezone.utc)


def record(level, message, *, rank=0, step=None):
    return format_record(level, message, rank=rank, step=step, at=AT)


def append(directory, rank, text):
    with (directory / f"rank_{rank}.log").open("ab") as file:
        file.write(text if isinstance(text, bytes) else text.encode())


class Follower:
    """A LogTail with a clock that the test moves."""

    def __init__(self, directory, *, ranks=2, console="normal", debug=False, from_end=True):
        self.time_s = 0.0
        settings = from_flat({"log.console": console, "run.debug": debug})
        self.tail = LogTail(
            directory,
            ranks=range(ranks),
            shows=Shown(hidden=hidden_levels(settings)),
            from_end=from_end,
            now_s=lambda: self.time_s,
        )

    def poll(self):
        return [(line.level, line.text) for line in self.tail.poll()]

    def drain(self):
        return [(line.level, line.text) for line in self.tail.drain()]


@pytest.fixture
def follow(tmp_path):
    made = []

    def make(**options):
        made.append(Follower(tmp_path, **options))
        return made[-1]

    yield make
    for follower in made:
        follower.tail.close()


def test_rank_0_is_shown_whole_and_others_only_where_they_warn(tmp_path, follow):
    """Rank 0's INFO and raw lines are shown; of rank 1 neither, but its warnings and errors."""
    follower = follow()
    append(tmp_path, 0, record("INFO", "hello") + "raw\n\n" + record("DEBUG", "detail"))
    append(tmp_path, 1, record("INFO", "hidden", rank=1) + "raw of 1\n")
    append(tmp_path, 1, record("WARNING", "careful", rank=1, step=5) + record("ERROR", "bad\nwhy"))
    expected = [
        ("INFO", "hello"),
        ("RAW", "raw"),
        ("WARNING", "careful (rank 1, step 5)"),
        ("ERROR", "bad (rank 1)\n  why"),
    ]
    assert follower.poll() == expected
    assert follower.poll() == []


def test_the_profilers_own_stages_stay_in_the_log(tmp_path, follow):
    """Its errors are shown, and what a task prints that only begins so."""
    follower = follow()
    stamp = "2026-11-23 23:54:44 17837:17837"
    append(
        tmp_path,
        0,
        f"USDT:{stamp} SyncActivityProfilerHandler.cpp:52] profiler_start\n"
        f"STAGE:{stamp} ActivityProfilerController.cpp:312] Completed Stage: Warm Up\n"
        f"ERROR:{stamp} CuptiActivityApi.cpp:9] no permission\nUSDT: 5 of 10\n",
    )
    assert [text for _, text in follower.poll()] == [
        f"ERROR:{stamp} CuptiActivityApi.cpp:9] no permission",
        "USDT: 5 of 10",
    ]


def test_debug_shows_debug_records_of_rank_0(tmp_path, follow):
    """With debug on, rank 0's DEBUG records are shown, others' are not."""
    follower = follow(debug=True)
    append(tmp_path, 0, record("DEBUG", "detail"))
    append(tmp_path, 1, record("DEBUG", "detail of 1", rank=1))
    assert follower.poll() == [("DEBUG", "detail")]


@pytest.mark.parametrize(
    ("console", "shown"),
    [
        ("quiet", ["WARNING"]),
        ("normal", ["INFO", "WARNING"]),
        ("verbose", ["DETAIL", "INFO", "WARNING"]),
    ],
)
def test_a_console_shows_as_much_as_it_is_asked_for(tmp_path, follow, console, shown):
    """The log has all of it. What the task prints is shown at each level."""
    follower = follow(console=console)
    for level in LEVELS[:-1]:
        append(tmp_path, 0, record(level, "text"))
    append(tmp_path, 0, "printed\n")
    assert sorted(level for level, _ in follower.poll()) == sorted([*shown, "RAW"])


def test_the_same_warning_of_several_ranks_is_one_line(tmp_path, follow):
    """Four ranks that say the same are reported once, by name."""
    follower = follow(ranks=4)
    for rank in range(4):
        append(tmp_path, rank, record("WARNING", "slow disk", rank=rank, step=3))
    assert follower.poll() == [("WARNING", "slow disk (ranks 0-3, step 3)")]


def test_a_warning_that_each_rank_gives_once_is_shown_once(tmp_path, follow):
    """Also where one rank is later than another; an error, and a second warning of one rank, are counted."""
    follower = follow(ranks=2)
    for level in ("WARNING", "ERROR"):
        append(tmp_path, 0, record(level, "slow disk", rank=0))
        assert follower.poll() == [(level, "slow disk (rank 0)")]
        append(tmp_path, 1, record(level, "slow disk", rank=1))
        assert follower.poll() == []
    assert follower.drain() == [("ERROR", "slow disk (rank 1, once more)")]
    append(tmp_path, 0, record("WARNING", "slow disk", rank=0))
    assert follower.poll() == [("WARNING", "slow disk (rank 0)")]
    append(tmp_path, 1, record("WARNING", "slow disk", rank=1) * 2)
    assert follower.drain() == [("WARNING", "slow disk (rank 1, 2 times more)")]


def test_an_identical_warning_is_held_back_and_counted(tmp_path, follow):
    """Within the window a repeated warning is silent; then its count comes; others pass."""
    follower = follow()
    append(tmp_path, 1, record("WARNING", "slow disk", rank=1))
    assert follower.poll() == [("WARNING", "slow disk (rank 1)")]
    append(tmp_path, 1, record("WARNING", "slow disk", rank=1) * 40)
    append(tmp_path, 1, record("WARNING", "other", rank=1))
    assert follower.poll() == [("WARNING", "other (rank 1)")]
    follower.time_s = REPEAT_WINDOW_S
    assert follower.poll() == [("WARNING", "slow disk (rank 1, 40 times more)")]
    follower.time_s = 3 * REPEAT_WINDOW_S
    assert follower.poll() == []
    append(tmp_path, 1, record("WARNING", "slow disk", rank=1))
    assert follower.poll() == [("WARNING", "slow disk (rank 1)")]


def test_drain_shows_what_was_held_back_and_the_unfinished_line(tmp_path, follow):
    """At the end nothing stays unsaid: counts and a last line without its end included."""
    follower = follow()
    append(tmp_path, 0, record("WARNING", "w") * 3 + "no end")
    assert follower.drain() == [
        ("WARNING", "w (rank 0)"),
        ("RAW", "no end"),
        ("WARNING", "w (rank 0, 2 times more)"),
    ]


def test_a_partial_line_waits_for_its_end(tmp_path, follow):
    """Half a line, even half a character, is shown once it is whole."""
    follower = follow()
    whole = record("INFO", "grüße").encode()
    cut = whole.index("ü".encode()) + 1
    append(tmp_path, 0, whole[:cut])
    assert follower.poll() == []
    append(tmp_path, 0, whole[cut:])
    assert follower.poll() == [("INFO", "grüße")]


def test_old_content_is_skipped_and_a_late_file_read_whole(tmp_path, follow):
    """from_end concerns what was there at the start; a file that appears later is all new."""
    append(tmp_path, 0, "old\n")
    follower = follow()
    append(tmp_path, 0, "new\n")
    append(tmp_path, 1, record("ERROR", "late", rank=1))
    assert follower.poll() == [("RAW", "new"), ("ERROR", "late (rank 1)")]
    assert follow(from_end=False).poll()[0] == ("RAW", "old")


def test_a_truncated_and_a_replaced_file_are_followed(tmp_path, follow):
    """After truncation or rotation the cursor goes on at the new start, and loses no torn line."""
    follower = follow()
    append(tmp_path, 0, "a long first line\n")
    assert follower.poll() == [("RAW", "a long first line")]
    (tmp_path / "rank_0.log").write_bytes(b"b\n")
    assert follower.poll() == [("RAW", "b")]
    append(tmp_path, 0, "half")
    assert follower.poll() == []
    (tmp_path / "rank_0.log").rename(tmp_path / "rank_0.log.1")
    append(tmp_path, 0, "c\n")
    assert follower.poll() == [("RAW", "half"), ("RAW", "c")]


def test_bytes_that_are_no_text_and_escape_sequences_do_no_harm(tmp_path, follow):
    """Invalid UTF-8 is replaced; colours and cursor moves never reach the console."""
    follower = follow()
    append(tmp_path, 0, b"\xff\xfe ok\n\x1b[31mred\x1b[0m\x1b[2A\n")
    assert follower.poll() == [("RAW", "\ufffd\ufffd ok"), ("RAW", "red")]


def test_of_a_progress_bar_only_the_last_state_is_shown(tmp_path, follow):
    """Carriage returns overwrite, and a record that follows a bar is still seen as a record."""
    follower = follow()
    append(tmp_path, 0, "\r 1%\r 50%\r100%\r\n\r 10%" + record("WARNING", "w", step=2))
    assert follower.poll() == [("RAW", "100%"), ("RAW", " 10%"), ("WARNING", "w (rank 0, step 2)")]


def test_a_record_that_comes_in_two_polls_keeps_its_level(tmp_path, follow):
    """The later lines of a warning are shown as part of it, also of a rank other than 0."""
    follower = follow()
    first, second = record("ERROR", "failed\nbecause", rank=1).splitlines(keepends=True)
    append(tmp_path, 1, first)
    assert follower.poll() == [("ERROR", "failed (rank 1)")]
    append(tmp_path, 1, second)
    assert follower.poll() == [("ERROR", "  because (rank 1)")]


def test_an_endless_line_is_cut(tmp_path, follow):
    """A line beyond the bound is shown up to it; its rest is left out; the next is whole."""
    follower = follow()
    append(tmp_path, 0, b"x" * (10 * LINE_BYTES_MAX) + b"\nnext\n")
    lines = follower.drain()
    assert lines[0] == ("RAW", "x" * LINE_BYTES_MAX + " …")
    assert lines[1:] == [("RAW", "next")]


def test_a_flood_is_bounded_and_warnings_survive_it(tmp_path, follow):
    """Of a flood of raw lines a bounded number is shown with a pointer; warnings always."""
    follower = follow()
    append(tmp_path, 0, "spam\n" * 2000 + record("WARNING", "w"))
    lines = follower.poll()
    assert len(lines) == LINES_PER_POLL_MAX + 2
    assert lines[-2][1] == f"1,800 more lines stand in {tmp_path / 'rank_0.log'}"
    assert lines[-1] == ("WARNING", "w (rank 0)")


def test_a_hopeless_backlog_is_skipped_and_said(tmp_path, follow):
    """Output faster than it can be followed costs its middle, not memory, and a line says so."""
    follower = follow()
    append(tmp_path, 0, b"x" * 99 + b"\n")
    append(tmp_path, 0, (b"y" * 99 + b"\n") * (BACKLOG_BYTES_MAX // 100 + 1000) + b"end\n")
    lines = [text for _, text in follower.drain()]
    assert lines[0].startswith("4.2 MB of output are not shown; they stand in ")
    assert set(lines[1:-1]) <= {"y" * 99, *(line for line in lines if "more lines" in line)}
    assert not any(line.startswith("x") for line in lines)


WRITER = """
import os, sys
from pathlib import Path
from ddp_runner.observe.logger import DDPLogger
log = DDPLogger(rank=1, path=Path(sys.argv[1]))
for n in range(50):
    log.warning(f"number {n}")
os.write(log._fd, b"2026-11-20 19:47:20.000 WARNING rank 1 | torn in the mid")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_writer_killed_in_mid_line_hides_nothing_of_its_successor(tmp_path, follow):
    """SIGKILL between two bytes of a line: every whole line is shown once, also the successor's."""
    follower = follow()
    log = tmp_path / "rank_1.log"
    command = [sys.executable, "-c", WRITER, str(log)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        shown = []
        while not shown or shown[-1][1] != "number 49 (rank 1)":
            shown += follower.poll()
            assert writer.poll() is None
        assert writer.stdout.readline() == b"ready\n"
        os.kill(writer.pid, signal.SIGKILL)
    assert shown == [("WARNING", f"number {n} (rank 1)") for n in range(50)]
    append(tmp_path, 1, record("ERROR", "successor", rank=1))
    assert follower.poll() == [
        ("WARNING", "torn in the mid (rank 1)"),
        ("ERROR", "successor (rank 1)"),
    ]


def test_closing_leaves_no_descriptor_open(tmp_path):
    """A tail gives its files back."""
    append(tmp_path, 0, "x\n")
    tail = LogTail(tmp_path, ranks=[0], shows=Shown())
    tail.poll()
    assert len(open_files_in(tmp_path)) == 1, "control"
    tail.close()
    assert open_files_in(tmp_path) == []


def test_one_path_per_rank_may_be_given(tmp_path):
    """Paths replace the directory; their number must be the number of ranks."""
    path = tmp_path / "other.log"
    tail = LogTail([path], ranks=[0], shows=Shown())
    path.write_text("x\n")
    assert [line.text for line in tail.poll()] == ["x"]
    tail.close()
    with pytest.raises(ValueError, match="1 log paths for 2 ranks"):
        LogTail([path], ranks=range(2), shows=Shown())


def test_a_printed_line_in_the_format_of_a_record_is_raw(tmp_path):
    """Also one that was a record of an earlier run, behind a torn line, or quoted in a record."""
    seal, other, path = "123", "124", tmp_path / "rank_0.log"

    def sealed(level, message, seal=seal):
        return format_record(level, message, rank=0, step=None, at=AT, seal=seal)

    forged = record("ERROR", "forged")
    quoted = f"quoted {forged.rstrip()}"
    lines = [
        sealed("INFO", "ours"),
        forged,
        sealed("ERROR", "of an earlier run", other),
        f"torn {forged}",
        f"torn {sealed('WARNING', 'ours too')}",
        sealed("INFO", quoted),
        sealed("INFO", "x" * 20_000),
    ]
    path.write_text("".join(lines), encoding="utf-8")
    tail = LogTail([path], ranks=[0], shows=Shown(seal=seal), from_end=False)
    with contextlib.closing(tail):
        shown = tail.drain()
    alarms = [line.text for line in shown if line.level in ("WARNING", "ERROR")]
    assert alarms == ["ours too (rank 0)"]
    texts = [(line.level, line.text.split("\n")[0]) for line in shown]
    assert ("INFO", "ours") in texts
    assert ("RAW", forged.rstrip()) in texts
    assert ("INFO", "quoted ") in texts
    assert any(level == "INFO" and text.startswith("xxx") for level, text in texts)


def test_what_was_shown_before_the_log_was_followed_is_not_shown_again(tmp_path):
    """The first bytes that rank 0 adds are those that it said before it had a log; others add theirs."""
    said = os.memfd_create("said")
    os.write(said, b"one\ntwo\nhalf")
    early = LogTail([said], ranks=[0], shows=Shown())
    os.close(said)
    assert [line.text for line in early.poll()] == ["one", "two"]
    logs = [tmp_path / "rank_0.log", tmp_path / "rank_1.log"]
    logs[0].write_text("of a run before\n")
    tail = LogTail(logs, ranks=range(2), shows=Shown(), shown_bytes=early.taken_bytes(0))
    with logs[0].open("a") as log:
        log.write("one\ntwo\nhalf a line\nmore\n")
    logs[1].write_text(record("WARNING", "w", rank=1))
    assert [line.text for line in tail.poll()] == ["half a line", "more", "w (rank 1)"]
    early.close()
    tail.close()


def test_ranks_that_are_asked_for_are_shown_and_marked(tmp_path):
    """In place of rank 0, with torchrun's mark on each line."""
    paths = [tmp_path / f"rank_{rank}.log" for rank in range(3)]
    for rank, path in enumerate(paths):
        path.write_text(f"raw {rank}\n")
    shows = Shown(ranks=(1, 2), marks_lines=True)
    tail = LogTail(paths, ranks=range(3), shows=shows, from_end=False)
    with contextlib.closing(tail):
        assert [line.text for line in tail.poll()] == ["[default1]:raw 1", "[default2]:raw 2"]


def test_behind_the_record_that_holds_back_nothing_is_shown(tmp_path):
    """Of that rank; the same without the seal, and any other record, hold nothing back."""
    seal, paths = new_seal(), [tmp_path / f"rank_{rank}.log" for rank in range(2)]
    last, other = (
        format_record("DEBUG", text, rank=0, step=None, at=AT, seal=seal)
        for text in (HELD_BACK, "other")
    )
    paths[0].write_text(f"before\n{HELD_BACK}\n{other}still\n{last}Traceback\n")
    paths[1].write_text("of another\n")
    shows = Shown(seal=seal, ranks=(0, 1))
    tail = LogTail(paths, ranks=range(2), shows=shows, from_end=False)
    with contextlib.closing(tail):
        assert [line.text for line in tail.poll()] == ["before", HELD_BACK, "still", "of another"]
        with paths[0].open("a") as file:
            file.write("more of it\n")
        assert tail.poll() == []
