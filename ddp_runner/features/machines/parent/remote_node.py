"""Another machine of the run, as its coordinator sees it: acts by messages, knows what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ddp_runner.checkpoint.catalog import NewestCheckpoint
from ddp_runner.features.machines.folder_probe import FolderProbe
from ddp_runner.features.machines.node_link import LinkLostError, NodeLink
from ddp_runner.features.machines.rules.node_messages import (
    AskRank,
    EndRank,
    FenceRank,
    ForgetAsked,
    Hello,
    Look,
    NodeMessage,
    RankLook,
    SignalRank,
    StartRank,
    ToRank,
)
from ddp_runner.kernel.processes.rank_start import RankStart, StartedBy
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.system.folder_owner import FolderOwner
from ddp_runner.kernel.wire import packets as wire
from ddp_runner.kernel.wire.board import Cell, Slot
from ddp_runner.kernel.wire.messages import Message, encode

SPARE = -1  # the number of each machine that waits for a place
# Cells with a time of the clock of their machine, and those that are not the rank's to write.
_TIMES = (Cell.PHASE_SINCE_NS, Cell.FIRST_STEP_NS, Cell.LAST_COMMIT_NS)
_OURS = (Cell.FENCED, Cell.LEASE_NS)


def machine_of(hello: Hello) -> str:
    """Return the machine's name; their numbers distinguish several nodes of one host."""
    return hello.host if hello.node_rank is None else f"{hello.host}, node {hello.node_rank}"


class RemoteProcess:
    """The process of a rank there, by the newest word of its node."""

    def __init__(self, rank: int, node: RemoteNode) -> None:
        self._rank = rank
        self._node = node
        self.pid: int | None = None
        self.written_bytes = 0
        self.stopped_s = 0.0
        self.is_killed = False
        self.resident_bytes = 0
        self.is_wanted = False  # it was asked for, and has not ended
        self._is_asked = False
        self._stack: str | None = None

    def take(self, look: RankLook) -> None:
        """Take in the newest report of its node about this process."""
        self.pid, self.written_bytes = look.pid, look.written_bytes
        self.stopped_s, self.is_killed = look.stopped_s, look.is_killed
        self.resident_bytes = look.resident_bytes
        if look.stack is not None and self._is_asked:
            self._stack = look.stack

    def is_gone(self) -> None:
        """It was reaped, or never came."""
        self.pid, self.stopped_s, self.is_killed, self.resident_bytes = None, 0.0, False, 0
        self.is_wanted = False
        self._is_asked, self._stack = False, None

    def mark_asked(self) -> None:
        """Ask the process to show where it hangs."""
        if not self._is_asked:
            self._is_asked, self._stack = True, None
            self._node.order(AskRank(rank=self._rank))

    def forget_asked(self) -> None:
        """Forget the question and its answer; the next one starts afresh."""
        if self._is_asked:
            self._is_asked, self._stack = False, None
            self._node.order(ForgetAsked(rank=self._rank))

    def has_answered(self, now_s: float) -> bool:
        """Return whether its node has reported where it hangs."""
        del now_s  # its node has waited for the end of it
        return self._stack is not None

    def stack_when_asked(self) -> str:
        """Return the main thread's place when it was asked; empty if its node has not reported it."""
        return self._stack or ""


