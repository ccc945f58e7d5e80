"""Moves a nested state of tensors and plain values from one rank to others.

Between processes of one machine the receiver reads the source's memory; to others it goes in large flat pieces.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import mmap
import pickle
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_runner.kernel.group import peer_memory
from ddp_runner.kernel.group.group import Group
from ddp_runner.kernel.values.nested import SENT, Hole, own_places, put_back, take_out

PIECE_BYTES = 64 * 1024 * 1024
PACKED_SHARE = 16  # of a piece: so much is packed together at most
SMALL_SHARE = 1024  # of a piece: tensors below are packed, others are sent as they lie
MADV_POPULATE_WRITE = 23  # of Linux; not in every Python's mmap
BACKED_BYTES_MIN = 1024 * 1024
_LIBC = ctypes.CDLL(None)
GROUP_PIECES = 16  # with one mark behind them; fewer where they come to a piece's bytes before
GROUPS_AHEAD = 4  # under way at once, so that neither side waits for the other's next call


@dataclass(frozen=True, slots=True)
class Description:
    """The facts that a receiver needs to allocate a tensor: dtype, shape, and whether it is on an accelerator."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_device: bool

    def __reduce__(self) -> tuple[type[Description], tuple[Any, ...]]:
        return Description, (self.dtype, self.shape, self.on_device)


def described_as(tensors: Sequence[Tensor]) -> list[Description]:
    """Return the description of each tensor; equal ones share one object, as few of many thousands differ."""
    known: dict[tuple[object, ...], Description] = {}
    found = []
    for tensor in tensors:
        key = tensor.dtype, tensor.shape, tensor.is_cpu
        if key not in known:
            known[key] = Description(tensor.dtype, tuple(tensor.shape), not tensor.is_cpu)
        found.append(known[key])
    return found


def size_bytes_of(described: Description) -> int:
    """Return the size of such a tensor in bytes."""
    return math.prod(described.shape) * described.dtype.itemsize


_OWN_TYPES = frozenset((one.__module__, one.__name__) for one in (Hole, Description))


class OwnTypes(pickle.Unpickler):
    """Reads a header from a peer of this very run; refuses every type that a header has no use for."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return the class if it is allowed. Raises UnpicklingError for any other."""
        if (module_name, global_name) in _OWN_TYPES:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and global_name in ("Size", "device"):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a state header")


def _as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's values in a row: a view of its memory where they lie there so."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


class _Part(NamedTuple):
    """Some bytes of one tensor."""

    tensor: int
    start: int
    end: int


def _pieces(sizes_bytes: Sequence[int]) -> Iterator[tuple[_Part, ...]]:
    """Yield the parts of each message: a part of one large tensor, or several small tensors in a row.

    Both sides compute the same division from the sizes alone.
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
    """Do nothing: the default callback during a transfer."""


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
    skeleton = take_out(state, tensors, SENT, once=True)
    described = described_as(tensors)
    device = _wire_device(group)
    sizes_bytes = [size_bytes_of(one) for one in described]
    with _shown(group, tensors) as shown:
        header = pickle.dumps((skeleton, described, None if shown is None else tuple(shown)))
        size = torch.tensor([len(header)], dtype=torch.int64, device=device)
        _Sent([size], to, group).wait()
        _Sent([torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)], to, group).wait()
        readers = [] if shown is None else _who_reads(group, to)
        _send_pieces(
            group, tensors, sizes_bytes, to=[r for r in to if r not in readers], call=on_progress
        )
        if readers:
            _await_readers(group, sizes_bytes, readers, call=on_progress)
    return sum(sizes_bytes)


def _shown(
    group: Group, tensors: list[Tensor]
) -> contextlib.AbstractContextManager[peer_memory.Shown | None]:
    """Let other processes of this machine read ``tensors`` in the block, as they are in memory then."""
    if group.ends_in_silence or any(tensor.device.type != "cpu" for tensor in tensors):
        return contextlib.nullcontext()
    tensors[:] = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    return peer_memory.showing(tensors)


def _who_reads(group: Group, to: Sequence[int]) -> list[int]:
    """Return the ranks of ``to`` that read this process's memory directly, as each reports by a mark."""
    answers = {rank: _mark() for rank in to}
    _wait([group.receive(answer, rank) for rank, answer in answers.items()])
    return [rank for rank, answer in answers.items() if int(answer)]


def _await_readers(
    group: Group, sizes_bytes: Sequence[int], readers: Sequence[int], *, call: Callable[[], None]
) -> None:
    """Return when all have read everything, and know that it was as it is."""
    for _ in _groups(sizes_bytes):
        _wait([group.receive(_mark(), rank) for rank in readers])
        call()
    # INVARIANT read-while-held: what a reader takes for a state is of before its source went on.
    # Broken if: a reader goes on without the source's word that it has stood still until then.
    # Guarded by: test_a_reader_whose_source_has_left_has_no_state.
    group.wait_for_messages([group.send(_mark(), rank) for rank in readers])


