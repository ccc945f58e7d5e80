"""Compares the warm-up run of a launch's first body with the run that makes the step of the same batch.

If they differ, no process can repeat the step. If a variable of the loop explains the difference, another check names
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from ddp_runner.core.run_stages import is_first_generation
from ddp_runner.data.loader import MicroBatch
from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.group.waiting import waiting_for_peers
from ddp_runner.training.beside_steps import BesideSteps, Noting
from ddp_runner.training.exactness.first_step import (
    NOT_DONE,
    not_repeated,
    report_inexact,
    report_repeated,
)
from ddp_runner.training.exactness.own_share import first_difference
from ddp_runner.training.own_loop.parts import LoopParts
from ddp_runner.training.own_loop.watched_step import WatchedStep

WAITS_STEPS = 3  # in which the variables of the loop are checked


class RepeatCheck(BesideSteps):
    """Performs the check on one rank. Every rank calls its methods at the same points."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        self._state = parts.state
        self._where: str | None = (
            None  # the first difference of the two runs, in this process's first step
        )
        self._is_over = False
        self._finding = ""  # of all ranks, until it is reported
        self._found_at = 0

    @contextlib.contextmanager
    def beside(
        self, stepper: Noting, group: Group, micro_batches: Sequence[MicroBatch]
    ) -> Iterator[None]:
        """Note the first step of a launch, at each attempt."""
        del micro_batches
        is_first = is_first_generation(group.membership.generation, self._parts.settings.stage)
        if self._is_over or not is_first or not isinstance(stepper, WatchedStep):
            self._is_over = True
            yield
            return
        step = self._state.committed_step
        with stepper.noted() as notes:
            yield
            if self._state.committed_step == step + 1:
                names = [name for name, _ in self._state.named_parameters()]
                before, again = stepper.rehearsed, notes.share()
                self._where = (
                    NOT_DONE if before is None else first_difference(before, again, names=names)
                )

    def after(self, step: int, group: Group, *, at_end: bool) -> None:
        """Compare the ranks' findings after the first step, and report the result."""
        if not self._is_over and self._where is not None:
            self._is_over = True
            with waiting_for_peers(self._parts.runtime.slot):
                answers = group.exchange(f"repeated/{step}", self._where)
            self._finding, self._found_at = not_repeated(answers), step
            if group.rank == 0 and not any(answers):
                report_repeated(self._parts, step - 1)
        # INVARIANT explained-once: a loop with variables that are not kept stays exact until it is repaired.
        # Broken if: the repeat of its first body changes such a variable, and this counts as a step that cannot repeat.
        # Guarded by: test_a_variable_that_is_named_explains_a_first_step_that_differs.
        if self._finding and (at_end or step >= self._found_at + WAITS_STEPS):
            if group.rank == 0 and not self._state.carried:
                report_inexact(self._parts, self._finding)
            self._finding = ""
