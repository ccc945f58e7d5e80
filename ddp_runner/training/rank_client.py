"""The part of the engine's client that a Task and a loop of the user's own have alike.

It reports what this rank has, completes the audits of lost ranks, and agrees on a tuning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import Fault
from ddp_runner.kernel.step.agreeing import Peer
from ddp_runner.kernel.step.engine import Client, Engine, Place
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.wire.events import TuningChanged
from ddp_runner.kernel.wire.messages import Ready
from ddp_runner.memory.reclaim import empty_device_cache
from ddp_runner.training.audit import (
    GenerationMembers,
    audit_path,
    complete_audits,
    who_completes,
)
from ddp_runner.training.components.tuning import Tuning, repair_tuning
from ddp_runner.training.exactness.first_step import SideComparison
from ddp_runner.training.figures.train_report import ready_message
from ddp_runner.training.guard import NumericsGuard
from ddp_runner.training.loading.loaders import collective_timeout_s
from ddp_runner.training.rank_context import RankParts
from ddp_runner.training.saves.save_room import ROOM_SHARE_MAX
from ddp_runner.training.starting.resume import leave_other_branch
from ddp_runner.training.state import TrainState


def engine_of(client: Client, parts: RankParts) -> Engine:
    """Return the engine that trains the state of ``parts`` by the steps of ``client``."""
    workload, runtime = parts.workload, parts.runtime
    place = Place(
        device=workload.device,
        backend=workload.backend,
        timeout_s=collective_timeout_s(parts.settings, is_watched=runtime.is_watched),
    )
    return Engine(client, state=parts.state, runtime=runtime, durable=parts.saving, place=place)


class RankClient:
    """Implements what does not depend on who makes the steps of :class:`~ddp_runner.kernel.step.engine.Client`."""

    def __init__(self, parts: RankParts, run_id: str) -> None:
        """``run_id``: of the run that is resumed, if one is."""
        self._parts = parts
        self._run_id = run_id
        self._runtime = parts.runtime
        self._changed: Tuning | None = None  # by this rank, until the ranks have agreed on it
        self._peers: Sequence[Peer] = ()  # of the generation that is being formed
        self._members: GenerationMembers | None = None  # of the newest that this process was in
        self._kept_tuning: Tuning | None = None  # while a newer state is received

    def ready(self, *, is_first: bool) -> Ready:
        """Implement the port."""
        return ready_message(self._parts, self._run_id, is_first=is_first)

    def share(
        self, group: Group, peers: Sequence[Peer], *, is_source: bool, is_first: bool
    ) -> None:
        """Complete the audits; before another rank gets the state of this run, leave the other branch."""
        parts, state = self._parts, self._parts.state
        self._peers = peers
        self._complete_audits(group)
        is_new = self._runtime.rank_info.loads and is_first
        if is_source and is_new and not parts.progress.is_from_memory:  # which is of after this
            # INVARIANT left-before-shared: whoever has the state of this run finds no other branch.
            # Broken if: it is sent first; should this rank die then, nobody loads it, and leaves that.
            # Guarded by: test_a_rank_that_dies_leaving_the_other_branch_has_a_successor.
            leave_other_branch(
                parts.settings,
                parts.store,
                begun_from=parts.progress.checkpoint,
                say=self._runtime.logger.info,
            )
        # Of the source's and this all agree on one next; who has read the state may be new.
        was_left = not is_first and state.committed_step == EMPTY_STEP
        self._kept_tuning = state.tuning if was_left else None

    def agree(self, group: Group, *, is_first: bool) -> None:
        """Take in the state that all ranks have by now."""
        parts, state = self._parts, self._parts.state
        if self._kept_tuning is not None:
            state.tuning, self._kept_tuning = self._kept_tuning, None
        if math.isnan(parts.progress.loss) and state.monitor.last is not None:
            parts.progress.loss = state.monitor.last  # until this process has trained a step
        self._agree_on_local(group)
        self._members = GenerationMembers(
            generation=group.membership.generation,
            slots=tuple(peer.place for peer in self._peers),
            first_step=state.committed_step,
        )
        if is_first:
            state.trained_since = state.committed_step
        if state.buffers.frozen_bytes():
            room_bytes = ROOM_SHARE_MAX * parts.memory.room_bytes()
            state.hold_frozen(room_bytes=room_bytes / self._runtime.rank_info.local_world_size)

    def _agree_on_local(self, group: Group) -> None:
        """Begin to keep per-rank state. Raises BadInputError if the ranks keep different names."""
        state = self._parts.state
        places = [peer.place for peer in self._peers]
        why = state.local.agree(group, self._runtime.slot, places=places, step=state.committed_step)
        if why:
            raise BadInputError(state.local.option, "", why)

    def recovered(self) -> None:
        """Empty the device's cache, and forget an update that was begun."""
        # NCCL takes its buffers from outside torch's cache.
        empty_device_cache(self._parts.workload.device)
        # Which reads from the device: not before that has let go of the generation.
        self._parts.state.precision.drop_unfinished_step()

    def _guard(self, group: Group) -> NumericsGuard:
        parts = self._parts
        return NumericsGuard(
            group,
            settings=parts.settings,
            state=parts.state,
            durable=parts.saving,
            runtime=parts.runtime,
        )

    def _side(self, group: Group) -> SideComparison:
        return SideComparison(self._parts, is_first=group.rank == 0)

    def _learnt(self, *, is_first: bool) -> Tuning | None:
        """Return what this rank has changed since the last agreement, or its previous process had."""
        return self._changed or (recalled(self._parts.state, self._runtime) if is_first else None)

    def _complete_audits(self, group: Group) -> None:
        """Write what ranks that are lost have not, on each machine into its own folder of logs."""
        parts, members, state = self._parts, self._members, self._parts.state
        if members is None:
            return
        folders = [peer.log_folder for peer in self._peers]
        steps = [peer.committed_step for peer in self._peers]
        if who_completes(folders, steps=steps).get(folders[group.rank]) != group.rank:
            return
        folder_of = {peer.place: peer.log_folder for peer in self._peers}
        # Whose machine is not there any more has its folder there, unless all have the same.
        slots = [
            slot
            for slot in members.slots
            if folder_of.get(slot, min(folders)) == folders[group.rank]
            and (
                slot in folder_of
                or len(set(folders)) == 1
                or audit_path(parts.settings, slot).exists()
            )
        ]
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
