"""The ranks of a run, wherever their processes are: asks their nodes to act. Decides nothing.

Knows ranks, their states and messages; pids, channels, files and clocks are a node's.
"""

from __future__ import annotations

import secrets
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from ddp_runner.kernel.parent.ports import Host, ProcessView
from ddp_runner.kernel.parent.rank_handle import HeadCount, RankHandle
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.processes.rank_start import RankStart, StartedBy
from ddp_runner.kernel.rules.helper_roles import STORE
from ddp_runner.kernel.rules.lifecycle import IN_WORLD, RankEvent, RankState
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import Cut
from ddp_runner.kernel.wire.messages import Abort, CountCollectives, Form, Message, Stacks, Stop

SECRET_BYTES = 32


class World:
    """All ranks of a run; ``present`` are those that were not given up. Owned by the supervisor's loop.

    ``home``: the node of this process, which has the store. ``others``: the nodes of the other machines.
    """

    def __init__(self, home: Node, others: Sequence[Host] = ()) -> None:
        self._home = home
        self._ranks_per_node = home.ranks_per_node
        nodes: tuple[Host, ...] = (home, *others)
        self._node_of = {rank: node for node in nodes for rank in node.processes}
        self._nodes = nodes
        self.counts = HeadCount()
        self.ranks = [
            RankHandle(rank, slot=home.slot(rank), counts=self.counts)
            for rank in range(home.world_size)
        ]
        self._present: list[RankHandle] = []
        self._present_at = -1  # the count of changes that _present is of
        self.aborted = (0, 0.0)  # the newest generation that ranks were told to leave, and when

    @property
    def present(self) -> list[RankHandle]:
        """The ranks that are not dropped, in order; the first one of them is rank 0. Not to be changed."""
        if self._present_at != self.counts.world_changes:
            self._present = [handle for handle in self.ranks if handle.membership in IN_WORLD]
            self._present_at = self.counts.world_changes
        return self._present

    def machines(self) -> str:
        """Those of the ranks that are present, for people; empty where there is only one."""
        numbers = {
            handle.rank // self._ranks_per_node: self._node_of[handle.rank].host
            for handle in self.present
        }
        names = [f"node {number} ({host})" for number, host in sorted(numbers.items())]
        return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else ""

    def present_cells(self, cell: Cell) -> list[int]:
        """One cell of each rank that is present, in order: far quicker than one by one."""
        present, column = self.present, self.ranks[0].slot.of_all(cell)
        if len(present) == len(column):
            return column
        return [column[handle.rank] for handle in present]

    @property
    def can_fork(self) -> bool:
        """Whether what serves all ranks, and a rank of the home node, can be forked at once."""
        return self._home.can_fork

    def can_fork_rank(self, handle: RankHandle) -> bool:
        """Whether a process for this rank can be forked at once, where it belongs."""
        return self._node_of[handle.rank].can_fork

    def can_start(self, handle: RankHandle) -> bool:
        """Whether a process for this rank is to be had at once: a fork, or a spare that waits."""
        node = self._node_of[handle.rank]
        return node.can_fork or node.has_spare

    @property
    def has_store(self) -> bool:
        """Whether there is a store, or one that starts."""
        return self._home.helper(STORE) is not None

    @property
    def has_ready_store(self) -> bool:
        """True if the store is ready, so that ranks can find each other."""
        return self._home.has_ready_store

    def start_store(self) -> None:
        """Have a store started; ``StoreReady`` follows."""
        self._home.start_store()

    def renew_store(self) -> None:
        """End the store, which is cheap to replace: another one takes its socket over. Its end is no fault."""
        store = self._home.helper(STORE)
        if store is not None and store.pid is not None:
            store.is_unwanted = True
            self._home.kill(store)

    def spawn_rank(self, handle: RankHandle, start: RankStart, *, now_s: float) -> bool:
        """A process for a rank that has none. False where there is neither a spare nor a zygote that is ready."""
        handle.begin(now_s=now_s, loads=start.loads)
        node = self._node_of[handle.rank]
        started = node.start_rank(handle.rank, start)
        if started is StartedBy.SPARE:
            handle.pid, handle.was_spare = node.processes[handle.rank].pid, True
        elif started is StartedBy.NOBODY:
            self._forget(handle)
        return started is not StartedBy.NOBODY

    def forget_start(self, handle: RankHandle) -> None:
        """No process comes of what was asked for this rank."""
        self._node_of[handle.rank].release(handle.rank)
        self._forget(handle)

    @staticmethod
    def _forget(handle: RankHandle) -> None:
        handle.machine.advance(RankEvent.EXITED)
        handle.released()

    def form(self, generation: int, *, run_id: str, drilled: RankHandle | None = None) -> None:
        """Have every rank join ``generation``. ``drilled``: whose share is to be drilled soon."""
        present = self.present
        # INVARIANT secret-by-channel: what a generation signs with travels by the control channel only.
        # Broken if: it comes from the store, or one that was used before is used again.
        # Guarded by: test_each_generation_is_handed_a_secret_of_its_own.
        secret = secrets.token_hex(SECRET_BYTES)
        there = Counter(id(self._node_of[handle.rank]) for handle in present)
        local_rank: Counter[int] = Counter()
        for number, handle in enumerate(present):
            node = id(self._node_of[handle.rank])
            handle.machine.advance(RankEvent.FORM_SENT)
            handle.has_log = True
            message = Form(
                generation=generation,
                rank=number,
                world_size=len(present),
                local_rank=local_rank[node],
                local_world_size=there[node],
                run_id=run_id,
                secret=secret,
                owes_drill=-1 if drilled is None else present.index(drilled),
            )
            local_rank[node] += 1
            self.send(handle, message)

    def abort(self, generation: int, now_s: float) -> None:
        """Have every rank leave ``generation`` at once."""
        if generation > self.aborted[0]:
            self.aborted = (generation, now_s)
        newest = self._newest_step(generation)
        for handle in self.ranks:
            if handle.state in (RankState.FORMING, RankState.TRAINING):
                is_in_steps = handle.state is RankState.TRAINING
                handle.machine.advance(RankEvent.ABORT_SENT)
                message = Abort(generation=generation, newest_step=newest if is_in_steps else -1)
                self.send(handle, message)

    def _newest_step(self, generation: int) -> int:
        """Return the newest step that a rank, dead or alive, has committed in ``generation``; below 0: none."""
        slot = self.ranks[0].slot
        found = zip(slot.of_all(Cell.GENERATION), slot.of_all(Cell.COMMITTED_STEP), strict=True)
        return max((step for of, step in found if of == generation), default=-1)

    def cut(self, generation: int) -> None:
        """Have every rank abort the communicators of ``generation``: all have heard of its abort."""
        for handle in self.ranks:
            self.send(handle, Cut(generation=generation))

    def stop(self, message: Stop) -> None:
        """Ask every live rank to stop after its step."""
        for handle in self.ranks:
            self.send(handle, message)

    def send(self, handle: RankHandle, message: Message) -> None:
        """Send to a rank; one that has just ended will be reaped, so that is no error here."""
        self._node_of[handle.rank].send(handle.rank, message)

    def kill_rank(self, handle: RankHandle, now_s: float) -> None:
        """SIGKILL a rank; its end follows. One whose pid is not known yet is cut off, and ends of it."""
        handle.machine.advance(RankEvent.KILL_SENT)
        if self._node_of[handle.rank].kill_rank(handle.rank) and handle.killed_at_s is None:
            handle.killed_at_s = now_s

    def signal_rank(self, handle: RankHandle, number: int) -> None:
        """Send a signal that somebody asked for."""
        self._node_of[handle.rank].signal_rank(handle.rank, number)

    def wake(self, handles: Iterable[RankHandle]) -> None:
        """Let stopped ranks go on: those that hang to write their stacks, a spared one to leave.

        The generation has been aborted by now, so a rank that wakes up finds itself fenced out.
        """
        for handle in handles:
            self.signal_rank(handle, signal.SIGCONT)

    def ask_stacks(self) -> None:
        """Have every rank that can still answer write its stacks to its log, before it is aborted."""
        for handle in self.ranks:
            if handle.state in (RankState.FORMING, RankState.TRAINING):
                self._process_of(handle).mark_asked()
                self.send(handle, Stacks())

    def count_collectives(self) -> None:
        """Have every rank of a script say how many it has begun."""
        for handle in self.ranks:
            if handle.state is RankState.TRAINING:
                self.send(handle, CountCollectives())

    def log_bytes(self, handle: RankHandle) -> int:
        """How much its process has written."""
        return self._process_of(handle).written_bytes

    def stack_of(self, handle: RankHandle) -> str:
        """Where its main thread was when it was asked; empty where it has not said so."""
        return self._process_of(handle).stack_when_asked()

    def force_stacks(self, hung: Collection[int]) -> None:
        """Have ranks that answer nothing write theirs by signal, once they are awake, and no file."""
        # INVARIANT only-the-hung: a healthy rank never gets this signal. The handler walks the
        # frames of threads that go on running, which now and then ends the process (SIGSEGV; seen in
        # one of about 30 runs of four hangs each; CPython issue 116008).
        # Broken if: survivors are made to dump this way.
        # Guarded by: test_survivors_write_their_stacks_and_live.
        for rank in hung:
            self.ranks[rank].slot.set(Cell.FENCED, 1)
            self._process_of(self.ranks[rank]).mark_asked()
            self._node_of[rank].force_stacks(rank)

    def has_written_stacks(self, handle: RankHandle, now_s: float) -> bool:
        """Whether a rank that was asked where it hangs has written all of it; asked at each tick."""
        return self._process_of(handle).has_answered(now_s)

    def forget_stacks(self) -> None:
        """What ranks are asked next is of another incident."""
        for handle in self.ranks:
            self._process_of(handle).forget_asked()

    def is_stopped(self, handle: RankHandle) -> bool:
        """Whether the system holds its process stopped."""
        return self._node_of[handle.rank].is_stopped(handle.rank)

    def stopped_s(self, handle: RankHandle, now_s: float) -> float:
        """How long its process has been seen stopped without a break; 0.0 where it is not now."""
        return self._node_of[handle.rank].stopped_s(handle.rank, now_s)

    def is_killed(self, handle: RankHandle) -> bool:
        """Whether somebody has sent SIGKILL to its process, which has not been reaped."""
        return self._node_of[handle.rank].is_killed(handle.rank)

    def was_killed_for_memory(
        self, handle: RankHandle, now_s: float, *, before_it: int = 0
    ) -> bool:
        """Whether what has just ended of SIGKILL there was most likely killed by the kernel; asked once each.

        ``before_it``: so many others of that node have, which are likelier to have been and have not
        been asked of.
        """
        return self._node_of[handle.rank].claim_kernel_kill(now_s, before_it=before_it)

    def is_here(self, handle: RankHandle) -> bool:
        """Whether the rank is on the machine of this process."""
        return self._node_of[handle.rank] is self._home

    def host_of(self, rank: int) -> str:
        """The name of the machine of this rank; empty where there is only one, or for -1."""
        return self._node_of[rank].host if rank >= 0 else ""

    def machine_of(self, handle: RankHandle) -> str:
        """``node 1: ``, to stand before a path on the machine of this rank; empty for that of this process."""
        return "" if self.is_here(handle) else f"node {handle.rank // self._ranks_per_node}: "

    def log_of(self, handle: RankHandle, folder: str, name: str = "") -> str:
        """Return where this rank's log is, for people; ``folder`` is that of the logs on this machine, ``name`` the log's in it."""
        name = name or f"rank_{handle.rank}.log"
        if self._node_of[handle.rank].shares_logs:
            return f"{self.machine_of(handle)}{folder}/{name}"
        return f"{name} on node {handle.rank // self._ranks_per_node}"

    def fence(self, handle: RankHandle, *, is_fenced: bool) -> None:
        """Have what a rank publishes refused from here on, or taken again."""
        handle.slot.set(Cell.FENCED, int(is_fenced))
        self._node_of[handle.rank].fence(handle.rank, is_fenced=is_fenced)

    def unheard_s(self, now_s: float) -> float:
        """How old what is known of the ranks of other machines is; 0.0 where all are here."""
        return max(node.unheard_s(now_s) for node in self._nodes)

    def unheard_of_s(self, handle: RankHandle, now_s: float) -> float:
        """How old what is known of this rank is."""
        return self._node_of[handle.rank].unheard_s(now_s)

    def known_ns(self, now_ns: int) -> list[int]:
        """Of each rank that is present, when what is known of it was true: at its node's newest look."""
        of_node = {
            id(node): now_ns - int(node.unheard_s(now_ns / 1e9) * 1e9) for node in self._nodes
        }
        return [of_node[id(self._node_of[handle.rank])] for handle in self.present]

    def are_neighbours(self, one: RankHandle, other: RankHandle) -> bool:
        """Whether both ranks are on one node, and share its memory."""
        return self._node_of[one.rank] is self._node_of[other.rank]

    def _process_of(self, handle: RankHandle) -> ProcessView:
        return self._node_of[handle.rank].processes[handle.rank]

    def measure_memory(self) -> None:
        """Refresh each rank's resident memory; a few microseconds each. One that ends has what it had."""
        for handle in self.ranks:
            resident = self._node_of[handle.rank].resident_bytes(handle.rank)
            handle.rss_bytes = resident or handle.rss_bytes
