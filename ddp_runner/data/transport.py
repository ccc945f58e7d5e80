"""Carries batches from a loader worker to its rank: tensors as shared memory, never by appointment.

Torch's own way makes the rank *ask* the sending worker for each tensor's descriptor, over a socket
in the temporary folder: the rank blocks for ever if that worker is stopped, fails if it is dead,
and the socket's file stays behind if it is killed. Here the worker sends the descriptors first,
over a socket pair made before the fork, so that whatever is announced can be had without it.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import reduce_storage
from torch.utils.data import get_worker_info

from ddp_runner.data.source import BatchKey, SampleSource, failed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_runner.data.stamps import LoadStamps

_DESCRIPTORS_PER_MESSAGE = 250  # the kernel takes 253: SCM_MAX_FD, unix(7)


class TransportError(Exception):
    """A batch that was announced cannot be taken out of the transport."""


class PackedBatch(NamedTuple):
    """A batch on its way: the pickled rest, and how many descriptors ``worker`` sent for it."""

    worker: int
    body: bytes
    descriptors: int


class _Packer(ForkingPickler):
    """Pickles a batch, its CPU storages as numbered descriptors in ``descriptors``."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.descriptors: list[int] = []
        self.dispatch_table = {
            **self.dispatch_table,
            torch.UntypedStorage: self._reduce_storage,
        }

    def _reduce_storage(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        if storage.device.type != "cpu" or storage.nbytes() == 0:
            return reduce_storage(storage)  # type: ignore[no-any-return,no-untyped-call,unused-ignore]
        descriptor, size_bytes = storage._share_fd_cpu_()
        self.descriptors.append(descriptor)
        return _received_storage, (len(self.descriptors) - 1, size_bytes)


def _received_storage(number: int, size_bytes: int) -> torch.UntypedStorage:
    """Stands for :func:`_mapped_storage` in a pickle; never called itself."""
    raise TransportError(f"storage {number} of {size_bytes} bytes outside an unpacker")


class _Unpacker(pickle.Unpickler):
    """Undoes :class:`_Packer` with the descriptors that came beside the pickle."""

    def __init__(self, file: io.BytesIO, descriptors: Sequence[int]) -> None:
        super().__init__(file)
        self._descriptors = descriptors

    def find_class(self, module: str, name: str) -> Any:
        if name == _received_storage.__name__ and module == __name__:
            # Not a method: in the memo of its own unpickler, that would keep every batch alive
            # until the next garbage collection.
            return partial(_mapped_storage, self._descriptors)
        return super().find_class(module, name)


def _mapped_storage(
    descriptors: Sequence[int], number: int, size_bytes: int
) -> torch.UntypedStorage:
    make: Any = torch.UntypedStorage._new_shared_fd_cpu  # type: ignore[attr-defined]  # noqa: SLF001
    storage: torch.UntypedStorage = make(descriptors[number], size_bytes)
    return storage


class PackedSource:
    """What the torch DataLoader sees as its dataset: ``(number, key)`` -> :class:`PackedBatch`."""

    def __init__(
        self, source: SampleSource, *, outboxes: Sequence[socket.socket], stamps: LoadStamps
    ) -> None:
        self._source = source
        self._outboxes = outboxes
        self._stamps = stamps

    def __getitem__(self, numbered: tuple[int, BatchKey]) -> PackedBatch:
        """Load and send. Raises OSError or RuntimeError if there is no shared memory for it."""
        info = get_worker_info()
        assert info is not None, "packed batches are for workers"
        send_descriptors = self._outboxes[info.id]
        number, key = numbered
        self._stamps.begin(info.id, number)
        batch = self._source.load(key, on_sample=partial(self._stamps.sample, info.id))
        try:
            body, packer = _pack(batch)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            body, packer = _pack(failed(error, indices=key.indices))
        # INVARIANT descriptors-first: a batch is announced only after all its descriptors are in
        # the socket, so that the rank never waits for a worker while it unpacks.
        # Broken if: the descriptors are sent after this function has returned.
        # Guarded by: test_batches_of_a_stopped_worker_that_are_ready_are_served.
        for first in range(0, len(packer.descriptors), _DESCRIPTORS_PER_MESSAGE):
            some = packer.descriptors[first : first + _DESCRIPTORS_PER_MESSAGE]
            socket.send_fds(send_descriptors, [b"\0"], some)
        self._stamps.end(info.id)
        return PackedBatch(worker=info.id, body=body, descriptors=len(packer.descriptors))


def _pack(batch: Any) -> tuple[bytes, _Packer]:
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(batch)
    return file.getvalue(), packer


class Inboxes:
    """The rank's ends of the socket pairs, by worker number."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = sockets
        for each in sockets:
            each.setblocking(False)

    def unpack(self, packed: PackedBatch) -> Any:
        """The batch. Never blocks. Raises TransportError if it did not come whole."""
        descriptors: list[int] = []
        try:
            while len(descriptors) < packed.descriptors:
                descriptors += self._receive(
                    packed.worker, missing=packed.descriptors - len(descriptors)
                )
            return _Unpacker(io.BytesIO(packed.body), descriptors).load()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)  # a storage keeps its own duplicate

    def _receive(self, worker: int, *, missing: int) -> list[int]:
        expected = min(missing, _DESCRIPTORS_PER_MESSAGE)
        _, received, _, _ = socket.recv_fds(self._sockets[worker], 1, expected)
        if len(received) < expected:
            for descriptor in received:
                os.close(descriptor)
            raise TransportError(
                f"only {len(received)} of {expected} tensors of a batch could be opened: "
                "the limit of open files is reached (ulimit -n)"
            )
        return received

    def close(self) -> None:
        """Let go of the sockets, and of what is still inside them."""
        for each in self._sockets:
            each.close()


def connect(workers: int) -> tuple[list[socket.socket], Inboxes]:
    """Socket pairs for ``workers``: the ends that they send on, and the rank's inboxes."""
    pairs = [socket.socketpair() for _ in range(workers)]
    return [theirs for theirs, _ in pairs], Inboxes([ours for _, ours in pairs])
