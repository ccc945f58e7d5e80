"""Connects a supervised rank with the supervisor: the control channel, stop and abort, this rank's log file."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ddp_runner.kernel.group.abort import AbortSwitch
from ddp_runner.kernel.group.group import Membership, collectives_begun
from ddp_runner.kernel.group.tcp_store import StoreLink
from ddp_runner.kernel.rank.fenced_disk import FencedDisk, may_not_publish
from ddp_runner.kernel.rank.signals import take_signals
from ddp_runner.kernel.replica.loss import Loss
from ddp_runner.kernel.rules.classify import VICTIM_KINDS
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import (
    PARKED_BY_RANK,
    REPAIRED_BY_RANK,
    SAVED_BEFORE_END,
    Fault,
    FaultKind,
)
from ddp_runner.kernel.step.runtime import Generation, Log, RankInfo, without_secrets_in
from ddp_runner.kernel.system.clock import SYSTEM_CLOCK
from ddp_runner.kernel.system.control_channel import Channel, ChannelClosedError
from ddp_runner.kernel.system.disk import Disk
from ddp_runner.kernel.system.folder_owner import FolderOwner
from ddp_runner.kernel.system.run_files import (
    not_written,
    open_to_append,
    open_to_append_anywhere,
)
from ddp_runner.kernel.wire.board import Cell, Slot
from ddp_runner.kernel.wire.events import Cut, Faulted, LogOutage, StopSignalAtRank
from ddp_runner.kernel.wire.messages import (
    Abort,
    AbortHeard,
    Checkpoint,
    CollectivesBegun,
    CopyWritten,
    Form,
    LoaderWorkers,
    Message,
    Ready,
    ReopenLog,
    SaveAlone,
    Stacks,
    Stop,
    WriteCopy,
    brief,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer


class StartupOutput:
    """Collects a rank's output in memory until the run may touch the disk, then moves it to the log file."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path
        self._log: os.stat_result | None = None  # the file that is written to
        self._is_refused = False  # there was no file when there should have been one
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)

    def attach(self) -> str:
        """Write to the log file from now on, after copying the earlier output there.

        If the file cannot be opened, the output stays in memory; the first time, a line that says so is returned.
        """
        if self._log is not None:
            return ""
        flush_output()
        try:
            log = open_to_append(self._path)
        except OSError as error:
            is_news, self._is_refused = not self._is_refused, True
            return not_written(self._path, error) if is_news else ""
        # The memory file was written through a shared offset; a second opening reads from its start.
        said = Path(f"/proc/self/fd/{self._descriptor}").read_bytes()
        if said:
            with contextlib.suppress(OSError):  # a full disk: the file goes on as soon as it can
                os.write(log, said)
        os.dup2(log, 1)
        os.dup2(log, 2)
        self._log = os.fstat(log)
        os.close(log)
        return ""

    def reopen(self) -> None:
        """Write to a new file, the old one was removed or moved away; what else 1 or 2 are stays."""
        before = self._log
        if before is None:
            if self._is_refused:
                self.attach()
            return
        try:
            log = open_to_append_anywhere(self._path)
        except OSError:
            return  # as above
        self._log = os.fstat(log)
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):  # user code has closed it
                if os.path.samestat(os.fstat(descriptor), before):
                    os.dup2(log, descriptor)
        os.close(log)


