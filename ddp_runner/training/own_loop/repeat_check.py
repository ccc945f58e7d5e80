"""Compares the warm-up run of a launch's first body with the run that makes the step of the same batch.

If they differ, no process can repeat the step. If a variable of the loop explains the difference, another check names
it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from ddp_runner.core.run_stages import is_first_generation
from ddp_runner.data.loader import MicroBatch
from ddp_runner.kernel.group.group import Group, Membership
from ddp_runner.kernel.group.waits import waiting_for_peers
from ddp_runner.training.beside_steps import BesideSteps, Noting
from ddp_runner.training.exactness.first_step import (
    NOT_DONE,
    not_repeated,
    report_inexact,
    report_lost_carried,
    report_repeated,
)
from ddp_runner.training.exactness.own_share import first_difference
from ddp_runner.training.exactness.own_update import first_unlike
from ddp_runner.training.own_loop.parts import LoopParts
from ddp_runner.training.own_loop.watched_step import WatchedStep

_UNPROVED = (
    "not proved: no drill and no second computation of the first step has shown that steps can be repeated"
    " (after the step the loop reads a variable that its body sets after the update)"
)
WAITS_STEPS = 3  # in which the variables of the loop are checked


class RepeatCheck(BesideSteps):
    """Performs the check on one rank. Every rank calls its methods at the same points."""

    def __init__(self, parts: LoopParts, *, rehearses: Callable[[], bool] = lambda: True) -> None:
        """``rehearses``: False for a loop that reads, after the step, what its body sets after the update."""
        self._parts = parts
        self._rehearses = rehearses
        self._state = parts.state
        self._where: str | None = (
            None  # the first difference of the two runs, in this process's first step
        )
        self._unlike = ""  # the first difference in what an optimizer was given
        self._hidden = ""  # the same, of any rank, until it is noted
        self._is_over = False
        self._finding = ""  # of all ranks, until it is reported
        self._found_at = 0
        # The ranks that are known to have found it, or not; not by its number, which a new coordinator counts from 1.
        self._known_in: Membership | None = None
        self._reporter = 0  # the lowest of those that have

    @contextlib.contextmanager
    def beside(
        self, stepper: Noting, group: Group, micro_batches: Sequence[MicroBatch]
    ) -> Iterator[None]:
        """Note the first step of a launch, at each attempt."""
        del micro_batches
        is_first = is_first_generation(group.membership.generation, self._parts.settings.stage)
        # In a later generation only where an interrupted first step is rehearsed again.
        may_be_first = is_first or not self._state.is_rehearsed
        if self._is_over or not may_be_first or not isinstance(stepper, WatchedStep):
            self._is_over = True
            yield
            return
        step = self._state.committed_step
        with stepper.noted() as notes:
            stepper.wants_given = True
            try:
                yield
            finally:
                stepper.wants_given = False
            if self._state.committed_step == step + 1:
                names = [name for name, _ in self._state.named_parameters()]
                before, again = stepper.rehearsed, notes.share()
                self._where = (
                    NOT_DONE if before is None else first_difference(before, again, names=names)
                )
                if not self._where and stepper.given:
                    self._unlike = first_unlike(stepper.given_rehearsed, stepper.given)

    def after(self, step: int, group: Group, *, at_end: bool) -> None:
        """Compare the ranks' findings after the first step, and report the result."""
        # INVARIANT finding-outlives-a-rank: a first step that cannot be repeated is reported while one rank knows of it.
        # Broken if: the rank that reports it was replaced, and none of the others does so.
        # Guarded by: test_a_finding_is_reported_by_a_rank_that_knows_it.
        if self._known_in is not group.membership:
            self._known_in = group.membership
            self._ask(step, group)
        # INVARIANT explained-once: a loop whose variables are not kept is not exact once it is repaired, and is before.
        # Broken if: its first body is repeated, and what that changes is taken for a step that nobody can repeat.
        # Guarded by: test_a_variable_that_is_named_explains_a_first_step_that_differs.
        if self._finding and (at_end or step >= self._found_at + WAITS_STEPS):
            if group.rank == self._reporter and not self._state.carried:
                report_inexact(self._parts, self._finding)
            self._finding = ""
        if self._hidden and (at_end or step >= self._found_at + WAITS_STEPS):
            self._note_hidden(group)

    def _note_hidden(self, group: Group) -> None:
        """Take note, on all ranks alike, of hidden state that changes the update."""
        # INVARIANT update-is-repeated: the two runs of a launch's first step are compared also in what the optimizer is given.
        # Broken if: state that sets a rate, or clips gradients, changes with each run of the body and no rank notices.
        # Guarded by: test_state_that_only_the_update_uses_makes_a_repaired_run_inexact.
        what, self._hidden = self._hidden, ""
        if self._state.carried:
            return
        if group.rank == 0:
            self._parts.runtime.logger.warning(
                f"the first step was computed twice from the same state, and {what} differed when optimizer.step() was"
                " called: some state that sets it (in an object, a closure, a global or a file) is not kept. A run that"
                " is repaired or resumed is not exact"
            )
        self._state.note_carried([f"state that sets {what}"])
        report_lost_carried(self._parts)

    # INVARIANT unrehearsed-says-so: a repaired or resumed run that nothing has shown to repeat its steps is not exact.
    # Broken if: one rank, which has no drills, rehearses nothing either, and a step that no process can repeat is done again.
    # Guarded by: test_one_rank_that_rehearses_nothing_is_not_proved.
    def _lacks_proof(self, step: int, group: Group) -> bool:
        """Return True if a loop that rehearses nothing goes on from a state, and no drill compares its steps."""
        settings = self._parts.settings
        is_first = is_first_generation(group.membership.generation, settings.stage)
        goes_on = not is_first or step > self._parts.workload.length.first_step + 1
        # As the drills of loops have it: one process cannot compute the share of a model that sums in forward.
        sums_in_forward = any(isinstance(m, nn.SyncBatchNorm) for m in self._state.model.modules())
        has_drills = group.world_size > 1 and settings.recovery.drill_at and not sums_in_forward
        return goes_on and not has_drills

    def _ask(self, step: int, group: Group) -> None:
        """Learn what each rank has found. All ask in a group's first step: of a launch's first one, some may know nothing."""
        if not self._rehearses() and group.rank == 0 and self._lacks_proof(step, group):
            report_inexact(self._parts, _UNPROVED)
        where = None if self._is_over else self._where
        self._is_over |= where is not None
        with waiting_for_peers(self._parts.runtime.slot):
            said = group.exchange(
                f"repeated/{step}", json.dumps([where, self._finding, self._unlike])
            )
        every = [json.loads(one) for one in said]
        answers = [NOT_DONE if where is None else where for where, *_ in every]
        if hidden := next((unlike for *_, unlike in every if unlike), ""):
            self._hidden, self._found_at = hidden, step
        self._unlike = ""
        if found := not_repeated(answers):
            self._finding, self._found_at, self._reporter = found, step, 0
        else:
            self._reporter = next((rank for rank, (_, one, _) in enumerate(every) if one), 0)
        if group.rank == 0 and not any(answers) and not self._hidden:
            report_repeated(self._parts, step - 1)
