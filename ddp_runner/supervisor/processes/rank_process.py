"""One rank as the supervisor sees it: its process, channel, state and newest reports."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from ddp_runner.core.board import Cell, Slot
from ddp_runner.core.election import EMPTY_STEP, Standing
from ddp_runner.core.faults import PARKED_BY_RANK
from ddp_runner.core.launch_plan import DevicePlan
from ddp_runner.core.lifecycle import RANK_TABLE, Machine, RankEvent, RankState
from ddp_runner.core.messages import Finished, Ready
from ddp_runner.core.recovery import Incident, WorldFacts
from ddp_runner.supervisor.processes.children import (
    WORDS_BYTES,
    file_size,
    make_output_file,
    read_end,
    read_output,
)
from ddp_runner.system.control_channel import Channel

# For a killed process to end; freeing much memory takes seconds, a file system that does not answer for ever.
REAP_TIMEOUT_S = 60.0


class RankHandle:
    """Owned by the supervisor's loop. ``pid`` is None while the zygote has not answered."""

    def __init__(self, rank: int, *, device: DevicePlan, slot: Slot, log_dir: Path) -> None:
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
        self.has_formed = False  # this process has been in a generation that trained
        self.was_spare = False  # the process waited for this rank's death; it was not forked for it
        self.given_up_at_s: float | None = None  # None: part of the world
        self.is_returning = False  # given up, and being tried again
        self.has_log = False  # it has joined a generation, and writes to a file from then on
        self.steps_before = 0  # done in this slot by the processes before this one
        self.spawned_at_s = 0.0
        self.killed_at_s: float | None = None  # when SIGKILL was sent, for the first time
        self.loader_pids: tuple[int, ...] = ()
        self.metrics: dict[str, float] = {}
        self.rss_bytes = 0
        self.device_free_bytes = 0  # when the first process of this rank came
        self.asked_bytes: int | None = None  # that it had written when asked where it hangs
        self._output = -1
        self._log_path = log_dir / f"rank_{rank}.log"
        self._log_begin = 0  # where the lines of this process begin, behind those before it

    @property
    def state(self) -> RankState:
        """Where the rank stands."""
        return self.machine.state

    @property
    def is_alive(self) -> bool:
        """Whether a process was asked for and has not been reaped."""
        return self.state is not RankState.DEAD

    @property
    def own_step_s(self) -> float | None:
        """A step's mean time outside collectives, over all processes of this rank; None: no step yet."""
        steps = self.slot.get(Cell.OWN_STEPS)
        return self.slot.get(Cell.OWN_NS) / 1e9 / steps if steps else None

    def does_not_end(self, now_s: float) -> bool:
        """Whether it was killed and has not been reaped for too long: it waits inside the kernel."""
        killed_at_s = self.killed_at_s
        return self.is_alive and killed_at_s is not None and now_s > killed_at_s + REAP_TIMEOUT_S

    @property
    def has_begun(self) -> bool:
        """Whether the process has shown itself on the board since it was asked for."""
        return self.slot.get(Cell.PHASE_SINCE_NS) >= int(self.spawned_at_s * 1e9)

    @property
    def is_filled(self) -> bool:
        """Whether the process has a state to give, or will have one once it is ready."""
        if self.state is RankState.STARTING:
            return self.loads
        return self.state is RankState.READY and self.standing.committed_step > EMPTY_STEP

    @property
    def has_state(self) -> bool:
        """Whether its process holds a state that could be given to others."""
        return self.has_formed or self.standing.committed_step > EMPTY_STEP

    @property
    def committed_step(self) -> int:
        """By the board."""
        return self.slot.get(Cell.COMMITTED_STEP)

    @property
    def standing(self) -> Standing:
        """What the process could offer, by its newest report."""
        step = EMPTY_STEP if self.ready is None else self.ready.committed_step
        return Standing(rank=self.rank, committed_step=step)

    def log_is_gone(self) -> bool:
        """Whether somebody has removed its log file, or moved it away."""
        if os.path.lexists(self._log_path):
            return False
        self._log_begin = 0
        return True

    def open_lines(self, *, token: int, now_s: float) -> tuple[int, int]:
        """New channel and output for a new process; the child's ends, for the fork request."""
        self.close_lines()
        self.channel, theirs = Channel.pair()
        self._output = make_output_file(f"rank_{self.rank}")
        self._log_begin = file_size(self._log_path)
        self.pid, self.token, self.spawned_at_s, self.killed_at_s = None, token, now_s, None
        self.ready, self.finished, self.has_log = None, None, False
        self.has_formed = False
        self.was_spare, self.asked_bytes = False, None
        self.steps_before = self.slot.get(Cell.OWN_STEPS)
        self.loader_pids, self.metrics = (), {}
        self.machine.advance(RankEvent.SPAWNED)
        return theirs.detach(), self._output

    @property
    def output(self) -> int | None:
        """What the process writes to before it has a log file; None where there is no process."""
        return self._output if self._output >= 0 else None

    def last_words(self) -> str:
        """What the process wrote before it had a log file."""
        return read_output(self._output) if self._output >= 0 else ""

    @property
    def written_bytes(self) -> int:
        """How much there is of what the rank wrote, before it had a log file and since."""
        before = os.fstat(self._output).st_size if self._output >= 0 else 0
        return file_size(self._log_path) + before

    def said_since(self, written_bytes: int) -> str:
        """What the rank wrote since there were so many :attr:`written_bytes`, to whichever place."""
        more_bytes = min(self.written_bytes - written_bytes, WORDS_BYTES)
        before = read_output(self._output, more_bytes) if self._output >= 0 else ""
        return before + read_end(self._log_path, begin=file_size(self._log_path) - more_bytes)

    def said_last(self) -> str:
        """The end of what the process wrote, to its log file or, where it has not come so far, before."""
        logged = read_end(self._log_path, begin=self._log_begin)
        return logged or (read_output(self._output, WORDS_BYTES) if self._output >= 0 else "")

    def mark_asked(self) -> int:
        """From so many bytes on it tells where it hangs; asked twice for one fault, it counts once."""
        if self.asked_bytes is None:
            self.asked_bytes = self.written_bytes
        return self.asked_bytes

    def said_when_asked(self) -> str:
        """What it wrote since it was asked where it hangs."""
        return self.said_since(self.asked_bytes or 0)

    def close_lines(self) -> None:
        """Close channel and output; a stale process behind them ends of it."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self._output >= 0:
            os.close(self._output)
            self._output = -1


def who_is_left(
    handles: Sequence[RankHandle], incident: Incident, *, doomed: Collection[int], now_s: float
) -> WorldFacts:
    """What the ranks of a world have, once ``incident`` has been gathered.

    ``doomed`` ranks may look usable until they are reaped, but nobody gets their state any more.
    """
    unending = {h.rank: h.pid or 0 for h in handles if h.does_not_end(now_s)}
    raised = {fault.rank for fault in incident.attribution.causes if fault.kind in PARKED_BY_RANK}
    lost: list[int] = []
    parked: list[Standing] = []
    others: list[RankHandle] = []
    for handle in handles:
        is_usable = handle.state in (RankState.READY, RankState.STARTING)
        if handle.rank in doomed or handle.rank in unending or not is_usable:
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
        unending=unending,
    )
