"""Running loader workers: receive their batches, notice a death at once, end them. Never restarts.

The workers are those of a torch ``DataLoader``; this module takes over the three places where that
one waits for ever, for 5 seconds, or raises from inside a signal handler.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pickle
import queue
import select
import signal
import struct
import threading
import time
import warnings
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import active_children
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _remove_worker_pids
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ddp_runner.data.workers import system_limits
from ddp_runner.data.workers.stamps import LoadStamps
from ddp_runner.data.workers.system_limits import SHARED_MEMORY
from ddp_runner.data.workers.timeouts import (
    BatchLateError,
    Endless,
    FilesUsedUpError,
    PoolError,
    Wait,
    WorkerDiedError,
)
from ddp_runner.data.workers.transport import (
    Inboxes,
    OutOfFilesError,
    PackedSource,
    TransportError,
    connect,
)
from ddp_runner.kernel.system import parent_death
from ddp_runner.start import STACKS_SIGNAL, write_stacks_when_asked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.process import BaseProcess

    from ddp_runner.data.workers.fetch import Key, Reader
    from ddp_runner.data.workers.timeouts import Patience


# ruff: noqa: SLF001 - torch's iterator and multiprocessing's queues have no public seam for this


_REAP_S = 5.0
_STACK_S = 0.5
_STACK_LOOK_S = 0.02
_LONG_MESSAGE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """The settings of the workers. ``prefetch_factor`` is in micro-batches per worker.

    ``by_value``: batches are copied through a pipe, which needs no open file for each tensor.
    """

    rank: int
    workers: int
    prefetch_factor: int
    pin_memory: bool
    by_value: bool = False


class _Receiver:
    """Reads whole messages from the workers' common pipe; gives up when a worker dies."""

    def __init__(self, results: Any, workers: list[BaseProcess], inboxes: Inboxes) -> None:
        self._results = results
        self._pipe_fd: int = results._reader.fileno()
        self._workers = workers
        self._inboxes = inboxes
        self._poll = select.poll()
        self._poll.register(self._pipe_fd, select.POLLIN)
        for worker in workers:
            self._poll.register(worker.sentinel, select.POLLIN)

    def receive(self, patience: Patience) -> tuple[int, Any]:
        """``(batch number, batch)``. Raises WorkerDiedError, or BatchLateError without patience."""
        # The wire form of multiprocessing.connection.Connection; read here because its own
        # recv() blocks for ever on a worker that dies or stops in the middle of a message.
        (size,) = struct.unpack("!i", self._read(4, patience))
        if size == _LONG_MESSAGE:
            (size,) = struct.unpack("!Q", self._read(8, patience))
        message = self._read(size, patience)
        self._results._sem.release()  # as Queue.get does
        number, packed = pickle.loads(message)  # noqa: S301 - from our own child
        if isinstance(packed, ExceptionWrapper):
            text = packed.exc_msg.strip().splitlines()[-1]
            raise PoolError(f"a batch could not be sent: {text}", worker=-1)
        try:
            return number, self._inboxes.unpack(packed)
        except OutOfFilesError as error:
            raise FilesUsedUpError(
                f"{system_limits.open_file_limit()}: {error}", worker=-1
            ) from error
        except (TransportError, OSError) as error:
            text = f"a batch could not be received: {type(error).__name__}: {error}"
            raise PoolError(text, worker=packed.worker) from error

    def _read(self, size: int, patience: Patience) -> bytearray:
        buffer = bytearray(size)
        with memoryview(buffer) as view:
            done = 0
            while done < size:
                self._wait_readable(patience)
                done += os.readv(self._pipe_fd, [view[done:]])
        return buffer

    def _wait_readable(self, patience: Patience) -> None:
        while True:
            ready = [fd for fd, _ in self._poll.poll(patience.slice_s() * 1000)]
            if ready == [self._pipe_fd]:
                return
            # Also when nothing is ready: a grandchild may hold a dead worker's sentinel open.
            self._raise_if_one_died()
            if not ready:
                patience.look()

    def _raise_if_one_died(self) -> None:
        ended = wait([worker.sentinel for worker in self._workers], timeout=0)
        for number, worker in enumerate(self._workers):
            if worker.sentinel in ended:
                _await_status(worker)
            if worker.sentinel in ended or worker.exitcode is not None:
                raise WorkerDiedError("a loader worker died", worker=number)


