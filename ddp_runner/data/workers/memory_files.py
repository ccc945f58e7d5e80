"""Memory files without a name: what a loader worker puts its batches in. Never sends them.

Torch's own collating makes named files in ``/dev/shm``: a worker that is killed leaves them there, and
a full one kills it. These end with the last process that has them open.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

SMALL_BYTES = (
    16 << 10
)  # up to here a copy through the pipe takes less than making, sending and mapping a file


class MemoryFiles:
    """The files of one batch, by the identity of the storages that they hold."""

    def __init__(self) -> None:
        self.may_open = True  # False: batches are sent by value
        # With the storages, which keeps their identities theirs until the end of the batch.
        self._kept: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def new_storage(self, size_bytes: int) -> torch.UntypedStorage:
        """An empty storage in a file of its own. Raises OSError without files or memory."""
        descriptor = _made()
        try:
            os.ftruncate(descriptor, size_bytes)
            make: Any = torch.UntypedStorage._new_shared_fd_cpu  # type: ignore[attr-defined]  # noqa: SLF001
            storage: torch.UntypedStorage = make(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._kept[identity(storage)] = (descriptor, storage)
        return storage

    def descriptor_of(self, storage: torch.UntypedStorage) -> int:
        """The file that holds ``storage``; it is copied into one if it is anywhere else."""
        known = self._kept.get(identity(storage))
        if known is not None:
            return known[0]
        content = as_bytes(storage)
        descriptor = _made()
        try:
            done = 0
            while done < len(content):
                done += os.write(descriptor, content[done:])
        except BaseException:
            os.close(descriptor)
            raise
        self._kept[identity(storage)] = (descriptor, storage)
        return descriptor

    def close(self) -> None:
        """Let go of the descriptors; what was sent or mapped of them lives on."""
        for descriptor, _ in self._kept.values():
            os.close(descriptor)
        self._kept.clear()


def identity(storage: torch.UntypedStorage) -> int:
    """Return the identity by which torch.save distinguishes storages; stable while ``storage`` is alive."""
    return int(storage._cdata)  # noqa: SLF001


def as_bytes(storage: torch.UntypedStorage) -> memoryview:
    """The content of a CPU storage, not copied."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data  # type: ignore[call-overload,unused-ignore]


def _made() -> int:
    return os.memfd_create("ddp-runner-batch", os.MFD_CLOEXEC)


BATCH = MemoryFiles()  # of the batch that this process is making: a worker makes one at a time


def collate_batch(samples: list[Any]) -> Any:
    """Collate like torch's ``default_collate``; in a loader worker tensors are stacked into memory files."""
    return collate(samples, collate_fn_map=_COLLATE)  # type: ignore[no-untyped-call,unused-ignore]


def _stacked(samples: list[Tensor], *, collate_fn_map: Any = None) -> Tensor:
    if get_worker_info() is None or not _are_of_one_kind(samples):
        stacked: Tensor = collate_tensor_fn(samples, collate_fn_map=collate_fn_map)
        return stacked
    first = samples[0]
    size_bytes = len(samples) * first.numel() * first.element_size()
    if not BATCH.may_open or size_bytes <= SMALL_BYTES:
        return torch.stack(samples)
    try:
        storage = BATCH.new_storage(size_bytes)
    except (OSError, RuntimeError):  # torch's own duplicate of a descriptor
        return torch.stack(samples)  # the transport finds another way, or says what is missing
    out = torch.empty(0, dtype=first.dtype).set_(storage)  # type: ignore[call-overload,unused-ignore]
    return torch.stack(samples, out=out.view(len(samples), *first.shape))


def _are_of_one_kind(samples: list[Tensor]) -> bool:
    """Return True if they are plain tensors of one shape and type; costs as much as stacking small ones."""
    first = samples[0]
    plain = first.layout is torch.strided and not first.is_nested and first.device.type == "cpu"
    alike = all(one.shape == first.shape and one.dtype == first.dtype for one in samples)
    return plain and alike and bool(first.numel())


_COLLATE = {**default_collate_fn_map, Tensor: _stacked}