class _LossyOutput(io.RawIOBase):
    """A descriptor that takes what the disk has room for and drops the rest."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Buffer, /) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return memoryview(data).nbytes


def flush_output() -> None:
    """Write out what Python still holds of this process's output."""
    for stream in (sys.stdout, sys.stderr):
        # User code may have closed it, or taken it away.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def lossy_text(descriptor: int) -> TextIO:
    """A line-buffered text stream for what a process prints: a full disk never ends a run there."""
    writer = io.BufferedWriter(_LossyOutput(descriptor))
    return io.TextIOWrapper(
        writer, encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


ASK_AGAIN_S = 1.0  # for what came of an order
FINISH_S = 1.0  # for the step that a peer has committed; a third of the time to answer an abort
FINISH_LOOK_S = 0.001


def _as_it_is(runtime: SupervisedRuntime) -> None:
    """Change nothing."""
    del runtime


class SupervisedRuntime:
    """Implements :class:`~ddp_runner.kernel.step.runtime.Runtime` over the control channel.

    One listener thread receives. It acts at once on ``Abort``, ``Cut`` and ``Stacks``; everything else waits until the
    training thread asks, between steps.
    """

    is_watched = True

    def __init__(
        self,
        channel: Channel,
        *,
        rank_info: RankInfo,
        slot: Slot,
        logger: Log,
        output: StartupOutput,
        link: StoreLink,
        owner: FolderOwner | None = None,
        surround: Callable[[SupervisedRuntime], None] = _as_it_is,
    ) -> None:
        """``owner``: of the checkpoint folder, where several coordinators might take it.

        ``surround``: called before the first message is heard; it may replace ``slot``, ``disk`` and ``change_loss``,
        and answer further messages.
        """
        self.rank_info = rank_info
        self.run_id = ""
        self.loader_pids: tuple[int, ...] = ()
        self.answer: dict[type, Callable[[Any], None]] = {}  # further messages, by their type
        self.change_loss: Callable[[Loss], Loss] = lambda loss: loss
        self._owner = owner
        self._fence = slot  # the given one: what replaces it does not change what may be published
        self.disk: Disk = FencedDisk(self.may_not_publish)
        self.slot = slot
        self.logger = logger
        self._channel = channel
        self._link = link
        self._output = output
        # None: there will be no generation.
        self._forms: queue.SimpleQueue[tuple[Generation, str] | None] = queue.SimpleQueue()
        self._newest: Generation | None = None
        self._ends_in_silence = False
        self._stop: StopReason | None = None
        self._save = threading.Event()
        self._owed: WriteCopy | None = None
        self._written: CopyWritten | None = None  # the newest answer
        self._has_written = threading.Condition()
        surround(self)
        threading.Thread(target=self._listen, name="control", daemon=True).start()
        take_signals((signal.SIGTERM, signal.SIGUSR1), self._on_signal)

    def next_generation(self, ready: Ready) -> Generation | None:
        """Report, then wait for a Form; the first one also opens this rank's log file."""
        self._ends_in_silence = ready.ends_in_silence
        self.report(ready)
        formed = self._forms.get()
        if formed is None:
            return None
        generation, self.run_id = formed
        if line := self._output.attach():
            self.report(LogOutage(rank=self.rank_info.rank, text=line))
        return generation

    def report(self, message: Message) -> None:
        """Send to the supervisor; without one there is nothing left to do."""
        message = without_secrets_in(message, self.logger.hidden)
        if self.logger.is_debug:
            self.logger.debug(f"to the supervisor: {brief(message)}")
        if isinstance(message, LoaderWorkers):
            self.loader_pids = message.pids
        if isinstance(message, Faulted):
            # This process may be ended as soon as its fault is known.
            flush_output()
        try:
            self._channel.send(message)
        except ChannelClosedError:
            os._exit(1)

    def stop_asked(self) -> StopReason | None:
        """Return the stop that the supervisor, or a signal to this process, asked for."""
        return self._stop

    def save_asked(self) -> bool:
        """Return whether a checkpoint was asked for since the last call."""
        if not self._save.is_set():
            return False
        self._save.clear()
        return True

    def order(self, order: WriteCopy) -> CopyWritten:
        """Have a file made of a copy. Asked for again and again: order or answer may have been lost."""
        while True:
            self.report(order)
            with self._has_written:
                if self._has_written.wait_for(lambda: self._is_of(order), ASK_AGAIN_S):
                    assert self._written is not None
                    return self._written

    def _is_of(self, order: WriteCopy) -> bool:
        return self._written is not None and self._written.sealed == order.sealed

    def take_owed(self) -> WriteCopy | None:
        """Take the copy that an earlier rank has ordered; None if there is none."""
        owed, self._owed = self._owed, None
        return owed

    def survives(self, fault: Fault) -> bool:
        """A victim goes on, who has repaired its own fault, and who waits to be judged, or to save.

        Never one that was inside its optimizer.
        """
        innocent = VICTIM_KINDS | {FaultKind.STORE_TAMPERED}
        stays = fault.kind in innocent | PARKED_BY_RANK | SAVED_BEFORE_END or (
            fault.kind in REPAIRED_BY_RANK and fault.may_retry
        )
        return stays and not self.slot.get(Cell.DIRTY)

    def training_loss(self, loss: Loss) -> Loss:
        """Return the loss that training computes: ``loss``, unless ``surround`` has changed that."""
        return self.change_loss(loss)

    def may_not_publish(self) -> bool:
        """Return whether this rank is dead, cut off, or its folder is another coordinator's. Any thread may ask."""
        is_anothers = self._owner is not None and self._owner.is_other()
        return may_not_publish(self._fence, SYSTEM_CLOCK.boottime_ns()) or is_anothers

    def _on_signal(self, number: signal.Signals) -> None:
        """SIGTERM or SIGUSR1 to this rank alone asks the whole run to stop."""
        del number
        self.report(StopSignalAtRank(rank=self.rank_info.rank, reason=StopReason.PREEMPTED))

    def _listen(self) -> None:
        """Thread: act on what the supervisor says. Its end is this rank's end."""
        try:
            while True:
                message, _ = self._channel.receive()
                self.logger.debug(f"from the supervisor: {brief(message)}")
                self._act(message)
        except ChannelClosedError:
            pass
        except BaseException:  # noqa: BLE001 - top of a thread: a deaf rank must not live on
            traceback.print_exc()  # raises where user code has closed stderr
        finally:
            os._exit(1)

    def _act(self, message: Message) -> None:  # noqa: C901, PLR0912 - one row a message
        match message:
            case Form():
                if message.store_host:
                    self._meet_elsewhere(message)
                generation = Generation(
                    membership=_membership(message), link=self._link, switch=AbortSwitch()
                )
                self._newest = generation
                self._forms.put((generation, message.run_id))
            case Abort(generation=number, newest_step=step):
                for generation in self._of(number):
                    self._finish_committed(generation.switch, step)
                    generation.switch.trip()
                if self._ends_in_silence:
                    self.report(AbortHeard(rank=self.rank_info.rank, generation=number))
            case Cut(generation=number):
                for generation in self._of(number):
                    generation.switch.cut()
            case Stacks():
                write_stacks()
                count = collectives_begun() - self.slot.get(Cell.COLLECTIVES)
                step = self.slot.get(Cell.COMMITTED_STEP)
                self.report(CollectivesBegun(rank=self.rank_info.rank, step=step, count=count))
            case Stop(reason=reason):
                self._stop = reason
            case Checkpoint():
                self._save.set()
            case ReopenLog():
                self._output.reopen()
            case SaveAlone():
                self.run_id = message.run_id or self.run_id
                if self._owner is not None and message.term:
                    self._owner.term = message.term
                self._forms.put(None)
            case WriteCopy():
                self._owed = message
            case CopyWritten():
                with self._has_written:
                    self._written = message
                    self._has_written.notify_all()
            case _ if type(message) in self.answer:
                self.answer[type(message)](message)
            case _:
                raise TypeError(f"a rank does not take {type(message).__name__}")

    # INVARIANT committed-is-finished: a rank does not break off a step that another rank has committed. All its sums
    # are whole then, and what this rank lacks of them is on its way, also from a rank that has died since.
    # Broken if: an abort ends its collectives at once.
    # Guarded by: test_an_abort_waits_for_the_step_that_a_peer_has_committed.
    def _finish_committed(self, switch: AbortSwitch, newest_step: int) -> None:
        """Return once this rank has committed ``newest_step`` too, if that is the step in its hands."""
        until_s = time.monotonic() + FINISH_S
        while (
            self._fence.get(Cell.COMMITTED_STEP) == newest_step - 1
            and not switch.is_left
            and time.monotonic() < until_s
        ):
            time.sleep(FINISH_LOOK_S)

    def _meet_elsewhere(self, form: Form) -> None:
        """Meet the others by a connection of its own age: the one from before may be dead, or lead elsewhere."""
        self._link = StoreLink(form.store_host, form.store_port, timeout_s=self._link.timeout_s)
        self._link.connect_ahead()
        os.environ["MASTER_ADDR"] = form.store_host
        os.environ["MASTER_PORT"] = str(form.store_port)
        if self._owner is not None:
            self._owner.term = form.term

    def _of(self, number: int) -> list[Generation]:
        """The newest generation, unless what is said of generation ``number`` came too late for it."""
        newest = self._newest
        return [newest] if newest is not None and newest.membership.generation <= number else []


def write_stacks() -> None:
    """Write the stack of every other thread where stderr leads, as faulthandler does.

    By a thread that holds the GIL, so that no frame changes meanwhile; faulthandler's own signal
    handler cannot wait for that. Past ``sys.stderr``, which user code may have closed or replaced.
    """
    here, names = threading.get_ident(), {t.ident: t.name for t in threading.enumerate()}
    lines = []
    for ident, top in sys._current_frames().items():  # noqa: SLF001 - documented, for debuggers
        if ident == here:
            continue
        lines.append(f"Thread 0x{ident:016x} [{names.get(ident, '?')}] (most recent call first):")
        lines += [
            f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}'
            for frame, line in traceback.walk_stack(top)
        ]
    with contextlib.suppress(OSError):  # a full disk: no stack is worth a rank
        os.write(2, "\n".join([*lines, ""]).encode(errors="backslashreplace"))


def _membership(form: Form) -> Membership:
    return Membership(
        generation=form.generation,
        rank=form.rank,
        world_size=form.world_size,
        local_rank=form.local_rank,
        local_world_size=form.local_world_size,
        secret=form.secret,
        owes_drill=form.owes_drill,
    )
