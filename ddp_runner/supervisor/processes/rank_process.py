"""One rank as the supervisor sees it: its process, channel, states and newest reports."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from ddp_runner.core.board import Cell, Slot
from ddp_runner.core.election import EMPTY_STEP, ReplicaProgress
from ddp_runner.core.faults import PARKED_BY_RANK
from ddp_runner.core.launch_plan import DevicePlan
from ddp_runner.core.lifecycle import (
    MEMBERSHIP_TABLE,
    NO_PROCESS_LEFT,
    RANK_TABLE,
    Machine,
    Membership,
    MembershipEvent,
    RankEvent,
    RankState,
)
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
    """Owned by the supervisor's loop, for the whole run; the processes of the rank come and go.

    Where it stands is in the two tables of ``core/lifecycle.py``. All else is a fact, and is asked for
    its value, never for where the rank stands.
    """

    def __init__(self, rank: int, *, device: DevicePlan, slot: Slot, log_dir: Path) -> None:
        # Of the rank, as long as the run lasts.

        # Its number at launch, and its index in World.ranks. While ranks are dropped the numbers that a
        # generation is formed with are others.
        self.rank = rank
        # What it computes on: the same for each of its processes.
        self.device = device
        # Its cells on the board. Written by its process, but for CONDEMNED; they outlive the process.
        self.slot = slot
        # What its process does. Moved where a message arrives, a process ends, or one is acted upon.
        self.machine: Machine[RankState, RankEvent] = Machine(RANK_TABLE, RankState.DEAD)
        # Whether the world counts on it. Moved by the repair alone. At launch all are missing.
        self.member: Machine[Membership, MembershipEvent] = Machine(
            MEMBERSHIP_TABLE, Membership.REPLACING
        )
        # When it was dropped, or its newest return failed. Means nothing while it is in the world.
        self.dropped_at_s = 0.0
        # Free on its device when the first process of the rank came, by its first Ready; 0 before that.
        self.device_free_bytes = 0

        # Of its process: each begins anew with the next one, in open_lines().

        # None while the zygote has not answered, and once it was reaped: a pid that is not None may be
        # signalled. A rank may have sent Ready before that.
        self.pid: int | None = None
        # What the zygote's answer is known by. No two forks of a run have the same.
        self.token = -1
        # Our end of its control channel; there from open_lines() to close_lines(), unless the process
        # was to be killed before its pid was known.
        self.channel: Channel | None = None
        # When the process was asked for; what the board has from before is its predecessor's.
        self.spawned_at_s = 0.0
        # Whether it is to read the checkpoint, because no other rank has a state to give it.
        self.loads = False
        # Steps that were done in this slot by the processes before this one.
        self.steps_before = 0
        # Its newest Ready: the step it holds. None: it has not built what it trains.
        self.ready: Ready | None = None
        # Its report at the end; there exactly while the state is FINISHED or ENDED.
        self.finished: Finished | None = None
        # Whether the process waited as a spare before it became this rank, and was not forked for it.
        self.was_spare = False
        # Whether it was asked to join a generation: it writes to its log file from then on.
        self.has_log = False
        # Whether it has been in a generation that trained: it holds a state.
        self.has_formed = False
        # When it was first sent SIGKILL; None before, and in KILLING until its pid is known.
        self.killed_at_s: float | None = None
        # How much it had written when it was first asked where it hangs; None: not in this incident.
        self.asked_bytes: int | None = None
        # Its loader workers, by its newest report.
        self.loader_pids: tuple[int, ...] = ()
        # Its newest Metrics, by name.
        self.metrics: dict[str, float] = {}
        # Resident memory, measured once a second. The kernel kills the largest first.
        self.rss_bytes = 0
        # A file in memory that it writes to before it has a log; -1 where there is no process.
        self._output = -1
        # Of all processes of the rank; it may have been removed by somebody.
        self._log_path = log_dir / f"rank_{rank}.log"
        # Where the lines of this process begin in it, behind those of the processes before.
        self._log_begin = 0

    @property
    def state(self) -> RankState:
        """What its process does."""
        return self.machine.state

    @property
    def membership(self) -> Membership:
        """Whether the world counts on it."""
        return self.member.state

    @property
    def is_alive(self) -> bool:
        """Whether a process was asked for and has not been reaped."""
        return self.state not in NO_PROCESS_LEFT

    @property
    def has_finished(self) -> bool:
        """Whether its process has done all that it had to; it may have been reaped since."""
        return self.state in (RankState.FINISHED, RankState.ENDED)

    @property
    def needs_process(self) -> bool:
        """Whether another process is to be forked for it, at once or after this one was reaped."""
        if self.membership is Membership.REJOINING:
            return not self.is_alive  # its fork was lost
        return self.membership is Membership.REPLACING

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
    def standing(self) -> ReplicaProgress:
        """What the process could offer, by its newest report."""
        step = EMPTY_STEP if self.ready is None else self.ready.committed_step
        return ReplicaProgress(rank=self.rank, committed_step=step)

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
    handles: Sequence[RankHandle],
    incident: Incident,
    *,
    forked_ahead: Collection[int],
    now_s: float,
) -> WorldFacts:
    """What the ranks of a world have, once ``incident`` has been gathered.

    Ranks that are ``forked_ahead`` of it, or are being replaced, have no state that anybody could get.
    """
    unending = {h.rank: h.pid or 0 for h in handles if h.does_not_end(now_s)}
    raised = {fault.rank for fault in incident.attribution.causes if fault.kind in PARKED_BY_RANK}
    lost: list[int] = []
    parked: list[ReplicaProgress] = []
    others: list[RankHandle] = []
    for handle in handles:
        is_usable = handle.state in (RankState.READY, RankState.STARTING)
        has_none = handle.membership is Membership.REPLACING or handle.rank in forked_ahead
        if has_none or handle.rank in unending or not is_usable:
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
