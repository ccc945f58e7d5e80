"""Whom a run names as slow: nobody whose slowness passes, or is everybody's."""

from __future__ import annotations

from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import Run

WINDOW = 20  # steps after which the ranks are compared; three of them in a row name a rank
SLOW_S = 0.04


def slow(ranks, first, steps):
    """The words that make ``ranks`` slow for ``steps`` steps from ``first`` on."""
    spec = f"step={first},times={steps},seconds={SLOW_S}"
    return [word for rank in ranks for word in ("--inject", f"slow:rank={rank},{spec}")]


def test_slowness_that_wanders_or_is_everybodys_names_nobody(tmp_path):
    """Each rank three times as slow for a while, then all for long; whoever stays slow is named elsewhere."""
    settings = ("-b", 8, "num_workers=0", "task.pace_s=0.02", "log.display=plain", *PATIENT)
    wandering = [word for rank in range(3) for word in slow([rank], 2 + WINDOW * rank, WINDOW)]
    everybody = slow(range(3), 2 + 3 * WINDOW, 3 * WINDOW + 5)
    steps = 2 + 6 * WINDOW + 5
    with Run(tmp_path, *settings, "--max-steps", steps, *wandering, *everybody, world=3) as run:
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert (summary["faults"], summary["stragglers"], summary["exact"]) == ([], {}, True)
    # Every rank was slow in so many of its steps.
    least_s = 0.02 + SLOW_S * (4 * WINDOW + 5) / steps
    assert min(summary["own_step_s"].values()) > least_s
