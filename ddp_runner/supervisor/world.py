"""The processes of a run as one thing to act on: zygote, store host, ranks. Performs, never decides."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ddp_runner import config
from ddp_runner.channel import Channel, ChannelClosedError
from ddp_runner.core.launch import LaunchPlan
from ddp_runner.core.lifecycle import RankEvent, RankState
from ddp_runner.core.messages import Abort, Fork, Forked, Form, Message, Stacks, Stop
from ddp_runner.supervisor.children import Ended, Zygote, kill, make_output_file, read_output
from ddp_runner.supervisor.claim import BoardMemory, bind_store_port
from ddp_runner.supervisor.environment import zygote_environment
from ddp_runner.supervisor.ranks import RankHandle

STORE_RANK = -1
STACKS_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteEnded:
    """The zygote is gone; ``output`` is what it said last."""

    ended: Ended
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEnded:
    """The store host is gone; ``output`` is what it said last."""

    ended: Ended
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnded:
    """A rank's process is gone."""

    ended: Ended
    handle: RankHandle


Departure = ZygoteEnded | StoreEnded | RankEnded


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
            RankHandle(rank, device=device, slot=self._memory.board.slot(rank))
            for rank, device in enumerate(plan.devices)
        ]
        self.store_ready = False
        self._zygote: Zygote | None = None
        self.zygote_since_s = 0.0
        self._store: Channel | None = None
        self._store_pid: int | None = None
        self._store_token = 0
        self.store_since_s = 0.0
        self._store_output = -1
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
    def zygote_pid(self) -> int | None:
        """The process that forks the others; None while there is none."""
        return None if self._zygote is None else self._zygote.pid

    @property
    def has_store(self) -> bool:
        """Whether a store host was forked and has not ended."""
        return self._store is not None

    @property
    def store_pid(self) -> int | None:
        """The store host's process; None while there is none, or none that is known."""
        return self._store_pid

    @property
    def fork_owed_since_s(self) -> float | None:
        """When the zygote was asked for the oldest fork that it still owes; None: it owes none."""
        asked_s = [h.spawned_at_s for h in self.ranks if h.is_alive and h.pid is None]
        if self._store is not None and self._store_pid is None:
            asked_s.append(self.store_since_s)
        return min(asked_s, default=None)

    @property
    def present(self) -> list[RankHandle]:
        """The ranks that are not given up, in order; the first one of them is rank 0."""
        return [handle for handle in self.ranks if handle.given_up_at_s is None]

    def start_zygote(self) -> None:
        """Start a zygote; ``ZygoteReady`` follows."""
        settings = self._plan.settings
        self._zygote = Zygote(
            task=settings.run.task, environment=zygote_environment(self._plan, os.environ)
        )
        self.zygote_since_s = time.monotonic()
        self._watch(self._zygote.channel, "zygote")

    def zygote_is_ready(self) -> None:
        """Note that forks are cheap from now on."""
        if self._zygote is not None:
            self._zygote.ready = True

    def spawn_store(self) -> None:
        """Fork a store host on the listening socket; ``StoreReady`` follows."""
        self.store_ready, self.store_since_s = False, time.monotonic()
        self._store, theirs = Channel.pair()
        self._store_output = make_output_file("store")
        self._watch(self._store, "store")
        self._store_token = self._take_token()
        descriptors = [theirs.detach(), self._listening.fileno(), self._store_output]
        self._fork(
            Fork(token=self._store_token, rank=STORE_RANK, local_rank=STORE_RANK), descriptors
        )
        os.close(descriptors[0])

    def spawn_rank(
        self,
        handle: RankHandle,
        *,
        loads: bool,
        resume: str,
        injections_left: dict[str, int],
        spares_memory: bool = False,
    ) -> None:
        """Fork a process for a rank that has none. ``resume``: what it loads, if it loads.

        ``spares_memory``: its predecessor had too little, so that this one halves the micro-batch.
        """
        plan = self._plan
        token = self._take_token()
        handle.loads = loads
        theirs, output = handle.open_lines(token=token, now_s=time.monotonic())
        assert handle.channel is not None
        handle.channel.set_blocking(blocking=False)
        self._watch(handle.channel, handle)
        spec: dict[str, object] = {
            "settings": self._settings_record,
            "device": handle.device.device,
            "world_size": plan.world_size,
            "local_world_size": plan.world_size,
            "threads": plan.threads_per_rank,
            "store_host": "127.0.0.1",
            "store_port": self.store_port,
            "loads": loads,
            "resume": resume,
            "spares_memory": spares_memory,
            "injections_left": injections_left,
            "detect_anomaly": plan.settings.run.detect_anomaly,
        }
        request = Fork(token=token, rank=handle.rank, local_rank=handle.rank, spec=spec)
        self._fork(request, [theirs, self._memory.descriptor, output])
        os.close(theirs)

    def claim(self, forked: Forked) -> Ended | None:
        """Learn a fork's pid; returns its end if it has been reaped already."""
        if forked.token == self._store_token and self._store is not None:
            self._store_pid = forked.pid
        for handle in self.ranks:
            if handle.token == forked.token:
                handle.pid = forked.pid
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
        if self._zygote is not None and self._zygote.pid == pid:
            channel = self._zygote.channel
        while channel is not None:
            channel.set_blocking(blocking=False)
            try:
                message, _ = channel.receive()
            except (ChannelClosedError, BlockingIOError):
                return
            yield message, handle

    def forget_owed_store(self) -> None:
        """A store host that was asked of a zygote that died, without an answer, will never come."""
        if self._store_pid is None:
            self._close_store()

    def departed(self, ended: Ended) -> Departure | None:
        """Whose process ended; None for an orphan that we merely adopted."""
        if self._zygote is not None and ended.pid == self._zygote.pid:
            zygote, self._zygote = self._zygote, None
            output = read_output(zygote.output)
            zygote.mark_reaped(ended.exit_code if ended.exit_code is not None else -1)
            self._forget(zygote.channel)
            zygote.close()
            return ZygoteEnded(ended=ended, output=output)
        if ended.pid == self._store_pid:
            output = read_output(self._store_output)
            self._close_store()
            return StoreEnded(ended=ended, output=output)
        for handle in self.ranks:
            if handle.pid == ended.pid:
                handle.machine.advance(RankEvent.EXITED)
                return RankEnded(ended=ended, handle=handle)
        if self.fork_owed_since_s is not None:
            self._unclaimed[ended.pid] = ended
        return None

    def bury(self, handle: RankHandle) -> None:
        """Close the lines of a rank whose process was reaped."""
        if handle.channel is not None:
            self._forget(handle.channel)
        handle.pid, handle.loader_pids, handle.rss_bytes = None, (), 0
        handle.close_lines()

    def form(self, generation: int, *, run_id: str) -> None:
        """Have every rank join ``generation``."""
        present = self.present
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
            )
            self.send(handle, message)

    def abort(self, generation: int) -> None:
        """Have every rank leave ``generation`` at once."""
        for handle in self.ranks:
            if handle.state in (RankState.FORMING, RankState.TRAINING):
                handle.machine.advance(RankEvent.ABORT_SENT)
                self.send(handle, Abort(generation=generation))

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
        if handle.pid is not None:
            kill(handle.pid)
        elif handle.channel is not None:
            self._forget(handle.channel)
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
        if self._store_pid is not None:
            kill(self._store_pid)

    def ask_stacks(self) -> None:
        """Have every rank that can still answer write its stacks to its log, before it is aborted."""
        for handle in self.ranks:
            if handle.state in (RankState.FORMING, RankState.TRAINING):
                self.send(handle, Stacks())

    def force_stacks(self, condemned: tuple[int, ...]) -> None:
        """Have ranks that answer nothing write theirs by signal, once they are awake."""
        # INVARIANT only-the-condemned: a healthy rank never gets this signal. The handler walks the
        # frames of threads that go on running, which now and then ends the process (SIGSEGV; seen in
        # one of about 30 runs of four hangs each; CPython issue 116008).
        # Broken if: survivors are made to dump this way.
        # Guarded by: test_survivors_write_their_stacks_and_live.
        for rank in condemned:
            handle = self.ranks[rank]
            if handle.pid is not None:
                kill(handle.pid, STACKS_SIGNAL)

    def wake(self) -> None:
        """Let stopped ranks go on: the condemned to write their stacks, a spared one to leave.

        The generation has been aborted by now, so a rank that wakes up finds itself fenced out.
        """
        for handle in self.ranks:
            if handle.pid is not None:
                kill(handle.pid, signal.SIGCONT)

    def forget_channel(self, channel: Channel) -> None:
        """Stop reading a channel whose other end is closed; its process is reaped by itself."""
        self._forget(channel)

    def close(self) -> None:
        """Let go of everything; the processes have been ended."""
        for handle in self.ranks:
            self.bury(handle)
        if self._zygote is not None:
            self._zygote.mark_reaped(-9)
            self._forget(self._zygote.channel)
            self._zygote.close()
            self._zygote = None
        self._close_store()
        self._listening.close()
        for handle in self.ranks:
            handle.slot.release()
        self._memory.close()

    def _close_store(self) -> None:
        if self._store is not None:
            self._forget(self._store)
            self._store.close()
            os.close(self._store_output)
        self._store, self._store_pid, self._store_output = None, None, -1
        self.store_ready = False

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

    def _forget(self, channel: Channel) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel)
