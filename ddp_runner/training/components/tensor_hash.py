"""A 64-bit hash of tensors, fast enough to take now and then while training. Not cryptographic."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_runner.values.word_sums import FOLD, MULTIPLIER, WORDS_MAX, odd_numbers, sum_of

PACKED_BYTES = 1 << 14  # tensors up to that are hashed many at once: one alone takes 20 us
_LOW = (1 << 64 - FOLD) - 1  # without the sign that torch's shift keeps
_PACKED_TYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_PACKED_COUNTS = {dtype: PACKED_BYTES // dtype.itemsize for dtype in _PACKED_TYPES}


def tensor_hash(tensor: Tensor) -> str:
    """16 hex digits over the bytes of ``tensor``; a changed, moved or swapped bit changes them.

    The sums of its chunks (:mod:`word_sums`) are added with odd multipliers. One core takes 2 to 6 GB/s. For
    any thread.
    """
    chunks, device = _chunks(tensor.detach()), tensor.device
    if device.type != "cpu":
        return _as_text(int(_total_on_device(chunks, device)))
    total, multiplier = 0, 1
    for chunk_sum in _sums_on_host(chunks):
        total += multiplier * chunk_sum
        multiplier = multiplier * MULTIPLIER % 2**64
    return _as_text(total)


def _as_text(total: int) -> str:
    return f"{total % 2**64:016x}"


def _sums_on_host(chunks: Iterable[Tensor]) -> Iterator[int]:
    # numpy and not torch: a thread that hashes beside training would start a second set of torch's
    # compute threads for itself.
    return (sum_of(chunk.numpy()) for chunk in chunks)


def _total_on_device(chunks: Iterable[Tensor], device: torch.device) -> Tensor:
    """The same number, left on the device: who reads it waits once, however many chunks there are."""
    odd = _odd_numbers(device)
    sums = [((((chunk >> FOLD) & _LOW) ^ chunk) * odd[: chunk.numel()]).sum() for chunk in chunks]
    powers, multiplier = [], 1
    for _ in sums:
        powers.append(_signed(multiplier))
        multiplier = multiplier * MULTIPLIER % 2**64
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=device)
    return (torch.stack(sums) * torch.tensor(powers, device=device)).sum()


@functools.lru_cache(maxsize=8)
def _odd_numbers(device: torch.device) -> Tensor:
    return torch.tensor(odd_numbers(), device=device)


def _signed(number: int) -> int:
    """Return the 64 bits of ``number`` as a signed int64."""
    return number - 2**64 if number >= 2**63 else number


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes as 8-byte words; what is left over at the end is a word of its own."""
    # Of a conjugate or negative view memory holds other numbers than the tensor.
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    flat = whole.reshape(-1).view(torch.uint8)
    rest = flat.numel() % 8
    # A view needs aligned storage, which the start of a slice may not have.
    aligned = flat if flat.storage_offset() % 8 == 0 else flat.clone()
    words = aligned[: flat.numel() - rest].view(torch.int64)
    for start in range(0, words.numel(), WORDS_MAX):
        yield words[start : start + WORDS_MAX]
    if rest:
        yield torch.nn.functional.pad(flat[-rest:], (0, 8 - rest)).view(torch.int64)


