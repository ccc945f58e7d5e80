"""Carries batches from a loader worker to its rank: large tensors as memory files, never by appointment.

Torch's own way makes the rank *ask* the sending worker for each tensor's descriptor, over a socket
in the temporary folder: the rank blocks for ever if that worker is stopped, fails if it is dead,
and the socket's file stays behind if it is killed. Here the worker sends the descriptors first,
over a socket pair made before the fork, so that whatever is announced can be had without it. The
files have no name: they take no room in ``/dev/shm``, and end with the last process that has them.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import pickle
import socket
import stat
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import reduce_storage
from torch.utils.data import get_worker_info

from ddp_runner.data.attributes import CountedReads
from ddp_runner.data.workers.fetch import Key, Reader, SampleFailed, failed
from ddp_runner.data.workers.memory_files import BATCH, SMALL_BYTES, as_bytes, identity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_runner.data.workers.stamps import LoadStamps


_DESCRIPTORS_PER_MESSAGE = 250  # the kernel takes 253: SCM_MAX_FD, unix(7)
_SHARED_FILE = (
    "its loader workers read {path} through one shared position, and so get wrong samples"
)
_OPEN_LATER = "open the file in __getitem__, once in each worker, or set num_workers=0"
_NOT_SENT = "a loader worker cannot send what its dataset returns"
_SEND_OTHERS = "return tensors, arrays or plain values, or set num_workers=0"


OUT_OF_FILES = -1  # in place of a count of descriptors
_NO_FILES_LEFT = frozenset({errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS})


class TransportError(Exception):
    """A batch that was announced cannot be taken out of the transport."""


class OutOfFilesError(TransportError):
    """The limit of open files is reached, here or in the worker; copying by value needs none."""


class PackedBatch(NamedTuple):
    """A batch on its way: the pickled rest, and how many descriptors ``worker`` sent for it.

    Instead of them :data:`OUT_OF_FILES`, if the worker could not open so many; there is no batch then.
    ``copies``: the content of storages that need no file.
    """

    worker: int
    body: bytes
    descriptors: int
    copies: tuple[bytes, ...] = ()
    counted: tuple[str, ...] = ()  # what its loads count up in the dataset, see CountedReads


class _Packer(ForkingPickler):
    """Pickles a batch, its CPU storages as numbered ``descriptors``; small ones, or all ``by_value``, as ``copies``."""

    def __init__(self, file: io.BytesIO, *, by_value: bool) -> None:
        super().__init__(file)
        self.descriptors: list[int] = []
        self.copies: list[bytes] = []
        self._copied: dict[int, int] = {}  # the place in there, by the identity of the storage
        self._by_value = by_value
        self.dispatch_table = {
            **self.dispatch_table,
            torch.UntypedStorage: self._reduce_storage,
        }

    def let_go(self) -> None:
        """Keep nothing of the batch; the packer is of no use afterwards.

        The memo holds every tensor of it, and the table makes the packer a cycle, which lives until
        the worker's next garbage collection: by then thirty large batches may have been made.
        """
        self.clear_memo()
        del self.dispatch_table

    def _reduce_storage(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        if storage.device.type != "cpu" or storage.nbytes() == 0:
            return reduce_storage(storage)  # type: ignore[no-any-return,no-untyped-call,unused-ignore]
        if self._by_value or storage.nbytes() <= SMALL_BYTES:
            number = self._copied.setdefault(identity(storage), len(self.copies))
            if number == len(self.copies):  # else a view of it was packed before
                self.copies.append(bytes(as_bytes(storage)))
            return _copied_storage, (number,)
        descriptor = BATCH.descriptor_of(storage)
        if descriptor not in self.descriptors:  # views share a storage
            self.descriptors.append(descriptor)
        return _received_storage, (self.descriptors.index(descriptor), storage.nbytes())


def _copied_storage(number: int) -> torch.UntypedStorage:
    """Stands for one of the copies in a pickle; never called itself."""
    raise TransportError(f"copy {number} outside an unpacker")


def _storage_of(content: bytes) -> torch.UntypedStorage:
    """Return memory of torch's own: how it is aligned may show in the last bits of what is computed from it."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).clone().untyped_storage()


def _received_storage(number: int, size_bytes: int) -> torch.UntypedStorage:
    """Stands for :func:`_mapped_storage` in a pickle; never called itself."""
    raise TransportError(f"storage {number} of {size_bytes} bytes outside an unpacker")


_FOUND: dict[tuple[str, str], Any] = {}  # what batches are made of, by module and name


