"""Draws an epoch's samples by weight, or by a program's own sampler.

By weight it is a function of seed and epoch alone: nothing but integers and single operations of IEEE numbers, whose
results are the same on every machine (stable-order in ``permutation.py``).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ddp_runner.data.permutation import Indices, Permutation, hashes_of
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.values.generators import generators_kept, seed_host, seed_offset

_TOTAL = 2**40  # of whole numbers that stand for the weights: 64 random bits fall on them evenly
_DRAWN = 1  # a seed beside the run's own
_TERMS = 17  # of the series for the logarithm: beyond the last bit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """``weights`` has an entry for each sample.

    With ``replacement`` each place of an epoch is drawn by itself, so a sample may come several times or
    never; without it each comes once, heavy ones earlier.
    """

    weights: npt.NDArray[np.float64]
    replacement: bool = True

    @classmethod
    def of(cls, *, size: int, weights: Any, replacement: bool) -> Draws | None:
        """Return draws by a task's ``weights``; None if it has none. Raises ValueError, which says what is wrong."""
        if weights is None:
            return None
        found = _weights(weights, size, replacement=replacement)
        return cls(weights=found, replacement=replacement)

    def digest(self) -> str:
        """16 hex digits: another one makes another run."""
        found = hashlib.sha256(str(self.replacement).encode())
        found.update(self.weights.tobytes())
        found.update(b"none")  # as versions wrote it whose samples could have lengths, too
        return found.hexdigest()[:16]

    def of_epoch(self, *, seed: int, epoch: int) -> Permutation:
        """The samples of an epoch."""
        kind = _WithReplacement if self.replacement else _WithoutReplacement
        return kind(self.weights, seed=seed + _DRAWN, epoch=epoch)


class SamplerDraws:
    """The samples of an epoch as a torch ``Sampler`` gives them, the same in every process.

    Before each epoch its ``set_epoch`` is called, and Python's, NumPy's, torch's and its own generator are seeded;
    they are given back as they were. It must follow from these alone.
    """

    def __init__(self, sampler: Any, *, dataset_size: int) -> None:
        """Raise ValueError where the sampler has no length, or another one than the data could have."""
        self._sampler = sampler
        self._dataset_size = dataset_size
        self._name = type(sampler).__name__
        self.samplings = 0  # how often the sampler has been drawn from
        try:
            self.size = len(sampler)
        except TypeError:
            raise ValueError(f"its sampler {self._name} has no length (__len__)") from None
        if not 0 < self.size <= dataset_size:
            expected = (
                f"gives {self.size:,} samples an epoch, of {dataset_size:,}: 1 to all is possible"
            )
            raise ValueError(f"its sampler {self._name} {expected}")
        generator = getattr(sampler, "generator", None)
        self._generator = generator if isinstance(generator, torch.Generator) else None
        self._first_seed = 0 if self._generator is None else self._generator.initial_seed()

    def digest(self) -> str:
        """16 hex digits: another one makes another run."""
        taken = b"".join(self._indices(seed=0, epoch=epoch).tobytes() for epoch in (0, 1))
        return hashlib.sha256(self._name.encode() + taken).hexdigest()[:16]

    def of_epoch(self, *, seed: int, epoch: int) -> Permutation:
        """The samples of an epoch."""
        return _Listed(self._indices(seed=seed, epoch=epoch))

    def _indices(self, *, seed: int, epoch: int) -> Indices:
        own = () if self._generator is None else (self._generator,)
        self.samplings += 1
        with generators_kept(also=own):
            seed_host(int(hashes_of(np.zeros(1, np.int64), seed=seed + _DRAWN, epoch=epoch)[0]))
            for generator in own:
                seed_offset(generator, first=self._first_seed, offset=epoch)
            if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
                set_epoch(epoch)
            found = np.asarray([int(index) for index in self._sampler], dtype=np.int64)
        if len(found) != self.size or not ((found >= 0) & (found < self._dataset_size)).all():
            expected = f"must give {self.size:,} samples, of 0 to {self._dataset_size - 1:,}"
            raise BadInputError("train_loader", "", f"its sampler {self._name} {expected}")
        return found


class _Listed:
    """The samples of an epoch, one after the other."""

    def __init__(self, table: Indices) -> None:
        self._table = table

    def at(self, places: Indices) -> Indices:
        """The samples at these places of the epoch."""
        found: Indices = self._table[places]
        return found


class _WithReplacement:
    """Draws each place of an epoch independently: 64 random bits, looked up in the sums of the weights."""

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


class _WithoutReplacement:
    """Draws every sample once, by exponential times, which are short for heavy samples.

    Source: Efraimidis and Spirakis, "Weighted random sampling with a reservoir", Information Processing
    Letters 97(5), 2006.
    """

    def __init__(self, weights: npt.NDArray[np.float64], *, seed: int, epoch: int) -> None:
        bits = hashes_of(np.arange(len(weights), dtype=np.int64), seed=seed, epoch=epoch)
        uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
        # A sample for each place of the epoch; 8 bytes a sample.
        self._table = np.argsort(-_log(uniform) / weights, kind="stable").astype(np.int64)

    def at(self, places: Indices) -> Indices:
        """The samples at these places of the epoch."""
        found: Indices = self._table[places]
        return found


def _log(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The natural logarithm by its series in (m - 1) / (m + 1): a library's own may differ in the last bit."""
    mantissa, exponent = np.frexp(values)
    z = (mantissa - 1.0) / (mantissa + 1.0)
    square, total = z * z, np.zeros_like(z)
    for term in range(_TERMS, -1, -1):
        total = total * square + 1.0 / (2 * term + 1)
    found: npt.NDArray[np.float64] = 2.0 * z * total + exponent * 0.6931471805599453
    return found


def _weights(given: Any, size: int, *, replacement: bool) -> npt.NDArray[np.float64]:
    try:
        weights: npt.NDArray[np.float64] = np.asarray(given).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Datasets(weights=...) must be numbers, one for each sample: {error}"
        ) from None
    if weights.shape != (size,):
        shape = "x".join(map(str, weights.shape)) or "no"
        raise ValueError(f"Datasets(weights=...) has {shape} entries, and the data {size} samples")
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
