"""What a rank does about a row of loader faults."""

from __future__ import annotations

import pytest

from ddp_runner.core.loader_recovery import (
    CALM_STEPS,
    PROGRESS_STEPS,
    LoaderHistory,
    plan_loader_repair,
    workers_to_use,
)


def history(*steps):
    """After faults at these steps."""
    known = LoaderHistory(last_step=-PROGRESS_STEPS)
    for step in steps:
        known = known.after_fault(step)
    return known


def test_the_first_fault_costs_no_worker():
    """It is taken for bad luck, also at step 0."""
    assert plan_loader_repair(history(0), workers=4).workers == 4


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 64])
def test_a_row_of_faults_ends_without_workers(workers):
    """Bounded: each further fault halves them, and with none left nothing can break."""
    steps = [5]
    for _ in range(10):
        plan = plan_loader_repair(history(*steps), workers=workers)
        assert plan.workers == (workers if len(steps) == 1 else workers // 2)
        assert plan.action
        workers = plan.workers
        if workers == 0:
            break
        steps.append(5)
    assert workers == 0


def test_progress_begins_a_new_row():
    """Control: faults with steps in between never cost a worker."""
    far_apart = history(*range(0, 100 * PROGRESS_STEPS, PROGRESS_STEPS))
    assert far_apart.in_a_row == 1
    assert history(0, PROGRESS_STEPS - 1).in_a_row == 2


def test_workers_come_back_after_a_calm_stretch_that_grows():
    """A bad minute does not slow a run for ever; what stays broken is tried ever more rarely."""
    once, twice = history(0, 0, 0), history(0, 0, 0, 300, 300)
    assert workers_to_use(once, step=CALM_STEPS - 1, workers=0, asked=2) == 0
    assert workers_to_use(once, step=CALM_STEPS, workers=0, asked=2) == 2
    assert workers_to_use(twice, step=300 + 4 * CALM_STEPS - 1, workers=0, asked=2) == 0
    assert workers_to_use(twice, step=300 + 4 * CALM_STEPS, workers=0, asked=2) == 2
    assert workers_to_use(history(), step=10**6, workers=2, asked=2) == 2
