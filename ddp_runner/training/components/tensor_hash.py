"""A 64-bit hash of tensors, fast enough to take now and then while training. Not cryptographic."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

_CHUNK = 1 << 18  # of 8-byte words: 2 MB, which stays in the cache
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd; 2**64 over the golden ratio


def tensor_hash(tensor: Tensor) -> str:
    """16 hex digits over the bytes of ``tensor``; a changed, moved or swapped bit changes them.

    Modulo 2**64, a sum of 8-byte words times odd numbers without a pattern, one for each position;
    the sums of the chunks are added with odd multipliers too. A single changed word changes the sum,
    since odd numbers are invertible there. A product keeps only the low bits of what is multiplied
    with a high one (of bit 63, a sign, one bit: two would cancel): each word's upper half is folded
    into its lower one first, so that of every bit at least 32 count. One core takes 2 to 6 GB/s. For
    any thread.
    """
    chunks, device = _chunks(tensor.detach()), tensor.device
    if device.type != "cpu":
        return _as_text(int(_total_on_device(chunks, device)))
    total, multiplier = 0, 1
    for chunk_sum in _sums_on_host(chunks):
        total += multiplier * chunk_sum
        multiplier = multiplier * _MULTIPLIER % 2**64
    return _as_text(total)


def _as_text(total: int) -> str:
    return f"{total % 2**64:016x}"


def _sums_on_host(chunks: Iterable[Tensor]) -> Iterator[int]:
    # numpy and not torch: a thread that hashes beside training would start a second set of torch's
    # compute threads for itself.
    odd = _odd_numbers(torch.device("cpu")).numpy()
    folded = np.empty(_CHUNK, dtype=np.int64)
    for chunk in chunks:
        words = chunk.numpy()
        mixed = folded[: words.size]
        np.right_shift(words, 32, out=mixed)
        np.bitwise_xor(mixed, words, out=mixed)
        yield int(np.dot(mixed, odd[: words.size]))


def _total_on_device(chunks: Iterable[Tensor], device: torch.device) -> Tensor:
    """The same number, left on the device: who reads it waits once, however many chunks there are."""
    odd = _odd_numbers(device)
    sums = [(((chunk >> 32) ^ chunk) * odd[: chunk.numel()]).sum() for chunk in chunks]
    powers, multiplier = [], 1
    for _ in sums:
        powers.append(_signed(multiplier))
        multiplier = multiplier * _MULTIPLIER % 2**64
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=device)
    return (torch.stack(sums) * torch.tensor(powers, device=device)).sum()


@functools.lru_cache(maxsize=8)
def _odd_numbers(device: torch.device) -> Tensor:
    """The same everywhere, and far from equal distances, at which changes would cancel.

    Two rounds of the mixing of splitmix64 (Steele et al., 2014), with shifts that keep the sign.
    """
    numbers = torch.arange(1, _CHUNK + 1, device=device) * _signed(_MULTIPLIER)
    for factor, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        numbers = (numbers ^ (numbers >> shift)) * _signed(factor)
    return (numbers ^ (numbers >> 31)) | 1


def _signed(number: int) -> int:
    """As int64 has these 64 bits."""
    return number - 2**64 if number >= 2**63 else number


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes as 8-byte words; what is left over at the end is a word of its own."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    rest = flat.numel() % 8
    # A view needs aligned storage, which the start of a slice may not have.
    aligned = flat if flat.storage_offset() % 8 == 0 else flat.clone()
    words = aligned[: flat.numel() - rest].view(torch.int64)
    for start in range(0, words.numel(), _CHUNK):
        yield words[start : start + _CHUNK]
    if rest:
        yield torch.nn.functional.pad(flat[-rest:], (0, 8 - rest)).view(torch.int64)


def state_hashes(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> hash, in the order of ``state``; a device is waited for once."""
    filled = {name: value.detach() for name, value in state.items() if value.numel()}
    totals = {
        name: _total_on_device(_chunks(value), value.device)
        for name, value in filled.items()
        if value.device.type != "cpu"
    }
    read = torch.stack(list(totals.values())).tolist() if totals else []
    on_device = {name: _as_text(total) for name, total in zip(totals, read, strict=True)}
    return {name: on_device.get(name) or tensor_hash(value) for name, value in filled.items()}


def combined(hashes: Sequence[str]) -> str:
    """One hash over many."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]
