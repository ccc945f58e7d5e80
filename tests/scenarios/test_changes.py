"""A run that is resumed with other settings: what makes other steps is reported, and nothing else is."""

from __future__ import annotations

import json

import pytest

from tests import ready
from tests.scenarios.conftest import NO_SPARE
from tests.scenarios.harness import Run
from tests.scenarios.test_outside import TORCHRUN

QUICK = (
    "-b",
    8,
    "num_workers=0",
    "task.pace_s=0",
    "warmup_steps=4",
    "learning_rate=6e-3",
    NO_SPARE,
)
RATE = "optim.learning_rate 0.006 -> 0.001 at step 12"
AVERAGE = "optim.ema_decay 0.9 -> none at step 12: the file's average (EMA) is dropped"
SINCE = ", where steps from 5 on had the rates of the length before"
LONGER = f"end of the schedule 12 -> 24 at step 12{SINCE}"


def launched(folder, *settings, **how):
    """A launch that ended well."""
    with Run(folder, *QUICK, *settings, **how) as run:
        assert run.wait() == 0, run.console
    return run


def manifest(run, step):
    return json.loads((run.checkpoints / f"step_{step:08d}.json").read_text(encoding="utf-8"))


def test_what_a_resume_changes_is_reported_everywhere_and_for_good(tmp_path):
    """On the console once, in the logs, the journal, the summary and the manifests of this and later launches."""
    first = launched(tmp_path, "--max-steps", 12, "ema_decay=0.9")
    assert first.summary()["exact"] is True
    assert manifest(first, 12)["changes"] == []
    second = launched(tmp_path, "--max-steps", 24, "learning_rate=1e-3")
    lines = [RATE, LONGER, AVERAGE]
    assert [second.console.count(f"changed: {line}\n") for line in lines] == [1, 1, 1]
    supervisor_log = (second.logs / "supervisor.log").read_text(encoding="utf-8")
    rank_log = (second.logs / "rank_0.log").read_text(encoding="utf-8")
    reported = [event["action"] for event in second.events("tuning_changed")]
    for line in lines:
        assert line in supervisor_log
        assert line in rank_log
        assert reported.count(line) == 1
    summary = second.summary()
    assert (summary["exact"], summary["inexact_reasons"]) == (False, lines)
    assert manifest(second, 24)["changes"] == lines
    # Elsewhere, so that only the checkpoint can know of it.
    third = launched(tmp_path, "--max-steps", 30, "learning_rate=1e-3", "-l", tmp_path / "other")
    third.logs = tmp_path / "other"
    again = f"end of the schedule 24 -> 30 at step 24{SINCE}"
    assert third.summary()["inexact_reasons"] == [*lines, again]
    assert manifest(third, 30)["changes"] == [*lines, again]
    assert third.console.count("changed: ") == 1
    assert f"changed: {again}\n" in third.console


@pytest.mark.timeout(300)
def test_under_an_outside_launcher_a_change_is_reported_too(tmp_path):
    """There the ranks have no supervisor: rank 0 says it, and writes the summary."""
    launched(tmp_path, "--max-steps", 12, "ema_decay=0.9")
    how = {"command": TORCHRUN, "environment": ready.environment(programs=True)}
    second = launched(tmp_path, "--max-steps", 24, "learning_rate=1e-3", **how)
    lines = {RATE, LONGER, AVERAGE}
    for line in lines:
        assert second.console.count(line) == 1, second.console
    summary = second.summary()
    assert summary["exact"] is False
    assert lines <= set(summary["inexact_reasons"])
    assert lines <= set(manifest(second, 24)["changes"])