class _PinAhead:
    """Receives in a thread and copies to pinned memory, as torch's own pinning thread does.

    Torch's own blocks for ever, and with it the rank, when a worker dies inside a message. This
    one ends with the workers, because the receiver does.
    """

    def __init__(self, receiver: _Receiver, device: int) -> None:
        self._receiver = receiver
        self._device = device
        self._ready: queue.Queue[tuple[int, Any] | Exception] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="loader-pin", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(1)  # of this thread only
        if self._device >= 0:
            torch.cuda.set_device(self._device)
        try:
            while True:
                number, batch = self._receiver.receive(Endless())
                pinned = pin_memory(batch)  # type: ignore[no-untyped-call,unused-ignore]
                self._ready.put((number, pinned))
        except Exception as error:  # noqa: BLE001 - top of a thread; raised again in receive()
            self._ready.put(error)

    def receive(self, patience: Patience) -> tuple[int, Any]:
        while True:
            try:
                item = self._ready.get(timeout=patience.slice_s())
                break
            except queue.Empty:
                patience.look()
        if isinstance(item, Exception):
            raise item
        return item

    @property
    def arrived(self) -> int:
        return self._ready.qsize()

    def join(self) -> None:
        """Wait for the thread; the workers have ended, so that it has nothing to wait for."""
        self._thread.join()


class WorkerPool:
    """The loader workers of one uninterrupted stretch of batches.

    Started from the rank's main thread: the kernel ties the workers to the *thread* that forked
    them. Raises :class:`PoolError` if they cannot be started.
    """

    def __init__(self, reader: Reader[Any], keys: Iterator[Key], *, settings: PoolSettings) -> None:
        self._pending: deque[Key] = deque()
        self._wait: Patience = Endless()
        self._stacks = os.memfd_create("loader_stacks")
        outboxes, self._inboxes = connect(settings.workers)
        self._stamps = LoadStamps(settings.workers)
        packed = PackedSource(
            reader,
            outboxes=outboxes,
            stamps=self._stamps,
            by_value=settings.by_value,
            watches_files=settings.workers > 1,
        )
        try:
            self._iterator = self._start(packed, keys, settings)
        except BaseException:
            self._inboxes.close()
            os.close(self._stacks)
            raise
        finally:
            for outbox in outboxes:
                outbox.close()
        self._workers: list[BaseProcess] = list(self._iterator._workers)
        # The process ids of the workers, by worker number.
        self.pids = tuple(worker.pid for worker in self._workers if worker.pid is not None)
        results = self._iterator._worker_result_queue
        receiver = _Receiver(results, self._workers, self._inboxes)
        self._pins = _PinAhead(receiver, _current_device()) if settings.pin_memory else None
        self._receive = receiver.receive if self._pins is None else self._pins.receive
        # INVARIANT one-way-in: batches reach torch's iterator through _receive_in_time only.
        # Broken if: torch's iterator reads its queue elsewhere than in _get_data.
        # Guarded by: test_stopped_worker_is_a_timeout_that_names_it.
        self._iterator._get_data = self._receive_in_time

    def _start(self, source: PackedSource, keys: Iterator[Key], settings: PoolSettings) -> Any:
        others = set(active_children())
        try:
            with warnings.catch_warnings(), run_signals_held(), garbage_kept() as collects:
                # A rank has threads; the workers touch nothing of theirs.
                warnings.filterwarnings("ignore", "This process.*fork", DeprecationWarning)
                # More workers than cores were asked for; the start lines say so.
                warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
                loader: DataLoader[Any] = DataLoader(
                    source,  # type: ignore[arg-type]  # needs no more than __getitem__
                    batch_size=None,
                    sampler=_Recorded(keys, self._pending),
                    collate_fn=_as_it_is,
                    num_workers=settings.workers,
                    prefetch_factor=settings.prefetch_factor,
                    worker_init_fn=WorkerStart(
                        rank=settings.rank,
                        rank_pid=os.getpid(),
                        stacks=self._stacks,
                        collects=collects,
                        then=source.enter_worker,
                    ),
                    multiprocessing_context=_Mailboxes(),
                    generator=torch.Generator(),  # or the rank's own generator would move
                )
                return _Iterator(loader)
        except (OSError, RuntimeError) as error:
            _end([child for child in active_children() if child not in others], grace_s=0.0)
            message = f"workers could not be started: {type(error).__name__}: {error}"
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                message += (
                    f" ({system_limits.shared_memory_room()}; their locks need a few KB of it)"
                )
            raise PoolError(message, worker=-1) from error

    @property
    def counted(self) -> tuple[str, ...]:
        """The attributes that loads count up in a worker's copy of the dataset, as far as they are known."""
        return self._inboxes.counted

    @property
    def arrived(self) -> int:
        """The number of batches that are here in pinned memory; 0 if none are pinned."""
        return 0 if self._pins is None else self._pins.arrived

    def next(self, *, timeout_s: float, on_wait: Callable[[], None]) -> tuple[Key, Any]:
        """The next batch in order, with its key. Raises PoolError; the pool must then be ended.

        ``on_wait`` is called about twice a second while there is none.
        """
        self._wait = Wait(timeout_s, pids=self.pids, on_wait=on_wait)
        batch = next(self._iterator)
        return self._pending.popleft(), batch

    def _receive_in_time(self) -> tuple[int, Any]:
        try:
            return self._receive(self._wait)
        except BatchLateError as late:
            if late.worker >= 0:
                raise
            owing = self._iterator._task_info[self._iterator._rcvd_idx][0]
            raise BatchLateError(str(late), worker=owing) from None

    def suspect(self, worker: int) -> tuple[Key, int | None] | None:
        """The batch that ``worker`` is loading or was when it died, and the sample, where known."""
        number, sample = self._stamps.read(worker)
        if number is None:
            return None
        return self._pending[number - self._iterator._rcvd_idx], sample

    def peak_bytes(self, worker: int) -> int:
        """The most memory that ``worker`` had resident when it last began a batch."""
        return self._stamps.peak_bytes(worker)

    def activity(self, worker: int) -> str:
        """Return a description of what ``worker`` is loading, or was loading when it died."""
        suspect = self.suspect(worker)
        _, last = self._stamps.read(worker)
        if suspect is None:
            return (
                f"idle{'' if last is None else f' after sample {last}'}, owing {self._owed(worker)}"
            )
        batch = _listed(suspect[0].indices)
        return f"loading {batch}" if last is None else f"loading sample {last} of {batch}"

    def _owed(self, worker: int) -> str:
        """The oldest batch that ``worker`` has not delivered."""
        for number, info in self._iterator._task_info.items():
            if info == (worker,):
                return _listed(self._pending[number - self._iterator._rcvd_idx].indices)
        return "nothing"

    def stack(self, worker: int) -> str:
        """Return the stack of ``worker`` as it reports it; empty if it does not answer soon, as when stopped."""
        give_up_s = time.monotonic() + _STACK_S
        os.ftruncate(self._stacks, 0)
        os.lseek(self._stacks, 0, os.SEEK_SET)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[worker], STACKS_SIGNAL)
        size = 0
        while time.monotonic() < give_up_s:
            time.sleep(_STACK_LOOK_S)
            before, size = size, os.fstat(self._stacks).st_size
            if 0 < size == before:
                break
        return os.pread(self._stacks, size, 0).decode(errors="replace")

    def process(self, worker: int) -> BaseProcess:
        """The process of ``worker``."""
        return self._workers[worker]

    def end(self, *, grace_s: float) -> None:
        """End the workers: by request within ``grace_s``, else by SIGKILL. Reaps them all."""
        iterator, self._iterator._shutdown = self._iterator, True
        # A worker that was killed or stopped while it held the lock of torch's event holds it for
        # ever; torch's own shutdown would then wait for ever, and is never called.
        if grace_s > 0 and iterator._workers_done_event._cond.acquire(True, grace_s):
            iterator._workers_done_event._cond.release()
            iterator._workers_done_event.set()
            for inbox in iterator._index_queues:
                inbox.put(None)
        _end(self._workers, grace_s=grace_s)
        if self._pins is not None:
            self._pins.join()
        for mailbox in (*iterator._index_queues, iterator._worker_result_queue):
            mailbox.cancel_join_thread()
            mailbox.close()
        self._inboxes.close()
        os.close(self._stacks)
        # Breaks the cycle between the two, so that the queues' pipes close now, not at some
        # later collection.
        del iterator._get_data


