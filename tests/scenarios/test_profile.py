"""A profile in a real run: a trace of each rank, through faults, a stop and a resume, and no other weights."""

from __future__ import annotations

import json
import signal

from tests.scenarios.conftest import LONG, LONG_STEPS, WITHOUT_WORKERS
from tests.scenarios.harness import Run
from tests.scenarios.workload import HOLD_NAME

FIRST, LAST = 10, 40
ASKED = (*WITHOUT_WORKERS, *LONG, "--profile", f"steps={FIRST}:{LAST},memory")
ASKED = (*ASKED, "log.phase_times=true")
FAULTS = (
    *("--inject", "kill:rank=1,step=11,phase=backward"),
    *("--inject", "kill:rank=0,step=13,phase=backward"),
    *("--inject", "raise:rank=1,step=15,phase=backward"),
    *(
        "--inject",
        "slow:rank=all,step=17,phase=forward,seconds=0.25",
    ),  # so that both have come there
    *("--inject", "kill:rank=all,step=17,phase=forward"),
)


def steps_traced(run, rank):
    """The numbers of the steps in the trace of the rank, whose table is of sums over ranks, too."""
    trace = json.loads((run.logs / f"profile_rank_{rank}.json").read_text(encoding="utf-8"))
    names = {str(one.get("name", "")) for one in trace["traceEvents"]}
    table = (run.logs / f"profile_rank_{rank}.txt").read_text(encoding="utf-8")
    assert "c10d::allreduce_" in table
    return sorted(int(name.split()[1]) for name in names if name.startswith("step "))


def test_ranks_are_traced_through_faults_and_a_resume_to_the_same_weights(fault_free, tmp_path):
    """Amid the steps each rank is killed, one raises, all are killed; then a stop, and a resume traces the rest."""
    hold = tmp_path / HOLD_NAME
    hold.write_text("16", encoding="utf-8")  # no process from before all were killed comes so far
    with Run(tmp_path, *ASKED, *FAULTS) as run:
        run.wait_for_step(22)
        run.signal(signal.SIGTERM)
        run.wait_for_event("stop_asked")
        hold.unlink()
        assert run.wait() == 75, run.console
    assert "a snapshot is of a GPU's allocator" in run.console
    assert "profiler_start" not in run.console
    summary = run.summary()
    kinds = [(fault["kind"], fault["all_ranks_dead"]) for fault in summary["faults"]]
    one = ("rank_killed", False)
    assert kinds == [one, one, ("rank_raised", False), ("rank_killed", True)]
    stopped_at = summary["steps"]
    assert FIRST < stopped_at < LAST
    for rank in (0, 1):
        traced = steps_traced(run, rank)
        assert traced == list(range(traced[0], stopped_at + 1)), "from where it goes on to the stop"
        assert traced[0] <= 18
    with Run(tmp_path, *ASKED) as run:
        assert run.wait() == 0, run.console
    for rank in (0, 1):
        assert steps_traced(run, rank) == list(range(stopped_at + 1, LAST + 1))
    assert (run.summary()["steps"], run.summary()["exact"]) == (LONG_STEPS, True)
    assert run.digest == fault_free(2, *LONG).digest
    metrics = (run.logs / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [each for each in map(json.loads, metrics) if "learning_rate" in each]
    # A rank that injects faults does not time its steps.
    assert all(each["forward_ms"] > 0 for each in steps if each["step"] > stopped_at)
