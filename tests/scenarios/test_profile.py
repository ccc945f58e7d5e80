"""A profile in a real run: a trace of each rank, also of a replacement, and no other weights."""

from __future__ import annotations

import json
import signal

from tests.scenarios.conftest import SETTINGS
from tests.scenarios.harness import Run
from tests.scenarios.workload import HOLD_NAME


def test_ranks_are_traced_over_a_kill_to_the_same_weights(fault_free, tmp_path):
    """The rank that takes the place of one that was killed amid the steps traces the rest of them."""
    hold = tmp_path / HOLD_NAME
    hold.write_text("20", encoding="utf-8")
    words = ("--profile", "steps=10:26,memory", "log.phase_times=true")
    with Run(tmp_path, *SETTINGS, *words) as run:
        run.wait_for_step(14)
        run.signal(signal.SIGKILL, run.rank_pid(1))
        hold.unlink()
        assert run.wait() == 0, run.console
    assert run.digest == fault_free(2).digest
    for rank in (0, 1):
        trace = json.loads((run.logs / f"profile_rank_{rank}.json").read_text(encoding="utf-8"))
        assert "step 26" in {one.get("name") for one in trace["traceEvents"]}
        table = (run.logs / f"profile_rank_{rank}.txt").read_text(encoding="utf-8")
        assert "c10d::allreduce_" in table
    assert "a snapshot is of a GPU's allocator" in run.console
    assert "profiler_start" not in run.console
    metrics = (run.logs / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [one for one in map(json.loads, metrics) if "learning_rate" in one]
    assert all(one["forward_ms"] > 0 for one in steps)