class _Iterator(_MultiProcessingDataLoaderIter):
    """Torch's own, with no worker on the list of its handler for SIGCHLD.

    That one raises RuntimeError at whatever line the rank is, also inside locks and thread starts; a
    death is seen on the sentinels instead, where it cannot be mistaken for anything else.
    """

    _shutdown = True  # until torch has something to end, or its __del__ prints a traceback

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        # Here and not once the iterator is made: this hands out the first batches, of which a
        # worker may die at once.
        _remove_worker_pids(id(self))
        self._worker_pids_set = False
        super()._reset(loader, first_iter)


class _Mailbox(Queue):  # type: ignore[type-arg]  # takes no argument before Python 3.12
    """A queue that writes a message itself while it fits into the pipe; from the first that does not on, a thread does.

    To wake that thread takes longer than a small step leaves, and it competes for the interpreter's lock.
    """

    def __init__(self, maxsize: int, *, ctx: Any) -> None:
        super().__init__(maxsize, ctx=ctx)
        own: Any = self  # whose attributes typeshed does not show
        self._room = select.poll()
        self._room.register(own._writer, select.POLLOUT)

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        """Send ``obj``. It never waits for the reader."""
        own: Any = self
        if own._thread is not None or not self._has_written(ForkingPickler.dumps(obj)):
            super().put(obj, block, timeout)

    def _has_written(self, message: memoryview[int]) -> bool:
        # The wire form has 4 bytes more. A pipe that is ready has room for as much (pipe(7): PIPE_BUF).
        own: Any = self
        if len(message) + 4 > select.PIPE_BUF or not own._sem.acquire(block=False):
            return False
        has_room = False
        if own._wlock.acquire(block=False):  # else another process writes, maybe into a full pipe
            try:
                has_room = bool(self._room.poll(0))
                if has_room:
                    own._writer.send_bytes(message)
            finally:
                own._wlock.release()
        if not has_room:
            own._sem.release()
        return has_room


