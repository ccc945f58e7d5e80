"""What the ranks of a generation agree on before they train: the tuning that suits every one."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from ddp_runner.collective.group import Group
from ddp_runner.core.faults import Fault, FaultError, FaultKind
from ddp_runner.core.messages import TuningChanged
from ddp_runner.training.components.tuning import Tuning, mend
from ddp_runner.training.rank_context import RankParts


def agree_on_tuning(
    group: Group, parts: RankParts, *, mended: Tuning | None, short_of_memory_in: str
) -> None:
    """Take what suits every rank, and cut this rank's share accordingly. Every rank must call it.

    ``mended``: what this rank has just changed for a fault of its own; the state that it received
    since then, where the others had gone on without it, knows nothing of that.
    ``short_of_memory_in``: the phase in which this rank's predecessor ended for lack of memory, if it
    did, so that it asks for half.
    Raises FaultError (OUT_OF_MEMORY) where that cannot be halved.
    """
    state = parts.state
    mine = _halved(parts, short_of_memory_in) if short_of_memory_in else state.tuning
    if mended is not None:
        mine = mine.agreed_with([mine, mended])
    records = group.exchange("tuning", json.dumps(mine.to_record()))
    all_tunings = [Tuning.from_record(json.loads(r), otherwise=mine) for r in records]
    state.tuning = mine.agreed_with(all_tunings)
    parts.loader.assign(
        rank=group.rank,
        world_size=group.world_size,
        micro_batch_size=state.tuning.micro_batch_size,
    )


def recalled(parts: RankParts) -> Tuning | None:
    """What the process before this one changed at or after the step that the ranks stand at."""
    state, runtime = parts.state, parts.runtime
    learnt = runtime.place.learnt
    if learnt is None or learnt.step < state.committed_step:
        return None  # a checkpoint that was made since then has it
    runtime.logger.warning(f"as the process before this one had it: {learnt.action}")
    runtime.report(replace(learnt, fault_free=True))
    return Tuning.from_record(learnt.tuning, otherwise=state.tuning)


def _halved(parts: RankParts, phase: str) -> Tuning:
    """What a rank does about its own lack of memory, done for its predecessor."""
    state, runtime = parts.state, parts.runtime
    fault = Fault(
        kind=FaultKind.OUT_OF_MEMORY,
        rank=runtime.place.rank,
        step=state.committed_step,
        cause="this rank ended for lack of memory, with single samples",
        phase=phase,
        at_ns=time.monotonic_ns(),
        may_retry=False,
    )
    mended = mend(fault, state.tuning, samples=parts.loader.share_samples)
    if mended is None:
        raise FaultError(fault)
    runtime.logger.warning(f"the process before this one ran out of memory: {mended.remedy}")
    runtime.report(
        TuningChanged(
            rank=fault.rank,
            step=fault.step,
            action=mended.remedy,
            inexact_reason=mended.inexact_reason,
            fault_free=True,
            plain_retry=mended.plain_retry,
        )
    )
    return mended.tuning
