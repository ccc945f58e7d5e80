"""Guards the numbers: non-finite steps, silent corruption, and the way back to a checkpoint.

Every decision here is taken from what all ranks know alike, so that all take the same one.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ddp_runner.collective.group import Group
from ddp_runner.collective.transfer import receive_state, send_state
from ddp_runner.collective.waiting import waiting_for_peers
from ddp_runner.core.board import Cell
from ddp_runner.core.divergence import compare_replicas, first_difference
from ddp_runner.core.election import EMPTY_STEP
from ddp_runner.core.explosion import broken_gradients
from ddp_runner.core.faults import Fault, FaultError, FaultKind
from ddp_runner.core.messages import Adjusted, MendedInPlace
from ddp_runner.core.phases import Phase
from ddp_runner.data.loader import MicroBatch
from ddp_runner.observe.format import rank_list
from ddp_runner.training.fingerprint import combined, state_hashes
from ddp_runner.training.loss_monitor import Verdict
from ddp_runner.training.parts import RankParts
from ddp_runner.training.step import StepResult

INDICES_SHOWN = 16
ROLLBACKS_WITHOUT_MAJORITY_MAX = 2  # to one checkpoint; what then differs again differs every time
DETAIL_CHARACTERS = 20_000  # a message has room for more, but not for any number


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Who brought about a step that cannot be applied, in ranks and in words, and what to suspect."""

    ranks: tuple[int, ...]
    words: str
    suspect: str