class _Unpacker(pickle.Unpickler):
    """Undoes :class:`_Packer` with the descriptors and copies that came beside the pickle."""

    def __init__(
        self, file: io.BytesIO, descriptors: Sequence[int], copies: Sequence[bytes]
    ) -> None:
        super().__init__(file)
        self._descriptors = descriptors
        self._copies = [_storage_of(content) for content in copies]

    def find_class(self, module: str, name: str) -> Any:
        if name == _copied_storage.__name__ and module == __name__:
            return self._copies.__getitem__
        if name == _received_storage.__name__ and module == __name__:
            # Not a method: in the memo of its own unpickler, that would keep every batch alive
            # until the next garbage collection.
            return partial(_mapped_storage, self._descriptors)
        known = _FOUND.get((module, name))  # a search of modules for each of a batch's few names
        if known is None:
            known = _FOUND[module, name] = super().find_class(module, name)
        return known


def _mapped_storage(
    descriptors: Sequence[int], number: int, size_bytes: int
) -> torch.UntypedStorage:
    make: Any = torch.UntypedStorage._new_shared_fd_cpu  # type: ignore[attr-defined]  # noqa: SLF001
    storage: torch.UntypedStorage = make(descriptors[number], size_bytes)
    return storage


def _refused(key: Key, why: str) -> SampleFailed:
    return SampleFailed(indices=key.indices, error=why, traceback="", for_memory=False, refused=why)


class PackedSource:
    """The dataset that the torch DataLoader sees: ``(number, key)`` -> :class:`PackedBatch`."""

    def __init__(
        self,
        reader: Reader[Any],
        *,
        outboxes: Sequence[socket.socket],
        stamps: LoadStamps,
        by_value: bool,
        watches_files: bool = False,
    ) -> None:
        self._reader = reader
        self._by_value = by_value
        self._watches_files = watches_files
        self._files: InheritedFiles | None = None  # of the worker whose copy this is
        self._reads: CountedReads | None = None  # likewise
        self._outboxes = outboxes
        self._stamps = stamps

    def enter_worker(self, worker: int) -> None:
        """See :meth:`Reader.enter_worker`."""
        self._reader.enter_worker(worker)

    def __getitem__(self, numbered: tuple[int, Key]) -> PackedBatch:
        """Load and send. Raises OSError if there is no memory for it."""
        info = get_worker_info()
        assert info is not None, "packed batches are for workers"
        send_descriptors = self._outboxes[info.id]
        number, key = numbered
        BATCH.may_open = not self._by_value
        self._stamps.begin(info.id, number)
        if self._watches_files and self._files is None:
            self._files = InheritedFiles()
        if self._reads is None:
            self._reads = CountedReads(self._reader.dataset)
        with self._reads.around_load():
            batch = self._reader.load(key, on_sample=partial(self._stamps.sample, info.id))
        if self._files is not None and (path := self._files.moved()):
            batch = _refused(key, f"{_SHARED_FILE.format(path=path)}; {_OPEN_LATER}")
        try:
            packed = self._sent(batch, worker=info.id, outbox=send_descriptors)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            trouble = replace(
                failed(error, indices=key.indices), refused=f"{_NOT_SENT}: {error}; {_SEND_OTHERS}"
            )
            packed = self._sent(trouble, worker=info.id, outbox=send_descriptors)
        self._stamps.end(info.id)
        return packed._replace(counted=self._reads.names)

    def _sent(self, batch: Any, *, worker: int, outbox: socket.socket) -> PackedBatch:
        file = io.BytesIO()
        packer = _Packer(file, by_value=self._by_value)
        try:
            packer.dump(batch)
            self._send(packer.descriptors, outbox)
        except OSError as error:
            if error.errno not in _NO_FILES_LEFT:
                raise
            return PackedBatch(worker=worker, body=b"", descriptors=OUT_OF_FILES)
        finally:
            packer.let_go()
            BATCH.close()
        return PackedBatch(
            worker=worker,
            body=file.getvalue(),
            descriptors=len(packer.descriptors),
            copies=tuple(packer.copies),
        )

    def _send(self, descriptors: Sequence[int], outbox: socket.socket) -> None:
        # INVARIANT descriptors-first: a batch is announced only after all its descriptors are in
        # the socket, so that the rank never waits for a worker while it unpacks.
        # Broken if: the descriptors are sent after this function has returned.
        # Guarded by: test_batches_of_a_stopped_worker_that_are_ready_are_served.
        for first in range(0, len(descriptors), _DESCRIPTORS_PER_MESSAGE):
            some = descriptors[first : first + _DESCRIPTORS_PER_MESSAGE]
            socket.send_fds(outbox, [b"\0"], some)


