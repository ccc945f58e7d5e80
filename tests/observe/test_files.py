"""Journal, metrics, status and summary files on healthy and failing disks."""

import itertools
import json
import math
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.observe import files
from ddp_runner.observe.journal import Journal, MetricsFile
from ddp_runner.observe.logger import DDPLogger
from ddp_runner.observe.summary import goodput, read_summary, write_summary
from ddp_runner.observe.view import status_record
from ddp_runner.supervisor.reporting.outputs import StatusFile
from tests.observe.views import run_summary, run_view


def names_in(directory):
    return [entry.name for entry in directory.iterdir()]


def parsed(line):
    try:
        return json.loads(line)
    except ValueError:
        return None


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_carry_ids_causes_and_both_clocks(tmp_path):
    """An event's id can be named as the cause of a later one; fields never replace the head."""
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    fault = journal.write(
        "rank_exited", rank=1, status=RunStatus.FAILED, ranks=(0, 1), loss=math.nan
    )
    plan = journal.write("respawn_rank", cause=fault, rank=1, utc="mine")
    journal.close()
    first, second = read_lines(path)
    assert list(first)[:5] == ["id", "utc", "mono_s", "event", "cause"]
    assert (first["id"], first["event"], first["cause"]) == (fault, "rank_exited", None)
    assert (first["status"], first["ranks"], first["loss"]) == ("failed", [0, 1], None)
    assert (second["id"], second["cause"]) == (plan, fault)
    assert second["mono_s"] >= first["mono_s"]
    assert second["utc"].endswith("Z")


def test_ids_go_on_after_a_relaunch(tmp_path):
    """A journal that is opened again goes on counting, also behind a line torn by a crash."""
    path = tmp_path / "events.jsonl"
    first = Journal(path)
    ids = [first.write("a"), first.write("b")]
    first.close()
    with path.open("ab") as file:
        file.write(b'{"id":9')
    second = Journal(path)
    ids.append(second.write("c"))
    second.close()
    assert ids == [0, 1, 2]


def test_a_torn_last_line_does_not_swallow_the_next_record(tmp_path):
    """After a crash in the middle of a line the next record stands on a line of its own."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"id":0}\n{"id":1,"ev')
    journal = Journal(path)
    journal.write("c")
    journal.close()
    lines = path.read_text().splitlines()
    assert lines[1] == '{"id":1,"ev'
    assert json.loads(lines[2])["event"] == "c"


def full_disk(path):
    """What the kernel answers to each write there is that the disk is full."""
    return os.open("/dev/full", os.O_WRONLY)


def test_a_full_disk_costs_lines_and_one_warning(tmp_path, monkeypatch):
    """Writes to a full disk are counted, warned about once, and never raised."""
    reported = []
    monkeypatch.setattr(files, "open_to_append_anywhere", full_disk)
    journal = Journal(tmp_path / "events.jsonl", warn=reported.append)
    assert [journal.write("a"), journal.write("b"), journal.write("c")] == [0, 1, 2]
    journal.close()
    assert journal.lines_lost == 3
    assert len(reported) == 1
    assert "No space left" in reported[0]


@pytest.mark.parametrize("gone", ["file", "folder", "moved"])
def test_a_file_that_was_removed_is_made_again(tmp_path, gone):
    """The next line is in a new file of that name, where people look for it; nothing is reported lost."""
    folder, reported = tmp_path / "logs", []
    folder.mkdir()
    journal = Journal(folder / "events.jsonl", warn=reported.append)
    journal.write("before")
    with DDPLogger(rank=0, path=folder / "rank_0.log") as log:
        log.info("before")
        if gone == "file":
            for path in folder.iterdir():
                path.unlink()
        else:
            folder.rename(tmp_path / "moved")
        if gone == "folder":
            shutil.rmtree(tmp_path / "moved")
        journal.write("after")
        log.info("after")
        journal.write("still")
        log.info("still")
        assert log.records_lost == 0
    journal.close()
    assert [line["event"] for line in read_lines(folder / "events.jsonl")] == ["after", "still"]
    lines = (folder / "rank_0.log").read_text().splitlines()
    assert [line.rpartition("| ")[2] for line in lines] == ["after", "still"]
    assert (reported, journal.lines_lost) == ([], 0)


FULL_THEN_FREE = """
import resource, sys
from pathlib import Path
from ddp_runner.observe.journal import Journal
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
journal = Journal(Path(sys.argv[1]), warn=print)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
for n in range(30):
    journal.write("event", n=n)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
