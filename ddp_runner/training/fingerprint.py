"""A 64-bit hash of tensors, fast enough to take now and then while training. Not cryptographic."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_CHUNK = 1 << 18  # of 8-byte words: 2 MB, which stays in the cache


def tensor_hash(tensor: Tensor) -> str:
    """16 hex digits over the bytes of ``tensor``; a changed, moved or swapped bit changes them.

    A sum of 8-byte words times odd multipliers that grow with the position, modulo 2**64: each
    single changed word changes the sum, since odd numbers are invertible there.
    """
    words = _as_words(tensor.detach())
    total = 0
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        first = 2 * start + 1
        odd = torch.arange(first, first + 2 * chunk.numel(), 2, device=chunk.device)
        total += int((chunk * odd).sum())
    return f"{total % 2**64:016x}"


def _as_words(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    rest = -flat.numel() % 8
    if rest:
        flat = torch.nn.functional.pad(flat, (0, rest))
    # A view needs aligned storage, which the start of a slice may not have.
    return (flat if flat.storage_offset() % 8 == 0 else flat.clone()).view(torch.int64)


def state_hashes(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> hash, in the order of ``state``."""
    return {name: tensor_hash(value) for name, value in state.items() if value.numel()}


def combined(hashes: Sequence[str]) -> str:
    """One hash over many."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]
