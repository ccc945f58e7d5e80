"""How an epoch's samples are drawn by weight, and put into batches of like length.

Functions of seed and epoch alone: nothing but integers and single operations of IEEE numbers, whose results
are the same on every machine (stable-order in ``permutation.py``).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ddp_runner.data.permutation import Indices, KeyedPermutation, Permutation, hashes_of

BATCHES_SORTED = 50  # global batches among which samples of like length are looked for
_TOTAL = 2**40  # of whole numbers that stand for the weights: 64 random bits fall on them evenly
_DRAWN, _SORTED = 1, 2  # seeds beside the run's own
_TERMS = 17  # of the series for the logarithm: beyond the last bit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """``weights`` and ``lengths`` have an entry for each sample; None: all alike.

    With ``replacement`` each place of an epoch is drawn by itself, so a sample may come several times or
    never; without it each comes once, heavy ones earlier.
    """

    weights: npt.NDArray[np.float64] | None = None
    replacement: bool = True
    lengths: Indices | None = None

    @classmethod
    def of(cls, *, size: int, weights: Any, replacement: bool, lengths: Any) -> Draws | None:
        """Of what a task has given; None where that is nothing. Raises ValueError, which says what is wrong."""
        if weights is None and lengths is None:
            return None
        return cls(
            weights=None if weights is None else _weights(weights, size, replacement=replacement),
            replacement=replacement,
            lengths=None if lengths is None else _lengths(lengths, size),
        )

    def digest(self) -> str:
        """16 hex digits: another one makes another run."""
        found = hashlib.sha256(str(self.replacement).encode())
        for one in (self.weights, self.lengths):
            found.update(b"none" if one is None else one.tobytes())
        return found.hexdigest()[:16]

    def of_epoch(
        self, shuffled: Permutation, *, seed: int, epoch: int, size: int, batch: int
    ) -> Permutation:
        """The samples of an epoch. ``shuffled``: as they come without this; ``batch``: samples of a step."""
        drawn = shuffled
        if self.weights is not None:
            kind = _WithReplacement if self.replacement else _WithoutReplacement
            drawn = kind(self.weights, seed=seed + _DRAWN, epoch=epoch)
        if self.lengths is None:
            return drawn
        table = drawn.at(np.arange(size, dtype=np.int64))
        return _Table(
            _by_length(table, self.lengths, batch=batch, seed=seed + _SORTED, epoch=epoch)
        )


class _Table:
    """A sample for each place of the epoch; 8 bytes a sample."""

    def __init__(self, table: Indices) -> None:
        self._table = table

    def at(self, places: Indices) -> Indices:
        """The samples at these places of the epoch."""
        found: Indices = self._table[places]
        return found


class _WithReplacement:
    """Each place of an epoch is a draw of its own: 64 random bits, looked up in the sums of the weights."""

    def __init__(self, weights: npt.NDArray[np.float64], *, seed: int, epoch: int) -> None:
        # Whole numbers in proportion to the weights; a weight above 0 stays above it.
        shares = np.floor(weights / math.fsum(weights) * _TOTAL).astype(np.uint64)
        self._sums = np.cumsum(np.maximum(shares, (weights > 0).astype(np.uint64)))
        self._seed, self._epoch = seed, epoch

    def at(self, places: Indices) -> Indices:
        """The samples at these places of the epoch."""
        bits = hashes_of(places, seed=self._seed, epoch=self._epoch)
        found: Indices = np.searchsorted(self._sums, bits % self._sums[-1], side="right")
        return found.astype(np.int64)


class _WithoutReplacement(_Table):
    """Every sample once, in the order of exponential times of which a heavy one has a short one.

    Source: Efraimidis and Spirakis, "Weighted random sampling with a reservoir", Information Processing
    Letters 97(5), 2006.
    """

    def __init__(self, weights: npt.NDArray[np.float64], *, seed: int, epoch: int) -> None:
        bits = hashes_of(np.arange(len(weights), dtype=np.int64), seed=seed, epoch=epoch)
        uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
        super().__init__(np.argsort(-_log(uniform) / weights, kind="stable").astype(np.int64))


def _log(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The natural logarithm by its series in (m - 1) / (m + 1): a library's own may differ in the last bit."""
    mantissa, exponent = np.frexp(values)
    z = (mantissa - 1.0) / (mantissa + 1.0)
    square, total = z * z, np.zeros_like(z)
    for term in range(_TERMS, -1, -1):
        total = total * square + 1.0 / (2 * term + 1)
    found: npt.NDArray[np.float64] = 2.0 * z * total + exponent * 0.6931471805599453
    return found


def _by_length(table: Indices, lengths: Indices, *, batch: int, seed: int, epoch: int) -> Indices:
    """Global batches of samples of like length, in random order; what fills no batch stays at the end.

    Sorted within some batches only, so that an epoch's batches differ from the next one's.
    """
    count = len(table) // batch
    whole, rest = table[: count * batch], table[count * batch :]
    run = BATCHES_SORTED * batch
    pieces = [whole[begin : begin + run] for begin in range(0, len(whole), run)]
    batches = np.concatenate(
        [piece[np.argsort(lengths[piece], kind="stable")] for piece in pieces]
    ).reshape(count, batch)
    order = KeyedPermutation(seed=seed, epoch=epoch, size=count)
    shuffled = batches[order.at(np.arange(count, dtype=np.int64))]
    return np.concatenate([shuffled.reshape(-1), rest])


def _weights(given: Any, size: int, *, replacement: bool) -> npt.NDArray[np.float64]:
    weights: npt.NDArray[np.float64] = _array(given, np.float64, size, what="weights")
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(f"the weight of sample {at} is {weights[at]:g}: it must be 0 or more")
    if not weights.any():
        raise ValueError("all weights are 0: no sample could be drawn")
    if not replacement and not weights.all():
        at = int(np.flatnonzero(weights == 0)[0])
        raise ValueError(
            f"the weight of sample {at} is 0, and without replacement each sample comes once: leave it"
            " out of the data"
        )
    return weights


def _lengths(given: Any, size: int) -> Indices:
    lengths: Indices = _array(given, np.int64, size, what="lengths")
    if len(wrong := np.flatnonzero(lengths < 0)):
        raise ValueError(f"the length of sample {int(wrong[0])} is below 0")
    return lengths


def _array(given: Sequence[Any], kind: type, size: int, *, what: str) -> Any:
    try:
        found: npt.NDArray[Any] = np.asarray(given).astype(kind)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Datasets({what}=...) must be numbers, one for each sample: {error}"
        ) from None
    if found.shape != (size,):
        shape = "x".join(map(str, found.shape)) or "no"
        raise ValueError(f"Datasets({what}=...) has {shape} entries, and the data {size} samples")
    return found