class Guard:
    """One generation's guard on this rank. Every rank calls its methods at the same steps."""

    def __init__(self, parts: RankParts, group: Group) -> None:
        self._settings = parts.settings
        self._state = parts.state
        self._store = parts.store
        self._saving = parts.saving
        self._runtime = parts.runtime
        self._rank = parts.runtime.place.rank
        self._group = group
        self._step_rolled_back_to = EMPTY_STEP  # where replicas differed without a majority
        self._rollbacks_there = 0

    def skipped(
        self,
        result: StepResult,
        verdict: Verdict,
        micro_batches: list[MicroBatch],
        *,
        recompute: Callable[[], float | None],
    ) -> bool:
        """A step without effect, on all ranks: bounded, then a roll-back at half the rate, then the end.

        Returns whether the state is now another one. ``recompute`` tells the norm of this rank's own
        gradient, computed once more; None where it cannot be. Raises FaultError (NON_FINITE,
        LOSS_EXPLODED) at the end.
        """
        if result.overflowed:
            scale = float(self._state.precision.scaler.get_scale())
            self._runtime.logger.progress(
                f"gradients overflowed in fp16: step skipped, loss scale {scale:g} from here on"
            )
            return False
        origin = self._origin(result, recompute)
        what = (result.explosion or f"gradient norm is {result.grad_norm}") + origin.words
        self._runtime.logger.warning(f"{what}: step skipped on all ranks")
        if verdict is not Verdict.TOO_MANY_ERRORS:
            return False
        limit = self._settings.recovery.max_errors_per_epoch
        factor = self._state.tuning.rate_factor / 2
        may_halve = factor >= 0.5**self._settings.recovery.rollbacks_max
        if may_halve and self._checkpoint_step() != EMPTY_STEP:
            kind = FaultKind.LOSS_EXPLODED if result.explosion else FaultKind.NON_FINITE
            reason = f"more than {limit} steps were skipped, the last because {what}"
            self._roll_back(reason, kind=kind, rate_factor=factor)
            return True
        raise FaultError(self._hopeless(result, what, micro_batches, origin))

    def _origin(self, result: StepResult, recompute: Callable[[], float | None]) -> _Origin:
        """Where it came from. A rank's loss tells by itself; a sum of gradients does not."""
        ranks, found = result.broken_ranks, bool(result.broken_ranks)
        if not found and math.isfinite(result.loss):
            mine = recompute()
            told = self._exchange(f"gradient/{result.step}", json.dumps(mine))
            norms = [json.loads(answer) for answer in told]
            found = None not in norms
            if found:
                limit = self._state.explosions.limits().grad_norm
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

    def compare_replicas(self) -> bool:
        """Find a replica whose state has silently changed. Raises FaultError on that rank.

        Returns whether the state is now another one, after a roll-back.
        """
        if self._group.world_size == 1:
            return False
        hashes = self._hashes()
        mine = combined(list(hashes.values()))
        step = self._state.committed_step
        found = self._exchange(f"weights/{step}", mine)
        comparison = compare_replicas(found)
        if not comparison.odd:
            return False
        # Rare, and worth a longer message: which tensor.
        everybody = self._exchange(f"tensors/{step}", json.dumps(list(hashes.values())))
        if not comparison.has_majority:
            self._settle_without_majority(step)
            return True
        rank = self._group.rank
        if rank not in comparison.odd:
            return False  # the next collective fails, and this rank's state is what the odd one receives
        usual = next(r for r in range(len(found)) if r not in comparison.odd)
        where = first_difference(list(hashes.values()), json.loads(everybody[usual]), list(hashes))
        raise FaultError(
            Fault(
                kind=FaultKind.REPLICA_DIVERGED,
                rank=rank,
                step=step,
                cause=f"rank {rank}'s state differs from the majority's, first in {where}",
                at_ns=time.monotonic_ns(),
            )
        )

    def _hashes(self) -> dict[str, str]:
        """Of everything that is replicated. A large state takes longer than a step may."""
        slot = self._runtime.slot
        before = Phase(slot.get(Cell.PHASE))
        slot.stamp(Phase.COMPARE, time.monotonic_ns())
        hashes = state_hashes(self._state.replicated())
        slot.stamp(before, time.monotonic_ns())
        return hashes

    def _settle_without_majority(self, step: int) -> None:
        checkpoint_step = self._checkpoint_step()
        if checkpoint_step != self._step_rolled_back_to:
            self._rollbacks_there = 0
        why = ""
        if checkpoint_step == EMPTY_STEP:
            why = "and there is no checkpoint"
        elif self._rollbacks_there == ROLLBACKS_WITHOUT_MAJORITY_MAX:
            why = f"again from the same checkpoint, of step {checkpoint_step}: suspect a device"
        if why:
            raise FaultError(
                Fault(
                    kind=FaultKind.REPLICA_DIVERGED,
                    rank=self._group.rank,
                    step=step,
                    cause=f"the replicas differ, no majority agrees, {why}",
                    at_ns=time.monotonic_ns(),
                    may_retry=False,
                )
            )
        self._roll_back(
            "the replicas differ and no majority agrees",
            kind=FaultKind.REPLICA_DIVERGED,
            rate_factor=self._state.tuning.rate_factor,
        )
        self._step_rolled_back_to = self._state.committed_step
        self._rollbacks_there += 1

    def _checkpoint_step(self) -> int:
        """The step of rank 0's newest checkpoint, or EMPTY_STEP; every rank must ask."""
        # All wait for rank 0's disk from here to the next step, under the deadline of a save.
        self._runtime.slot.stamp(Phase.CHECKPOINT, time.monotonic_ns())
        newest = EMPTY_STEP
        if self._group.rank == 0:
            self._saving.settle()  # what is being written is the newest there will be
            newest = max((entry.step for entry in self._store.catalog.entries()), default=newest)
        step = self._state.committed_step
        return int(self._exchange(f"checkpoint/{step}", str(newest))[0])

    def _exchange(self, name: str, value: str) -> list[str]:
        with waiting_for_peers(self._runtime.slot):
            return self._group.exchange(name, value)

    def _roll_back(self, reason: str, *, kind: FaultKind, rate_factor: float) -> None:
        """Go back to the newest checkpoint that verifies, on all ranks, within the generation."""
        began_s, step = time.monotonic(), self._state.committed_step
        # What was learnt since that checkpoint holds, and DDP and loader are made for it.
        kept = self._state.tuning
        others = [rank for rank in range(self._group.world_size) if rank != 0]
        if self._group.rank == 0:
            loaded = self._store.load("auto", set_bad_aside=True)
            assert loaded is not None, "there was one a moment ago"
            self._saving.rolled_back()
            self._state.restore(loaded.state)
            send_state(self._group, self._state.capture(), to=others)
        else:
            self._state.committed_step = EMPTY_STEP  # what is being left must not be elected again
            with waiting_for_peers(self._runtime.slot):
                received = receive_state(self._group, source=0)
            self._state.restore(received)
        lowered = rate_factor != kept.rate_factor
        self._state.tuning = replace(kept, rate_factor=rate_factor)
        self._runtime.slot.set(Cell.COMMITTED_STEP, self._state.committed_step)
        remedy = f"rolled back to step {self._state.committed_step}"
        if lowered:
            remedy += f", learning rate x {rate_factor:g}"
        if self._group.rank == 0:
            self._runtime.logger.warning(f"{reason}: {remedy}", step=step)
            fault = Fault(kind=kind, rank=-1, step=step, cause=reason, at_ns=time.monotonic_ns())
            self._report_roll_back(fault, remedy, lowered=lowered, began_s=began_s)

    def _report_roll_back(
        self, fault: Fault, remedy: str, *, lowered: bool, began_s: float
    ) -> None:
        step = fault.step
        took_s = time.monotonic() - began_s
        self._runtime.tell(
            MendedInPlace(
                rank=self._rank,
                fault=fault,
                remedy=remedy,
                seconds=took_s,
                steps_lost=step - self._state.committed_step,
            )
        )
        inexact = f"the replicas had diverged by step {step}"
        if lowered:
            inexact = f"learning rate lowered after step {step}"
        self._runtime.tell(
            Adjusted(
                rank=self._rank, step=step, remedy=remedy, inexact_reason=inexact, in_peace=True
            )
        )


def _shortened(indices: list[int]) -> str:
    """A line's worth of sample indices; the log has them all."""
    shown = ", ".join(str(index) for index in indices[:INDICES_SHOWN])
    return shown + (", ..." if len(indices) > INDICES_SHOWN else "")
