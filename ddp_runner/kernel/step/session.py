"""One formed generation on one rank: where each of its steps begins and ends, and what is due between.

The steps are made elsewhere: ``while step := session.begin(): ...; session.end(step)``
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from ddp_runner.kernel.group.group import Group, collectives_begun
from ddp_runner.kernel.group.waits import waiting_for_peers
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.kernel.rules.phases import DueActions, Phase
from ddp_runner.kernel.step.commit import State
from ddp_runner.kernel.step.durable import Durable, Keep, Owed
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.wire.board import Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Votes:
    """What a rank wants to happen after the step; one rank is enough."""

    stop: StopReason | None = None
    save: bool = False
    copy: bool = False  # in memory, without a file: only rank 0 votes for that
    news: bool = False  # what it follows is to be compared


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A committed step, but for ``waited_ns`` the same on every rank.

    ``applied`` is False for a step that was skipped, because it was not finite or, as ``explosion``
    then says, far above the steps before it; ``overflowed``: because the loss scale was too high.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    applied: bool
    explosion: str
    overflowed: bool
    loss_scale: float | None = None  # that it was computed with, in fp16
    broken_ranks: tuple[int, ...]  # whose own loss or gradient was not finite, or far too high
    waited_ns: int = field(compare=False)  # this rank's own, for its peers in the reduction
    wanted: Votes = Votes()  # by some rank, which is enough for all
    parts: Mapping[str, float] = field(default_factory=dict)  # named numbers beside the loss
    without_weight: bool = False  # skipped: no sample of any rank counts


class WrapAgainError(Exception):
    """DDP has to wrap again, and the step is done again.

    Forward has changed which parameters require a gradient, or the loss has other numbers beside it.
    """


@dataclass(slots=True, kw_only=True)
class StepInHand:
    """A step from where it is begun to where what is due after it is done; times of the monotonic clock.

    ``result`` is for whoever makes it to set. It stays None where the state is now an older one.
    """

    micro_batches: list[Any]  # this rank's share, of which only the client knows more
    votes: Votes
    began_ns: int
    waited_ns: int  # for its data
    aside_ns: int  # given to saves and comparisons, in all, when it began
    result: StepResult | None = None
    must_wrap: bool = False  # it is begun again, once the model is wrapped again


class Outcome(Enum):
    """What the session does after a finished step."""

    GOES_ON = auto()
    WENT_BACK = auto()  # to an older state, of which nothing is due
    ALL_DONE = auto()  # before the last step: what the run was for is reached


class StepMaker(Protocol):
    """Makes the steps of a generation. Every rank calls its methods at the same places."""

    @property
    def at_end(self) -> bool:
        """True if all steps of the run are made."""
        ...

    def bucket_sizes(self) -> str:
        """The bytes of each bucket in which gradients are summed; for a log."""
        ...

    def settle(self) -> None:
        """Bring DDP's bucket layout to its final form before the first step."""
        ...

    def adapt(self) -> None:
        """Try, before a step, a change that may be faster."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds that the newest :meth:`take` has waited."""
        ...

    def due(self, step: int) -> DueActions:
        """Say what is due once ``step`` steps are committed."""
        ...

    def take(self, step: int) -> list[Any]:
        """Give this rank's share of ``step``; blocks until it is loaded."""
        ...

    def wrap_again(self) -> None:
        """Wrap the model again after a step that raised WrapAgainError, and that is repeated."""
        ...

    def after(self, step: StepInHand, result: StepResult, *, due: DueActions) -> Outcome:
        """Handle the result of a step, and do what is due after it."""
        ...

    def evaluate(self, *, is_again: bool = False) -> StopReason | None:
        """Evaluate the state as it is; why that was left early, if it was.

        ``is_again``: what was due at this step is done, by the run that is being resumed behind its last step.
        """
        ...

    def end_epoch(self) -> None:
        """Call the user's code for the end of an epoch. No rank returns before all have called theirs."""
        ...

    def must_keep(self) -> bool:
        """Return True if the present evaluation has found the best so far, which the run's end needs."""
        ...

    def gather(self) -> None:
        """Collect, before the state is captured, the parts that each rank alone knows."""
        ...

    def close(self) -> None:
        """The generation ends."""
        ...


