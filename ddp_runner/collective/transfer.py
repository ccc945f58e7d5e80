"""Moves a nested state of tensors and plain values from one rank to others, in large flat pieces."""

from __future__ import annotations

import ctypes
import io
import math
import mmap
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.collective.group import Group

PIECE_BYTES = 64 * 1024 * 1024
PACKED_SHARE = 16  # of a piece: so much is packed together at most
SMALL_SHARE = 1024  # of a piece: tensors below are packed, others are sent as they lie
MADV_POPULATE_WRITE = 23  # of Linux; not in every Python's mmap
BACKED_BYTES_MIN = 1024 * 1024
_LIBC = ctypes.CDLL(None)
GROUP_PIECES = 16  # with one mark behind them; fewer where they come to a piece's bytes before
GROUPS_AHEAD = 4  # under way at once, so that neither side waits for the other's next call


@dataclass(frozen=True, slots=True)
class _Hole:
    """Stands in the skeleton where a tensor was."""

    index: int


@dataclass(frozen=True, slots=True)
class _Description:
    """What the receiver must allocate: dtype, shape, and whether it lived on an accelerator."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_device: bool


def _take_out(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return _Hole(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _take_out(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_take_out(item, tensors) for item in value)
    return value


def _put_back(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, _Hole):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: _put_back(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_put_back(item, tensors) for item in value)
    return value


def _as_bytes(tensor: Tensor) -> Tensor:
    """A flat uint8 view of a contiguous tensor's memory."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some bytes of one tensor."""

    tensor: int
    start: int
    end: int


def _pieces(sizes_bytes: Sequence[int]) -> Iterator[tuple[_Part, ...]]:
    """What each message holds: a part of one large tensor, or many small tensors in a row.

    Both sides come to the same answer from the sizes alone.
    """
    small: list[_Part] = []
    small_bytes = 0
    for number, size in enumerate(sizes_bytes):
        is_small = size * SMALL_SHARE < PIECE_BYTES
        if small and (not is_small or (small_bytes + size) * PACKED_SHARE > PIECE_BYTES):
            yield tuple(small)
            small, small_bytes = [], 0
        if is_small:
            small += [_Part(number, 0, size)] if size else []
            small_bytes += size
            continue
        for start in range(0, size, PIECE_BYTES):
            yield (_Part(number, start, min(start + PIECE_BYTES, size)),)
    if small:
        yield tuple(small)


def _groups(sizes_bytes: Sequence[int]) -> Iterator[list[tuple[_Part, ...]]]:
    """The pieces, by those that are waited for together."""
    together: list[tuple[_Part, ...]] = []
    together_bytes = 0
    for piece in _pieces(sizes_bytes):
        together.append(piece)
        together_bytes += sum(part.end - part.start for part in piece)
        if len(together) == GROUP_PIECES or together_bytes >= PIECE_BYTES:
            yield together
            together, together_bytes = [], 0
    if together:
        yield together


def _wire_device(group: Group) -> torch.device:
    return group.device if group.ends_in_silence else torch.device("cpu")


def _nothing() -> None:
    """What is done on the way where nobody asks."""


def send_state(
    group: Group,
    state: dict[str, Any],
    *,
    to: Sequence[int],
    on_progress: Callable[[], None] = _nothing,
) -> int:
    """Send ``state`` to the ranks ``to``; returns the bytes sent to each. Blocking.

    Each of ``to`` must call :func:`receive_state`; nobody else takes part. ``on_progress`` is called
    each time that some pieces have arrived.
    """
    tensors: list[Tensor] = []
    skeleton = _take_out(state, tensors)
    described = [
        _Description(tensor.dtype, tuple(tensor.shape), tensor.device.type != "cpu")
        for tensor in tensors
    ]
    header = pickle.dumps((skeleton, described))
    device = _wire_device(group)
    sizes_bytes = [_size_bytes(one) for one in described]
    size = torch.tensor([len(header)], dtype=torch.int64, device=device)
    _Sent([size], to, group).wait()
    _Sent([torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)], to, group).wait()
    under_way: deque[_Sent] = deque()
    for pieces in _groups(sizes_bytes):
        if len(under_way) == GROUPS_AHEAD:
            under_way.popleft().wait()
            on_progress()
        under_way.append(_Sent([_packed(piece, tensors, device) for piece in pieces], to, group))
    for sent in under_way:
        sent.wait()
        on_progress()
    return sum(sizes_bytes)


