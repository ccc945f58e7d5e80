"""Lets the ranks of a generation agree before they train: on the newest state, and on a tuning that suits all."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, replace

from ddp_runner.collective.group import Group
from ddp_runner.collective.transfer import receive_state, send_state
from ddp_runner.collective.waiting import waiting_for_peers
from ddp_runner.core.board import Cell
from ddp_runner.core.election import EMPTY_STEP, ReplicaProgress, elect_source
from ddp_runner.core.events import TuningChanged
from ddp_runner.core.faults import Fault, FaultError, FaultKind
from ddp_runner.core.nodes import who_completes
from ddp_runner.core.phases import Phase
from ddp_runner.training.audit import GenerationMembers, audit_path, complete_audits
from ddp_runner.training.components.tuning import Tuning, repair_tuning
from ddp_runner.training.durable import Durable
from ddp_runner.training.rank_context import RankParts, TaskParts
from ddp_runner.training.resume import leave_other_branch
from ddp_runner.training.runtime import Runtime
from ddp_runner.training.state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """All ranks are at the newest committed step, which came from the rank ``source``."""

    source: int
    members: GenerationMembers


def bring_to_newest(
    group: Group,
    parts: RankParts,
    durable: Durable,
    *,
    members: GenerationMembers | None,
    has_trained: bool,
) -> Brought:
    """Bring every rank to the newest committed step. Every rank must call it.

    ``members``: of the newest generation that this process stood at a step with, before this one.
    ``has_trained``: it has come so far as to train in one.
    """
    state, slot = parts.state, parts.runtime.slot
    answers = _committed_steps(group, parts, "committed_step")
    if all(step == EMPTY_STEP for step, *_ in answers):  # a roll-back was cut short
        slot.stamp(Phase.CHECKPOINT, time.monotonic_ns())  # under the deadline of a save
        if group.rank == 0:
            durable.give_back()
        answers = _committed_steps(group, parts, "restored_step")
        slot.stamp(Phase.FORMING, time.monotonic_ns())
    election = elect_source(
        [ReplicaProgress(rank=rank, committed_step=step) for rank, (step, *_) in enumerate(answers)]
    )
    _complete_audits(group, parts, members, answers)
    if group.rank == election.source:
        _prepare_source(parts, has_trained=has_trained)
    if election.receivers and group.rank == election.source:
        send_state(
            group, state.capture(), to=election.receivers, on_progress=lambda: _show_progress(parts)
        )
    elif group.rank in election.receivers:
        was_left = has_trained and state.committed_step == EMPTY_STEP
        learnt = state.tuning
        received = receive_state(
            group,
            source=election.source,
            into=state.to_write_over(),
            on_progress=lambda: _show_progress(parts),
        )
        state.restore(received)
        if was_left:
            # Of the source's and this all agree on one next; who has read the state may be new.
            state.tuning = learnt
    if math.isnan(parts.progress.loss) and state.monitor.last is not None:
        parts.progress.loss = state.monitor.last  # until this process has trained a step
    slot.set(Cell.COMMITTED_STEP, state.committed_step)
    slot.set(Cell.SAMPLES, state.samples)
    slot.set(Cell.DIRTY, 0)
    now_members = GenerationMembers(
        generation=group.membership.generation,
        slots=tuple(place for _, place, _ in answers),
        first_step=state.committed_step,
    )
    return Brought(source=election.source, members=now_members)


def _complete_audits(
    group: Group,
    parts: RankParts,
    members: GenerationMembers | None,
    answers: list[tuple[int, int, int]],
) -> None:
    """Write what ranks that are lost have not, on each machine into its own folder of logs."""
    if members is None:
        return
    steps, _, folders = zip(*answers, strict=True)
    if who_completes(folders, steps=steps).get(folders[group.rank]) != group.rank:
        return
    folder_of = {slot: folder for _, slot, folder in answers}
    # Whose machine is not there any more has its folder there, unless all have the same.
    slots = [
        slot
        for slot in members.slots
        if folder_of.get(slot, min(folders)) == folders[group.rank]
        and (
            slot in folder_of or len(set(folders)) == 1 or audit_path(parts.settings, slot).exists()
        )
    ]
    state = parts.state
    complete_audits(
        parts.settings,
        members,
        slots=slots,
        step=state.committed_step,
        order=replace(parts.workload.order, version=state.order_version),
        quarantine=state.quarantine,
        loss=parts.progress.loss,
        warn=parts.runtime.logger.warning,
    )


def _prepare_source(parts: RankParts, *, has_trained: bool) -> None:
    """Prepare the source rank before another rank receives the newest step."""
    runtime = parts.runtime
    is_new = runtime.rank_info.loads and not has_trained
    if is_new and not parts.progress.is_from_memory:  # which is of after this was done
        # INVARIANT left-before-shared: whoever has the state of this run finds no other branch.
        # Broken if: it is sent first; should this rank die then, nobody loads it, and leaves that.
        # Guarded by: test_a_rank_that_dies_leaving_the_other_branch_has_a_successor.
        leave_other_branch(
            parts.settings,
            parts.store,
            begun_from=parts.progress.checkpoint,
            say=runtime.logger.info,
        )


def _committed_steps(group: Group, parts: RankParts, name: str) -> list[tuple[int, int, int]]:
    """Committed step, slot and folder of logs of every rank; all ranks take rank 0's run id."""
    runtime, info = parts.runtime, parts.runtime.rank_info
    mine = json.dumps([parts.state.committed_step, info.rank, info.log_folder, runtime.run_id])
    answers = [json.loads(answer) for answer in group.exchange(name, mine)]
    runtime.run_id = answers[0][3]  # without a supervisor each rank has made one
    return [(step, slot, folder) for step, slot, folder, _ in answers]


