"""One rank as the supervisor sees it: its process, channel, state and newest reports."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from ddp_runner.channel import Channel
from ddp_runner.core.board import Cell, Slot
from ddp_runner.core.election import EMPTY_STEP, Standing
from ddp_runner.core.faults import PARKED_BY_RANK
from ddp_runner.core.launch import DevicePlan
from ddp_runner.core.lifecycle import RANK_TABLE, Machine, RankEvent, RankState
from ddp_runner.core.messages import Finished, Ready
from ddp_runner.core.recovery import Incident, WorldFacts
from ddp_runner.supervisor.children import make_output_file, read_output


class RankHandle:
    """Owned by the supervisor's loop. ``pid`` is None while the zygote has not answered."""

    def __init__(self, rank: int, *, device: DevicePlan, slot: Slot) -> None:
        self.rank = rank
        self.device = device
        self.slot = slot
        self.machine: Machine[RankState, RankEvent] = Machine(RANK_TABLE, RankState.DEAD)
        self.pid: int | None = None
        self.token = -1
        self.channel: Channel | None = None
        self.ready: Ready | None = None
        self.finished: Finished | None = None
        self.loads = False
        self.given_up_at_s: float | None = None  # None: part of the world
        self.is_returning = False  # given up, and being tried again
        self.has_log = False  # it has joined a generation, and writes to a file from then on
        self.steps_before = 0  # done in this slot by the processes before this one
        self.spawned_at_s = 0.0
        self.loader_pids: tuple[int, ...] = ()
        self.metrics: dict[str, float] = {}
        self.rss_bytes = 0
        self._output = -1

    @property
    def state(self) -> RankState:
        """Where the rank stands."""
        return self.machine.state

    @property
    def is_alive(self) -> bool:
        """Whether a process was asked for and has not been reaped."""
        return self.state is not RankState.DEAD

    @property
    def is_filled(self) -> bool:
        """Whether the process has a state to give, or will have one once it is ready."""
        if self.state is RankState.STARTING:
            return self.loads
        return self.state is RankState.READY and self.standing.committed_step > EMPTY_STEP

    @property
    def standing(self) -> Standing:
        """What the process could offer, by its newest report."""
        step = EMPTY_STEP if self.ready is None else self.ready.committed_step
        return Standing(rank=self.rank, committed_step=step)

    def open_lines(self, *, token: int, now_s: float) -> tuple[int, int]:
        """New channel and output for a new process; the child's ends, for the fork request."""
        self.close_lines()
        self.channel, theirs = Channel.pair()
        self._output = make_output_file(f"rank_{self.rank}")
        self.pid, self.token, self.spawned_at_s = None, token, now_s
        self.ready, self.finished, self.has_log = None, None, False
        self.steps_before = self.slot.get(Cell.OWN_STEPS)
        self.loader_pids, self.metrics = (), {}
        self.machine.advance(RankEvent.SPAWNED)
        return theirs.detach(), self._output

    def last_words(self) -> str:
        """What the process wrote before it had a log file."""
        return read_output(self._output) if self._output >= 0 else ""

    def close_lines(self) -> None:
        """Close channel and output; a stale process behind them ends of it."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self._output >= 0:
            os.close(self._output)
            self._output = -1


def who_is_left(
    handles: Sequence[RankHandle], incident: Incident, *, doomed: Collection[int]
) -> WorldFacts:
    """What the ranks of a world have, once ``incident`` has been gathered.

    ``doomed`` ranks may look usable until they are reaped, but nobody gets their state any more.
    """
    raised = {fault.rank for fault in incident.attribution.causes if fault.kind in PARKED_BY_RANK}
    lost: list[int] = []
    parked: list[Standing] = []
    others: list[RankHandle] = []
    for handle in handles:
        if handle.rank in doomed or handle.state not in (RankState.READY, RankState.STARTING):
            lost.append(handle.rank)
        elif handle.rank in raised and handle.state is RankState.READY:
            parked.append(handle.standing)
        else:
            others.append(handle)
    return WorldFacts(
        lost=tuple(lost),
        filled=any(handle.is_filled for handle in others),
        newest_step=max((one.standing.committed_step for one in others), default=EMPTY_STEP),
        present=len(handles),
        parked=tuple(parked),
    )
