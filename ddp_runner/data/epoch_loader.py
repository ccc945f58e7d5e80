"""``SafeDataLoader`` as programs use it without a run: iterated by epochs, like torch's DataLoader."""

from __future__ import annotations

import contextlib
import math
import operator
import warnings
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import IterableDataset

from ddp_runner.data.by_number import gives_by_number
from ddp_runner.data.loader import Loader, LoadObserver, LoadOptions
from ddp_runner.data.map_source import MapSource
from ddp_runner.data.order import SampleOrder, SamplerOrder, WholeOrder
from ddp_runner.data.quarantine import Quarantine
from ddp_runner.data.source import Cut
from ddp_runner.data.workers.fetch import SampleReader
from ddp_runner.data.workers.memory_files import collate_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ddp_runner.data.loader_faults import LoadingRepaired

_EPOCHS_MAX = 2**31


class SafeDataLoader(Loader):
    """Batches of a map-style dataset, epoch after epoch, whatever happens to the worker processes.

    ``for batch in SafeDataLoader(dataset, batch_size=32, shuffle=True, num_workers=2):`` A batch is what
    ``collate_fn`` makes of a list of samples (tensors of ``[batch_size, ...]`` by default). Each ``iter()`` begins
    the next epoch, from 0 on; ``set_epoch`` chooses another one. Which samples a batch has depends on seed and
    epoch alone, and so do the random numbers of a sample (python's, numpy's, torch's on the CPU), however many
    workers there are. A worker that dies or hangs for ``timeout_s`` seconds is replaced and its batch loaded
    again, with a RuntimeWarning; after two in a row there is one fewer, and at last samples are loaded in this process.

    ``shuffle``, ``drop_last``, ``num_workers``, ``pin_memory``, ``prefetch_factor`` and ``persistent_workers`` are as torch's;
    ``seed`` is that of order and samples. With ``world_size`` above 1 this is the part of ``rank`` of each
    ``batch_size * world_size`` samples, and ``drop_last`` must be true, so that all ranks have equally many
    batches. ``sampler``, ``timeout`` and ``worker_init_fn`` are torch's, too: a sampler gives this rank's samples of an
    epoch, whose workers are then new in each; ``timeout`` is another name of ``timeout_s``, with 0 for no limit;
    ``worker_init_fn(number)`` runs in each worker before it loads, and never in this process. ``on_bad_sample``: ``stop``, or ``substitute`` another one, for at most ``max_bad_samples`` samples.

    Raises TypeError for a dataset without a length or items by number, ValueError for numbers that do
    not fit, and, while it is iterated, FaultError for a sample that cannot be loaded. Use it from the
    main thread: workers end with the thread that has made them.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        persistent_workers: bool = False,
        timeout_s: float = 60.0,
        timeout: float | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        sampler: Iterable[int] | None = None,
        on_bad_sample: Literal["stop", "substitute"] = "stop",
        max_bad_samples: int = 10,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        size = _size_of(dataset)
        _refuse_numbers(batch_size, timeout, on_bad_sample)
        _refuse_rank(rank, world_size, drop_last)
        if sampler is not None:
            _refuse_with_sampler(shuffle, world_size, on_bad_sample)
        order = _order(
            sampler, size, batch_size * world_size, seed=seed, shuffle=shuffle, drop_last=drop_last
        )
        bad_max = max_bad_samples if on_bad_sample == "substitute" else 0
        cut = Cut(order=order, rank=rank, world_size=world_size, micro_batch_size=batch_size)
        reader = SampleReader(
            dataset, seed=seed, collate=collate_fn or collate_batch, worker_init=worker_init_fn
        )
        quarantine = Quarantine(seed=seed, dataset_size=size, bad_max=bad_max)
        limit_s = timeout_s if timeout is None else timeout or math.inf
        super().__init__(
            MapSource(reader, cut, quarantine=quarantine),
            total_steps=0,
            num_workers=num_workers,
            options=LoadOptions(
                prefetch_factor=prefetch_factor, pin_memory=pin_memory, timeout_s=limit_s
            ),
            observer=LoadObserver(on_repaired=_warn),
        )
        # As torch's DataLoader has them.
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.collate_fn, self.worker_init_fn = collate_fn, worker_init_fn
        self.num_workers, self.pin_memory, self.drop_last = num_workers, pin_memory, drop_last
        self.timeout = timeout_s if timeout is None else timeout
        self.epoch = 0  # that the next iter() gives
        self.sampler: Any = sampler
        # The samples of the next epoch are the sampler's to say, once that begins.
        self._persistent_workers = persistent_workers and sampler is None
        self._order = order
        self._steps_per_epoch = order.steps_per_epoch
        self._iterations = 0

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self._steps_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Have the next ``iter()`` begin this epoch, 0 or more, as it always was with this seed."""
        if not 0 <= epoch < _EPOCHS_MAX:
            raise ValueError(f"epoch={epoch}: 0 to {_EPOCHS_MAX - 1}")
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch. An iterator that is not at its end ends with the next one."""
        epoch, self.epoch = self.epoch, self.epoch + 1
        self._iterations += 1
        if self.sampler is not None and isinstance(self._order, SamplerOrder):
            self.pause()
            self._order.take(operator.index(index) for index in self.sampler)
        return self._batches(epoch, self._iterations)

    def _batches(self, epoch: int, iteration: int) -> Iterator[Any]:
        first = epoch * self._steps_per_epoch
        # Workers load ahead up to the end of this, which is that of the epoch unless they stay for the next.
        epochs = _EPOCHS_MAX if self._persistent_workers else epoch + 1
        self.total_steps = epochs * self._steps_per_epoch
        try:
            for step in range(first, first + self._steps_per_epoch):
                if iteration != self._iterations:
                    raise RuntimeError("another iterator of this loader has been made since")
                for micro_batch in self.take(step):
                    yield micro_batch.batch
        finally:
            if iteration == self._iterations and not self._persistent_workers:
                self.pause()


def _size_of(dataset: Any) -> int:
    # torch's IterableDataset inherits a __getitem__ that merely raises.
    if isinstance(dataset, IterableDataset) or not gives_by_number(dataset):
        raise TypeError(
            f"{type(dataset).__name__} has no items by number (__getitem__): streams are for a run's Datasets"
        )
    with contextlib.suppress(TypeError, AttributeError):
        return len(dataset)
    raise TypeError(f"{type(dataset).__name__} has no length (__len__)")


def _size_of_sampler(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError:
        raise TypeError(f"sampler: {type(sampler).__name__} has no length (__len__)") from None


def _refuse_numbers(batch_size: int | None, timeout: float | None, on_bad_sample: str) -> None:
    if batch_size is None or batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: at least 1")
    if timeout is not None and timeout < 0:
        raise ValueError(f"timeout={timeout}: 0, for no limit, or more")
    if on_bad_sample not in {"stop", "substitute"}:
        raise ValueError(f"on_bad_sample={on_bad_sample!r}: stop or substitute")


def _refuse_rank(rank: int, world_size: int, drop_last: bool) -> None:
    """Raise ValueError where the ranks would not have the same number of batches."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: 0 to {world_size - 1}, of world_size={world_size}")
    if world_size > 1 and not drop_last:
        raise ValueError(
            "drop_last=False: must be true with several ranks, which else differ in batches"
        )


