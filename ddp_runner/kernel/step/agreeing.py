"""Lets the ranks of a generation agree on the newest state before they train, and on the weights at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.group.transfer import receive_state, send_state
from ddp_runner.kernel.group.waits import waiting_for_peers
from ddp_runner.kernel.rules.election import EMPTY_STEP, ReplicaProgress, elect_source
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.step.commit import State
from ddp_runner.kernel.step.durable import Durable
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.wire.board import Cell, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A rank of the generation, as it joined: its step, its rank in the launch and its folder of logs."""

    committed_step: int
    place: int
    log_folder: int


class Share(Protocol):
    """Prepares the transfer of the newest state. All ranks call it."""

    def __call__(self, peers: Sequence[Peer], *, is_source: bool) -> None:
        """``peers``: all ranks, in order; ``is_source``: this rank has the newest state, and sends it."""
        ...


def bring_to_newest(
    group: Group, state: State, runtime: Runtime, durable: Durable, *, share: Share
) -> int:
    """Bring every rank to the newest committed step, and return the rank that had it. Every rank must call it."""
    slot = runtime.slot
    peers = _peers(group, state, runtime, "committed_step")
    if all(peer.committed_step == EMPTY_STEP for peer in peers):  # a roll-back was cut short
        slot.stamp(Phase.CHECKPOINT, time.monotonic_ns())  # under the deadline of a save
        if group.rank == 0:
            durable.give_back()
        peers = _peers(group, state, runtime, "restored_step")
        slot.stamp(Phase.FORMING, time.monotonic_ns())
    election = elect_source(
        [
            ReplicaProgress(rank=rank, committed_step=peer.committed_step)
            for rank, peer in enumerate(peers)
        ]
    )
    is_source = group.rank == election.source
    share(peers, is_source=is_source)
    if election.receivers and is_source:
        send_state(
            group, state.capture(), to=election.receivers, on_progress=lambda: _show_progress(slot)
        )
    elif group.rank in election.receivers:
        received = receive_state(
            group,
            source=election.source,
            into=state.to_write_over(),
            on_progress=lambda: _show_progress(slot),
        )
        state.restore(received)
    slot.set(Cell.COMMITTED_STEP, state.committed_step)
    slot.set(Cell.SAMPLES, state.samples)
    slot.set(Cell.DIRTY, 0)
    return election.source


def _peers(group: Group, state: State, runtime: Runtime, name: str) -> list[Peer]:
    """Return the facts of every rank; all ranks take rank 0's run id."""
    info = runtime.rank_info
    mine = json.dumps([state.committed_step, info.rank, info.log_folder, runtime.run_id])
    answers = [json.loads(answer) for answer in group.exchange(name, mine)]
    runtime.run_id = answers[0][3]  # without a supervisor each rank has made one
    return [
        Peer(committed_step=step, place=place, log_folder=folder)
        for step, place, folder, _ in answers
    ]


def _show_progress(slot: Slot) -> None:
    """Show the supervisor that the transfer continues: it may take longer than forming may."""
    slot.set(Cell.PHASE_SINCE_NS, time.monotonic_ns())


def agree_on_weights(group: Group, state: State, runtime: Runtime, weights_sha256: str) -> None:
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
