"""Guards the numbers: non-finite steps, silent corruption, and the way back to a checkpoint.

Every decision here is taken from what all ranks know alike, so that all take the same one.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from ddp_runner.core.injection import flips_bits
from ddp_runner.core.loss_spikes import broken_gradients
from ddp_runner.core.settings import Settings
from ddp_runner.data.loader import MicroBatch
from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.group.transfer import receive_state, send_state
from ddp_runner.kernel.group.waits import waiting_for_peers
from ddp_runner.kernel.rules.divergence import (
    Comparison,
    compare_replicas,
    first_difference,
    unlike_option,
)
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind, rank_list
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.step.durable import Durable, Trust
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.step.session import StepResult
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import FaultTolerated, RepairedInPlace, TuningChanged
from ddp_runner.training.components.loss_monitor import Verdict
from ddp_runner.training.components.tensor_hash import combined, state_hashes
from ddp_runner.training.exactness.own_update import options_of
from ddp_runner.training.exactness.state_hashes import StateHashing
from ddp_runner.training.loading.batch_copy import tensors_of
from ddp_runner.training.state import TrainState

INDICES_SHOWN = 16
ROLLBACKS_WITHOUT_MAJORITY_MAX = 2  # to one step; what then differs again differs every time
DETAIL_CHARACTERS = 20_000  # a message has room for more, but not for any number


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """The ranks that caused a step that cannot be applied, with the words for it, and the suspected part."""

    ranks: tuple[int, ...]
    words: str
    suspect: str


_OF_ONE_RANK = (
    "does a step change weights or gradients by values of one rank? random draws differ by rank"
)


class NumericsGuard:
    """One generation's guard on this rank. Every rank calls its methods at the same steps."""

    def __init__(
        self,
        group: Group,
        *,
        settings: Settings,
        state: TrainState,
        durable: Durable,
        runtime: Runtime,
    ) -> None:
        self._settings = settings
        self._state = state
        self._durable = durable
        self._runtime = runtime
        self._rank = runtime.rank_info.rank
        self._group = group
        self._step_rolled_back_to = EMPTY_STEP  # where replicas differed without a majority
        self._rollbacks_there = 0
        self._compares = group.world_size > 1 and bool(self._settings.recovery.replica_check_steps)
        self._hashing: StateHashing | None = None  # of the state that the step in hand began with
        self._begun_ns = 0  # what it took to begin with it
        self.compared_s = 0.0  # the last comparison at the end of training
        # Each is called on all ranks once the state is an older one.
        self.went_back: list[Callable[[], None]] = []

    def skipped(
        self,
        result: StepResult,
        verdict: Verdict,
        micro_batches: list[MicroBatch],
        *,
        recompute: Callable[[], float | None],
    ) -> bool:
        """A step without effect, on all ranks: bounded, then a roll-back at half the rate, then the end.

        Returns whether the state is now another one. ``recompute`` returns the norm of this rank's own
        gradient, computed once more; None where it cannot be. Raises FaultError (NON_FINITE,
        LOSS_EXPLODED) at the end.
        """
        if result.overflowed:
            scale = self._state.precision.scale()
            self._runtime.logger.progress(
                f"gradients overflowed in fp16: step skipped, loss scale {scale:g} from here on"
            )
            if words := _in_batch([not_finite_in(micro_batches)]):
                self._runtime.logger.warning(f"gradients overflowed, and {words}")
            return False
        if result.without_weight:
            if self._group.rank == 0:
                self._runtime.logger.warning("no sample of the step has any weight: step skipped")
            return False
        origin = self._origin(result, recompute)
        mine = json.dumps(not_finite_in(micro_batches))
        answers = self._exchange(f"batch/{result.step}", mine)
        if words := _in_batch([json.loads(answer) for answer in answers]):
            origin = replace(origin, words=f"{origin.words}; {words}", suspect="the data")
        what = (result.explosion or f"gradient norm is {result.grad_norm}") + origin.words
        action = "step skipped on all ranks"
        if result.explosion:
            action += self._state.loss_spikes.says_of_rate()
        self._runtime.logger.warning(f"{what}: {action}")
        if self._group.rank == 0:
            fault = Fault(
                kind=FaultKind.LOSS_EXPLODED if result.explosion else FaultKind.NON_FINITE,
                rank=origin.ranks[0] if len(origin.ranks) == 1 else -1,
                step=result.step - 1,
                cause=what,
                at_ns=time.monotonic_ns(),
            )
            self._runtime.report(FaultTolerated(rank=self._rank, fault=fault, action=action))
        if verdict is not Verdict.TOO_MANY_ERRORS:
            return False
        limit = self._settings.recovery.max_errors_per_epoch
        factor = self._state.tuning.rate_factor / 2
        may_halve = factor >= 0.5**self._settings.recovery.rollbacks_max
        if may_halve and self._step_to_go_back_to() != EMPTY_STEP:
            kind = FaultKind.LOSS_EXPLODED if result.explosion else FaultKind.NON_FINITE
            reason = f"more than {limit} steps were skipped, the last because {what}"
            self._roll_back(reason, kind=kind, rate_factor=factor)
            return True
        raise FaultError(self._hopeless(result, what, micro_batches, origin))

    def _origin(self, result: StepResult, recompute: Callable[[], float | None]) -> _Origin:
        """Find the origin of a bad step. A rank's own loss shows it; a sum of gradients does not."""
        ranks, found = result.broken_ranks, bool(result.broken_ranks)
        if not found and math.isfinite(result.loss):
            mine = recompute()
            answers = self._exchange(f"gradient/{result.step}", json.dumps(mine))
            norms = [json.loads(answer) for answer in answers]
            found = None not in norms
            if found:
                limit = self._state.loss_spikes.limits().grad_norm
                ranks = broken_gradients(norms, limit=limit)
        if not found:
            words = ""
        elif ranks:
            words = f", first on {rank_list(ranks)}"
        else:
            words = ", on no rank when computed once more"
        suspect = "the data or the learning rate"
        if found and len(ranks) <= 1 < self._group.world_size:
            suspect = "its device" if ranks else "a device or the links between them"
        return _Origin(ranks=ranks, words=words, suspect=suspect)

    def _hopeless(
        self, result: StepResult, what: str, micro_batches: list[MicroBatch], origin: _Origin
    ) -> Fault:
        """Neither skipping nor a lower rate has helped. Every rank must ask."""
        limit = self._settings.recovery.max_errors_per_epoch
        mine = [index for micro_batch in micro_batches for index in micro_batch.indices]
        everybody = self._exchange(f"indices/{result.step}", json.dumps(mine))
        blamed = origin.ranks or tuple(range(self._group.world_size))
        indices = [index for rank in blamed for index in json.loads(everybody[rank])]
        return Fault(
            kind=FaultKind.LOSS_EXPLODED if result.explosion else FaultKind.NON_FINITE,
            rank=self._group.rank,
            step=result.step - 1,
            cause=f"more than max_errors_per_epoch={limit} steps were skipped, the last because "
            f"{what}: suspect {origin.suspect}; "
            f"samples {_shortened(indices)}",
            detail=f"sample indices of the last one: {indices}"[:DETAIL_CHARACTERS],
            at_ns=time.monotonic_ns(),
        )

    def begin_comparison(self) -> None:
        """Have the state as it is at this boundary hashed beside the next step.

        Of the rank that saves, what it has copied for that: a bit that flips on the way to the file
        shows. Nothing may change the state before :meth:`may_commit`, which gives the verdict.
        """
        if not self._compares:
            self._durable.judge(Trust.SOUND)
            return
        began_ns = time.monotonic_ns()
        with self._comparing():
            self._hashing = StateHashing(self._state, source=self._durable.copies_of)
        self._begun_ns = self._counted_ns(began_ns)

    def may_commit(self) -> bool:
        """Return True if the current step, whose reduction is complete, may change the state.

        False if the state was rolled back, so that the step is another one. Raises FaultError if ranks differ from
        a majority: on those, and on the others too, since the step's gradient is partly of the odd ones.
        """
        hashing, self._hashing = self._hashing, None
        if hashing is None:
            return True
        began_ns = time.monotonic_ns()
        with self._comparing():
            hashes = hashing.result()
        comparison = self._judge(hashes, is_beside=True)
        if not comparison.odd:
            took_ns = self._begun_ns + self._counted_ns(began_ns)
            self._durable.judge(Trust.SOUND, compare_s=took_ns / 1e9)
            return True
        if not comparison.has_majority:
            return False
        raise FaultError(
            Fault(
                kind=FaultKind.COLLECTIVE_FAILED,  # by whoever is at fault, who reports it
                rank=self._group.rank,
                step=self._state.committed_step,
                cause=f"the step has a gradient of {rank_list(comparison.odd)}, whose state differs",
                at_ns=time.monotonic_ns(),
            )
        )

    def compare_replicas(self) -> bool:
        """Find a replica whose state has silently changed, at once. Raises FaultError on that rank.

        Returns whether the state is now another one, after a roll-back.
        """
        if not self._compares:
            return False
        began_ns = time.monotonic_ns()
        with self._comparing():
            hashes = state_hashes(self._state.replicated())
        comparison = self._judge(hashes)
        if not comparison.odd:
            self._durable.judge(Trust.SOUND)
            self.compared_s = self._counted_ns(began_ns) / 1e9
        # With a majority, the next collective fails, and its state is what the odd one receives.
        return bool(comparison.odd) and not comparison.has_majority

    def close(self) -> None:
        """The generation ends: a verdict that has not come does not come, and another state is saved."""
        # INVARIANT compared-before-save: what is saved is what all replicas have, so that there is a
        # checkpoint to go back to when they differ and no majority can be believed.
        # Broken if: a save is proven by anything but the comparison of that very state.
        # Guarded by: test_what_one_rank_alone_has_is_never_saved.
        self._durable.judge(Trust.UNKNOWN)
        if self._hashing is not None:
            self._hashing.drop()

    def _counted_ns(self, began_ns: int) -> int:
        """Return the time that training has waited since ``began_ns`` for a comparison; the board adds it up."""
        took_ns = time.monotonic_ns() - began_ns
        self._runtime.slot.add(Cell.COMPARISON_NS, took_ns)
        return took_ns

    @contextlib.contextmanager
    def _comparing(self) -> Iterator[None]:
        """Show the comparison on the board: a large state takes longer than a step may."""
        slot = self._runtime.slot
        before = Phase(slot.get(Cell.PHASE))
        slot.stamp(Phase.COMPARE, time.monotonic_ns())
        yield
        slot.stamp(before, time.monotonic_ns())

    def _judge(self, hashes: Mapping[str, str], *, is_beside: bool = False) -> Comparison:
        """The verdict of all ranks, also on the save under way where they differ. Raises FaultError on an odd rank.

        Without a majority all are rolled back. ``is_beside``: hashed beside the step in hand.
        """
        mine = combined(list(hashes.values()))
        step = self._state.committed_step
        found = self._exchange(f"weights/{step}", mine)
        comparison = compare_replicas(found)
        rank = self._group.rank
        if is_beside and comparison.odd and self._was_only_written(hashes, step):
            return Comparison(odd=(), has_majority=True)
        # Before anything that another rank's end may cut short: such a state is never saved.
        self._state.is_in_doubt = bool(comparison.odd) and (
            rank in comparison.odd or not comparison.has_majority
        )
        if not comparison.odd:
            return comparison
        # Rare, and worth a longer message: which tensor.
        details = json.dumps([list(hashes.values()), dict(options_of(self._state))])
        everybody = [json.loads(one) for one in self._exchange(f"tensors/{step}", details)]
        option = unlike_option([options for _, options in everybody])
        if not comparison.has_majority:
            self._durable.judge(Trust.WRONG)
            self._settle_without_majority(step, option)
            return comparison
        # What was evaluated at this boundary was not of one model: it is done again.
        self._state.boundary_done_step = min(self._state.boundary_done_step, step - 1)
        if rank not in comparison.odd:
            self._durable.judge(Trust.SOUND)  # what is saved is the majority's
            # INVARIANT odd-ones-first: whoever is reported first makes all leave, and a rank that was held
            # up would never read that its state is wrong, and keep it.
            # Broken if: a rank of the majority leaves before the odd ones know.
            # Guarded by: test_the_majority_leaves_when_the_odd_one_knows.
            with waiting_for_peers(self._runtime.slot):
                self._group.await_notes(f"odd/{step}", comparison.odd)
            return comparison
        self._group.note(f"odd/{step}")
        usual = next(r for r in range(len(found)) if r not in comparison.odd)
        where = first_difference(list(hashes.values()), everybody[usual][0], list(hashes))
        where += f"; {option}" * bool(option)
        raise FaultError(
            Fault(
                kind=FaultKind.REPLICA_DIVERGED,
                rank=rank,
                step=step,
                cause=f"rank {rank}'s state differs from the majority's, first in {where}",
                at_ns=time.monotonic_ns(),
            )
        )

    def _was_only_written(self, hashes: Mapping[str, str], step: int) -> bool:
        """Return True if the ranks no longer differ: the step's forward wrote what was being hashed meanwhile.

        Forward may write through ``.data`` or numpy, for example, which torch does not count. The tensor is followed
        from now on; the save, which may have parts of both, is made at a later boundary.
        """
        now = state_hashes(self._state.replicated())
        if len(set(self._exchange(f"again/{step}", combined(list(now.values()))))) > 1:
            return False
        mine = [name for name in hashes if hashes[name] != now.get(name)]
        answers = self._exchange(f"written/{step}", json.dumps(mine))
        written = sorted({name for names in answers for name in json.loads(names)})
        self._durable.judge(Trust.UNKNOWN)
        self._state.buffers.follow(written)
        if self._group.rank == 0 and written:
            self._runtime.logger.info(
                f"{written[0]} is written by forward or loss, from this step on: it is put back too"
                " where a step is done again",
                step=step,
            )
        return True

    def _settle_without_majority(self, step: int, option: str) -> None:
        """Roll back, or have all processes replaced. Raises FaultError if neither helps. ``option``: one that differs."""
        since = set(self._exchange(f"trained since/{step}", str(self._state.trained_since)))
        is_injected = flips_bits(
            self._settings.run.inject, world_size=self._runtime.rank_info.world_size
        )
        # Ranks that have trained equally long have any hidden state alike: then it is a bit that has flipped.
        if len(since) > 1 and not is_injected:
            self._replace_all(step)
        if option:  # it comes from the program, which would give it again
            raise self._undecided(step, f"and {option}")
        checkpoint_step = self._step_to_go_back_to()
        if checkpoint_step != self._step_rolled_back_to:
            self._rollbacks_there = 0
        why = ""
        if checkpoint_step == EMPTY_STEP:
            why = f"and there is no checkpoint ({_OF_ONE_RANK})"
        elif self._rollbacks_there == ROLLBACKS_WITHOUT_MAJORITY_MAX:
            why = f"again after going back to step {checkpoint_step}: suspect a device"
        if why:
            raise self._undecided(step, why)
        try:
            self._roll_back(
                "the replicas differ and no majority agrees",
                kind=FaultKind.REPLICA_DIVERGED,
                rate_factor=self._state.tuning.rate_factor,
            )
        except FaultError as error:  # a loop cannot begin again by itself
            if error.fault.kind is not FaultKind.CHECKPOINT_BAD:
                raise
            raise self._undecided(step, f"and {error.fault.cause}") from None
        self._step_rolled_back_to = self._state.committed_step
        self._rollbacks_there += 1

    def _undecided(self, step: int, why: str) -> FaultError:
        return FaultError(
            Fault(
                kind=FaultKind.REPLICA_DIVERGED,
                rank=self._group.rank,
                step=step,
                cause=f"the replicas differ, no majority agrees, {why}",
                at_ns=time.monotonic_ns(),
                may_retry=False,
            )
        )

    def _replace_all(self, step: int) -> NoReturn:
        """Have all processes replaced: they begin at a checkpoint, or at step 0, with equal hidden state."""
        why = "ranks had been replaced: a state that is not kept"
        if self._group.rank == 0:
            self._report_inexact(step, f"the replicas differed at step {step}, where {why}")
        self._leave_state(step)
        raise FaultError(
            Fault(
                kind=FaultKind.RANK_RAISED,
                rank=self._group.rank,
                step=step,
                cause=f"the replicas differ, where {why}",
                detail="all processes begin again, with equal state",
                at_ns=time.monotonic_ns(),
            )
        )

    def _step_to_go_back_to(self) -> int:
        """Return the newest step on rank 0's disk, or EMPTY_STEP; every rank must call it."""
        # All wait for rank 0's disk from here to the next step, under the deadline of a save.
        self._runtime.slot.stamp(Phase.CHECKPOINT, time.monotonic_ns())
        newest = EMPTY_STEP
        if self._group.rank == 0:
            newest = self._durable.newest_step()
        step = self._state.committed_step
        return int(self._exchange(f"checkpoint/{step}", str(newest))[0])

    def _exchange(self, name: str, value: str) -> list[str]:
        with waiting_for_peers(self._runtime.slot):
            return self._group.exchange(name, value)

    def _roll_back(self, reason: str, *, kind: FaultKind, rate_factor: float) -> None:
        """Go back to what was kept, on all ranks, within the generation."""
        began_s, step = time.monotonic(), self._state.committed_step
        lowered = rate_factor != self._state.tuning.rate_factor
        if self._group.rank == 0:  # also where what follows is cut short
            self._report_inexact(
                step, f"learning rate lowered after step {step}" if lowered else ""
            )
        self._state.tuning = replace(self._state.tuning, rate_factor=rate_factor)
        self._leave_state(step)
        if self._group.rank == 0:
            self._durable.give_back()
            if lowered:
                self._state.monitor.restart_count()
            others = [rank for rank in range(self._group.world_size) if rank != 0]
            send_state(self._group, self._state.capture(), to=others)
        else:
            with waiting_for_peers(self._runtime.slot):
                received = receive_state(self._group, source=0, into=self._state.to_write_over())
            self._state.restore(received)
        self._runtime.slot.set(Cell.COMMITTED_STEP, self._state.committed_step)
        for take_in in self.went_back:
            take_in()
        action = f"rolled back to step {self._state.committed_step}"
        if lowered:
            action += f", learning rate x {rate_factor:g}"
        if self._group.rank == 0:
            self._runtime.logger.warning(f"{reason}: {action}", step=step)
            fault = Fault(
                kind=kind,
                rank=-1,
                step=step,
                cause=reason,
                phase=Phase.COMPARE.label if kind is FaultKind.REPLICA_DIVERGED else "",
                at_ns=time.monotonic_ns(),
            )
            self._report_roll_back(fault, action, began_s=began_s)

    def _leave_state(self, step: int) -> None:
        # INVARIANT left-for-good: after a roll-back has begun, no rank has the state that is left.
        # Broken if: a rank fails in here while its own committed_step, or another's, is still the old one.
        # Guarded by: test_a_roll_back_whose_load_fails_leaves_no_old_state.
        self._state.committed_step = EMPTY_STEP
        self._durable.forget()  # first: who begins where none is left would take one
        self._exchange(f"left/{step}", "")

    def _report_inexact(self, step: int, reason: str) -> None:
        """Without a ``reason`` the state gone back to is one that all ranks had: the same steps follow."""
        self._runtime.report(
            TuningChanged(
                rank=self._rank,
                step=step,
                action="going back to an older state",
                inexact_reason=reason,
                fault_free=True,
            )
        )

    def _report_roll_back(self, fault: Fault, action: str, *, began_s: float) -> None:
        took_s = time.monotonic() - began_s
        self._runtime.report(
            RepairedInPlace(
                rank=self._rank,
                fault=fault,
                action=action,
                seconds=took_s,
                steps_lost=fault.step - self._state.committed_step,
            )
        )