class _Mailboxes(ForkContext):
    """Processes that are forked, and have :class:`_Mailbox` as their queues."""

    def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802 - as in the class above it
        """Return a new queue."""
        return _Mailbox(maxsize, ctx=self.get_context())


class _Recorded:
    """The index stream that torch draws from; notes what was drawn and is not delivered yet."""

    def __init__(self, keys: Iterator[Key], drawn: deque[Key]) -> None:
        self._keys = keys
        self._drawn = drawn

    def __iter__(self) -> Iterator[tuple[int, Key]]:
        # Torch numbers its batches in the same way, from 0.
        for numbered in enumerate(self._keys):
            self._drawn.append(numbered[1])
            yield numbered


def _listed(indices: tuple[int, ...]) -> str:
    return "samples " + ", ".join(str(index) for index in indices)


def _as_it_is(batch: Any) -> Any:
    return batch


def _current_device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else -1


def _await_status(worker: BaseProcess) -> None:
    """Give a worker whose files are closed the time to end, which a busy machine may put off.

    Not by ``join``, which waits without limit once they are: user code may have closed them.
    """
    give_up_s = time.monotonic() + _REAP_S
    while worker.exitcode is None and time.monotonic() < give_up_s:
        time.sleep(0.002)


def _end(workers: list[BaseProcess], *, grace_s: float) -> None:
    deadline_s = time.monotonic() + grace_s
    alive = {worker.sentinel for worker in workers}
    while alive and (left_s := deadline_s - time.monotonic()) > 0:
        alive -= {ended for ended in wait(alive, timeout=left_s) if isinstance(ended, int)}
    for worker in workers:
        worker.kill()  # a no-op on one that was reaped
        worker.join()
        # A worker that is killed between making a segment and unlinking it leaves the name. One that
        # was never started, for want of files, has none; there is no file left for this look then.
        with contextlib.suppress(OSError):
            for segment in SHARED_MEMORY.glob(f"torch_{worker.pid}_*"):
                segment.unlink(missing_ok=True)


# What a loader worker does before it loads: ties its life to its rank. Never loads anything.

# The rank acts on these at its next step boundary, and still needs batches to get there.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def run_signals_held() -> Iterator[None]:
    """Hold the run's signals back while workers are forked: they inherit that, until they ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def garbage_kept() -> Iterator[bool]:
    """Hold the garbage collector back while workers are forked; yields whether it was on.

    A worker that collects what its rank has left destroys tensors of a GPU that it cannot use, and
    CUDA's error in a destructor ends the process.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield was_on
    finally:
        if was_on:
            gc.enable()


class WorkerStart:
    """The ``worker_init_fn`` of a rank's loader workers, which are forked from that rank."""

    def __init__(
        self,
        *,
        rank: int,
        rank_pid: int,
        stacks: int,
        collects: bool,
        then: Callable[[int], None],
    ) -> None:
        """``collects``: whether the worker's garbage collector is on. ``stacks``: the file that stacks go to."""
        self._rank = rank
        self._collects = collects
        self._then = then  # what the worker's source has to do
        self._rank_pid = rank_pid
        self._stacks = stacks

    def __call__(self, worker: int) -> None:
        """Set up worker number ``worker``; runs in the worker, once."""
        # INVARIANT die-downhill: the kernel ends a worker with its rank, also one that is stuck.
        # Broken if: the workers are forked by anything but the rank's own process.
        # Guarded by: test_no_worker_outlives_a_killed_rank.
        parent_death.die_with_parent(self._rank_pid)
        gc.freeze()  # what the rank has left is never destroyed here
        if self._collects:
            gc.enable()
        write_stacks_when_asked(self._stacks)
        parent_death.set_process_name(f"loader {self._rank}.{worker}")
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
        # A forked worker inherits the rank's handlers: its children are none of the rank's
        # business, and its signals must not wake the rank's event loop.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        let_go_of_devices()
        self._then(worker)


def let_go_of_devices(prefix: str = "/dev/nvidia") -> None:
    """Close the GPUs that a rank has opened: a fork cannot use them.

    While anybody holds one, the driver keeps the memory of a rank that has died (Megatron-LM#3684).
    """
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # closed since it was listed
            if str(descriptor.readlink()).startswith(prefix):
                os.close(int(descriptor.name))
