"""Every task of the table, through every fault in one run: the fault-free weights, or a reason why not.

Those about data and batches have loader workers by turns. The whole table, one fault a run, all with and
without workers: ``python -m tests.strangers.whole``.
"""

from __future__ import annotations

import pytest

from tests.strangers.driving import WORLD, run, verdict
from tests.strangers.table import EXACT, REFUSED, TABLE

pytestmark = pytest.mark.whole_run
LOADED = ("batches", "datasets")


def cases():
    """Each task once: the workers without faults, those beside the faults, and the spare, by turns."""
    for number, (key, stranger) in enumerate(TABLE.items()):
        reason = f"waits for part {stranger.waits_for}"
        marks = [pytest.mark.xfail(reason=reason, strict=False)] if stranger.waits_for else []
        if stranger.is_twin:
            marks.append(pytest.mark.slow)
        yield pytest.param(stranger, number, id=key, marks=marks)


@pytest.mark.parametrize(("stranger", "number"), list(cases()))
def test_a_task_ends_with_the_fault_free_weights_or_says_why_not(tmp_path, stranger, number):
    """Killed in forward, in the reduction and inside a commit, all killed, stopped and started again."""
    workers = stranger.workers if stranger.file in LOADED else (0,)
    # A task that may end in one way only shows by its digest what a drill without faults would show.
    calm = run(
        stranger,
        tmp_path / "calm",
        workers=workers[number % len(workers)],
        drills=stranger.allowed != (EXACT,),
    )
    assert verdict(stranger, calm, calm=calm) in stranger.allowed, calm.console
    if calm.exit_code == 2:
        return
    hit = run(
        stranger,
        tmp_path / "hit",
        how="everything",
        workers=workers[(number + 1) % len(workers)],
        spare=number // 2 % 2 == 0,
    )
    result = verdict(stranger, hit, calm=calm)
    assert result in stranger.allowed, f"{result}\n{hit.console}"
    if result != REFUSED:
        assert hit.killed >= 3
        # On a busy machine one of all is held up, leaves with the abort, and is killed when the step is redone.
        assert hit.all_dead or hit.killed >= 3 + WORLD