class RemoteNode:
    """A machine that may be there or not; a new link is another supervisor, with no rank at first.

    ``slots``: those of its ranks on the board of this machine, which mirror theirs.
    """

    def __init__(
        self, number: int, *, ranks: Sequence[int], slots: Mapping[int, Slot], clock: Clock
    ) -> None:
        self.number = number
        self.ranks = tuple(ranks)
        self.host = self.supervisor = ""
        self.hello: Hello | None = None  # its newest
        self.shares_logs = True  # with the coordinator, until it says that it does not
        self.shares_checkpoints = False  # it has said so, and may take the place of the coordinator
        self.keeps_parked = False  # its ranks came with a memory that this run may take up
        self.is_leaving = False  # it was asked to leave, so its end is no loss
        self.is_to_note_end = False  # it was asked to write down that the run has ended
        self.has_noted_end = False  # it has said that it has
        self.left_out_until_s = 0.0  # it is lost all the time, and is not waited for until then
        self.link: NodeLink | None = None
        self.broken = ""  # why nothing more can be sent to it
        self.newest: NewestCheckpoint | None = None  # of its folder, when it came
        self.copied_step = EMPTY_STEP  # of the copy in its memory that is of use, when it came
        self.heard_at_s = self.looked_at_s = self.round_trip_s = 0.0
        self.behind_ns = 0  # what its clock is behind ours, by its newest look
        self._started = dict.fromkeys(ranks, 0)  # processes that were asked for, of each rank
        self._clock = clock
        self._slots = slots
        self._processes = {rank: RemoteProcess(rank, self) for rank in ranks}
        self._can_fork = False
        self._has_spare = False
        self._is_memory_kill = False  # the end that it has reported last

    @property
    def processes(self) -> Mapping[int, RemoteProcess]:
        """The processes of the node, by rank."""
        return self._processes

    @property
    def is_there(self) -> bool:
        """True if its supervisor is connected."""
        return self.link is not None

    @property
    def keeps_memory(self) -> bool:
        """True if it came with a state in memory that this run may take up: its ranks', or a copy."""
        return self.keeps_parked or self.copied_step > EMPTY_STEP

    @property
    def can_fork(self) -> bool:
        """True if its zygote was ready at the newest report."""
        return self.is_there and self._can_fork

    @property
    def name(self) -> str:
        """The node's name for people."""
        what = "a spare node" if self.number == SPARE else f"node {self.number}"
        return f"{what} ({self.host})"

    @property
    def machine(self) -> str:
        """The machine that it is, or was last: its host, and the number that it was given."""
        return "" if self.hello is None else machine_of(self.hello)

    def joined(self, link: NodeLink, hello: Hello) -> None:
        """Its supervisor is there, with none of its ranks."""
        self.link, self.hello, self.broken = link, hello, ""
        self.is_leaving, self.keeps_parked, self.left_out_until_s = False, False, 0.0
        self.host, self.supervisor = hello.host, hello.supervisor
        newest = NewestCheckpoint(step=hello.newest_step, run_id=hello.newest_run_id)
        self.newest = newest if newest.step > EMPTY_STEP else None
        self.heard_at_s = self.looked_at_s = self._clock.monotonic()
        self._can_fork = self._has_spare = False

    def is_lost(self) -> None:
        """Its supervisor is not there any more."""
        if self.link is not None:
            self.link.close()
        self.link = None
        for process in self._processes.values():
            process.is_gone()

    def order(self, message: NodeMessage) -> None:
        """Send, if it is there; a link that breaks at that is found at the next look."""
        if self.link is None:
            return
        try:
            self.link.send(wire.encode(message))
        except LinkLostError as lost:
            self.broken = self.broken or str(lost)

    def _order_of(self, rank: int, message: NodeMessage) -> None:
        """Order ``message``, unless the process is parked there and the order is for its predecessor."""
        if self._processes[rank].is_wanted:
            self.order(message)

    def take(self, look: Look) -> None:
        """Mirror what it says."""
        now_ns = self._clock.monotonic_ns()
        self.looked_at_s, self.behind_ns = now_ns / 1e9, now_ns - look.now_ns
        self._can_fork, self._has_spare = look.can_fork, look.has_spare
        self.round_trip_s = look.round_trip_s
        for text, one in look.ranks.items():
            rank = int(text)
            if rank in self._processes:
                self._processes[rank].take(one)
                self.mirror(rank, one.cells, behind_ns=self.behind_ns)

    def mirror(self, rank: int, cells: Sequence[int], *, behind_ns: int) -> None:
        """Copy a slot's cells; ``behind_ns`` is what the clock of its machine is behind ours."""
        slot = self._slots[rank]
        ours = slot.cells()
        values = [*cells, *ours[len(cells) :]]
        for cell in _OURS:
            values[cell] = ours[cell]
        for cell in _TIMES:
            values[cell] += behind_ns if values[cell] else 0
        slot.put(values)

    def rank_ended(self, *, killed_for_memory: bool) -> None:
        """Its node says how a rank there has ended; what that means is asked for at once."""
        self._is_memory_kill = killed_for_memory

    def cannot_start(self) -> None:
        """It has just said that it can start nobody; its next look says when that is over."""
        self._can_fork = self._has_spare = False

    @property
    def has_spare(self) -> bool:
        """True if a process there is ready to become a rank."""
        return self.is_there and self._has_spare

    def start_rank(self, rank: int, start: RankStart) -> StartedBy:
        """Ask for a process; who it is follows."""
        if not self.is_there or not (self._can_fork or self._has_spare):
            return StartedBy.NOBODY
        self._started[rank] += 1
        self._processes[rank].is_wanted = True
        self.order(StartRank(rank=rank, process=self._started[rank], start=asdict(start)))
        return StartedBy.ZYGOTE

    def release(self, rank: int) -> None:
        """Nothing of it is here."""
        self._processes[rank].is_gone()

    def is_of_now(self, rank: int, process: int) -> bool:
        """Return whether this is the newest process that was asked for; reports of an older one come too late."""
        return self._started.get(rank) == process

    def send(self, rank: int, message: Message) -> None:
        """Pass a message on to a rank."""
        self._order_of(rank, ToRank(rank=rank, packet=encode(message)))

    def kill_rank(self, rank: int) -> bool:
        """Have it ended there; its end follows, or that of the node."""
        self._order_of(rank, EndRank(rank=rank))
        return self._processes[rank].is_wanted

    def signal_rank(self, rank: int, number: int) -> None:
        """Have it signalled there."""
        self._order_of(rank, SignalRank(rank=rank, number=number))

    def force_stacks(self, rank: int) -> None:
        """Have a rank that answers nothing write where it is."""
        self._order_of(rank, AskRank(rank=rank, by_force=True))

    def is_stopped(self, rank: int) -> bool:
        """Return whether a signal had stopped it at the newest report."""
        return self._processes[rank].stopped_s > 0

    def stopped_s(self, rank: int, now_s: float) -> float:
        """Return how long it had been stopped at the newest report, in seconds."""
        del now_s
        return self._processes[rank].stopped_s

    def unheard_s(self, now_s: float) -> float:
        """Return the age of its newest report in seconds; 0 for a node that is not connected, which has no ranks."""
        return now_s - self.looked_at_s if self.is_there else 0.0

    def is_killed(self, rank: int) -> bool:
        """Return whether somebody had sent SIGKILL to it at the newest report."""
        return self._processes[rank].is_killed

    def claim_kernel_kill(self, now_s: float, *, before_it: int = 0) -> bool:
        """Return whether the kernel caused the newest end there; its node has found out, for loader workers too."""
        del now_s, before_it
        was, self._is_memory_kill = self._is_memory_kill, False
        return was

    def fence(self, rank: int, *, is_fenced: bool) -> None:
        """Have what this rank publishes refused there, or taken again."""
        self.order(FenceRank(rank=rank, is_fenced=is_fenced))

    def resident_bytes(self, rank: int) -> int:
        """Memory of the process of this rank by the newest look."""
        return self._processes[rank].resident_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherMachines:
    """The other machines of a run, and the names of its coordinator in the folders that they may share."""

    nodes: tuple[RemoteNode, ...]
    owner: FolderOwner
    probes: tuple[FolderProbe, ...]
