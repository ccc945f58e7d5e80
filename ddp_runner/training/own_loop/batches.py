"""The batches of a loop of the user's own, by step: drawn in order, held for a step that is done again.

A process that comes late draws what is behind it and drops it, so it stands where the others stand.
"""

from __future__ import annotations

import copy
import hashlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL, signal_handling
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from ddp_runner.core.settings import Settings
from ddp_runner.core.step_schedule import RunLength
from ddp_runner.data.by_number import gives_by_number
from ddp_runner.data.loader import Loader
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind, Origin
from ddp_runner.kernel.values.nested import PLAIN, SENT, rebuilt, tensors_in
from ddp_runner.training.components.tensor_hash import combined, tensor_hash
from ddp_runner.training.exactness.held_values import DataWatch, owners_of
from ddp_runner.training.own_loop.misuse import misuse
from ddp_runner.values.generators import mix64, seed_offset, seed_step

_ELEMENTS_READ = 100_000  # of an array, about, spread over all of it
_SAYS_AFTER_S = 1.0  # that it draws what is behind
_LOOKS_EVERY_S = 0.5  # for dead workers, while a batch of a DataLoader is awaited
_NONE = object()
# In the place of a micro-step: where functions are called between steps, and where a batch is drawn.
BETWEEN, _DRAWING = -1, -2
# Of generators that batches or loaders draw from, by id: the generator, so that no other one gets the id (torch before
# 2.13 has no weak references to it), the program's seed, and the one of the newest pass.
_seeds: dict[int, tuple[torch.Generator, int, int]] = {}


def leave_deaths_to_loaders() -> None:
    """Have each DataLoader of this process notice a dead worker where it awaits a batch, and nowhere else.

    Torch's handler for SIGCHLD raises RuntimeError at whatever line the rank is. Outside the loop's own code
    that ends the process, which alone may have the newest state.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    # A DataLoader that was used before has set it.
    if getattr(signal.getsignal(signal.SIGCHLD), "__module__", "") == signal_handling.__name__:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal_handling._SIGCHLD_handler_set = True  # noqa: SLF001 - there is no other way
    awaits: Any = _MultiProcessingDataLoaderIter._try_get_data  # noqa: SLF001
    if awaits.__defaults__ == (MP_STATUS_CHECK_INTERVAL,):
        awaits.__defaults__ = (_LOOKS_EVERY_S,)


def have_new_workers(loader: Any) -> None:
    """Have the next pass over ``loader`` begin with new workers.

    Those of an earlier pass would go on with random numbers that a process which came later does not have.
    """
    if getattr(loader, "persistent_workers", False):
        loader._iterator = None  # noqa: SLF001 - there is no public name


def keeps_iterator(loader: Any) -> bool:
    """Return True for a loader of a subclass that goes on with one iterator in each pass, so that its workers stay."""
    return bool(_kept_iterators(loader))


def have_new_iterator(loader: Any) -> None:
    """Have such a loader begin its next pass with a new iterator, as it was made by its constructor."""
    for name in _kept_iterators(loader):
        have_new_workers(loader)  # which may have the same one
        object.__setattr__(loader, name, None)  # ends the workers
        object.__setattr__(loader, name, DataLoader.__iter__(loader))


def _kept_iterators(loader: Any) -> list[str]:
    held = vars(loader).items() if isinstance(loader, DataLoader) else ()
    return [
        name for name, one in held if isinstance(one, _BaseDataLoaderIter) and name != "_iterator"
    ]


def generators_in(batches: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators that a loader and what it loads from draw from, each once."""
    given = [getattr(owner, "generator", None) for owner in owners_of(batches).values()]
    return list({id(one): one for one in given if isinstance(one, torch.Generator)}.values())


def _note_seeds(batches: Iterable[Any]) -> None:
    """Note the seeds that the program has given the generators, before a pass or a function between steps gives others."""
    for one in generators_in(batches):
        _seeds.setdefault(id(one), (one, one.initial_seed(), one.initial_seed()))


def seed_pass(generator: torch.Generator, step: int) -> None:
    """Seed ``generator`` for a pass over a DataLoader in the loop itself, by the program's seed and ``step``."""
    first = programs_seed(generator)
    generator.manual_seed(mix64(mix64(first) + step) % 2**63)
    _seeds[id(generator)] = generator, first, generator.initial_seed()


def programs_seed(generator: torch.Generator) -> int:
    """Return the newest seed that the program has given a generator, which a function between steps may have changed."""
    now = generator.initial_seed()
    _, first, of_pass = _seeds.get(id(generator), (generator, now, now))
    return first if now == of_pass else now


