"""The processes of a run as one thing to act on: zygote, store host, ranks. Performs, never decides."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import time
from collections.abc import Iterator
from pathlib import Path

from ddp_runner import config
from ddp_runner.core.board import Cell
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.lifecycle import IN_WORLD, Membership, RankEvent, RankState
from ddp_runner.core.messages import (
    NO_PROCESS,
    Abort,
    Cut,
    Fork,
    Forked,
    Form,
    Message,
    Stacks,
    Stop,
)
from ddp_runner.core.spare import SparePlan
from ddp_runner.observe.logger import new_seal
from ddp_runner.supervisor.processes.children import Ended, Zygote, kill, read_output
from ddp_runner.supervisor.processes.departures import (
    HELPER_ENDED,
    Departure,
    RankEnded,
    ZygoteEnded,
)
from ddp_runner.supervisor.processes.environment import zygote_environment
from ddp_runner.supervisor.processes.guardian import Guardian
from ddp_runner.supervisor.processes.helper_process import (
    Drill,
    Helper,
    PromotedZygote,
    Spare,
    Standby,
    StoreHost,
)
from ddp_runner.supervisor.processes.rank_process import RankHandle
from ddp_runner.supervisor.processes.resources import BoardMemory, bind_store_port
from ddp_runner.supervisor.processes.stack_dump import STACKS_SIGNAL
from ddp_runner.system.control_channel import Channel, ChannelClosedError

SECRET_BYTES = 32


class World:
    """Owned by the supervisor's loop. Channels of live processes are kept registered for reading.

    Raises BadInputError where no port can be had for the store.
    """

    def __init__(self, plan: LaunchPlan, selector: selectors.BaseSelector) -> None:
        self._plan = plan
        self._selector = selector
        self._settings_record = config.to_record(plan.settings)
        self._listening = bind_store_port(plan.settings.ddp.port)
        self._memory = BoardMemory(plan.world_size)
        self.ranks = [
            RankHandle(
                rank,
                device=device,
                slot=self._memory.board.slot(rank),
                log_dir=Path(plan.settings.run.log_dir),
            )
            for rank, device in enumerate(plan.devices)
        ]
        self.store: StoreHost | None = None
        self.spare: Spare | None = None
        self.standby: Standby | None = None
        self.drill: Drill | None = None
        self._zygote: Zygote | PromotedZygote | None = None
        self.guardian = Guardian()
        self.log_seal = new_seal()
        self.aborted = (0, 0.0)  # the newest generation that ranks were told to leave, and when
        self.zygote_since_s = 0.0
        self._next_token = 1
        # A fork may end before the zygote's answer that names it has been read.
        self._unclaimed: dict[int, Ended] = {}

    @property
    def store_port(self) -> int:
        """The loopback port of the store, for the whole run."""
        return int(self._listening.getsockname()[1])

    @property
    def can_fork(self) -> bool:
        """Whether the zygote is ready."""
        return self._zygote is not None and self._zygote.ready

    @property
    def has_ready_store(self) -> bool:
        """Whether ranks can find each other."""
        return self.store is not None and self.store.is_ready

    def has_spare_for(self, handle: RankHandle) -> bool:
        """Whether a process waits that may become this rank."""
        spare = self.spare
        return spare is not None and spare.is_warm and spare.plan.serves(handle.device.device)

    @property
    def zygote_pid(self) -> int | None:
        """The process that forks the others; None while there is none."""
        return None if self._zygote is None else self._zygote.pid

    @property
    def zygote_output(self) -> int | None:
        """What the zygote writes to; None while there is none."""
        return None if self._zygote is None else self._zygote.output

    @property
    def fork_owed_since_s(self) -> float | None:
        """When the zygote was asked for the oldest fork that it still owes; None: it owes none."""
        asked_s = [h.spawned_at_s for h in self.ranks if h.is_alive and h.pid is None]
        asked_s += [helper.since_s for helper in self._helpers if helper.pid is None]
        return min(asked_s, default=None)

    @property
    def present(self) -> list[RankHandle]:
        """The ranks that are not dropped, in order; the first one of them is rank 0."""
        return [handle for handle in self.ranks if handle.membership in IN_WORLD]

    def start_zygote(self) -> None:
        """Start a zygote; ``ZygoteReady`` follows."""
        settings = self._plan.settings
        self._zygote = Zygote(
            task=settings.run.task,
            environment=self.guardian.marked(zygote_environment(self._plan, os.environ)),
        )
        self.zygote_since_s = time.monotonic()
        self._watch(self._zygote.channel, "zygote")

    def start_standby(self) -> None:
        """Fork the next zygote ahead of need."""
        self.standby = Standby(token=self._take_token(), now_s=time.monotonic())
        self._watch(self.standby.channel, self.standby.name)
        self._fork_helper(self.standby.request(), self.standby.descriptors())

    def promote_standby(self) -> bool:
        """Have who stands by fork from now on; False where nobody does."""
        zygote = None if self.standby is None else self.standby.take_over()
        if zygote is None:
            return False
        self.standby, self._zygote = None, zygote
        self.zygote_since_s = time.monotonic()
        return True

    def zygote_is_ready(self) -> None:
        """Note that forks are cheap from now on."""
        if self._zygote is not None:
            self._zygote.ready = True

    def store_is_ready(self) -> None:
        """Note that ranks can find each other from now on."""
        if self.store is not None:
            self.store.is_ready = True

    def start_store(self) -> None:
        """Fork a store host on the listening socket; ``StoreReady`` follows."""
        self.store = StoreHost(token=self._take_token(), now_s=time.monotonic())
        self._watch(self.store.channel, self.store.name)
        self._fork_helper(self.store.request(), self.store.descriptors(self._listening.fileno()))

    def spawn_rank(
        self,
        handle: RankHandle,
        *,
        loads: bool,
        resume: str,
        injections_left: dict[str, int],
        short_of_memory_in: str = "",
    ) -> bool:
        """A process for a rank that has none: the spare, or else a fork. ``resume``: what it loads.

        False where there is neither: the spare has just ended, and no zygote is ready.

        ``short_of_memory_in``: the phase in which its predecessor had too little, so that this one
        halves the micro-batch, or what it evaluates at a time; empty where it did not.
        """
        token = self._take_token()
        handle.loads = loads
        handle.slot.set(Cell.CONDEMNED, 0)  # its predecessor was
        theirs, output = handle.open_lines(token=token, now_s=time.monotonic())
        assert handle.channel is not None
        handle.channel.set_blocking(blocking=False)
        self._watch(handle.channel, handle)
        spec = {
            **self._surroundings(handle),
            "loads": loads,
            "resume": resume,
            "short_of_memory_in": short_of_memory_in,
            "device_free_bytes": handle.device_free_bytes * self._plan.has_own_device(handle.rank),
            "injections_left": injections_left,
            "log_seal": self.log_seal,
        }
        request = Fork(token=token, rank=handle.rank, local_rank=handle.rank, spec=spec)
        descriptors = [theirs, self._memory.descriptor, output]
        has_process = True
        if not self._spare_becomes(handle, request, descriptors):
            if self.can_fork:
                self._fork(request, descriptors)
            else:
                self.forget_start(handle)
                has_process = False
        os.close(theirs)
        return has_process

    def _surroundings(self, handle: RankHandle) -> dict[str, object]:
        """What user code finds around it in this rank."""
        plan = self._plan
        return {
            "settings": self._settings_record,
            "device": handle.device.device,
            "world_size": plan.world_size,
            "local_world_size": plan.world_size,
            "threads": plan.threads_per_rank,
            "store_host": "127.0.0.1",
            "store_port": self.store_port,
            "detect_anomaly": plan.settings.run.detect_anomaly,
        }

    def start_drill(self, rank: int, *, step: int, folder: str) -> None:
        """Fork a process that computes the share of ``rank`` of ``step``; ``Drilled`` follows."""
        self.drill = Drill(token=self._take_token(), now_s=time.monotonic())
        self._watch(self.drill.channel, self.drill.name)
        around = self._surroundings(self.ranks[rank])
        spec = {**around, "rank": rank, "step": step, "folder": folder}
        self._fork_helper(self.drill.request(spec), self.drill.descriptors())

    def start_spare(self, plan: SparePlan) -> None:
        """Fork a process ahead of need; ``SpareReady`` follows."""
        self.spare = Spare(plan, token=self._take_token(), now_s=time.monotonic())
        self._watch(self.spare.channel, self.spare.name)
        spec = {"settings": self._settings_record, "threads": self._plan.threads_per_rank}
        spec |= {"kind": plan.kind.value, "device": plan.device}
        self._fork_helper(self.spare.request(spec), self.spare.descriptors())

    def _spare_becomes(self, handle: RankHandle, request: Fork, descriptors: list[int]) -> bool:
        spare = self.spare
        # One that is tried again may take its time.
        if spare is None or handle.membership is Membership.REJOINING:
            return False
        if not spare.becomes(request, descriptors):
            return False
        assert spare.pid is not None
        handle.pid, handle.was_spare = spare.pid, True
        self.guardian.watch(spare.pid)
        self._close(spare)
        return True

    def claim(self, forked: Forked) -> Ended | None:
        """Learn a fork's pid; returns its end if it has been reaped already."""
        for helper in self._helpers:
            if helper.token == forked.token:
                helper.pid, helper.since_s = forked.pid, time.monotonic()
                if forked.pid == NO_PROCESS:
                    self._close(helper)
                elif helper is self.drill:  # it runs what users have written
                    self.guardian.watch(forked.pid)
        for handle in self.ranks:
            if handle.token == forked.token:
                handle.pid = forked.pid
                self.guardian.watch(forked.pid)
        ended = self._unclaimed.pop(forked.pid, None)
        if self.fork_owed_since_s is None:
            self._unclaimed.clear()  # orphans; their numbers may be given out again
        return ended

    def rank_of(self, pid: int) -> RankHandle | None:
        """The rank whose process has this pid."""
        return next((handle for handle in self.ranks if handle.pid == pid), None)

    def last_messages(self, pid: int) -> Iterator[tuple[Message, RankHandle | None]]:
        """What a process that has ended had sent and nobody has read yet; with its rank, if any."""
        handle = self.rank_of(pid)
        channel = handle.channel if handle is not None else None
        if self.drill is not None and self.drill.pid == pid:
            channel = self.drill.channel
        if self._zygote is not None and self._zygote.pid == pid:
            channel = self._zygote.channel
        while channel is not None:
            channel.set_blocking(blocking=False)
            try:
                message, _ = channel.receive()
            except (ChannelClosedError, BlockingIOError):
                return
            yield message, handle

    def forget_start(self, handle: RankHandle) -> None:
        """No process comes of what was asked for this rank."""
        handle.machine.advance(RankEvent.EXITED)
        self.bury(handle)

    def forget_owed(self) -> None:
        """What was asked of a zygote that died, without an answer, will never come; ranks aside."""
        for helper in self._helpers:
            if helper.pid is None:
                self._close(helper)

    def departed(self, ended: Ended) -> Departure | None:
        """Whose process ended; None for an orphan that we merely adopted."""
        if self._zygote is not None and ended.pid == self._zygote.pid:
            zygote, self._zygote = self._zygote, None
            output = read_output(zygote.output)
            zygote.mark_reaped(ended.exit_code if ended.exit_code is not None else -1)
            self.forget_channel(zygote.channel)
            zygote.close()
            return ZygoteEnded(ended=ended, output=output)
        for helper in self._helpers:
            if helper.pid == ended.pid:
                output = helper.last_words()
                kind = HELPER_ENDED[type(helper)]
                if helper is self.drill:
                    self.guardian.rank_ended(ended.pid, known=self._pids)
                self._close(helper)
                return kind(ended=ended, output=output)
        for handle in self.ranks:
            if handle.pid == ended.pid:
                handle.machine.advance(RankEvent.EXITED)
                self.guardian.rank_ended(ended.pid, known=self._pids)
                return RankEnded(ended=ended, handle=handle)
        if self.fork_owed_since_s is not None:
            self._unclaimed[ended.pid] = ended
        return None

    def bury(self, handle: RankHandle) -> None:
        """Close the lines of a rank whose process was reaped."""
        if handle.channel is not None:
            self.forget_channel(handle.channel)
        handle.pid, handle.loader_pids, handle.rss_bytes = None, (), 0
        handle.close_lines()

    def form(self, generation: int, *, run_id: str) -> None:
        """Have every rank join ``generation``."""
        present = self.present
        # INVARIANT secret-by-channel: what a generation signs with travels by the control channel only.
        # Broken if: it comes from the store, or one that was used before is used again.
        # Guarded by: test_each_generation_is_handed_a_secret_of_its_own.
        secret = secrets.token_hex(SECRET_BYTES)
        for number, handle in enumerate(present):
            handle.machine.advance(RankEvent.FORM_SENT)
            handle.has_log = True
            message = Form(
                generation=generation,
                rank=number,
                world_size=len(present),
                local_rank=number,
                local_world_size=len(present),
                run_id=run_id,
                secret=secret,
            )
            self.send(handle, message)

    def abort(self, generation: int) -> None:
        """Have every rank leave ``generation`` at once."""
        if generation > self.aborted[0]:
            self.aborted = (generation, time.monotonic())
        for handle in self.ranks:
            if handle.state in (RankState.FORMING, RankState.TRAINING):
                handle.machine.advance(RankEvent.ABORT_SENT)
                self.send(handle, Abort(generation=generation))

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
        if handle.channel is not None:
            # One that is stopped may have a full buffer; it will be found hung.
            with contextlib.suppress(ChannelClosedError, BlockingIOError):
                handle.channel.send(message)

    def kill_rank(self, handle: RankHandle) -> None:
        """SIGKILL a rank; its departure follows. One whose pid is not known yet is cut off."""
        handle.machine.advance(RankEvent.KILL_SENT)
        if handle.pid is not None:
            kill(handle.pid)
            if handle.killed_at_s is None:
                handle.killed_at_s = time.monotonic()
        elif handle.channel is not None:
            self.forget_channel(handle.channel)
            handle.channel.close()  # it ends itself when it finds nobody listening
            handle.channel = None

    def kill_zygote(self) -> None:
        """SIGKILL the zygote; its departure follows."""
        if self._zygote is not None:
            kill(self._zygote.pid)

    def ask_zygote_for_stacks(self) -> None:
        """Have the zygote say where it is; that is in its output once it has ended."""
        if self._zygote is not None:
            kill(self._zygote.pid, STACKS_SIGNAL)

    def kill_store(self) -> None:
        """SIGKILL the store host; its departure follows, and another one takes its socket over."""
        if self.store is not None and self.store.pid is not None:
            kill(self.store.pid)

    def kill_standby(self) -> None:
        """SIGKILL the zygote that stands by; its departure follows."""
        if self.standby is not None and self.standby.pid is not None:
            kill(self.standby.pid)

    def kill_spare(self) -> None:
        """SIGKILL the spare; its departure follows."""
        if self.spare is not None and self.spare.pid is not None:
            kill(self.spare.pid)

    def kill_drill(self) -> None:
        """SIGKILL the drill; its departure follows."""
        if self.drill is not None and self.drill.pid is not None:
            kill(self.drill.pid)

    def ask_stacks(self) -> None:
        """Have every rank that can still answer write its stacks to its log, before it is aborted."""
        for handle in self.ranks:
            if handle.state in (RankState.FORMING, RankState.TRAINING):
                handle.mark_asked()
                self.send(handle, Stacks())

    def close(self) -> None:
        """Let go of everything; the processes have been ended."""
        for handle in self.ranks:
            self.bury(handle)
        if self._zygote is not None:
            self._zygote.mark_reaped(-9)
            self.forget_channel(self._zygote.channel)
            self._zygote.close()
            self._zygote = None
        for helper in self._helpers:
            self._close(helper)
        self.guardian.close()
        self._listening.close()
        for handle in self.ranks:
            handle.slot.release()
        self._memory.close()

    @property
    def _pids(self) -> set[int]:
        """The run's own processes, as far as they are known."""
        pids = {handle.pid for handle in self.ranks} | {helper.pid for helper in self._helpers}
        return {pid for pid in {*pids, self.zygote_pid} if pid is not None}

    @property
    def _helpers(self) -> list[Helper]:
        helpers = (self.store, self.spare, self.standby, self.drill)
        return [helper for helper in helpers if helper is not None]

    def _close(self, helper: Helper) -> None:
        self.forget_channel(helper.channel)
        helper.close()
        if helper is self.store:
            self.store = None
        elif helper is self.spare:
            self.spare = None
        elif helper is self.drill:
            self.drill = None
        else:
            self.standby = None

    def _fork_helper(self, request: Fork, descriptors: list[int]) -> None:
        self._fork(request, descriptors)
        os.close(descriptors[0])

    def _take_token(self) -> int:
        self._next_token += 1
        return self._next_token

    def _fork(self, request: Fork, descriptors: list[int]) -> None:
        assert self._zygote is not None
        # A zygote that has just died is reaped in the next round, and what it owes asked for again.
        with contextlib.suppress(ChannelClosedError):
            self._zygote.fork(request, descriptors)

    def _watch(self, channel: Channel, who: object) -> None:
        self._selector.register(channel, selectors.EVENT_READ, (channel, who))

    def forget_channel(self, channel: Channel) -> None:
        """Stop reading a channel whose other end is closed; its process is reaped by itself."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel)
