"""A copy of a state in host memory, most of it made while training reads on. Never touches a disk.

The copy is by storage, as torch.save writes: tensors that share memory share it in the copy too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ddp_runner.kernel.values.nested import STORED, rebuilt, tensors_in

_SMALL_BYTES = 1 << 14  # what is not larger is copied many at once: torch uses no threads for that

_COPIED = (Tensor, torch.nn.Parameter)  # others are left for the store to refuse
_Storage = torch.UntypedStorage


def storage_key(tensor: Tensor) -> int:
    """The identity of the memory behind a tensor, as torch.save distinguishes storages."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


class Rooms(Protocol):
    """Memory that is somebody else's, for a copy and the one before it."""

    def make_room(self, sizes: Sequence[int]) -> list[_Storage]:
        """A piece for each size, in order. Raises OSError where there is none."""
        ...

    def reserve(self, sizes: Sequence[int]) -> None:
        """The same for all copies that there will be, ahead of them."""
        ...

    @property
    def size_bytes(self) -> int:
        """The memory held, in bytes."""
        ...


class HostMemory:
    """Room for one copy of a state, kept from copy to copy. Only one copy may be alive."""

    def __init__(self, rooms: Rooms | None = None) -> None:
        """``rooms``: where copies are made; None: in memory of this process."""
        self._rooms = rooms
        self._pieces: list[_Storage] = []
        self._making: threading.Thread | None = None

    def snapshot(self, state: Mapping[str, Any], *, steady: Iterable[Tensor]) -> Snapshot:
        """Copy ``state``, but leave what ``steady`` tensors hold to :meth:`Snapshot.copy_steady`.

        What it does not know is left in place, for the store to refuse. Raises RuntimeError (of torch's allocator) when there is no memory for it; then nothing is held.
        """
        self._wait_made()
        if self._rooms is None:
            pieces, self._pieces = self._pieces, []
        else:
            try:
                pieces = self._rooms.make_room(storage_sizes(state))
            except OSError as error:
                raise MemoryError(error.strerror) from error
        walk = _Walk(pieces, steady=_keys(steady))
        content = {key: walk.tree(value) for key, value in state.items()}
        walk.copy_small()
        if self._rooms is None:
            self._pieces = walk.pieces
        return Snapshot(content, walk)

    def reserve(self, sizes_bytes: Sequence[int]) -> None:
        """Begin to make room, in a thread, for a device's state whose storages have these sizes.

        Pinning takes a part of a second for each GB, which training need not wait for. Where there
        is no memory for it nothing is held; the first :meth:`snapshot` tries again and reports it.
        """
        if self._making is None and not self._pieces:
            # A thread begins with GPU 0, where pinning would open a context, whichever GPU this rank has.
            device = torch.cuda.current_device() if can_pin() else -1
            self._making = threading.Thread(
                target=self._make, args=(tuple(sizes_bytes), device), name="checkpoint-memory"
            )
            self._making.start()

    def _make(self, sizes_bytes: Sequence[int], device: int) -> None:
        with contextlib.suppress(RuntimeError, MemoryError, OSError):
            if device >= 0:
                torch.cuda.set_device(device)
            if self._rooms is None:
                self._pieces = [_room(size, pinned=can_pin()) for size in sizes_bytes]
            else:
                self._rooms.reserve(sizes_bytes)

    def _wait_made(self) -> None:
        if self._making is not None:
            self._making.join()

    @property
    def size_bytes(self) -> int:
        """The memory held, in bytes."""
        self._wait_made()
        if self._rooms is not None:
            return self._rooms.size_bytes
        return sum(piece.nbytes() for piece in self._pieces)


def can_pin() -> bool:
    """Return True if there is a device for whose copies memory can be pinned."""
    return torch.cuda.is_available()


def borrowed(state: Mapping[str, Any], *, steady: Iterable[Tensor]) -> Snapshot:
    """A snapshot that copies only what is not steady; the rest must stay as it is while it is used."""
    walk = _Walk([], borrowed=_keys(steady))
    content = {key: walk.tree(value) for key, value in state.items()}
    walk.copy_small()
    return Snapshot(content, walk)


