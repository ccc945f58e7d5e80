"""Has the datasets of a rank, or of a drill, read from memory that all ranks share, where ``data.preload`` asks for it.

Whichever rank comes first reads them, once; one that dies is followed by another, which goes on from there.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset

from ddp_runner import config
from ddp_runner.core.monitor import ALONE
from ddp_runner.core.settings import Settings
from ddp_runner.data.by_number import sample_at
from ddp_runner.features.preload.memory import (
    OtherSamplesError,
    PreloadedDataset,
    SampleMemory,
    Unread,
)
from ddp_runner.features.preload.reading import PROBES, NoRoomError, NotKeptError, Reading
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.memory.readings import SystemReader
from ddp_runner.observe.format import byte_size, count
from ddp_runner.training.loading.preloaded_data import OPTION
from ddp_runner.training.state import TrainState
from ddp_runner.training.workload import TaskWorkload

TRAINING, VALIDATION = "training", "validation"
_LOOK_S = 0.05  # whether the one who reads has come further
_SHOWN_S = 5.0  # between lines that say how far it is


def preloaded(
    settings: Settings,
    workload: TaskWorkload,
    state: TrainState,
    runtime: Runtime,
    *,
    ending: contextlib.ExitStack,
) -> TaskWorkload:
    """Return the workload with data that is in memory.

    Blocks until all is read, which one rank does. Raises BadInputError where it cannot be kept, or does not
    fit. What is to be closed is left to ``ending``.
    """
    datasets = workload.datasets
    sets = datasets.validation_sets
    # Those that are the training data are in its memory; the others share one, behind each other.
    own = {name: one for name, one in sets.items() if one is not datasets.train}
    found: dict[str, SampleMemory] = {}
    given: dict[str, Any] = {TRAINING: datasets.train}
    if own:
        given[VALIDATION] = joined(list(own.values()))
    for what, dataset in given.items():
        number = (TRAINING, VALIDATION).index(what)
        memory = _opened(settings, runtime, number, samples=len(dataset))
        ending.callback(memory.close)
        _Preloading(runtime, memory, what=what).load(dataset)
        found[what] = memory
    train = PreloadedDataset(found[TRAINING])
    shared: dict[str, Any] = dict.fromkeys(sets, train)
    if own:
        sizes = [len(one) for one in own.values()]  # type: ignore[arg-type] # map-style
        shared |= zip(own, parts_of(PreloadedDataset(found[VALIDATION]), sizes), strict=True)
    validation = shared.get(ALONE) if ALONE in shared else shared or None
    return replace(
        workload,
        datasets=replace(datasets, train=train, validation=validation),
        replaced_data=tuple(_let_go(one, state) for one in (datasets.train, *sets.values())),
        notes=(*workload.notes, *_notes(found), *_watched_notes(given)),
    )


def _opened(settings: Settings, runtime: Runtime, number: int, *, samples: int) -> SampleMemory:
    """The memory of these samples: the run's or, of a process alone, its own."""
    info = runtime.rank_info
    if not info.preload:
        config.refuse_without_supervisor(settings, world_size=info.world_size)
        return SampleMemory(os.memfd_create("samples"), samples=samples)
    try:
        descriptor = os.open(info.preload[number], os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        expected = f"cannot be: the supervisor's memory cannot be opened ({error.strerror})"
        raise BadInputError(OPTION, "true", f"{expected}; leave it out") from error
    return SampleMemory(descriptor, samples=samples)


class _Preloading:
    """One rank's part in the reading of one dataset."""

    def __init__(self, runtime: Runtime, memory: SampleMemory, *, what: str) -> None:
        self._runtime = runtime
        self._memory = memory
        self._what = what
        self._reader = SystemReader()
        self._began_s = self._shown_s = time.monotonic()

    def load(self, dataset: Any) -> None:
        """Return once every sample is there, whoever reads it."""
        try:
            while not self._memory.try_lock():
                self._be_alive()  # it is the reader's time that counts
                self._show(self._memory.filling().done)
                time.sleep(_LOOK_S)
            try:
                if not self._memory.is_whole:
                    self._read(dataset)
            finally:
                self._memory.unlock()
        except OtherSamplesError as error:
            raise self._refused(
                f"cannot be: the ranks differ in the {self._what} data, {error}"
            ) from error

    def _read(self, dataset: Any) -> None:
        slot, sign = self._runtime.slot, 1 if self._what == TRAINING else -1

        def on_sample(index: int) -> None:
            slot.set(Cell.SAMPLE, sign * (index + 1))
            self._be_alive()

        try:
            Reading(
                dataset,
                self._memory,
                room=lambda: self._reader(()).available_bytes,
                on_sample=on_sample,
                on_progress=self._show,
            ).read()
        except NotKeptError as error:
            raise self._refused(f"cannot be: {self._what} {error}; leave it out") from error
        except NoRoomError as error:
            free = byte_size(error.available_bytes)
            needed = f"about {byte_size(error.needed_bytes)}" if error.needed_bytes else "more"
            raise self._refused(
                f"needs {needed} of memory for the {self._what} data, and {free} are available: leave it"
                " out, or give it more memory"
            ) from error
        except OSError as error:
            raise self._refused(f"cannot be: {error.strerror or error}; leave it out") from error
        slot.set(Cell.SAMPLE, 0)

    def _show(self, done: int) -> None:
        """Have rank 0 say, now and then, how far it is."""
        now_s = time.monotonic()
        if self._runtime.rank_info.rank or now_s < self._shown_s + _SHOWN_S:
            return
        self._shown_s = now_s
        samples = self._memory.samples
        left_s = (now_s - self._began_s) / max(1, done) * (samples - done)
        self._runtime.logger.info(
            f"preloading {self._what} data: {count(done)} of {count(samples)} samples,"
            f" {byte_size(self._memory.size_bytes)}, about {left_s:.0f} s left"
        )

    def _be_alive(self) -> None:
        self._runtime.slot.set(Cell.PHASE_SINCE_NS, time.monotonic_ns())

    def _refused(self, expected: str) -> BadInputError:
        return BadInputError(OPTION, "true", expected)


def _let_go(dataset: Any, state: TrainState) -> Callable[[], Any]:
    """Let a dataset be freed that nobody else holds: it may have all its samples in this rank's memory.

    Gives it as long as it is there.
    """
    try:
        ending = weakref.finalize(dataset, state.side.no_longer_apart, id(dataset))
        ending.atexit = False
        found: Callable[[], Any] = weakref.ref(dataset)
    except TypeError:  # of a type without weak references
        return lambda: dataset
    return found


def _notes(found: dict[str, SampleMemory]) -> list[str]:
    total = sum(memory.size_bytes for memory in found.values())
    samples = sum(memory.samples for memory in found.values())
    notes = [f"{count(samples)} samples are preloaded: {byte_size(total)} that all ranks share"]
    for what, memory in found.items():
        filling = memory.filling()
        if filling.unread:
            first = memory.read(filling.first_unread)
            assert isinstance(first, Unread), "the first that could not be read"
            notes.append(
                f"{count(filling.unread)} of the {what} samples could not be read; the first is"
                f" {filling.first_unread}: {first.error}"
            )
    return notes


def _watched_notes(given: Mapping[str, Any]) -> list[str]:
    """Return a note on data that is not declared deterministic, and why it was preloaded nevertheless."""
    named = [
        what for what, dataset in given.items() if not getattr(dataset, "deterministic", False)
    ]
    if not named:
        return []
    line = (
        f"the {' and the '.join(named)} data does not say deterministic = True and is preloaded all the same:"
        f" no sample has drawn a random number, and up to {PROBES} were the same when they were read again"
    )
    return [line]


# Several map-style datasets as one, and one as several, by where each begins. Reads no sample
# by itself.


class _Joined(Dataset[Any]):
    """All samples of the parts, one part behind the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))
        self.deterministic = all(getattr(part, "deterministic", False) for part in parts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        number = bisect_right(self._ends, index)
        return sample_at(self._parts[number], index - (self._ends[number - 1] if number else 0))


class _Part(Dataset[Any]):
    """So many samples of a dataset, from one on."""

    def __init__(self, of: Any, *, first: int, size: int) -> None:
        self._of = of
        self._first = first
        self._size = size
        self.deterministic = getattr(of, "deterministic", False)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._size:
            raise IndexError(index)
        return sample_at(self._of, self._first + index)


def joined(parts: Sequence[Any]) -> Any:
    """One dataset of all; the only one itself."""
    return parts[0] if len(parts) == 1 else _Joined(parts)


def parts_of(whole: Any, sizes: Sequence[int]) -> list[Any]:
    """The datasets again that :func:`joined` has made one of; it itself where it is the only one."""
    if len(sizes) == 1:
        return [whole]
    firsts = [0, *accumulate(sizes)]
    return [
        _Part(whole, first=first, size=size) for first, size in zip(firsts, sizes, strict=False)
    ]