def _send_pieces(
    group: Group,
    tensors: Sequence[Tensor],
    sizes_bytes: Sequence[int],
    *,
    to: Sequence[int],
    call: Callable[[], None],
) -> None:
    if not to:
        return
    device = _wire_device(group)
    under_way: deque[_Sent] = deque()
    for pieces in _groups(sizes_bytes):
        if len(under_way) == GROUPS_AHEAD:
            under_way.popleft().wait()
            call()
        under_way.append(_Sent([_packed(piece, tensors, device) for piece in pieces], to, group))
    for sent in under_way:
        sent.wait()
        call()


def _packed(piece: Sequence[_Part], tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    views = [_as_bytes(tensors[part.tensor])[part.start : part.end] for part in piece]
    if len(views) == 1 and views[0].device.type == device.type:
        return views[0]
    return torch.cat([view.to(device) for view in views])


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


def _mark(word: int = 0) -> Tensor:
    return torch.full((1,), word, dtype=torch.uint8)


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def receive_state(
    group: Group,
    *,
    source: int,
    into: Mapping[str, Any] | None = None,
    on_progress: Callable[[], None] = _nothing,
) -> dict[str, Any]:
    """The state that ``source`` sends, on the CPU or on this rank's device as it was at the source.

    ``into``: a state of this rank's own that counts for nothing any more: where it has a tensor in the same
    place, of the same kind, that one is written and returned. Raises ConnectionError or DistNetworkError when it was cut short.
    """
    device = _wire_device(group)
    size = torch.empty(1, dtype=torch.int64, device=device)
    _Received([size], source, group).wait()
    header = torch.empty(int(size), dtype=torch.uint8, device=device)
    _Received([header], source, group).wait()
    skeleton, described, shown = OwnTypes(io.BytesIO(header.cpu().numpy().tobytes())).load()
    own: dict[int, list[Tensor]] = {}
    own_places(skeleton, into, own)
    tensors = _places(described, own, group)
    if shown is None or not _read_memory(
        peer_memory.Shown(*shown), tensors, described, source=source, group=group, call=on_progress
    ):
        _fill(
            tensors, described, source=source, group=group, device=device, on_progress=on_progress
        )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    group.confirm()
    state = put_back(skeleton, tensors, SENT)
    if not isinstance(state, dict):
        raise TypeError(f"received a {type(state).__name__} where a state dict was due")
    return state


def _places(
    described: Sequence[Description], own: Mapping[int, Sequence[Tensor]], group: Group
) -> list[Tensor]:
    """Memory for each tensor: the first of this rank's ``own`` that fits; none of them twice."""
    taken: set[int] = set()
    places = []
    for number, one in enumerate(described):
        device = group.device if one.on_device else torch.device("cpu")
        for place in own.get(number, ()):
            if place.data_ptr() not in taken and _fits(place, one, device):
                taken.add(place.data_ptr())
                places.append(place)
                break
        else:
            places.append(torch.empty(one.shape, dtype=one.dtype, device=device))
    return places


def _fits(place: Tensor, described: Description, device: torch.device) -> bool:
    return (
        place.dtype == described.dtype
        and tuple(place.shape) == described.shape
        and place.device == device
        and place.layout is torch.strided
        and place.is_contiguous()
        and not place.is_conj()
        and not place.is_neg()
    )


def _read_memory(
    shown: peer_memory.Shown,
    tensors: Sequence[Tensor],
    described: Sequence[Description],
    *,
    source: int,
    group: Group,
    call: Callable[[], None],
) -> bool:
    """Read the source's memory into ``tensors``, and let it know; False where that cannot be."""
    reads = peer_memory.can_read(shown) and all(one.device.type == "cpu" for one in tensors)
    group.wait_for_messages([group.send(_mark(int(reads)), source)])
    if not reads:
        return False
    addresses = array("Q")
    addresses.frombytes(shown.addresses)
    marks: list[dist.Work | None] = []
    groups = list(_groups([size_bytes_of(one) for one in described]))
    for left, pieces in zip(reversed(range(len(groups))), groups, strict=True):
        parts = [
            peer_memory.Part(
                source=addresses[part.tensor] + part.start,
                target=tensors[part.tensor].data_ptr() + part.start,
                size=part.end - part.start,
            )
            for piece in pieces
            for part in piece
        ]
        for part in (part for piece in pieces for part in piece):
            if part.end - part.start >= BACKED_BYTES_MIN:
                _back_with_memory(_as_bytes(tensors[part.tensor])[part.start : part.end])
        peer_memory.read(shown, parts)
        if not left and not peer_memory.can_read(shown):
            raise dist.DistNetworkError("the source has gone while its memory was read")
        marks.append(group.send(_mark(), source))
        if left:
            call()
    group.wait_for_messages(marks)
    _wait([group.receive(_mark(), source)])
    if groups:
        call()
    return True


def _fill(
    tensors: Sequence[Tensor],
    described: Sequence[Description],
    *,
    source: int,
    group: Group,
    device: torch.device,
    on_progress: Callable[[], None],
) -> None:
    """Receive into ``tensors``, in place where they lie on the wire's device."""
    under_way: deque[tuple[_Received, list[_Incoming]]] = deque()
    for pieces in _groups([size_bytes_of(one) for one in described]):
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
    """The memory that receives a piece: its tensor itself, or a buffer that is copied from afterwards."""

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

    Else each page is a fault of its own in gloo's one thread, which costs more than the receiving. What has
    its pages already costs next to nothing.
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