def state_hashes(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> hash, in the order of ``state``; a device is waited for once. Empty tensors have none."""
    found = dict(hashes_of(state))
    return {name: found[name] for name in state if name in found}


def hashes_of(state: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """The same, one after the other in an order of their own; what lies on devices comes last."""
    small: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    on_devices: dict[str, Tensor] = {}
    for name, value in state.items():
        count = value.numel()
        if not count:
            continue
        if _is_packed(value, count):
            small.setdefault((value.device, value.dtype), {})[name] = value
        elif value.is_cpu:
            yield name, tensor_hash(value)
        else:
            own = value.detach()
            on_devices[name] = _total_on_device(_chunks(own), own.device)
    packs_there: list[tuple[list[str], Tensor]] = []
    for (device, dtype), tensors in small.items():
        for names, pack in _packs(tensors, dtype):
            sums = pack.sums_on_host() if device.type == "cpu" else pack.sums_on_device()
            if isinstance(sums, Tensor):
                packs_there.append((names, sums))
            else:
                yield from zip(names, map(_as_text, sums), strict=True)
    read = [sums for _, sums in packs_there] + [total.view(1) for total in on_devices.values()]
    if read:
        names = [name for names, _ in packs_there for name in names] + list(on_devices)
        yield from zip(names, map(_as_text, _read_together(read)), strict=True)


def _read_together(totals: Sequence[Tensor]) -> list[int]:
    """The numbers of all, in their order; each device is waited for once."""
    devices = {one.device for one in totals}
    read = {
        device: iter(torch.cat([one for one in totals if one.device == device]).tolist())
        for device in devices
    }
    return [next(read[one.device]) for one in totals for _ in range(one.numel())]


def _is_packed(tensor: Tensor, count: int) -> bool:
    most = _PACKED_COUNTS.get(tensor.dtype)
    return (
        most is not None
        and count <= most
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
    )


class _Pack(NamedTuple):
    """The bytes of many small tensors; each begins with a word, and its last one is filled up."""

    words: Tensor
    lengths: np.ndarray[Any, np.dtype[np.int64]]  # of each, in words
    ragged: np.ndarray[
        Any, np.dtype[np.bool_]
    ]  # those whose last word is filled up, after another one

    def sums_on_host(self) -> list[int]:
        """The sum of each, as of :func:`tensor_hash`."""
        words, factors = self.words.numpy(), self._factors()
        mixed = np.right_shift(words.view(np.uint64), np.uint64(FOLD)).view(np.int64)
        np.bitwise_xor(mixed, words, out=mixed)
        np.multiply(mixed, factors, out=mixed)
        sums: list[int] = np.add.reduceat(mixed, self._starts()).tolist()
        return sums

    def sums_on_device(self) -> Tensor:
        """The same numbers, left there."""
        device = self.words.device
        factors = torch.from_numpy(self._factors()).to(device)
        ends = torch.from_numpy(self._starts() + self.lengths - 1).to(device)
        up_to = ((((self.words >> FOLD) & _LOW) ^ self.words) * factors).cumsum(0)[ends]
        return torch.cat([up_to[:1], up_to[1:] - up_to[:-1]])

    def _starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        ends: np.ndarray[Any, np.dtype[np.int64]] = np.cumsum(self.lengths)
        starts: np.ndarray[Any, np.dtype[np.int64]] = ends - self.lengths
        return starts

    def _factors(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the factor of each word: the odd number of its place in its tensor."""
        odd, starts = odd_numbers(), self._starts()
        places = np.arange(self.words.numel()) - np.repeat(starts, self.lengths)
        factors: np.ndarray[Any, np.dtype[np.int64]] = odd[places]
        # What is left over at the end is a chunk of its own.
        last = (starts + self.lengths - 1)[self.ragged]
        factors[last] = _signed(int(odd[0]) * MULTIPLIER % 2**64)
        return factors


def _packs(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[list[str], _Pack]]:
    """``tensors``, which are small, of one type and on one device, with their names."""
    counts = np.array([one.numel() for one in tensors.values()])
    per_word = max(1, 8 // dtype.itemsize)
    lengths = -(-counts * dtype.itemsize // 8)
    ragged = (counts % per_word > 0) & (lengths > 1)
    names, parts = list(tensors), list(tensors.values())
    fill = [parts[0].new_zeros(count) for count in range(per_word)]
    together = (
        np.cumsum(lengths) // WORDS_MAX
    )  # the pack that each is in, and so at most twice that
    bounds = [0, *(np.flatnonzero(np.diff(together)) + 1).tolist(), len(parts)]
    for begin, end in itertools.pairwise(bounds):
        with torch.no_grad():
            flat = torch._utils._flatten_dense_tensors(  # type: ignore[no-untyped-call] # noqa: SLF001 - one call for all
                [
                    one
                    for part, count in zip(
                        parts[begin:end], counts[begin:end].tolist(), strict=True
                    )
                    for one in ((part, fill[-count % per_word]) if count % per_word else (part,))
                ]
            )
        # Flattening one tensor copies nothing, so that it may be a view: of other numbers, or where no word begins.
        flat = flat.resolve_conj().resolve_neg()
        if flat.storage_offset() * flat.element_size() % 8:
            flat = flat.clone()
        words = flat.view(torch.int64)
        yield names[begin:end], _Pack(words, lengths[begin:end], ragged[begin:end])


def combined(hashes: Sequence[str]) -> str:
    """One hash over many."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]
