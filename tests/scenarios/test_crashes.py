"""Ranks that die of their own doing: the record says where and why, in the words of the process."""

from __future__ import annotations

import re

from tests.scenarios.conftest import STEPS, WITHOUT_WORKERS
from tests.scenarios.harness import Run
from tests.scenarios.workload import TROUBLE_NAME


def test_a_crash_is_reported_with_its_place_and_a_kill_without(tmp_path):
    """A bad memory access names the line of the task; what others did to a rank has no such line."""
    (tmp_path / TROUBLE_NAME).write_text("loss 1 segfault", encoding="utf-8")
    kill = ("--inject", "kill:rank=0,step=12,phase=forward", "task.pace_s=0")
    with Run(tmp_path, *WITHOUT_WORKERS, *kill, "--max-steps", 24, "log.display=plain") as run:
        assert run.wait() == 0, run.console
    crashed, killed = run.summary()["faults"]
    assert re.fullmatch(r"rank 1 killed \(SIGSEGV in _make, workload\.py:\d+\)", crashed["cause"])
    assert (killed["cause"], killed["detail"]) == ("rank 0 killed (SIGKILL)", "")
    assert crashed["kind"] == killed["kind"] == "rank_killed"
    assert crashed["detail"].startswith("Fatal Python error: Segmentation fault\n")
    assert re.search(r'workload\.py", line \d+ in loss\n', crashed["detail"])
    assert "Extension modules" not in crashed["detail"]
    [reported] = [event for event in run.events("fault") if event["text"] == crashed["cause"]]
    assert reported["detail"] == crashed["detail"]
    # When it happens, and when it is repaired.
    assert run.console.count(f"{crashed['cause']} at step {crashed['step']}") == 2, run.console
    assert "Extension modules" not in run.console


def test_ranks_that_disagree_twice_on_a_collective_are_the_user_s_error(tmp_path):
    """gloo ends a rank for that; the step is tried once more, and what each rank was doing is named."""
    odd = ("task.odd_at_sample=5", "log.display=plain")
    with Run(tmp_path, *WITHOUT_WORKERS, *odd, world=3) as run:
        assert run.wait() == 1, run.console
    summary = run.summary()
    assert summary["status"] == "failed"
    assert summary["steps"] < STEPS
    first, second = summary["faults"]
    for fault in (first, second):
        assert (fault["kind"], fault["rank"], fault["step"]) == (
            "collective_stuck",
            -1,
            first["step"],
        )
        assert re.match(
            r"the ranks disagree on a collective: rank \d was sent \d+ bytes where it expected \d+ \(",
            fault["cause"],
        ), fault["cause"]
        assert re.search(r"rank \d in loss, workload\.py:\d+", fault["cause"]), fault["cause"]
        assert "gloo::EnforceNotMet" in fault["detail"]
    assert first["recovered_s"] is not None
    assert second["recovered_s"] is None
    assert "(the ranks disagreed at this step before)" in run.console
