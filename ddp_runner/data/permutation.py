"""Permutations of an epoch's samples, named by seed and epoch: places in, sample indices out.

Nothing here depends on the versions of numpy or torch, or on the processor. Pure functions of their
arguments; a large dataset costs no more than a small one, except in the first version.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ddp_runner.values.generators import mix64

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF
# By measurement: eight rounds make places, and distances between neighbours, even. A small set needs
# more for all its arrangements to be as likely, because a round has few values to choose from.
_ROUNDS = 12
_ROUNDS_OF_FEW = 24
_FEW = 4096


def _mix64_array(values: _Words) -> _Words:
    """:func:`mix64` of each element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _base(seed: int, epoch: int) -> int:
    return mix64(mix64(seed & _MASK) ^ ((epoch * _GOLDEN) & _MASK))


def hashes_of(places: Indices, *, seed: int, epoch: int) -> _Words:
    """64 random bits for each place, that ``(seed, epoch)`` names; any shape."""
    counters = (places.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return _mix64_array(counters + np.uint64(_base(seed, epoch)))


class Permutation(Protocol):
    """One epoch's order of the samples."""

    def at(self, places: Indices) -> Indices:
        """The samples at these places of the epoch; one-to-one, but where they are drawn by weight."""
        ...


class KeyedPermutation:
    """The permutation of ``range(size)`` that ``(seed, epoch)`` names, without a table.

    A Feistel network over pairs (left, right): left of ``range(a)``, right of ``range(b)``, where
    ``a * b`` is just above ``size``. Each round adds a keyed hash of one half to the other one, which
    is one-to-one whatever the hash. What falls beyond ``size`` is sent through again, until it falls
    within. Sources: Luby and Rackoff, SIAM J. Computing 17(2), 1988; Black and Rogaway, "Ciphers with
    arbitrary finite domains", CT-RSA 2002, for the halves of any size and for this cycle walking.
    Not a cipher: it mixes well and keeps no secret.
    """

    # INVARIANT stable-order: the order never depends on the versions of numpy or torch, or on the
    # processor, because a resumed run must continue it: nothing but arithmetic of 64-bit integers.
    # Broken if: this calls a library's shuffle, whose stream may change between versions, or if
    # anything here changes without a new version in SampleOrder.
    # Guarded by: test_order_is_the_same_for_ever.

    def __init__(self, *, seed: int, epoch: int, size: int) -> None:
        self._size = size
        # Even: with an odd half, all rounds on the other one would be even permutations.
        left = math.isqrt(max(0, size - 1)) + 1
        left += left % 2
        right = -(-size // left)
        self._left, self._right = np.uint64(left), np.uint64(right)
        self._is_exact = left * right == size
        base = _base(seed, epoch)
        rounds = _ROUNDS_OF_FEW if size < _FEW else _ROUNDS
        self._keys = [np.uint64(mix64((base + n * _GOLDEN) & _MASK)) for n in range(1, rounds + 1)]

    def at(self, places: Indices) -> Indices:
        """The samples at ``places``, each within ``range(size)``; any shape."""
        values = self._once(places.astype(np.uint64))
        while not self._is_exact:
            beyond = values >= np.uint64(self._size)
            if not beyond.any():
                break
            values[beyond] = self._once(values[beyond])
        return values.astype(np.int64)

    def _once(self, values: _Words) -> _Words:
        """Apply the network once: a one-to-one mapping of ``range(a * b)``."""
        left = values // self._right
        right = values - left * self._right
        for number, key in enumerate(self._keys):
            # Without the lowest bit of the hash there is no carry out of 64 bits.
            if number % 2 == 0:
                left = (left + (_mix64_array(right + key) >> np.uint64(1))) % self._left
            else:
                right = (right + (_mix64_array(left + key) >> np.uint64(1))) % self._right
        return left * self._right + right


class SortedPermutation:
    """The permutation of the first version's runs: a table, made by sorting hashes; 8 bytes a sample."""

    def __init__(self, *, seed: int, epoch: int, size: int) -> None:
        # Part of stable-order: the keys are distinct (mix64 is one-to-one), so that every sorting
        # algorithm gives the same result.
        counters = np.arange(size, dtype=np.uint64) * np.uint64(_GOLDEN)
        counters += np.uint64(_base(seed, epoch))
        self._table = np.argsort(_mix64_array(counters)).astype(np.int64, copy=False)

    def at(self, places: Indices) -> Indices:
        """The samples at ``places``, each within ``range(size)``; any shape."""
        return self._table[places]