class Inboxes:
    """The rank's ends of the socket pairs, by worker number."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = sockets
        self.counted: tuple[str, ...] = ()  # as a worker said last
        for each in sockets:
            each.setblocking(False)

    def unpack(self, packed: PackedBatch) -> Any:
        """The batch. Never blocks. Raises TransportError if it did not come whole."""
        self.counted = packed.counted or self.counted
        if packed.descriptors == OUT_OF_FILES:
            raise OutOfFilesError("its worker cannot open so many files")
        descriptors: list[int] = []
        try:
            while len(descriptors) < packed.descriptors:
                descriptors += self._receive(
                    packed.worker, missing=packed.descriptors - len(descriptors)
                )
            return _Unpacker(io.BytesIO(packed.body), descriptors, packed.copies).load()
        except (OSError, RuntimeError) as error:  # torch's own duplicate of a descriptor
            if isinstance(error, OSError) and error.errno not in _NO_FILES_LEFT:
                raise
            raise OutOfFilesError(f"{type(error).__name__}: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)  # a storage keeps its own duplicate

    def _receive(self, worker: int, *, missing: int) -> list[int]:
        expected = min(missing, _DESCRIPTORS_PER_MESSAGE)
        _, received, _, _ = socket.recv_fds(self._sockets[worker], 1, expected)
        if len(received) < expected:
            for descriptor in received:
                os.close(descriptor)
            raise OutOfFilesError(f"only {len(received)} of {expected} tensors could be opened")
        return received

    def close(self) -> None:
        """Let go of the sockets, and of what is still inside them."""
        for each in self._sockets:
            each.close()


def connect(workers: int) -> tuple[list[socket.socket], Inboxes]:
    """Socket pairs for ``workers``: the ends that they send on, and the rank's inboxes."""
    pairs = [socket.socketpair() for _ in range(workers)]
    return [theirs for theirs, _ in pairs], Inboxes([ours for _, ours in pairs])


# Finds that loader workers read a file through a position that they share. Runs in a worker.

LOADS_WATCHED = 3  # of each worker: a dataset that reads by a position does so at once
_STANDARD_STREAMS = range(3)
_MEMORY = "/memfd:"


class _OpenFile(NamedTuple):
    path: str
    watched: int  # a descriptor of the same open file description, which has the position
    offset: int


class InheritedFiles:
    """The regular files that a worker has inherited open for reading, and whether it moves their positions.

    A forked worker shares the position with its rank and all other workers. Each such file is opened
    again under its number, at the same position: from then on nobody else moves it, and what another
    process reads is never taken for this worker's. A file that the dataset opens again, or reads
    without a position (``pread``, memory maps), does not move. Logs, which are appended to, are left alone.
    """

    def __init__(self) -> None:
        self._loads = 0
        each = [_opened_again(number, mode) for number, mode in _readable().items()]
        self._files = [file for file in each if file is not None]

    def moved(self) -> str:
        """The path of a file whose position this worker's loads have moved; empty: there is none."""
        if self._loads < LOADS_WATCHED:
            self._loads += 1
            for file in self._files:
                if os.lseek(file.watched, 0, os.SEEK_CUR) != file.offset:
                    return file.path.removesuffix(" (deleted)")
            if self._loads == LOADS_WATCHED:
                for file in self._files:
                    os.close(file.watched)
        return ""


def _readable() -> dict[int, int]:
    """The descriptors of regular files that are open for reading, and not to append; with their access modes."""
    found: dict[int, int] = {}
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # closed since it was listed
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            is_file = stat.S_ISREG(os.fstat(number).st_mode) and number not in _STANDARD_STREAMS
            if is_file and flags & os.O_ACCMODE != os.O_WRONLY and not flags & os.O_APPEND:
                found[number] = flags & os.O_ACCMODE
    return found


def _opened_again(number: int, mode: int) -> _OpenFile | None:
    with suppress(OSError):  # it may not be opened by whom this process runs as now
        path = Path("/proc/self/fd", str(number))
        name, offset = str(path.readlink()), os.lseek(number, 0, os.SEEK_CUR)
        if name.startswith(_MEMORY):  # of the rank's own: the board, the stacks of hung workers
            return None
        watched = os.open(path, mode)
        os.lseek(watched, offset, os.SEEK_SET)
        os.dup2(watched, number, inheritable=os.get_inheritable(number))
        return _OpenFile(name, watched, offset)
    return None
