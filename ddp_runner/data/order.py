"""The sample order: which indices a step takes, as a pure function of seed, epoch and step.

Nothing here knows how many ranks or loader workers there are until a step's indices are shared out;
so neither changes which samples a step takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ddp_runner.core.batch_sizes import cut
from ddp_runner.data.draws import Draws, SamplerDraws
from ddp_runner.data.permutation import Indices, KeyedPermutation, Permutation, SortedPermutation

if TYPE_CHECKING:
    from typing_extensions import Self

# Which order a run has, for as long as it lives: its checkpoints name it.
ORDER_VERSION = 2  # of a run that begins now
FIRST_ORDER_VERSION = 1  # of a checkpoint that names none
_PERMUTATIONS: dict[int, type[SortedPermutation | KeyedPermutation]] = {
    FIRST_ORDER_VERSION: SortedPermutation,
    ORDER_VERSION: KeyedPermutation,
}
_EPOCHS_KEPT = 2  # the one being trained and the one that prefetch has begun
_AHEAD = 4096  # indices: so many cost little more at once than one step's alone


def known_order_version(version: int) -> int:
    """``version``, if this program has it. Raises ValueError."""
    if version not in _PERMUTATIONS:
        known = ", ".join(map(str, _PERMUTATIONS))
        raise ValueError(f"its samples are in order {version}; this program knows {known}")
    return version


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """The samples that one rank loads in the steps from ``first_step`` of an epoch on, a row a step."""

    share: tuple[int, int, int]  # the epoch; the first place in the global batch, and how many
    first_step: int
    rows: Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """The order in which a run takes the samples of a map-style dataset.

    An epoch is a permutation cut into global batches; the last partial one is dropped, so that
    the global batch is constant. Raises ValueError if not even one global batch fits.
    ``steps_max``: an epoch ends after so many global batches; 0: after all.
    """

    seed: int
    dataset_size: int
    global_batch_size: int
    shuffle: bool = True
    version: int = ORDER_VERSION
    shares: tuple[int, ...] = ()  # of the ranks, in proportion; none: equal ones
    draws: Draws | SamplerDraws | None = None  # None: each sample once, in any order
    first_step: int = 0  # at which the first epoch begins
    steps_max: int = 0
    _epochs: dict[int, Permutation] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _ahead: list[_Ahead] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known_order_version(self.version)
        if self.global_batch_size < 1:
            raise ValueError(f"global_batch_size={self.global_batch_size}: at least 1")
        if self.dataset_size < self.global_batch_size:
            raise ValueError(
                f"the dataset has {self.dataset_size} samples, "
                f"fewer than one global batch of {self.global_batch_size}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in the dataset, up to ``steps_max``."""
        whole = self.dataset_size // self.global_batch_size
        return min(whole, self.steps_max or whole)

    def position(self, step: int) -> tuple[int, int]:
        """``(epoch, step within the epoch)`` of ``step``."""
        if step < self.first_step:
            raise ValueError(f"step={step}: at least {self.first_step}")
        return divmod(step - self.first_step, self.steps_per_epoch)

    def batch_size(self, step: int) -> int:
        """Return the number of samples of ``step`` over all ranks."""
        _, step_in_epoch = self.position(step)
        left = self.dataset_size - step_in_epoch * self.global_batch_size
        return min(self.global_batch_size, left)

    def indices(self, step: int) -> Indices:
        """The sample indices of ``step`` over all ranks, in order."""
        return self._part_of(step, first=0, count=self.batch_size(step))

    def share_of(self, step: int, *, rank: int, world_size: int) -> Indices:
        """The sample indices that ``rank`` loads for ``step``; empty if the ranks outnumber them."""
        first, count = self.span_of(step, rank=rank, world_size=world_size)
        return self._part_of(step, first=first, count=count)

    def span_of(self, step: int, *, rank: int, world_size: int) -> tuple[int, int]:
        """Return the first place and the number of the samples of ``step`` that ``rank`` loads."""
        total = self.batch_size(step)
        if not self.shares:
            return share_span(total, rank=rank, world_size=world_size)
        if world_size != len(self.shares):
            raise ValueError(f"world_size={world_size}: there are shares of {len(self.shares)}")
        counts = cut(total, self.shares)
        return sum(counts[:rank]), counts[rank]

    def of_ranks(self, ranks: Sequence[int]) -> Self:
        """The same order for these ranks of the launch, in place of all."""
        return (
            replace(self, shares=tuple(self.shares[one] for one in ranks)) if self.shares else self
        )

    def in_version(self, version: int) -> Self:
        """The same samples in this version of the order; itself if that is the one."""
        return self if version == self.version else replace(self, version=version)

    def _part_of(self, step: int, *, first: int, count: int) -> Indices:
        epoch, step_in_epoch = self.position(step)
        if not self.shuffle or count == 0:
            begin = step_in_epoch * self.global_batch_size + first
            return np.arange(begin, begin + count, dtype=np.int64)
        ahead = self._ahead[0] if self._ahead else None
        if (
            ahead is None
            or ahead.share != (epoch, first, count)
            or not 0 <= step_in_epoch - ahead.first_step < len(ahead.rows)
        ):
            ahead = self._looked_ahead(epoch, step_in_epoch, first=first, count=count)
            self._ahead[:] = [ahead]
        mine: Indices = ahead.rows[step_in_epoch - ahead.first_step]
        return mine

    def _looked_ahead(self, epoch: int, step_in_epoch: int, *, first: int, count: int) -> _Ahead:
        whole = (
            self.dataset_size // self.global_batch_size
        )  # an order with partial batches has more steps
        whole_left = min(whole, self.steps_per_epoch) - step_in_epoch
        steps = max(1, min(_AHEAD // count, whole_left))
        begins = (step_in_epoch + np.arange(steps, dtype=np.int64)) * self.global_batch_size + first
        rows = self._permutation(epoch).at(begins[:, None] + np.arange(count, dtype=np.int64))
        rows.setflags(write=False)
        return _Ahead(share=(epoch, first, count), first_step=step_in_epoch, rows=rows)

    def _permutation(self, epoch: int) -> Permutation:
        found = self._epochs.get(epoch)
        if found is None:
            make = _PERMUTATIONS[self.version]
            if self.draws is None:
                found = make(seed=self.seed, epoch=epoch, size=self.dataset_size)
            else:
                found = self.draws.of_epoch(seed=self.seed, epoch=epoch)
            while len(self._epochs) >= _EPOCHS_KEPT:
                del self._epochs[min(self._epochs, key=lambda kept: -abs(kept - epoch))]
            self._epochs[epoch] = found
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeOrder(SampleOrder):
    """Every sample once, in the dataset's own order; the last global batch may be a smaller one."""

    shuffle: bool = False

    def __post_init__(self) -> None:
        """Do nothing: the last batch may be incomplete."""

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in the dataset."""
        return -(-self.dataset_size // self.global_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerOrder(SampleOrder):
    """The order in which a torch ``Sampler`` gives them, which decides it in each epoch.

    ``dataset_size`` is the sampler's. The last batch may be a smaller one, unless ``drop_last``.
    """

    drop_last: bool = False
    _taken: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Do nothing: the last batch may be incomplete, as in torch."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        whole = self.dataset_size // self.global_batch_size
        return whole if self.drop_last else -(-self.dataset_size // self.global_batch_size)

    def take(self, indices: Iterable[int]) -> None:
        """Have the next epoch consist of these. Raises ValueError for another number of them."""
        self._taken[:] = indices
        if len(self._taken) != self.dataset_size:
            said = f"the sampler gives {len(self._taken)} samples"
            raise ValueError(f"{said}, and its length is {self.dataset_size}")

    def _part_of(self, step: int, *, first: int, count: int) -> Indices:
        _, step_in_epoch = self.position(step)
        begin = step_in_epoch * self.global_batch_size + first
        return np.asarray(self._taken[begin : begin + count], dtype=np.int64)


def share_size(total: int, *, rank: int, world_size: int) -> int:
    """Return the number of samples, of ``total``, that ``rank`` gets; the first ranks take the remainder."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: 0 to {world_size - 1}")
    return total // world_size + (rank < total % world_size)


def share_span(total: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first place and the number of the samples, of ``total``, that ``rank`` gets."""
    count = share_size(total, rank=rank, world_size=world_size)
    return rank * (total // world_size) + min(rank, total % world_size), count


def share(indices: Indices, *, rank: int, world_size: int) -> Indices:
    """The contiguous part of ``indices`` that ``rank`` loads; empty if the ranks outnumber them."""
    first, count = share_span(len(indices), rank=rank, world_size=world_size)
    return indices[first : first + count]


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