def _in_batch(found: Sequence[Mapping[str, list[int]]]) -> str:
    """Return the non-finite values in the batches of all ranks, in words; empty if there are none."""
    for kind in (NAN, INF):
        indices = [index for one in found for index in one.get(kind, ())]
        if indices:
            return f"the batch has {kind} already, in samples {_shortened(indices)}"
    return ""


def _shortened(indices: list[int]) -> str:
    """A line's worth of sample indices; the log has them all."""
    shown = ", ".join(str(index) for index in indices[:INDICES_SHOWN])
    return shown + (", ..." if len(indices) > INDICES_SHOWN else "")


# Whether a batch itself holds NaN or inf, and in which samples. Looked at only where a step has
# failed.

NAN, INF = "NaN", "inf"


def not_finite_in(micro_batches: Sequence[MicroBatch]) -> dict[str, list[int]]:
    """Samples by what a tensor of theirs holds, ``NAN`` or ``INF``; where no row is theirs, all of the batch."""
    found: dict[str, dict[int, None]] = {}
    for micro in micro_batches:
        for tensor in tensors_of(micro.batch):
            if not _has_numbers(tensor):
                continue
            is_by_sample = tensor.dim() > 0 and len(tensor) == len(micro.indices)
            parts: list[tuple[tuple[int, ...], Tensor]] = [(micro.indices, tensor)]
            if is_by_sample:
                parts = [((index,), tensor[at]) for at, index in enumerate(micro.indices)]
            for indices, part in parts:  # one after the other: no second batch has to fit in memory
                if kind := _kind(part):
                    found.setdefault(kind, {}).update(dict.fromkeys(indices))
    return {kind: list(indices) for kind, indices in found.items()}


def _has_numbers(tensor: Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    return is_plain and (tensor.is_floating_point() or tensor.is_complex())


def _kind(part: Tensor) -> str:
    if bool(torch.isfinite(part).all()):
        return ""
    return NAN if bool(torch.isnan(part).any()) else INF
