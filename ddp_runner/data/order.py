"""The sample order: which indices a step takes, as a pure function of seed, epoch and step.

Nothing here knows how many ranks or loader workers there are until :func:`share` cuts a step's
indices; so neither changes which samples a step takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 0xFFFFFFFFFFFFFFFF
_EPOCHS_CACHED = 2  # the one being trained and the one that prefetch has begun


def mix64(value: int) -> int:
    """Scramble 64 bits one-to-one. Source: the finaliser of splitmix64 (Steele et al., 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix64_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """:func:`mix64` of each element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permutation(*, seed: int, epoch: int, size: int) -> Indices:
    """A permutation of ``range(size)`` named by ``(seed, epoch)``, shape ``(size,)``."""
    # INVARIANT stable-order: the order never depends on the versions of numpy or torch, or on the
    # processor, because a resumed run must continue it. The keys are distinct (mix64 is
    # one-to-one), so every sorting algorithm gives the same result.
    # Broken if: this calls a library's shuffle, whose stream may change between versions.
    # Guarded by: test_order_is_the_same_for_ever.
    base = mix64(mix64(seed & _MASK) ^ ((epoch * _GOLDEN) & _MASK))
    counters = np.arange(size, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(base)
    return np.argsort(_mix64_array(counters)).astype(np.int64, copy=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """The order in which a run takes the samples of a map-style dataset.

    An epoch is a permutation cut into global batches; the last partial one is dropped, so that
    the global batch is constant. Raises ValueError if not even one global batch fits.
    """

    seed: int
    dataset_size: int
    global_batch_size: int
    shuffle: bool = True
    _epochs: dict[int, Indices] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise ValueError(f"global_batch_size={self.global_batch_size}: at least 1")
        if self.dataset_size < self.global_batch_size:
            raise ValueError(
                f"the dataset has {self.dataset_size} samples, "
                f"fewer than one global batch of {self.global_batch_size}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in the dataset."""
        return self.dataset_size // self.global_batch_size

    def position(self, step: int) -> tuple[int, int]:
        """``(epoch, step within the epoch)`` of ``step``."""
        if step < 0:
            raise ValueError(f"step={step}: at least 0")
        return divmod(step, self.steps_per_epoch)

    def indices(self, step: int) -> Indices:
        """The sample indices of ``step`` over all ranks, shape ``(global_batch_size,)``."""
        epoch, step_in_epoch = self.position(step)
        first = step_in_epoch * self.global_batch_size
        return self._epoch(epoch)[first : first + self.global_batch_size]

    def _epoch(self, epoch: int) -> Indices:
        order = self._epochs.get(epoch)
        if order is None:
            if self.shuffle:
                order = permutation(seed=self.seed, epoch=epoch, size=self.dataset_size)
            else:
                order = np.arange(self.dataset_size, dtype=np.int64)
            order.setflags(write=False)
            while len(self._epochs) >= _EPOCHS_CACHED:
                del self._epochs[min(self._epochs, key=lambda cached: -abs(cached - epoch))]
            self._epochs[epoch] = order
        return order


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeOrder(SampleOrder):
    """Every sample once, in the dataset's own order; the last global batch may be a smaller one."""

    shuffle: bool = False

    def __post_init__(self) -> None:
        """No batch has to be whole."""

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in the dataset."""
        return -(-self.dataset_size // self.global_batch_size)


def share_size(total: int, *, rank: int, world_size: int) -> int:
    """How many of ``total`` samples fall to ``rank``; the first ranks take the rest."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: 0 to {world_size - 1}")
    return total // world_size + (rank < total % world_size)


def share(indices: Indices, *, rank: int, world_size: int) -> Indices:
    """The contiguous part of ``indices`` that ``rank`` loads; empty if the ranks outnumber them."""
    size = share_size(len(indices), rank=rank, world_size=world_size)
    first = rank * (len(indices) // world_size) + min(rank, len(indices) % world_size)
    return indices[first : first + size]


def micro_batch_count(samples: int, size: int) -> int:
    """Into how many micro-batches of at most ``size`` a share of ``samples`` is cut."""
    if size < 1:
        raise ValueError(f"micro_batch_size={size}: at least 1")
    return -(-samples // size)


def micro_batches(indices: Indices, size: int) -> list[Indices]:
    """``indices`` cut into as few pieces of at most ``size`` as there can be, nearly equal ones.

    A remainder would be a small batch, perhaps of one sample, which batch normalisation refuses.
    """
    count = micro_batch_count(len(indices), size)
    return [share(indices, rank=number, world_size=count) for number in range(count)]