journal.write("after")
"""


def test_a_disk_that_has_room_again_is_used_again(tmp_path):
    """The outage ends with a record of what is missing, and every whole line stays readable."""
    path = tmp_path / "events.jsonl"
    command = [sys.executable, "-c", FULL_THEN_FREE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    lines = path.read_text().splitlines()
    whole = [record for record in map(parsed, lines) if record is not None]
    assert len(lines) - len(whole) <= 1, "at most the line that met the limit is torn"
    kept = [line["n"] for line in whole if line["event"] == "event"]
    assert kept == list(range(len(kept)))
    assert [line["event"] for line in whole][-2:] == ["after", "journal_lines_lost"]
    assert whole[-1]["lines"] == 30 - len(kept) > 0
    assert "training continues" in done.stdout.splitlines()[0]
    assert done.stdout.splitlines()[1].endswith(f"{30 - len(kept)} writes were lost")
    assert len(done.stdout.splitlines()) == 2


def test_metrics_are_a_line_per_logged_step(tmp_path):
    """Values stand beside step and rank; what is not finite becomes null."""
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write(20, 0, {"loss": 2.5, "grad_norm": math.inf})
    metrics.close()
    (line,) = read_lines(path)
    reported = (line["step"], line["rank"], line["loss"], line["grad_norm"])
    assert reported == (20, 0, 2.5, None)


def test_a_point_done_again_after_a_take_over_stands_once(tmp_path):
    """A step or an evaluation with the values that are there already; another value is written."""
    path = tmp_path / "metrics.jsonl"
    loss, evaluation = {"loss": 2.5, "step_s": 0.1}, {"validation_loss": math.nan}
    before = MetricsFile(path)
    for step in (20, 30):
        before.write(step, 0, loss)
        before.write(step, 0, evaluation)
    before.close()
    after = MetricsFile(path)
    after.keep_points()
    after.write(30, 0, {**loss, "step_s": 0.3})
    after.write(30, 0, evaluation)
    after.write(20, 0, {"loss": 2.25})
    after.write(40, 0, loss)
    for _ in range(2):  # of one launch: a roll-back, which is shown
        after.write(50, 0, loss)
    after.close()
    steps = [line["step"] for line in read_lines(path)]
    assert steps == [20, 20, 30, 30, 20, 40, 50, 50]


def test_status_is_whole_at_every_moment(tmp_path):
    """A reader that never stops reading sees only complete records, and no file is left over."""
    path = tmp_path / "status.json"
    status = StatusFile(path)
    status.write({"n": 0, "fill": "x" * 5000})
    seen, problems = [], []
    done = threading.Event()

    def read():
        while not done.is_set():
            record = parsed(path.read_bytes())
            (problems if record is None else seen).append(record and record["n"])

    reader = threading.Thread(target=read)
    reader.start()
    for n in itertools.count(1):  # until the reader has had its turns
        status.write({"n": n, "fill": "x" * (n * 37 % 5000)})
        if n >= 400 and (len(set(seen)) > 1 or problems or not reader.is_alive()):
            break
    done.set()
    reader.join(30)
    assert problems == []
    assert len(set(seen)) > 1
    assert seen == sorted(seen)
    assert names_in(tmp_path) == ["status.json"]


def test_status_outlives_a_vanished_directory(tmp_path):
    """A write that fails is counted and warned about once per outage."""
    reported = []
    folder = tmp_path / "logs"
    status = StatusFile(folder / "status.json", warn=reported.append)
    status.write({"n": 1})
    status.write({"n": 2})
    folder.mkdir()
    status.write({"n": 3})
    assert len(reported) == 2
    assert "2 writes were lost" in reported[1]


def test_status_has_the_keys_that_scripts_rely_on():
    """Programs read these names."""
    record = status_record(run_view(2))
    run_keys = "run_id pid state generation world_size step max_steps faults_total ranks"
    rank_keys = "rank pid state step phase phase_age_s rss_bytes device loader_pids"
    assert set(run_keys.split()) <= set(record)
    assert [rank["rank"] for rank in record["ranks"]] == [0, 1]
    assert set(rank_keys.split()) <= set(record["ranks"][0])
    assert json.loads(files.encode_record(record))["ranks"][1]["loader_pids"] == [201]


def test_summary_reads_back_equal(tmp_path):
    """A summary survives its file, and the file has the keys that scripts rely on."""
    path = tmp_path / "summary.json"
    summary = run_summary()
    write_summary(path, summary)
    assert read_summary(path) == summary
    record = json.loads(path.read_text())
    keys = (
        "run_id status exit_code steps epochs samples world_size final_loss weights_sha256 exact "
        "inexact_reasons exact_proof wall_s time_s goodput faults checkpoint"
    )
    assert set(keys.split()) <= set(record)
    shares = "startup productive data_wait checkpoint comparison evaluation recovery lost"
    assert set(record["time_s"]) == set(shares.split())
    fault = "kind rank step cause detected_s recovered_s steps_lost generation"
    assert set(fault.split()) <= set(record["faults"][0])
    assert (record["status"], record["goodput"]) == ("completed", 0.9)
    assert record["exact_proof"] == {
        "repeated": 1,
        "drilled": [2, 50],
        "repairs_proved": "1 of 1",
        "differences": [],
    }
    assert names_in(tmp_path) == ["summary.json"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_keeps_the_previous_summary(tmp_path, monkeypatch, failing):
    """Whatever call fails before the new name is published, the old summary stays and no litter."""
    path = tmp_path / "summary.json"
    write_summary(path, run_summary(steps=1))

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if failing == "fsync" else (Path, "replace")), fail)
    with pytest.raises(OSError, match="No space left"):
        write_summary(path, run_summary(steps=2))
    monkeypatch.undo()
    assert read_summary(path).steps == 1
    assert names_in(tmp_path) == ["summary.json"]


def test_a_summary_is_synced_before_its_name_and_its_folder_after(tmp_path, monkeypatch):
    """A power cut leaves the old summary or the new one, and the new one once the call has returned."""
    sync, rename, done = os.fsync, Path.replace, []

    def synced(descriptor):
        done.append(f"{'folder' if stat.S_ISDIR(os.fstat(descriptor).st_mode) else 'file'} synced")
        sync(descriptor)

    def renamed(path, target):
        done.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    write_summary(tmp_path / "summary.json", run_summary(steps=1))
    assert done == ["file synced", "renamed", "folder synced"]


@pytest.mark.parametrize("text", ["{}", "[]", '{"status": "completed"}', "not json"])
def test_a_file_that_is_no_summary_is_a_clear_error(tmp_path, text):
    """Reading something else raises ValueError, never a KeyError from inside."""
    path = tmp_path / "summary.json"
    path.write_text(text)
    with pytest.raises(ValueError):
        read_summary(path)


@pytest.mark.parametrize(
    ("productive_s", "wall_s", "startup_s", "share"),
    [(90, 110, 10, 0.9), (200, 110, 10, 1.0), (0, 5, 5, 0.0), (1, 4, 5, 0.0), (-1, 10, 0, 0.0)],
)
def test_goodput_is_a_share(productive_s, wall_s, startup_s, share):
    """Goodput stays within 0 and 1, also for runs that ended in their start-up."""
    assert goodput(productive_s=productive_s, wall_s=wall_s, startup_s=startup_s) == share
