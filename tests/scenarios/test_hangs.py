"""Ranks that hang, stop or wait where it is hard to tell who lets the others wait."""

from __future__ import annotations

from tests.scenarios.harness import WORKLOAD, Run
from tests.scenarios.workload import TROUBLE_NAME

QUICK = (
    *("-b", 8, "num_workers=1", "task.pace_s=0.01", "log.display=plain", "--audit"),
    *("save_every_steps=10", "save_interval=0", "evaluate_interval=0"),
    "recovery.hang_min_s=0.8",
    *(
        "recovery.replica_check_steps=5",
        "evaluate_every_steps=25",
        "recovery.evaluation_timeout_s=2",
    ),
)


def test_who_waits_for_an_evaluation_or_a_comparison_is_not_blamed(tmp_path):
    """Rank 1 hangs in each: it alone is replaced, though all are past the same deadline by then."""
    with Run(tmp_path, *QUICK, "--max-steps", 60, world=3, task=f"{WORKLOAD}:HashedTask") as run:
        run.wait_for_step(5)
        (tmp_path / TROUBLE_NAME).write_text("state_dict 1 sleep1000")
        run.wait_for_event("repaired")
        (tmp_path / TROUBLE_NAME).write_text("validation 1 sleep1000")
        assert run.wait() == 0, run.console
    faults = run.events("fault")
    causes = [(f["kind"], f["rank"], f["phase"]) for f in faults if f["kind"] == "rank_hung"]
    assert causes == [("rank_hung", 1, "optimizer"), ("rank_hung", 1, "evaluate")], faults
    assert [plan["replaced"] for plan in run.events("plan")] == [[1], [1]]
    waited = {f["phase"] for f in faults if f["kind"] == "collective_failed"}
    assert waited == {"reduce"}
