"""The stacks that a fault's ranks wrote, found in logs between records with a time: also in huge and torn ones."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from ddp_runner.observe.history.run_history import RunHistory, stacks_around, stacks_in
from ddp_runner.observe.history.table_rows import FaultRow

BEGAN = datetime(2026, 11, 23, 12, 0, 0, tzinfo=timezone.utc).astimezone()  # as logs have it


def record(at_s, text="trains"):
    at = BEGAN + timedelta(seconds=at_s)
    return f"{at:%Y-%m-%d %H:%M:%S}.000 STEP    rank 1 step 3 | {text}"


def stack(name):
    return [
        f"Thread 0x00007f18875fcb80 [{name}] (most recent call first):",
        '  File "a.py", line 1 in f',
        "  File <evil>",
    ]


def test_stacks_are_those_between_records_of_that_time():
    """What was printed beside them is none, nor are those of other faults."""
    lines = [
        *("torn", *stack("before"), record(0), "printed", *stack("first"), record(30)),
        *(*stack("hung"), "  no stack", "", "Current thread 0x1f (most recent call first):"),
        *('  File "b.py", line 2 in g', record(90), "\x1b[2J", *stack("later")),
    ]
    found = stacks_around(lines, BEGAN.timestamp() + 40)
    assert "[hung]" in found
    assert "line 2 in g" in found
    for other in ("[before]", "[first]", "[later]", "printed", "no stack"):
        assert other not in found
    assert "[later]" in stacks_around(lines, BEGAN.timestamp() + 200)
    assert stacks_around([], 0.0) == stacks_around(["Thread 0x1"], float("nan")) == ""


@pytest.mark.parametrize("at_s", [5, 30_000, 59_990])
def test_a_moment_is_found_in_a_huge_log(tmp_path, at_s):
    """Without reading all of it."""
    lines = [record(second, "x" * 100) for second in range(60_000)]
    lines[at_s:at_s] = stack("hung")
    path = tmp_path / "rank_1.log"
    path.write_text("\n".join(lines))
    assert path.stat().st_size > 8_000_000
    assert "[hung]" in stacks_in(path, BEGAN.timestamp() + at_s)
    assert stacks_in(path, BEGAN.timestamp() + at_s + 9_000) == ""


def test_the_rank_of_a_fault_comes_first(tmp_path):
    """What its event already holds is not said again, and no log is looked for elsewhere."""
    for rank in (0, 1, 2):
        lines = [record(0), *stack(f"of {rank}"), record(90)]
        (tmp_path / f"rank_{rank}.log").write_text("\n".join(lines))
    row = FaultRow(id=1, at_s=BEGAN.timestamp() + 40, kind="rank_hung", rank=1, step=3, phase="", text="hung",
                   origin="own", detail="\n".join(stack("of 0")))  # fmt: skip
    found = RunHistory(tmp_path).stacks(row)
    assert [name for name, _ in found] == ["rank_1.log", "rank_2.log"]
    assert stacks_in(tmp_path / "none.log", 0.0) == ""
