"""Wrong gradients and hidden state: found by a drill, distinguished, and undone where that can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.conftest import LONG, WITHOUT_WORKERS
from tests.scenarios.harness import Run

SETTINGS = (*WITHOUT_WORKERS, *LONG)
HIDDEN = Path(__file__).with_name("hidden.py")
# Of two ranks the second is drilled at the second of each pair of steps.
PAIRS = ("drill_at=2,3,14,15", "recovery.proof_share=0", "task.pace_s=0.2")


def finish(folder, *settings, until, task=None):
    """A run to its end, with the difference that its drills have found first: steps leave them the time ``until`` then."""
    how = {} if task is None else {"task": task}
    with Run(folder, *SETTINGS, *PAIRS, *settings, **how) as run:
        name, fields = until
        run.wait_for_event(name, **fields)
        assert run.wait() == 0, run.console
    [found, *_] = run.summary()["exact_proof"]["differences"]
    return run, found


def test_a_wrong_gradient_is_found_and_undone(fault_free, tmp_path):
    """One bit of one number on one rank, once: all go back to before its last good drill, and it is as if it never was."""
    wrong = ("--inject", "wrong_gradient:rank=1,step=15,bit=12")
    run, found = finish(
        tmp_path, *wrong, "save_every_steps=3", "keep_last=50", until=("in_doubt", {})
    )
    assert found == {
        "rank": 1,
        "step": 15,
        "first_in": "0.weight",
        "cause": "once",
        "places": [],
        "undone": True,
        "host": "",
    }, run.console
    [doubt] = run.events("in_doubt")
    assert (doubt["rank"], doubt["first"]) == (1, 5)
    assert "since its drill at step 3, which passed (5 to " in run.console
    assert "all ranks roll back to step 3" in run.console
    assert list(run.checkpoints.glob("set_aside_*/step_*.pt"))
    summary = run.summary()
    assert [(one["kind"], one["rank"]) for one in summary["faults"]] == [("wrong_gradient", 1)]
    assert summary["exact"], run.console
    assert run.digest == fault_free(2, *LONG).digest


def test_state_that_only_one_process_has_is_no_device(tmp_path):
    """Another process of the rank has none of it: no step is undone, and the run is not exact."""
    run, found = finish(
        tmp_path,
        "--inject",
        "hidden_state:rank=1,step=3",
        until=("diagnosed", {"source": "process"}),
    )
    assert (found["rank"], found["cause"], found["undone"]) == (1, "process", False), run.console
    causes = [one["source"] for one in run.events("diagnosed")]
    assert causes == ["lasting", "process"]
    assert [plan["replaced"] for plan in run.events("plan")] == [[1]]
    assert not run.summary()["exact"]


@pytest.mark.parametrize(
    ("name", "rank", "cause", "place"),
    [
        ("HasItsOwnCount", 1, "state", "task.count"),
        pytest.param("LoadsItsOwn", 0, "data", None, marks=pytest.mark.slow),
    ],
)
def test_a_diagnosis_names_state_or_data(tmp_path, name, rank, cause, place):
    """With what the rank had, a replacement computes the same bits; nobody is repaired."""
    until = "diagnosed", {"source": cause}
    run, found = finish(tmp_path, task=f"{HIDDEN}:{name}", until=until)
    assert (found["rank"], found["cause"]) == (rank, cause), run.console
    assert place is None or found["places"] == [place]
    assert run.summary()["faults"] == []