def _packed(piece: Sequence[_Part], tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    views = [_as_bytes(tensors[part.tensor])[part.start : part.end] for part in piece]
    if len(views) == 1 and views[0].device.type == device.type:
        return views[0]
    return torch.cat([view.to(device) for view in views])


def _size_bytes(described: _Description) -> int:
    return math.prod(described.shape) * described.dtype.itemsize


# INVARIANT nobody-waits-inside-a-message: receivers wait for the mark behind some tensors, the sender
# for their receipts; neither for a tensor itself. gloo forgets a message that has begun to come or go
# when its connection ends (see waits), and a wait for a message cannot be cut into pieces: one that
# runs out of time fails the whole group. A mark is of one byte.
# Broken if: a tensor is waited for before the mark or the receipt behind it is there.
# Guarded by: test_a_transfer_cut_within_a_piece_frees_the_other_side.


class _Sent:
    """Tensors under way to some ranks. NCCL needs no marks: its abort ends whatever waits."""

    def __init__(self, tensors: Sequence[Tensor], to: Sequence[int], group: Group) -> None:
        self._works: list[dist.Work | None] = []
        self._receipts: list[dist.Work | None] = []
        for rank in to:
            self._works += [group.send(tensor, rank) for tensor in tensors]
            if not group.ends_in_silence:
                self._works.append(group.send(_mark(), rank))
                self._receipts.append(group.receive(_mark(), rank))

    def wait(self) -> None:
        """Return when every rank has them."""
        _wait([*self._receipts, *self._works])


class _Received:
    """Tensors under way from ``source``."""

    def __init__(self, tensors: Sequence[Tensor], source: int, group: Group) -> None:
        self._source = source
        self._group = group
        self._has_mark = not group.ends_in_silence
        self._works = [group.receive(tensor, source) for tensor in tensors]
        self._marks = [group.receive(_mark(), source)] if self._has_mark else []

    def wait(self) -> None:
        """Return when they are here, and the sender knows it."""
        _wait([*self._marks, *self._works])
        if self._has_mark:
            self._group.wait_for_messages([self._group.send(_mark(), self._source)])


def _mark() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8)


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


class _OwnTypes(pickle.Unpickler):
    """Reads a header from a peer of this very run; refuses every type that a header has no use for."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == __name__ and global_name in ("_Hole", "_Description"):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and global_name in ("Size", "device"):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a state header")


def receive_state(
    group: Group, *, source: int, on_progress: Callable[[], None] = _nothing
) -> dict[str, Any]:
    """The state that ``source`` sends, on the CPU or on this rank's device as it was at the source.

    Raises ConnectionError when it was cut short.
    """
    device = _wire_device(group)
    size = torch.empty(1, dtype=torch.int64, device=device)
    _Received([size], source, group).wait()
    header = torch.empty(int(size), dtype=torch.uint8, device=device)
    _Received([header], source, group).wait()
    skeleton, described = _OwnTypes(io.BytesIO(header.cpu().numpy().tobytes())).load()
    tensors = [
        torch.empty(d.shape, dtype=d.dtype, device=group.device if d.on_device else "cpu")
        for d in described
    ]
    _fill(tensors, described, source=source, group=group, device=device, on_progress=on_progress)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    group.confirm()
    state = _put_back(skeleton, tensors)
    if not isinstance(state, dict):
        raise TypeError(f"received a {type(state).__name__} where a state dict was due")
    return state


def _fill(
    tensors: Sequence[Tensor],
    described: Sequence[_Description],
    *,
    source: int,
    group: Group,
    device: torch.device,
    on_progress: Callable[[], None],
) -> None:
    """Receive into ``tensors``, in place where they lie on the wire's device."""
    under_way: deque[tuple[_Received, list[_Incoming]]] = deque()
    for pieces in _groups([_size_bytes(one) for one in described]):
        if len(under_way) == GROUPS_AHEAD:
            _unpack(*under_way.popleft())
            on_progress()
        incoming = [_Incoming(piece, tensors, device) for piece in pieces]
        received = _Received([one.piece for one in incoming], source, group)
        under_way.append((received, incoming))
    while under_way:
        _unpack(*under_way.popleft())
        on_progress()


class _Incoming:
    """Where a piece is received: in its tensor itself, or in memory that is copied from then."""

    def __init__(
        self, parts: Sequence[_Part], tensors: Sequence[Tensor], device: torch.device
    ) -> None:
        views = [_as_bytes(tensors[part.tensor])[part.start : part.end] for part in parts]
        is_direct = len(views) == 1 and views[0].device.type == device.type
        size_bytes = sum(view.numel() for view in views)
        self._views = [] if is_direct else views
        self.piece = (
            views[0] if is_direct else torch.empty(size_bytes, dtype=torch.uint8, device=device)
        )
        _back_with_memory(self.piece)

    def unpack(self) -> None:
        start = 0
        for view in self._views:
            view.copy_(self.piece[start : start + view.numel()])
            start += view.numel()


def _back_with_memory(piece: Tensor) -> None:
    """Have the kernel give a new allocation its pages at once, in the shadow of earlier pieces.

    Else each page is a fault of its own in gloo's one thread, which costs more than the receiving.
    """
    if piece.device.type != "cpu":
        return
    page = mmap.PAGESIZE
    start = -(-piece.data_ptr() // page) * page
    length = (piece.data_ptr() + piece.numel()) // page * page - start
    if length >= BACKED_BYTES_MIN:
        # Linux 5.14; refused by older kernels, which costs nothing but the time.
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_POPULATE_WRITE)


def _unpack(received: _Received, incoming: Sequence[_Incoming]) -> None:
    received.wait()
    for one in incoming:
        one.unpack()