def length_of(batches: Iterable[Any], *, accumulate: int, max_steps: int, epochs: int) -> RunLength:
    """Return the number of steps of a loop over ``batches``. Raises BadInputError if it is not given."""
    if bool(max_steps) is bool(epochs) or max_steps < 0 or epochs < 0:
        raise misuse("steps() needs max_steps= or epochs=, one of them, above 0")
    if accumulate < 1:
        raise misuse(f"accumulate={accumulate}: must be 1 or more")
    count = _count_of(batches)
    if count is None:
        if epochs:
            raise misuse("the batches have no length: steps() needs max_steps= instead of epochs=")
        return RunLength(steps_per_epoch=max_steps, total_steps=max_steps)
    if count < accumulate:
        raise misuse(f"an epoch of {count} batches has no step of {accumulate}")
    per_epoch = count // accumulate
    return RunLength(steps_per_epoch=per_epoch, total_steps=max_steps or epochs * per_epoch)


def _count_of(batches: Iterable[Any]) -> int | None:
    """Return the number of batches of an epoch; None if it is unknown."""
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:  # a DataLoader over an iterable dataset without a length
        return None


def batch_size_of(batches: object) -> int:
    """Return the number of samples of a batch if ``batches`` knows it, as a DataLoader does; else 1."""
    sampler = getattr(batches, "batch_sampler", None)
    size = getattr(batches, "batch_size", None) or getattr(sampler, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else 1


def digest_in_memory(batches: object) -> str:
    """Return a digest of the data that the program holds in memory: loads no sample, and samples large data."""
    data = getattr(batches, "dataset", batches)
    while isinstance(data, Subset):
        data = data.dataset
    values = [data] if isinstance(data, (Tensor, np.ndarray)) or type(data) in (list, tuple) else []
    values += getattr(data, "__dict__", {}).values()
    found = [part for value in values for part in _parts_in_memory(value)]
    return combined(found) if found else ""


def _parts_in_memory(value: Any) -> Iterator[str]:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.size:
        every = max(1, value.size // _ELEMENTS_READ)
        yield hashlib.sha256(value.reshape(-1)[::every].tobytes()).hexdigest()
    elif isinstance(value, Tensor) and value.layout is torch.strided and value.device.type == "cpu":
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
        yield tensor_hash(flat[:: max(1, flat.numel() // _ELEMENTS_READ)].contiguous())
    elif type(value) in (list, tuple) and value:
        for at in (0, len(value) // 2, -1):
            if value[at] is not value:
                yield from _parts_in_memory(value[at])


def why_alike(batches: object) -> str:
    """Why every rank is given the same samples, in words; empty where nothing says so."""
    if not isinstance(batches, DataLoader) or isinstance(batches.dataset, IterableDataset):
        return ""
    if type(batches.sampler) is SequentialSampler:
        return (
            "the DataLoader gives every rank the same samples, in order: use run.loader(), or"
            " DistributedSampler(dataset, run.world_size, run.rank)"
        )
    if type(batches.sampler) is RandomSampler:
        return (
            "the DataLoader gives every rank all samples, each in an order of its own: use"
            " run.loader(), or DistributedSampler(dataset, run.world_size, run.rank)"
        )
    return ""


def why_spawned(batches: object, *, is_guarded: Callable[[], bool]) -> str:
    """Why workers of the loader would begin the program again, in words; empty where they do not.

    ``is_guarded``: whether what runs now is left out where the program is imported.
    """
    if not isinstance(batches, DataLoader) or not batches.num_workers:
        return ""
    context = batches.multiprocessing_context
    method = multiprocessing.get_start_method() if context is None else context.get_start_method()
    if method == "fork" or is_guarded():
        return ""
    return (
        f"workers that are started by {method} import the program, which would begin the run again in each: put"
        ' what starts it under if __name__ == "__main__":'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBatches:
    """What ``run.steps()`` was given: batches, and how many of them make a step, and how many steps the run."""

    batches: Iterable[Any]
    length: RunLength
    accumulate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLoader:
    """The result of ``run.loader()``, from which ``run.steps()`` makes a Loader."""

    dataset: Any
    batch_size: int
    accumulate: int
    collate_fn: Callable[[list[Any]], Any] | None
    shuffle: bool = True
    num_workers: int | None = None  # None: the setting's

    def __post_init__(self) -> None:
        if not hasattr(self.dataset, "__len__") or not gives_by_number(self.dataset):
            raise misuse(
                "loader() needs a dataset with __len__ and __getitem__; pass others to steps()"
            )
        if self.batch_size < 1 or self.accumulate < 1:
            raise misuse("loader() needs batch_size= and accumulate= of 1 or more")
        if self.num_workers is not None and self.num_workers < 0:
            raise misuse(f"loader() needs num_workers= of 0 or more, not {self.num_workers}")

    def settings_in(self, settings: Settings) -> Settings:
        """Return ``settings`` with what the loop says of its batches."""
        share = self.batch_size * self.accumulate
        data = replace(settings.data, batch_size=share, micro_batch_size=self.batch_size)
        if self.num_workers is not None:
            data = replace(data, num_workers=self.num_workers)
        return replace(settings, data=data)

    def count(self, world_size: int) -> int:
        """Return the number of a rank's batches in an epoch. Raises BadInputError if the data is too small."""
        whole = self.batch_size * self.accumulate * world_size
        steps = len(self.dataset) // whole
        if steps == 0:
            raise misuse(f"the dataset has {len(self.dataset)} samples, and a step takes {whole}")
        return steps * self.accumulate


class SafeBatches:
    """Batches of a :class:`Loader`, by step."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.watch: DataWatch | None = None

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for the newest step."""
        return self._loader.waited_s

    @property
    def counted(self) -> tuple[str, ...]:
        """The numbers that loads count up in the dataset, once that is known."""
        return self._loader.counted

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The pids of the loader's workers."""
        return self._loader.worker_pids

    def shrink_prefetch(self) -> None:
        """Load less ahead, where that can be."""
        self._loader.shrink_prefetch()

    def take(self, step: int) -> list[Any]:
        """Give this rank's batches of ``step``: as many as are accumulated."""
        if self.watch is not None:
            self.watch.draws()
        found = [one.batch for one in self._loader.take(step)]
        if self.watch is not None:
            self.watch.drawn()
        return found

    def close(self) -> None:
        """End the workers."""
        self._loader.close()


class OwnBatches:
    """Batches of any iterable, by step. ``take`` is called with the step in hand, in order.

    Before each pass Python, NumPy and torch are seeded from (seed, pass, rank), and ``set_epoch`` of
    the sampler is called, so every process draws the same batches. A generator that the loader or its
    sampler was given begins each pass from its first seed and the pass's number. A pass is an epoch, where the
    batches have a length; else the next one begins when they end.
    """

    counted: tuple[str, ...] = ()  # ``watch`` names what loads count up

    def __init__(
        self,
        given: GivenBatches,
        *,
        seed: int,
        rank: int,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        alive: Callable[[], None],
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        """``alive`` is called before a step's batches are drawn, and may raise; ``say`` hears of what takes long.

        ``begins`` is called where a pass begins, whose first batch may take as long as a start.

        ``warn``: of what cannot be copied for a step that is done again.
        """
        self._batches = given.batches
        _note_seeds(self._batches)
        self._length = given.length
        self._accumulate = given.accumulate
        self._has_length = _count_of(given.batches) is not None
        self._seed = seed
        self._rank = rank
        self._say = say
        self._warn = warn
        self._alive = alive
        self._begins = begins
        self._shared: set[str] = set()  # types of what is in batches and cannot be copied
        self._drawn: Iterator[Any] | None = None
        self._pass = 0
        self._next_step = -1  # which the iterator gives next; -1: there is none
        self._held_step = -1
        self._held: list[Any] = []
        self._looks: list[int] = []
        self.waited_s = 0.0  # for the newest step
        # The step whose batches are drawn, or the number of the pass that begins; -1: neither.
        self.at_step = -1
        self.watch: DataWatch | None = None

    def take(self, step: int) -> list[Any]:
        """Give this rank's batches of ``step``: as many as are accumulated."""
        began_s = time.monotonic()
        if self._held_step != step or self._looks != _versions(self._held):
            self._held_step = -1
            try:
                self._held = self._draw(step)
            finally:
                self.at_step = -1
            self._held_step, self._looks = step, _versions(self._held)
        self.waited_s = time.monotonic() - began_s
        return [_handed(one, on_shared=self._say_shared) for one in self._held]

    def _say_shared(self, kind: str) -> None:
        if kind not in self._shared:
            self._shared.add(kind)
            self._warn(
                f"the batches hold a {kind}, which cannot be copied: a body must not change it, or a step that is"
                " done again begins with it changed"
            )

    @property
    def given(self) -> Iterable[Any]:
        """Return what the steps were given."""
        return self._batches

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Nobody knows whether those of a loop's own loader are the rank's to end."""
        return ()

    def shrink_prefetch(self) -> None:
        """Nothing of the loop's own loader is changed."""

    def close(self) -> None:
        """End the iterator, and workers with it: they clean up after themselves where they are asked to end."""
        self._drawn = None
        have_new_workers(self._batches)
        self._batches = ()
        self._held = []

    def _draw(self, step: int) -> list[Any]:
        epoch = self._length.epoch_of(step) if self._has_length else 0
        is_other = self._has_length and epoch != self._pass
        if self._drawn is None or is_other or self._next_step > step:
            self._begin(epoch)
            self._next_step = epoch * self._length.steps_per_epoch
        began_s, from_step = time.monotonic(), self._next_step
        while self._next_step < step:
            self._draw_next()
        took_s = time.monotonic() - began_s
        if took_s > _SAYS_AFTER_S:
            self._say(
                f"drew the batches of {step - from_step:,} steps once more, in {took_s:.1f} s"
            )
        return self._draw_next()

    def _begin(self, number: int) -> None:
        """A new pass over the batches."""
        self._begins()
        if self.watch is not None:
            self.watch.pass_ends()
        if self._drawn is not None and self._drawn is self._batches:
            raise misuse(
                "an iterator gives its batches once: pass what it comes from, such as a DataLoader"
            )
        self._drawn = None
        have_new_workers(self._batches)
        # Before set_epoch(), which may give them seeds of its own.
        _note_seeds(self._batches)
        for generator in generators_in(self._batches):
            first = _seeds[id(generator)][1]
            seed_offset(generator, first=first, offset=number)
            _seeds[id(generator)] = generator, first, generator.initial_seed()
        owners = owners_of(self._batches)
        for owner in owners.values():
            set_epoch = getattr(owner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(number)
        if self.watch is not None:
            self.watch.pass_begins()
        seed_step(seed=self._seed, step=number, rank=self._rank, micro_step=_DRAWING)
        have_new_iterator(self._batches)
        self.at_step = number
        self._drawn = iter(self._batches)
        self._pass = number

    def _draw_next(self) -> list[Any]:
        """The batches of the next step. Raises BadInputError where the iterable ends before its time."""
        if self.watch is not None:
            self.watch.draws()
        # What is loaded in this process draws from the global generators.
        seed_step(seed=self._seed, step=self._next_step, rank=self._rank, micro_step=_DRAWING)
        self.at_step = self._next_step
        self._alive()  # raises where this rank is to leave: nothing is drawn then
        try:
            found = [self._draw_one() for _ in range(self._accumulate)]
        except BaseException:
            self._drawn = None  # nobody knows where it stands
            raise
        self._next_step += 1
        if self.watch is not None:
            self.watch.drawn()
        return found

    def _draw_one(self) -> Any:
        assert self._drawn is not None, "the pass has begun"
        try:
            batch = next(self._drawn)
        except StopIteration:
            if self._has_length:
                self._drawn = None
                per_epoch = self._length.steps_per_epoch
                made = self._next_step - self._pass * per_epoch
                raise misuse(
                    f"the batches ended after {made:,} steps of epoch {self._pass + 1}; by their length an"
                    f" epoch has {per_epoch:,}"
                ) from None
            self._begin(self._pass + 1)
            batch = next(self._drawn, _NONE)
            if batch is _NONE:
                raise misuse("the batches are empty") from None
        except Exception as error:
            if not _has_killed_worker(self._drawn, error):
                raise
            raise FaultError(
                Fault(
                    kind=FaultKind.RANK_RAISED,
                    rank=self._rank,
                    step=self._next_step,
                    cause=f"{type(error).__name__}: {error}",
                    origin=Origin.OUTSIDE,
                )
            ) from error
        return batch


def _has_killed_worker(drawn: Any, error: Exception) -> bool:
    """Return True if ``drawn`` is a DataLoader's iterator and one of its workers had ended by SIGKILL before ``error``."""
    if not isinstance(drawn, _MultiProcessingDataLoaderIter):
        return False
    workers = drawn._workers  # noqa: SLF001 - there is no other way
    if isinstance(error, (ConnectionError, EOFError)):  # it was not quite dead
        wait([one.sentinel for one in workers], timeout=_LOOKS_EVERY_S)
    return any(one.exitcode == -signal.SIGKILL for one in workers)


def _handed(value: Any, *, on_shared: Callable[[str], None]) -> Any:
    """``value`` in containers of its own, for a body that takes something out of them; tensors are the same.

    Of other types it is a copy: nobody sees whether such a one was changed. ``on_shared`` is called with the
    name of a type of which there can be none.
    """

    def own(one: Any) -> Any:
        if isinstance(one, Tensor):
            return one
        try:
            return copy.deepcopy(one)
        except Exception:  # noqa: BLE001 - whatever a type of the loop's own raises; then it is shared
            on_shared(type(one).__name__)
            return one

    return rebuilt(value, own, PLAIN)


def _versions(value: Any) -> list[int]:
    """Torch's counts of changes of the tensors in a batch."""
    return [one._version for one in tensors_in(value, SENT)]  # noqa: SLF001 - as autograd
