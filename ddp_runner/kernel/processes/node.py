"""The processes of one machine: forks, signals, reaps and reads them. Performs, never decides.

Whoever decides knows ranks by their numbers; pids, channels, files and signals stay in here.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ddp_runner.kernel.processes.children import Ended, read_output
from ddp_runner.kernel.processes.helper_process import (
    Departure,
    Helper,
    HelperEnded,
    PromotedZygote,
    RankEnded,
    ZygoteEnded,
)
from ddp_runner.kernel.processes.node_plan import NodePlan
from ddp_runner.kernel.processes.operating_system import OperatingSystem, ZygoteProcess
from ddp_runner.kernel.processes.rank_process import RankProcess
from ddp_runner.kernel.processes.rank_start import RankStart, StartedBy
from ddp_runner.kernel.processes.resources import (
    BoardMemory,
    ProgramMemory,
    SharedByRanks,
    StorePlace,
)
from ddp_runner.kernel.rules.helper_roles import STANDBY, STORE, Role
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.system.control_channel import Channel, ChannelClosedError
from ddp_runner.kernel.system.proc_state import StoppedWatch
from ddp_runner.kernel.wire.board import Cell, Slot
from ddp_runner.kernel.wire.fork_specs import (
    ForkKind,
    NothingMore,
    Program,
    ProgramSpec,
    RankSpec,
    SpareKind,
    SpareSpec,
    Spec,
)
from ddp_runner.kernel.wire.messages import (
    NO_PROCESS,
    Fork,
    Forked,
    Form,
    Message,
    SaveAlone,
    encode,
)
from ddp_runner.start import STACKS_SIGNAL

FIRST_LOGS = 0  # the number of the first coordinator's machine


class Node:
    """Owned by the supervisor's loop. Channels of live processes are kept registered for reading.

    ``ranks``: the ranks of the run that this machine has; None: all. ``store``: where ranks meet, which
    is this node's to close; None: on loopback. Raises BadInputError where no port can be had for that.
    """

    def __init__(
        self,
        plan: NodePlan,
        selector: selectors.BaseSelector,
        *,
        system: OperatingSystem,
        clock: Clock,
        ranks: Sequence[int] | None = None,
        store: StorePlace | None = None,
    ) -> None:
        self.train(plan)
        self._selector, self.system, self._clock = selector, system, clock
        self._program = None if plan.program is None else ProgramMemory(plan.program, plan.source)
        self.store_at = store or StorePlace.on_this_machine(plan.store_port)
        self.shared = SharedByRanks(plan)
        self._memory = BoardMemory(plan.world_size)
        # Of all ranks of the run, wherever they are: its board has the same layout on each machine.
        self._slots = [self._memory.board.slot(rank) for rank in range(plan.world_size)]
        self.become(range(plan.world_size) if ranks is None else ranks)
        self._helpers: dict[str, Helper] = {}  # by the name of its role
        self._zygote: ZygoteProcess | None = None
        self.guardian = system.make_guardian()
        self.kernel_kills = system.kernel_kills()
        self._stopped = StoppedWatch(system.is_stopped)
        self.log_seal = plan.log_seal
        self.zygote_since_s = 0.0
        self.term = ""  # the coordinator's, where there is one
        self.shares_checkpoints = self.shares_logs = True  # with the coordinator
        self.logs_number = (
            FIRST_LOGS  # of the coordinator's log folder, on all machines that have it
        )
        # Ranks that outlive their coordinator: their next Form says where ranks meet now.
        self.moved: set[int] = set()
        self._next_token = 1
        # A fork may end before the zygote's answer that names it has been read.
        self._unclaimed: dict[int, Ended] = {}

    def train(self, plan: NodePlan) -> None:
        """Have whoever is started from now on train what ``plan`` has; the rest of it is as before."""
        self._plan, self.settings_record = plan, plan.settings

    def become(self, ranks: Sequence[int]) -> None:
        """Have these ranks from now on. None of those before has a process."""
        self.ranks, log_dir = tuple(ranks), self._plan.log_dir
        # What they are at present, and not where the ranks stand.
        self.processes = {rank: RankProcess(rank, log_dir=log_dir) for rank in ranks}

    @property
    def host(self) -> str:
        """The host's name; empty if there is only one machine."""
        return "" if self._plan.is_alone else socket.gethostname()

    @property
    def world_size(self) -> int:
        """The number of ranks of the run, on all machines."""
        return len(self._slots)

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each machine."""
        return self._plan.ranks_per_node

    @property
    def can_fork(self) -> bool:
        """True if the zygote is ready."""
        return self._zygote is not None and self._zygote.ready

    @property
    def has_ready_store(self) -> bool:
        """True if the store is ready, so that ranks can find each other."""
        store = self.helper(STORE)
        return store is not None and store.is_ready

    @property
    def zygote_pid(self) -> int | None:
        """The process that forks the others; None while there is none."""
        return None if self._zygote is None else self._zygote.pid

    @property
    def zygote_output(self) -> int | None:
        """The descriptor that the zygote writes to; None if there is no zygote."""
        return None if self._zygote is None else self._zygote.output

    @property
    def fork_owed_since_s(self) -> float | None:
        """When the zygote was asked for the oldest fork that it still owes; None: it owes none."""
        ranks = self.processes.values()
        asked_s = [one.asked_at_s for one in ranks if one.asked_at_s and one.is_owed]
        asked_s += [helper.since_s for helper in self._helpers.values() if helper.pid is None]
        return min(asked_s, default=None)

    def slot(self, rank: int) -> Slot:
        """The cells of a rank on the board."""
        return self._slots[rank]

    def start_guardian(self) -> None:
        """Start the process that ends what is left, should this one be killed. May raise OSError."""
        self.guardian.start()

    def start_zygote(self) -> None:
        """Start a zygote; ``ZygoteReady`` follows."""
        self._zygote = self.system.start_zygote(
            wanted=self._plan.wanted,
            environment=self.guardian.marked(self._plan.environment),
        )
        self.zygote_since_s = self._clock.monotonic()
        self._watch(self._zygote.channel, None)

    def promote_standby(self) -> bool:
        """Have who stands by fork from now on; False where nobody does, or it is stopped or not forked yet."""
        standby = self.helper(STANDBY)
        if standby is None or standby.pid is None or self.system.is_stopped(standby.pid):
            return False
        del self._helpers[STANDBY.name]
        self._zygote = PromotedZygote(standby, standby.pid)
        self.zygote_since_s = self._clock.monotonic()
        return True

    def zygote_is_ready(self) -> None:
        """Note that forks are cheap from now on."""
        if self._zygote is not None:
            self._zygote.ready = True

    def helper(self, role: Role) -> Helper | None:
        """The process of a role, also while it is owed; None where there is none."""
        return self._helpers.get(role.name)

    def start_helper(self, role: Role, spec: Spec, *inherited: int) -> Helper:
        """Fork a process of a role that has none, with these descriptors; it may say that it is ready."""
        token, now_s = self._take_token(), self._clock.monotonic()
        helper = self._helpers[role.name] = Helper(role, spec, token=token, now_s=now_s)
        self._watch(helper.channel, None)
        descriptors = helper.descriptors(*inherited)
        self._fork(helper.request, descriptors)
        os.close(descriptors[0])
        return helper

    def helper_is_ready(self, role: Role, message: Message) -> None:
        """Note that the helper's process is ready."""
        if (helper := self.helper(role)) is not None:
            helper.ready = message

    def start_store(self) -> None:
        """Fork a store host on the listening socket; ``StoreReady`` follows."""
        self.start_helper(STORE, NothingMore(), self.store_at.fileno())

    def start_rank(self, rank: int, start: RankStart) -> StartedBy:
        """A process for a rank that has none: the spare, or else a fork, which is owed then."""
        process = self.processes[rank]
        if start.log_name:
            process.log_path = self._plan.log_dir / start.log_name
        token = self._take_token()
        theirs, output = process.open_lines(token=token, now_s=self._clock.monotonic())
        assert process.channel is not None
        process.channel.set_blocking(blocking=False)
        self._watch(process.channel, rank)
        request = Fork(
            token=token,
            kind=self._plan.kind,
            module=self._plan.module,
            rank=rank,
            local_rank=self.ranks.index(rank),
            spec=self._of_rank(rank, start),
        )
        descriptors = [theirs, self._memory.descriptor, output, *([0] if start.reads_stdin else [])]
        started = StartedBy.NOBODY
        if start.may_take_spare and self._spare_becomes(process, request, descriptors):
            started = StartedBy.SPARE
        elif self.can_fork:
            self._fork(request, descriptors)
            started = StartedBy.ZYGOTE
        else:
            self.release(rank)
        os.close(theirs)
        return started

    @property
    def has_spare(self) -> bool:
        """True if a process waits that may become a rank."""
        spare = self._spare
        return spare is not None and self._is_warm(spare) and self.fits(spare)

    @property
    def _spare(self) -> Helper | None:
        """The process that waits to become a rank, whoever has asked for it."""
        helpers = self._helpers.values()
        return next((one for one in helpers if one.role.fork is ForkKind.SPARE), None)

    def forked_helper(self, forked: Forked) -> Helper | None:
        """Return the helper whose fork the zygote reports; None if none is waited for."""
        helpers = self._helpers.values()
        return next((one for one in helpers if one.token == forked.token), None)

    def claim(self, forked: Forked) -> tuple[int | None, Ended | None]:
        """Learn a fork's pid. Returns which rank it is, if any, and its end if it was reaped already."""
        its_rank = None
        helper = self.forked_helper(forked)
        if helper is not None:
            helper.pid, helper.since_s = forked.pid, self._clock.monotonic()
            if forked.pid == NO_PROCESS:
                self._close(helper)
            elif helper.role.runs_user_code:
                self.guardian.watch(forked.pid)
        for process in self.processes.values():
            if process.token == forked.token and process.is_owed:
                process.pid, its_rank = forked.pid, process.rank
                self.guardian.watch(forked.pid)
        ended = self._unclaimed.pop(forked.pid, None)
        if self.fork_owed_since_s is None:
            self._unclaimed.clear()  # orphans; their numbers may be given out again
        return its_rank, ended

    def forget_owed(self) -> None:
        """Forget helpers that a dead zygote was asked for and has not started; ranks are handled apart."""
        for helper in [one for one in self._helpers.values() if one.pid is None]:
            self._close(helper)

    def receive(self, channel: Channel, rank: int | None) -> tuple[bytes, int | None] | None:
        """The packet of a channel that is ready; with the rank that it is of, None for one that is no rank.

        None where there is nothing: its process was replaced in this very round, or its end is closed.
        """
        if rank is not None and self.processes[rank].channel is not channel:
            return None
        if channel.fileno() < 0:
            return None
        try:
            packet, _ = channel.receive_packet()
        except ChannelClosedError:
            self._forget_channel(channel)
            return None
        return packet, rank

    def last_packets(self, pid: int) -> Iterator[tuple[bytes, int | None]]:
        """Yield the unread messages of a process that has ended, with its rank, if any."""
        found = [(one.channel, one.rank) for one in self.processes.values() if one.pid == pid]
        channel, rank = found[0] if found else (None, None)
        for helper in self._helpers.values():
            if helper.pid == pid:
                channel = helper.channel
        if self._zygote is not None and self._zygote.pid == pid:
            channel = self._zygote.channel
        while channel is not None:
            channel.set_blocking(blocking=False)
            try:
                packet, _ = channel.receive_packet()
            except (ChannelClosedError, BlockingIOError):
                return
            yield packet, rank

    def reap(self) -> Iterator[Ended]:
        """Yield every child that has ended since the last call, adopted orphans included."""
        return self.system.reap()

    def departed(self, ended: Ended) -> Departure | None:
        """Return the owner of the process that ended; None for an orphan that was merely adopted."""
        if self._zygote is not None and ended.pid == self._zygote.pid:
            zygote, self._zygote = self._zygote, None
            output = read_output(zygote.output)
            zygote.mark_reaped(ended.exit_code if ended.exit_code is not None else -1)
            self._forget_channel(zygote.channel)
            zygote.close()
            return ZygoteEnded(ended=ended, output=output)
        for helper in list(self._helpers.values()):
            if helper.pid == ended.pid:
                output = read_output(helper.output)
                if helper.role.runs_user_code:
                    self.guardian.rank_ended(ended.pid, known=self._pids)
                self._close(helper)
                return HelperEnded(
                    role=helper.role,
                    ended=ended,
                    output=output,
                    was_unwanted=helper.is_unwanted,
                )
        for process in self.processes.values():
            if process.pid == ended.pid:
                self.guardian.rank_ended(ended.pid, known=self._pids)
                wrote = process.what_it_wrote()
                self.release(process.rank)
                return RankEnded(ended=ended, rank=process.rank, wrote=wrote)
        if self.fork_owed_since_s is not None:
            self._unclaimed[ended.pid] = ended
        return None

    def release(self, rank: int) -> None:
        """Close the lines of a rank whose process was reaped, or never comes."""
        process = self.processes[rank]
        if process.channel is not None:
            self._forget_channel(process.channel)
        process.close_lines()

    def send(self, rank: int, message: Message) -> None:
        """Send to a rank; one that has just ended will be reaped, so that is no error here."""
        if isinstance(message, Form) and rank in self.moved:
            self.moved.discard(rank)
            message = self.with_store(message)
        elif isinstance(message, SaveAlone):
            message = replace(message, term=self.term)
        self.pass_on(rank, encode(message))

    def with_store(self, form: Form) -> Form:
        """Return ``form`` with where ranks meet, and in which term, for a rank that was in another coordinator's."""
        store = self.store_at
        return replace(form, store_host=store.host, store_port=store.port, term=self.term)

    def pass_on(self, rank: int, packet: bytes) -> None:
        """Send an encoded message like :meth:`send`."""
        channel = self.processes[rank].channel
        if channel is not None:
            # One that is stopped may have a full buffer; it will be found hung.
            with contextlib.suppress(ChannelClosedError, BlockingIOError):
                channel.send_packet(packet)

    def kill_rank(self, rank: int) -> bool:
        """SIGKILL a rank; its end follows. False where its pid is not known yet: it is cut off."""
        process = self.processes[rank]
        if process.pid is not None:
            self.system.signal(process.pid, signal.SIGKILL)
            return True
        if process.channel is not None:
            self._forget_channel(process.channel)
            process.channel.close()  # it ends itself when it finds nobody listening
            process.channel = None
        return False

    def signal_rank(self, rank: int, number: int) -> None:
        """Signal the process of a rank, if it is known."""
        if (pid := self.processes[rank].pid) is not None:
            self.system.signal(pid, number)

    def force_stacks(self, rank: int) -> None:
        """Have the main thread of a rank that answers nothing write where it is, once it is awake."""
        if (pid := self.processes[rank].pid) is not None:
            self.system.signal_main_thread(pid, STACKS_SIGNAL)

    def claim_kernel_kill(self, now_s: float, *, before_it: int = 0) -> bool:
        """Return True if the kernel most likely sent the SIGKILL that ended a process; asked once for each."""
        return self.kernel_kills.claim(now_s, before_it=before_it)

    def fence(self, rank: int, *, is_fenced: bool) -> None:
        """Have what this rank publishes refused from here on, or taken again."""
        self.slot(rank).set(Cell.FENCED, int(is_fenced))

    def is_stopped(self, rank: int) -> bool:
        """Return True if the system holds the process of this rank stopped."""
        return self.system.is_stopped(self.processes[rank].pid)

    def stopped_s(self, rank: int, now_s: float) -> float:
        """Return how long it has been seen stopped without a break; 0.0 if it is not stopped now."""
        return self._stopped.stopped_s(self.processes[rank].pid, now_s)

    def unheard_s(self, now_s: float) -> float:
        """Return 0: the facts about a rank of this machine are always current."""
        del now_s
        return 0.0

    def is_killed(self, rank: int) -> bool:
        """Return True if the unreaped process of this rank was sent SIGKILL."""
        return self.system.is_killed(self.processes[rank].pid)

    def resident_bytes(self, rank: int) -> int:
        """Memory of the process of this rank; 0 where it is not known."""
        pid = self.processes[rank].pid
        return 0 if pid is None else self.system.resident_bytes(pid)

    def helper_stopped_s(self, helper: Helper | None, now_s: float) -> float:
        """Return the time like :meth:`stopped_s`, for a helper process."""
        return self._stopped.stopped_s(None if helper is None else helper.pid, now_s)

    def zygote_stopped_s(self, now_s: float) -> float:
        """Return the time like :meth:`stopped_s`, for the zygote."""
        return self._stopped.stopped_s(self.zygote_pid, now_s)

    def kill_zygote(self) -> None:
        """SIGKILL the zygote; its end follows."""
        if self._zygote is not None:
            self.system.signal(self._zygote.pid, signal.SIGKILL)

    def ask_zygote_for_stacks(self) -> None:
        """Have the zygote say where it is; that is in its output once it has ended."""
        if self._zygote is not None:
            self.system.signal(self._zygote.pid, STACKS_SIGNAL)

    def kill(self, helper: Helper | None) -> None:
        """SIGKILL a process that is no rank, if it is there; its end follows."""
        if helper is not None and helper.pid is not None:
            self.system.signal(helper.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of everything; the processes have been ended."""
        for process in self.processes.values():
            self.release(process.rank)
        if self._zygote is not None:
            self._zygote.mark_reaped(-9)
            self._forget_channel(self._zygote.channel)
            self._zygote.close()
            self._zygote = None
        for helper in list(self._helpers.values()):
            self._close(helper)
        self.guardian.close()
        self.store_at.close()
        for slot in self._slots:
            slot.release()
        self._memory.close()
        self.shared.close()
        if self._program is not None:
            self._program.close()

    def _of_rank(self, rank: int, start: RankStart) -> RankSpec | ProgramSpec:
        """Return the specification of a rank's process."""
        surroundings = self.surroundings(rank)
        if self._plan.kind is ForkKind.PROGRAM:
            return ProgramSpec(
                **surroundings,
                call=dict(start.call or {}),
                log_file=str(self.processes[rank].log_path),
                log_seal=self.log_seal,
            )
        return RankSpec(
            **surroundings,
            loads=start.loads,
            resume=start.resume,
            not_after=start.not_after,
            short_of_memory_in=start.short_of_memory_in,
            device_free_bytes=start.device_free_bytes * self._plan.has_own_device[rank],
            injections_left=dict(start.injections_left),
            log_seal=self.log_seal,
            program=self.program,
        )

    @property
    def program(self) -> Program | None:
        """The program of an attached loop, as it was at launch; None without one."""
        return None if self._program is None else self._program.program

    def surroundings(self, rank: int) -> dict[str, Any]:
        """The fields of Surroundings, for this rank."""
        around = self._plan.around[rank]
        return {
            **around,
            "log_folder": self.logs_number if self.shares_logs else around["node"],
            "term": self.term,
            "settings": self.settings_record,
            "store_host": self.store_at.host,
            "store_port": self.store_at.port,
            **self.shared.paths,
        }

    def fits(self, spare: Helper) -> bool:
        """Return True if the spare may become a rank: a model that it may have built must be of these settings."""
        spec = spare.spec
        assert isinstance(spec, SpareSpec)
        return spec.kind is not SpareKind.MODEL or spec.settings is self.settings_record

    def _is_warm(self, spare: Helper) -> bool:
        """Return True if the spare waits, and is not stopped."""
        return spare.is_ready and spare.pid is not None and not self.system.is_stopped(spare.pid)

    def _spare_becomes(self, process: RankProcess, request: Fork, descriptors: list[int]) -> bool:
        """Have it become a rank. False where that needs an ordinary fork: it is gone, or has built something else."""
        spare = self._spare
        if spare is None or not self.has_spare or not isinstance(request.spec, RankSpec):
            return False
        assert spare.pid is not None
        spare.channel.set_blocking(blocking=False)  # it may be stopped since
        try:
            spare.channel.send(request, descriptors=descriptors)
        except (ChannelClosedError, BlockingIOError):
            return False
        process.pid = spare.pid
        self.guardian.watch(spare.pid)
        self._close(spare)
        return True

    @property
    def _pids(self) -> set[int]:
        """The run's own processes, as far as they are known."""
        pids: set[int | None] = {process.pid for process in self.processes.values()}
        pids |= {one.pid for one in self._helpers.values()} | {self.zygote_pid}
        return {pid for pid in pids if pid is not None}

    def _close(self, helper: Helper) -> None:
        self._forget_channel(helper.channel)
        helper.close()
        del self._helpers[helper.role.name]

    def _take_token(self) -> int:
        self._next_token += 1
        return self._next_token

    def _fork(self, request: Fork, descriptors: list[int]) -> None:
        assert self._zygote is not None
        # A zygote that has just died is reaped in the next round, and what it owes asked for again.
        with contextlib.suppress(ChannelClosedError):
            self._zygote.fork(request, descriptors)

    def _watch(self, channel: Channel, rank: int | None) -> None:
        self._selector.register(channel, selectors.EVENT_READ, (channel, rank))

    def _forget_channel(self, channel: Channel) -> None:
        """Stop reading a channel whose other end is closed; its process is reaped by itself."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel)