def _show_progress(parts: RankParts) -> None:
    """A transfer may take longer than forming may; it shows that it goes on."""
    parts.runtime.slot.set(Cell.PHASE_SINCE_NS, time.monotonic_ns())


def agree_on_tuning(
    group: Group, parts: TaskParts, *, changed: Tuning | None, short_of_memory_in: str
) -> None:
    """Take what suits every rank, and cut this rank's share accordingly. Every rank must call it.

    ``changed``: what this rank has just changed for a fault of its own; the state that it received
    since then, where the others had gone on without it, knows nothing of that.
    ``short_of_memory_in``: the phase in which this rank's predecessor ended for lack of memory, if it
    did, so that it asks for half.
    Raises FaultError (OUT_OF_MEMORY) where that cannot be halved.
    """
    state = parts.state
    mine = _halved(parts, short_of_memory_in) if short_of_memory_in else state.tuning
    state.tuning = exchange_tuning(group, mine, changed=changed)
    shares = parts.settings.data.shares
    if shares and shares != "auto":
        # By the ranks of the launch: of those that are left each keeps its own.
        places = group.exchange("place", str(parts.runtime.rank_info.rank))
        parts.loader.use_shares(tuple(shares[int(place)] for place in places))
    parts.loader.assign(
        rank=group.rank,
        world_size=group.world_size,
        micro_batch_size=state.tuning.micro_batch_size,
    )


def exchange_tuning(group: Group, mine: Tuning, *, changed: Tuning | None) -> Tuning:
    """Return a tuning that suits every rank; all must call it. ``changed``: by this rank, since the last agreement."""
    if changed is not None:
        mine = mine.agreed_with([mine, changed])
    records = group.exchange("tuning", json.dumps(mine.to_record()))
    return mine.agreed_with([Tuning.from_record(json.loads(r), otherwise=mine) for r in records])


def recalled(state: TrainState, runtime: Runtime) -> Tuning | None:
    """Return the tuning that this rank's previous process changed at or after the present step, if any."""
    learnt = runtime.rank_info.learnt
    if learnt is None or learnt.step < state.committed_step:
        return None  # a checkpoint that was made since then has it
    runtime.logger.warning(f"as the process before this one had it: {learnt.action}")
    runtime.report(replace(learnt, fault_free=True))
    return Tuning.from_record(learnt.tuning, otherwise=state.tuning)


def change_tuning(
    state: TrainState, runtime: Runtime, fault: Fault, *, samples: int
) -> Tuning | None:
    """Change what keeps this rank from doing a step, where that can be; None where it cannot.

    ``samples``: this rank's share of a step.
    """
    change = repair_tuning(fault, state.tuning, samples=samples)
    if change is None:
        return None
    state.tuning = change.tuning
    runtime.logger.progress(f"{fault.cause}: {change.action}", step=fault.step)
    runtime.report(
        TuningChanged(
            rank=runtime.rank_info.rank,
            step=fault.step,
            action=change.action,
            inexact_reason=change.inexact_reason,
            tuning=dict(change.tuning.to_record()),
            plain_retry=change.plain_retry,
        )
    )
    return change.tuning


def agree_on_weights(
    group: Group, state: TrainState, runtime: Runtime, weights_sha256: str
) -> None:
    """Raise FaultError if the replicas have different weights at the end of training."""
    with waiting_for_peers(runtime.slot):
        digests = group.exchange("weights_sha256", weights_sha256)
    if len(set(digests)) > 1:
        state.is_in_doubt = True
        raise FaultError(
            Fault(
                kind=FaultKind.REPLICA_DIVERGED,
                rank=-1,
                step=state.committed_step,
                cause=f"the replicas ended with different weights: {digests}",
                at_ns=time.monotonic_ns(),
                may_retry=False,  # they were equal before the save: there is nobody to believe
            )
        )


def _halved(parts: TaskParts, phase: str) -> Tuning:
    """Return the tuning with which this rank avoids the lack of memory that ended its predecessor."""
    state, runtime = parts.state, parts.runtime
    fault = Fault(
        kind=FaultKind.OUT_OF_MEMORY,
        rank=runtime.rank_info.rank,
        step=state.committed_step,
        cause="this rank ended for lack of memory, with single samples",
        phase=phase,
        at_ns=time.monotonic_ns(),
        may_retry=False,
    )
    change = repair_tuning(fault, state.tuning, samples=parts.loader.share_samples)
    if change is None:
        raise FaultError(fault)
    runtime.logger.warning(f"the process before this one ran out of memory: {change.action}")
    runtime.report(
        TuningChanged(
            rank=fault.rank,
            step=fault.step,
            action=change.action,
            inexact_reason=change.inexact_reason,
            fault_free=True,
            plain_retry=change.plain_retry,
        )
    )
    return change.tuning
