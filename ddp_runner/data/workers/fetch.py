"""Loads one index batch, with the generators seeded per sample; a failure becomes a value.

Runs in loader workers and, without workers, in the rank itself. Never decides what to do about a
sample that fails.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from torch.utils.data import get_worker_info

from ddp_runner.data.by_number import gives_several_only, sample_at
from ddp_runner.data.sample_hash import sample_hash
from ddp_runner.data.unshared import Unshared
from ddp_runner.data.workers.memory_files import collate_batch
from ddp_runner.kernel.rules.classify import lacks_memory
from ddp_runner.kernel.system.user_errors import traceback_text, user_place
from ddp_runner.values.generators import generators_kept, mix64, seed_host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15
_SALT = 0x5A17ED5EED5A17ED  # keeps the seeds of samples apart from the keys of the sample order


class Key(Protocol):
    """Names what is read at once; what the index stream carries to a worker."""

    @property
    def indices(self) -> tuple[int, ...]:
        """The numbers of its samples."""
        ...


Key_contra = TypeVar("Key_contra", bound=Key, contravariant=True)


class Reader(Protocol[Key_contra]):
    """Reads keys in a worker; each worker has its own copy."""

    @property
    def dataset(self) -> Any:
        """The dataset whose attributes may count reads; None where what is counted is a position, which is kept."""
        ...

    def enter_worker(self, worker: int) -> None:
        """Called once in each worker, with its number, before it reads."""
        ...

    def load(self, key: Key_contra, *, on_sample: Callable[[int], None]) -> Any | SampleFailed:
        """Return the data of ``key``, or the reason why there is none; no ``Exception`` of the dataset escapes.

        ``on_sample`` is called before each sample.
        """
        ...


class BatchKey(NamedTuple):
    """Names one micro-batch of a map-style dataset.

    ``hashed``: of each sample only a hash is wanted (:mod:`sample_hash`).
    """

    epoch: int
    indices: tuple[int, ...]
    hashed: bool = False


def unobserved(_index: int) -> None:
    """Shows nobody which sample is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailed:
    """The dataset or the collate function raised. ``indices`` are the samples to suspect.

    ``for_memory``: an allocation was refused, which says nothing about any sample. ``refused``: what
    is wrong with the dataset as a whole, and what to do; empty: nothing is. ``option``: by whose words.
    """

    indices: tuple[int, ...]
    error: str
    traceback: str
    for_memory: bool
    refused: str = ""
    option: str = "--task"


def seeding_base(*, seed: int, epoch: int) -> int:
    """The part of the sample seeds that ``(seed, epoch)`` decides."""
    return mix64(mix64((seed ^ _SALT) & _MASK) ^ (epoch * _GOLDEN & _MASK))


def seed_generators(base: int, *, index: int) -> None:
    """Seed python's, numpy's and torch's CPU generator for sample ``index`` of ``base``.

    About 6 microseconds. ``torch.manual_seed`` would take a hundred, because it also visits every
    device; generators of devices are left alone, since a dataset must not touch a device.
    """
    seed_host(mix64((base + index * _GOLDEN) & _MASK))