class Snapshot:
    """A state's copy: whole once :meth:`copy_steady` has returned."""

    def __init__(self, content: dict[str, Any], walk: _Walk) -> None:
        self.content = content
        self.borrows = bool(walk.borrowed)
        self._copies = walk.copies
        self._small = walk.small
        self._waiting = waiting = walk.waiting
        self._device = next((s.device for _, s in waiting if s.device.type == "cuda"), None)
        self._ready: Any = None
        if self._device is not None:
            self._ready = torch.cuda.current_stream(self._device).record_event()

    def copy_steady(self) -> None:
        """Copy what was left; any one thread, with one core, while others run Python.

        The source must stay as it is until this returns.
        """
        small, self._small = self._small, _Pairs()
        small.copy()
        waiting, self._waiting = self._waiting, []
        on_host = [(to, of) for to, of in waiting if of.device.type == "cpu"]
        on_device = [(to, of) for to, of in waiting if of.device.type != "cpu"]
        if on_device:
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream.wait_event(self._ready)
            with torch.cuda.stream(stream):
                for target, source in on_device:
                    _bytes_of(target).copy_(_bytes_of(source), non_blocking=True)
        for target, source in on_host:
            # numpy and not torch: torch would start a second set of compute threads for this one.
            np.copyto(_bytes_of(target).numpy(), _bytes_of(source).numpy())
        if on_device:
            stream.synchronize()

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor of the state; the tensor itself if it has none."""
        storage = self._copies.get(storage_key(tensor))
        return tensor.detach() if storage is None else _like(tensor, storage)


class _Pairs:
    """Small tensors in host memory, each all that its memory holds, and where they are copied to."""

    def __init__(self) -> None:
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []

    def add(self, target: Tensor, source: Tensor) -> None:
        """Add a pair for :meth:`copy`."""
        self._targets.append(target)
        self._sources.append(source)

    def copy(self) -> None:
        """Copy all pairs in one call, without the interpreter's lock."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)


class _Walk:
    """Walks once over a state: rebuilds its containers around tensors in host memory."""

    def __init__(
        self,
        spare: list[_Storage],
        *,
        steady: frozenset[int] = frozenset(),
        borrowed: frozenset[int] = frozenset(),
    ) -> None:
        self.pieces: list[_Storage] = []
        self.waiting: list[tuple[_Storage, _Storage]] = []
        self.small = _Pairs()  # the same of small tensors
        self._small_now = _Pairs()  # of those that are not steady
        self.copies: dict[int, _Storage] = {}
        self.borrowed = borrowed
        self._spare = spare
        self._steady = steady

    def tree(self, value: Any) -> Any:
        """``value`` around the copies of its tensors."""
        return rebuilt(value, self._leaf, STORED)

    def _leaf(self, value: Any) -> Any:
        return self._tensor(value.detach()) if type(value) in _COPIED else value

    def _tensor(self, tensor: Tensor) -> Tensor:
        if not _is_of_storage(tensor):
            return tensor.cpu().clone()
        source = tensor.untyped_storage()
        key = int(source._cdata)  # noqa: SLF001 - as storage_key()
        if key in self.borrowed:
            return tensor
        known = self.copies.get(key)
        if known is not None:
            return _like(tensor, known)
        target = self._room_for(source, key)
        copied = _like(tensor, target)
        if _is_small(tensor, source):
            (self.small if key in self._steady else self._small_now).add(copied, tensor)
        elif key in self._steady:
            self.waiting.append((target, source))
        else:
            _bytes_of(target).copy_(_bytes_of(source))
        return copied

    def copy_small(self) -> None:
        """Copy what was left of small tensors that are not steady: the walk is over."""
        self._small_now.copy()

    def _room_for(self, source: _Storage, key: int) -> _Storage:
        target = self._piece(source.nbytes(), pinned=source.device.type == "cuda")
        self.pieces.append(target)
        self.copies[key] = target
        return target

    def _piece(self, size_bytes: int, *, pinned: bool) -> _Storage:
        """The piece that had this place in the copy before, if its size still fits."""
        place = len(self.pieces)
        if place < len(self._spare) and self._spare[place].nbytes() == size_bytes:
            return self._spare[place]
        return _room(size_bytes, pinned=pinned)


def _is_of_storage(tensor: Tensor) -> bool:
    """Return True if ``tensor`` is copied with its memory, not as the numbers that it represents."""
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _is_small(tensor: Tensor, storage: _Storage) -> bool:
    """Return True if ``tensor`` is small, and fills its memory on the host without gaps."""
    size_bytes = storage.nbytes()
    return (
        0 < size_bytes <= _SMALL_BYTES
        and tensor.nbytes == size_bytes
        and tensor.is_contiguous()
        and tensor.is_cpu
    )


def _room(size_bytes: int, *, pinned: bool) -> _Storage:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned).untyped_storage()


def _keys(tensors: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(storage_key(tensor) for tensor in tensors)


def _like(tensor: Tensor, storage: _Storage) -> Tensor:
    """``tensor`` as it would be in ``storage``."""
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _bytes_of(storage: _Storage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storage_sizes(state: Mapping[str, Any]) -> tuple[int, ...]:
    """The bytes of each memory that the tensors of ``state`` refer to, in the order of a copy."""
    tensors = (one for one in tensors_in(dict(state), STORED) if type(one) in _COPIED)
    sizes = {storage_key(t): t.untyped_storage().nbytes() for t in tensors if _is_of_storage(t)}
    return tuple(sizes.values())


def size_in_memory(state: Mapping[str, Any]) -> int:
    """The bytes of all memory that the tensors of ``state`` refer to."""
    return sum(storage_sizes(state))