def _order(
    sampler: Iterable[int] | None,
    size: int,
    batch_size: int,
    *,
    seed: int,
    shuffle: bool,
    drop_last: bool,
) -> SampleOrder:
    """Return the order of the samples: that of ``sampler``, or one of ``size`` samples."""
    if sampler is None:
        make = SampleOrder if drop_last else WholeOrder
        return make(seed=seed, dataset_size=size, global_batch_size=batch_size, shuffle=shuffle)
    return SamplerOrder(
        seed=seed,
        dataset_size=_size_of_sampler(sampler),
        global_batch_size=batch_size,
        shuffle=False,
        drop_last=drop_last,
    )


def _refuse_with_sampler(shuffle: bool, world_size: int, on_bad_sample: str) -> None:
    if shuffle:
        raise ValueError("shuffle=True: the sampler decides the order; leave one of them out")
    if world_size > 1:
        raise ValueError(
            f"world_size={world_size}: the sampler gives the samples of this rank alone (as"
            " DistributedSampler does); leave rank and world_size out"
        )
    if on_bad_sample != "stop":
        raise ValueError(
            f"on_bad_sample={on_bad_sample!r}: would take samples that the sampler leaves out;"
            " stop is possible"
        )


def _warn(repaired: LoadingRepaired) -> None:
    text = f"{repaired.fault.cause}; {repaired.action} ({repaired.seconds:.2f} s)"
    warnings.warn(text, RuntimeWarning, stacklevel=2)