class SampleReader:
    """Loads and collates the samples of a :class:`BatchKey`.

    A dataset with ``deterministic = True`` is not seeded, though a task's own collate function is. It is
    asked for a whole micro-batch by ``__getitems__`` if it has that method. One with nothing else is asked
    so for each sample.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        collate: Callable[[list[Any]], Any],
        worker_init: Callable[[int], None] | None = None,
    ) -> None:
        """``worker_init``: what a worker calls with its number before it loads."""
        self._dataset = dataset
        self._worker_init = worker_init
        self._unusable: SampleFailed | None = None  # this worker could not be set up
        self._seed = seed
        self._collate = collate
        self._deterministic = bool(getattr(dataset, "deterministic", False))
        # A task's own may draw, as MixUp does; after samples that are seeded it is seeded, too.
        self._seeds_collate = self._deterministic and collate not in (collate_batch, list)
        self._many = getattr(dataset, "__getitems__", None) if self._deterministic else None
        self._several_only = gives_several_only(dataset)
        self._here: SampleReader | None = None

    def one_by_one(self) -> SampleReader:
        """The same, but the dataset is never asked for many samples at once: each is announced."""
        other = copy.copy(self)
        other._many = None  # noqa: SLF001 - of its own class
        return other

    def enter_worker(self, worker: int) -> None:
        """Called once in each worker; a failure becomes that of each batch."""
        if self._worker_init is None:
            return
        info = get_worker_info()
        if info is not None:
            # As in torch's workers, for the function that asks. The value is frozen.
            object.__setattr__(info, "dataset", self._dataset)
        try:
            self._worker_init(worker)
        except Exception as error:  # noqa: BLE001 - the loader-fetch boundary
            refused = failed(error, indices=())
            self._unusable = replace(refused, refused=refused.error, option="worker_init_fn")

    @property
    def dataset(self) -> Any:
        """The one that it loads from."""
        return self._dataset

    @property
    def gives_many(self) -> bool:
        """True if the dataset loads a batch at once, so that the sample being read is unknown."""
        return self._many is not None

    def load(self, key: BatchKey, *, on_sample: Callable[[int], None]) -> Any:
        """The collated batch, or :class:`SampleFailed`; no ``Exception`` of the dataset escapes.

        ``on_sample`` gets each index before it is loaded, where they are loaded one by one.
        """
        if self._unusable is not None:
            return self._unusable
        if self._many is None:
            samples = self._one_by_one(key, on_sample)
        else:
            samples = self._all_at_once(key, on_sample)
        if isinstance(samples, SampleFailed):
            return samples
        if self._seeds_collate:
            seed_generators(seeding_base(seed=self._seed, epoch=key.epoch), index=key.indices[-1])
        try:
            return list(map(sample_hash, samples)) if key.hashed else self._collate(samples)
        except Exception as error:  # noqa: BLE001 - the loader-fetch boundary
            return failed(error, indices=key.indices)

    def _one_by_one(
        self, key: BatchKey, on_sample: Callable[[int], None]
    ) -> list[Any] | SampleFailed:
        samples: list[Any] = []
        base = seeding_base(seed=self._seed, epoch=key.epoch)
        for index in key.indices:
            on_sample(index)  # outside the boundary: what it raises is not the dataset's
            try:
                if not self._deterministic:
                    seed_generators(base, index=index)
                one = (
                    sample_at(self._dataset, index) if self._several_only else self._dataset[index]
                )
                samples.append(one)
            except Exception as error:  # noqa: BLE001 - the loader-fetch boundary
                return failed(error, indices=(index,))
        return samples

    def _all_at_once(
        self, key: BatchKey, on_sample: Callable[[int], None]
    ) -> list[Any] | SampleFailed:
        assert self._many is not None
        try:
            return list(self._many(list(key.indices)))
        except Exception as error:  # noqa: BLE001 - the loader-fetch boundary
            # One by one only names the sample; if each loads alone, the whole batch is named.
            alone = self._one_by_one(key, on_sample)
            if isinstance(alone, SampleFailed):
                return alone
            return failed(error, indices=key.indices)

    def load_here(self, key: BatchKey, *, on_sample: Callable[[int], None] = unobserved) -> Any:
        """Load ``key`` like :meth:`load` in the rank's own process: the caller's generators stay untouched.

        As with a worker's batch, no tensor of the batch shares memory with the dataset.
        """
        if self._here is None:
            self._here = copy.copy(self)
            self._here._collate = Unshared(self._collate)  # noqa: SLF001 - of its own class
        if self._deterministic and not self._seeds_collate:
            return self._here.load(key, on_sample=on_sample)
        with generators_kept():
            return self._here.load(key, on_sample=on_sample)


def failed(error: Exception, *, indices: Sequence[int]) -> SampleFailed:
    """``error`` as a value; called while it is handled."""
    lines = str(error).splitlines()
    name = type(error).__name__
    place = f" ({where})" if (where := user_place(error)) else ""
    return SampleFailed(
        indices=tuple(indices),
        error=(f"{name}: {lines[0]}" if lines else name) + place,
        traceback=traceback_text(error),
        for_memory=lacks_memory(error),
    )
