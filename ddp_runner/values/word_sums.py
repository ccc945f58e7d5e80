"""Sums over bytes as 64-bit words, which change with any changed or moved bit. Fast, not cryptographic, and without torch.

Modulo 2**64 a sum of words times odd numbers without a pattern, one for each position. A single changed word changes the
sum, since odd numbers are invertible there. A product keeps only the low bits of what is multiplied with a high one (of
bit 63, a sign, one bit: two would cancel): each word's upper bits are folded into its lower ones first, so that of every
bit at least 32 count. They move by 33, so that numbers of 8, 16 or 32 bits in a word do not meet: all signs may change.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]

MULTIPLIER = 0x9E3779B97F4A7C15  # odd; 2**64 over the golden ratio
WORDS_MAX = 1 << 18  # of one sum: 2 MB
FOLD = 33  # bits by which a word's upper bits move
_AT_ONCE = 1 << 15  # words, which stay in the cache


@functools.lru_cache(maxsize=1)
def odd_numbers() -> Words:
    """Return the factors of :data:`WORDS_MAX` words: the same everywhere, and far from equal distances.

    Changes would cancel at those. Two rounds of the mixing of splitmix64 (Steele et al., 2014), with shifts that keep the
    sign.
    """
    numbers = np.arange(1, WORDS_MAX + 1, dtype=np.int64) * _signed(MULTIPLIER)
    for factor, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        numbers = (numbers ^ (numbers >> shift)) * _signed(factor)
    found: Words = (numbers ^ (numbers >> 31)) | 1
    found.setflags(write=False)
    return found


def sum_of(words: Words, *, first: int = 0) -> int:
    """Return the sum of ``words``, which stand from position ``first`` on; to be taken modulo 2**64."""
    odd, total = odd_numbers()[first : first + len(words)], 0
    room = np.empty(min(_AT_ONCE, len(words)), dtype=np.int64)
    for at in range(0, len(words), _AT_ONCE):
        part = words[at : at + _AT_ONCE]
        mixed = room[: len(part)]
        # Without its sign: a shift that keeps it folds a word and its complement into the same one, zeros and ones too.
        np.right_shift(part.view(np.uint64), np.uint64(FOLD), out=mixed.view(np.uint64))
        np.bitwise_xor(mixed, part, out=mixed)
        total += int(np.dot(mixed, odd[at : at + _AT_ONCE]))
    return total


class BlockSum:
    """The sum of one block, which comes in pieces; used as a hash of hashlib is."""

    def __init__(self) -> None:
        self._total = self._words = 0
        self._rest = b""  # less than a word

    def update(self, view: memoryview) -> None:
        """Take the next bytes of the block."""
        if self._rest:
            missing = 8 - len(self._rest)
            self._rest, view = self._rest + bytes(view[:missing]), view[missing:]
            if len(self._rest) < 8:
                return
            self._add(self._rest)
        count = len(view) // 8 * 8
        self._add(view[:count])
        self._rest = bytes(view[count:])

    def _add(self, whole: Any) -> None:
        words = np.frombuffer(whole, dtype=np.int64)
        self._total += sum_of(words, first=self._words)
        self._words += len(words)

    def digest(self) -> bytes:
        """Return the sum, with zeros behind the last byte up to a whole word; the block is over."""
        if self._rest:
            self._add(self._rest.ljust(8, b"\0"))
        return (self._total % 2**64).to_bytes(8, "little")


def _signed(number: int) -> np.int64:
    """Return the 64 bits of ``number`` as a signed number."""
    return np.int64(number - 2**64 if number >= 2**63 else number)