class ReplicaGuard(Protocol):
    """Compares the replicas of a generation. Every rank calls its methods at the same boundaries."""

    compared_s: float  # the last comparison of :meth:`compare_replicas`

    def begin_comparison(self) -> None:
        """Compare the state as it is now, while the next step is computed; it changes only after the verdict."""
        ...

    def compare_replicas(self) -> bool:
        """Compare now, and return True if the state is an older one after it. Raises FaultError on an odd rank."""
        ...

    def close(self) -> None:
        """The generation ends: a comparison without a verdict gets none."""
        ...


class SideWatch(Protocol):
    """What each rank has beside the model, which steps change and a replaced rank may lack."""

    @property
    def has_news(self) -> bool:
        """True if ranks have to compare what they have beside the model."""
        ...

    def mine(self) -> dict[str, Any]:
        """Return what the other ranks need to know, as plain values."""
        ...

    def compare(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Take in what :meth:`mine` returned on each rank."""
        ...

    def report_lost(self) -> None:
        """Say what could not be kept over the repair, or the resume, with which the generation begins."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Makers:
    """Who makes, compares and watches the steps of one generation."""

    maker: StepMaker
    guard: ReplicaGuard
    side: SideWatch


class Session:
    """Trains inside one generation until the run's end, a stop, or a fault that leaves as exception."""

    def __init__(
        self,
        state: State,
        runtime: Runtime,
        durable: Durable,
        *,
        group: Group,
        makers: Makers,
    ) -> None:
        self._state = state
        self._runtime = runtime
        self._durable = durable
        self.group = group
        self._guard = makers.guard
        self._maker = makers.maker
        self._side = makers.side
        self._step: StepInHand | None = None
        self.reason = StopReason.COMPLETED  # why training ended, once it has
        self._evaluated_step = EMPTY_STEP  # for whose evaluation the run ends, if it does
        self._passed_step = EMPTY_STEP  # the newest boundary that every rank has done
        runtime.slot.begin_between(state.committed_step)
        self._begun_step = state.committed_step
        # Until it is made up for.
        self._owed: Owed | None = self._lead()

    def _lead(self) -> Owed:
        group = self.group
        return self._durable.lead(
            is_leader=group.rank == 0, is_first_here=group.membership.local_rank == 0
        )

    def close(self) -> None:
        """Unwrap the model; what was not proven to be sound is not saved."""
        try:
            self._guard.close()
        finally:
            self._maker.close()

    def begin(self) -> StepInHand | None:
        """Do what is due at this boundary, then begin the next step; None once training has ended.

        After a step that was given up without a result it is the same step again.
        """
        stop = self._pass_boundary()
        while stop is not None or self._maker.at_end:
            self.reason = stop or StopReason.COMPLETED
            if self._finish(self.reason):
                return None
            stop = self._take_up()
        self._maker.adapt()
        began_ns = time.monotonic_ns()
        slot = self._runtime.slot
        if slot.get(Cell.FIRST_STEP_NS) == 0:
            slot.set(Cell.FIRST_STEP_NS, began_ns)
        micro_batches = self._maker.take(self._state.committed_step)
        stop = self._runtime.stop_asked()
        votes = self._durable.vote(is_asked=self._runtime.save_asked())
        self._step = StepInHand(
            micro_batches=micro_batches,
            waited_ns=int(self._maker.waited_s * 1e9),
            votes=Votes(
                stop=stop,
                save=votes.file,
                copy=votes.copy,
                news=self._side.has_news or self._is_replacement,
            ),
            began_ns=began_ns,
            aside_ns=self._aside_ns(),
        )
        return self._step

    def end(self, step: StepInHand) -> None:
        """Account for a step that was begun, once it is made or left out."""
        begun = collectives_begun()
        self._runtime.slot.set(Cell.COLLECTIVES, begun)
        if step.result is None:
            return
        if self._runtime.logger.is_debug:
            self._runtime.logger.debug(
                f"committed: {begun} collectives so far; buckets of {self._maker.bucket_sizes()} bytes",
                step=step.result.step,
            )
        self._account(step, step.result)

    def _pass_boundary(self) -> StopReason | None:
        """Do what is due after the current step; before the first one, what was cut short."""
        step, self._step = self._step, None
        if step is None:
            return self._take_up()
        if step.must_wrap:
            self._maker.wrap_again()
        if step.result is None:
            return None
        return self._after(step, step.result)

    def _take_up(self) -> StopReason | None:
        """Prepare for the first step of a generation, or for the end of training after a roll-back."""
        if self._state.is_at_goal:  # by the run that is being resumed
            return StopReason.COMPLETED
        self._runtime.slot.set(Cell.COLLECTIVES, collectives_begun())
        return self._make_up()

    def _after(self, step: StepInHand, result: StepResult) -> StopReason | None:
        due = self._maker.due(result.step)
        outcome = self._maker.after(step, result, due=due)
        if outcome is Outcome.ALL_DONE:
            return StopReason.COMPLETED
        if outcome is Outcome.WENT_BACK or result.wanted.stop is not None or self._maker.at_end:
            return result.wanted.stop  # the end of the run compares, evaluates and saves by itself
        save_now = self._may_save(wanted=due.save or result.wanted.save)
        if result.wanted.news or save_now or due.compare:
            self._compare_side()
        copy_now = not save_now and result.wanted.copy and self._state.is_calm
        # INVARIANT replaced-are-compared: after its first step a replacement is compared with the others.
        # Broken if: what it lacks for the update is found at the next save only, where it may be the last with that state.
        # Guarded by: test_replicas_that_differ_after_a_replacement_are_no_flipped_bit.
        is_first = result.step == self._begun_step + 1 and self.group.membership.generation > 1
        return self._run_due(
            evaluate_now=due.evaluate,
            epoch_ends=due.end_epoch,
            save_now=save_now,
            copy_now=copy_now,
            compare_now=due.compare or copy_now or (is_first and result.wanted.news),
        )

    @property
    def _is_replacement(self) -> bool:
        """True in a process that was started for a lost one, until it has made a step."""
        is_new = self._state.trained_since == self._state.committed_step
        return is_new and self.group.membership.generation > 1

    def _compare_side(self) -> None:
        """Learn what each rank has of its own beside the model, before a repair or a file makes it one rank's."""
        step = self._state.committed_step
        with waiting_for_peers(self._runtime.slot):
            answers = self.group.exchange(f"side/{step}", json.dumps(self._side.mine()))
        self._side.compare([json.loads(answer) for answer in answers])

    def _aside_ns(self) -> int:
        """Return the time of steps that saves and comparisons have taken so far."""
        slot = self._runtime.slot
        return slot.get(Cell.CHECKPOINT_NS) + slot.get(Cell.COMPARISON_NS)

    def _account(self, step: StepInHand, result: StepResult) -> None:
        now_ns, slot = time.monotonic_ns(), self._runtime.slot
        aside_ns = self._aside_ns() - step.aside_ns
        took_ns = now_ns - step.began_ns
        self._durable.committed(
            result.step,
            step_s=(took_ns - aside_ns) / 1e9,
            is_wanted=result.wanted.save,
            is_mine=step.votes.save,
        )
        slot.account(
            now_ns,
            took_ns,
            aside_ns=aside_ns,
            for_data_ns=step.waited_ns,
            for_peers_ns=result.waited_ns,
            samples=self._state.samples,
        )

    def _may_save(self, *, wanted: bool) -> bool:
        """Not amid skipped steps: a roll-back would lead into them again. It is made up for later."""
        if wanted and not self._state.is_calm:
            self._durable.keep(Keep.LATER)
            return False
        return wanted

    def _make_up(self) -> StopReason | None:
        """Make up for an evaluation or save that a fault or a stop cut short, on all ranks alike."""
        step = self._state.committed_step
        owed = self._owed or self._lead()
        self._owed = None
        mine = json.dumps(
            [
                self._state.boundary_done_step,
                owed.is_due,
                owed.wanted_step,
                owed.covered_step,
                self._side.mine(),
            ]
        )
        with waiting_for_peers(self._runtime.slot):
            answers = [json.loads(answer) for answer in self.group.exchange("boundary_done", mine)]
        self._side.compare([own for *_, own in answers])
        self._passed_step = min(done for done, *_ in answers)
        if self._maker.at_end:
            return None
        due = self._maker.due(step)
        is_undone = self._passed_step < step
        is_lost = (
            max(wanted for _, _, wanted, *_ in answers) > answers[0][3]
        )  # with the rank 0 before
        evaluate_now = is_undone and due.evaluate
        if self._state.is_spent and not evaluate_now:  # a run that has ended, or was to
            return StopReason.COMPLETED
        save_now = self._may_save(wanted=(is_undone and due.save) or answers[0][1] or is_lost)
        return self._run_due(
            evaluate_now=evaluate_now,
            epoch_ends=is_undone and due.end_epoch,
            save_now=save_now,
            copy_now=False,
            compare_now=False,
        )

    def _run_due(
        self,
        *,
        evaluate_now: bool,
        epoch_ends: bool,
        save_now: bool,
        copy_now: bool,
        compare_now: bool,
    ) -> StopReason | None:
        """Do what is due at this boundary. A state that is saved is compared too."""
        if evaluate_now:
            stop = self._maker.evaluate()
            if stop is not None:
                self._evaluated_step = self._state.committed_step
                return stop
        if epoch_ends:
            self._maker.end_epoch()
        if evaluate_now and self._maker.must_keep():
            if not self._keep():
                return None
            save_now = False
        self._state.boundary_done_step = self._passed_step = self._state.committed_step
        if save_now or copy_now:
            self._maker.gather()
        if save_now:
            self._durable.keep(Keep.FILE)
        if copy_now:
            self._durable.keep(Keep.COPY)
        if save_now or compare_now:
            self._guard.begin_comparison()
        return None

    def _keep(self) -> bool:
        """Have the state as it is now on disk, if the disk takes it, before any rank goes on. False: all went back."""
        # INVARIANT best-kept: the state that was evaluated best so far is on disk before a step changes it.
        # Broken if: a rank counts the boundary as done while rank 0, which may die, still writes.
        # Guarded by: test_the_end_is_of_the_best_also_where_ranks_die.
        if self._guard.compare_replicas():
            return False
        self._maker.gather()
        self._runtime.slot.stamp(Phase.CHECKPOINT, time.monotonic_ns())
        if self.group.rank == 0:
            self._state.boundary_done_step = self._state.committed_step
            self._durable.keep(Keep.BEST)
        with waiting_for_peers(self._runtime.slot):
            self.group.exchange("kept", "")
        self._count_done()
        return True

    def _finish(self, reason: StopReason) -> bool:
        """Compare the replicas, evaluate (at the end of the run only), save. True if that is all.

        False after a roll-back: there is more to train. Raises FaultError if the save fails.
        """
        # Before the last save: what is saved is what a majority has.
        if self._guard.compare_replicas():
            return False
        self._compare_side()
        self._count_done()
        step, was_done = self._state.committed_step, self._state.boundary_done_step
        if reason is StopReason.COMPLETED and self._evaluated_step != step:
            # Left early, it is the end of this launch only: the next one makes up for it.
            is_again = self._passed_step == step
            reason = self.reason = self._maker.evaluate(is_again=is_again) or reason
        if reason is StopReason.COMPLETED:
            if self._passed_step < step and self._maker.due(step).end_epoch:
                self._maker.end_epoch()
            self._state.boundary_done_step = self._passed_step = step
        self._maker.gather()
        # Who has nothing to save waits for rank 0's disk, under the deadline of a save.
        self._runtime.slot.stamp(Phase.CHECKPOINT, time.monotonic_ns())
        if self.group.rank == 0:
            has_news = was_done < self._state.boundary_done_step  # which a file of this step lacks
            compare_s = self._guard.compared_s
            refusal = self._durable.end(reason, compare_s=compare_s, has_news=has_news)
            if refusal is not None:
                raise FaultError(refusal)
            self._count_done()
        return True

    def _count_done(self) -> None:
        """Count the step as progress at the end of a run, when no step can be committed."""
        self._runtime.slot.count_done(self._state.committed_step)
