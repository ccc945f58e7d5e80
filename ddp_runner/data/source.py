"""Defines the batches that a loader serves, and the port for its data. Starts no worker and repairs nothing."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ddp_runner.data.order import SampleOrder, micro_batches
from ddp_runner.kernel.rules.phases import Phase

if TYPE_CHECKING:
    from ddp_runner.data.loader_faults import LoaderKills, LoadingRepaired
    from ddp_runner.data.loader_repair import DataRepair, Trouble
    from ddp_runner.data.permutation import Indices
    from ddp_runner.data.shard_agreement import Exchanging
    from ddp_runner.data.workers.fetch import Key, Reader, SampleFailed
    from ddp_runner.kernel.rules.faults import Fault

SEVERAL = -1  # samples at once: nobody knows at which of them the dataset is

K = TypeVar("K", bound="Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The input of one forward: the dataset's samples at ``indices``, collated."""

    indices: tuple[int, ...]
    batch: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The part of each step that a rank loads, and the size of its micro-batches."""

    order: SampleOrder
    rank: int
    world_size: int
    micro_batch_size: int

    def span(self, step: int) -> tuple[int, int]:
        """Return the first place of this rank's part of the global batch of ``step``, and its number of samples."""
        return self.order.span_of(step, rank=self.rank, world_size=self.world_size)

    def share(self, step: int) -> Indices:
        """The indices of this rank's samples of ``step``; empty if the ranks outnumber them."""
        return self.order.share_of(step, rank=self.rank, world_size=self.world_size)

    def pieces(self, step: int) -> list[Indices]:
        """The same, in micro-batches."""
        return micro_batches(self.share(step), self.micro_batch_size)

    def numbers(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the indices of this rank's samples of ``step`` in a row, and the sizes of its micro-batches."""
        pieces = self.pieces(step)
        return tuple(index for piece in pieces for index in piece.tolist()), tuple(map(len, pieces))

    @property
    def samples(self) -> int:
        """The number of samples of a whole global batch that this rank loads."""
        return self.span(self.order.first_step)[1]

    @property
    def ranks(self) -> tuple[int, int]:
        """The number of this rank, and the number of ranks."""
        return self.rank, self.world_size


class Source(ABC, Generic[K]):
    """The data of one loader.

    A loader asks for the ``keys`` of steps, has its workers read them (by :meth:`reader`) or reads them itself
    (:meth:`read`), and gives all that was read of a step to :meth:`taken`, which moves the source behind that
    step. ``step`` is the next one; -1: a loader has to say it first, by :meth:`go_to`. A key is read as often as a
    repair needs: nothing but :meth:`taken` moves a position.

    The methods below :meth:`taken` have answers for a source that needs nothing of the kind.
    """

    phase = Phase.DATA  # that faults are reported with
    notes: tuple[str, ...] = ()  # for people, before the first step
    runs_ahead = False  # whether a step may be taken before it is certain that it comes next

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.step = -1

    @abstractmethod
    def due(self, step: int) -> int:
        """Return the number of keys of ``step``."""

    @abstractmethod
    def keys(self, steps: Iterable[int]) -> Iterator[K]:
        """Yield the keys to read for ``steps``, in order."""

    @abstractmethod
    def reader(self) -> Reader[K]:
        """Return what workers read keys with, from where the source stands on."""

    @abstractmethod
    def read(self, key: K, *, on_sample: Callable[[int], None]) -> Any | SampleFailed:
        """Read ``key`` in this process, whose random generators stay as they are.

        ``on_sample`` is called before each sample, and may raise.
        """

    @abstractmethod
    def go_to(self, step: int) -> None:
        """Stand before ``step``, exactly."""

    @abstractmethod
    def taken(self, step: int, read: Sequence[tuple[K, Any]]) -> list[MicroBatch]:
        """Stand behind ``step``, of which all was ``read``. Returns its micro-batches."""

    @abstractmethod
    def fault_of(self, failed: SampleFailed, *, key: K, step: int) -> Fault:
        """Name what has raised, for people."""

    @abstractmethod
    def repair_with(
        self, *, timeout_s: float, on_wait: Callable[[], None], kills: LoaderKills
    ) -> DataRepair:
        """Return what is done about faults of this data."""

    @property
    def counted(self) -> tuple[str, ...]:
        """The dataset's attributes that reads in this process count up, once they are known."""
        return ()

    def use(self, cut: Cut) -> None:
        """Serve another part of the steps from now on."""
        self.cut = cut

    def lose(self) -> None:
        """Let go of what is being read in this process: a fault may have left it anywhere."""

    def suits(self, workers: int) -> int:
        """Return the number of workers that can read at once, at most ``workers``."""
        return workers

    def patience(self, step: int) -> float:
        """Return the factor of the time-out for ``step`` when its workers begin."""
        del step
        return 1.0

    def given_again(
        self, step: int, load: Callable[[tuple[K, ...]], list[tuple[K, Any]] | None]
    ) -> list[MicroBatch] | None:
        """Return a former step's batches while what is ahead stays ahead; None where that cannot be.

        ``load`` reads keys in workers of their own.
        """
        del step, load
        return None

    def gives_again(self, step: int) -> bool:
        """Return True if an earlier ``step`` can be taken at no more than a restart of the workers."""
        del step
        return True

    def suspected(self, step: int) -> Trouble | None:
        """Return the trouble of a previous process that ended while it was reading, if any; asked once."""
        del step
        return None

    def left_out(self, read: Sequence[tuple[K, Any]]) -> list[LoadingRepaired]:
        """Return the items of a step that could not be read and were left out. Raises FaultError for too many."""
        del read
        return []

    def agree(self, group: Exchanging, *, step: int) -> bool:
        """Have the ranks of a new generation agree on who reads what from ``step`` on; each calls it.

        Returns whether the source stands elsewhere now.
        """
        del group, step
        return False

    def go_back(self, group: Exchanging, *, step: int) -> bool:
        """Use the positions of the state at ``step`` after a roll-back; returns as :meth:`agree`."""
        del group, step
        return False

    def gathers(self, step: int) -> bool:
        """Return True if all ranks must :meth:`gather` before ``step``; the same on all of them."""
        del step
        return False

    def gather(self, group: Exchanging, *, step: int) -> None:
        """Have every rank know where all of them stand before ``step``; each calls it at the same boundary."""

    def place(self) -> tuple[int, int, str] | None:
        """Epoch, items, and a hash of the newest, where all ranks are to stand at the same place; else None."""
        return None

    def slow_line(self, data_wait_share: float) -> str:
        """Return a line, once, about a high share of time spent waiting for data; empty if there is none."""
        del data_wait_share
        return ""


def micro_batches_of(
    indices: Iterable[int], sizes: Iterable[int], batches: Iterable[Any]
) -> list[MicroBatch]:
    """``batches`` of these ``sizes``, with the numbers of their samples."""
    numbers = iter(indices)
    return [
        MicroBatch(indices=tuple(islice(numbers, size)), batch=batch)
        for size, batch in zip(sizes, batches, strict=True)
    ]


class NotCopiedError(Exception):
    """The batches hold something of which there is no copy; says what."""


def copied(batches: list[MicroBatch]) -> list[MicroBatch]:
    """The same batches in other memory. Raises :class:`NotCopiedError`."""
    try:
        copies = copy.deepcopy([batch.batch for batch in batches])
    except Exception as error:  # whatever a type of the task's own raises
        lines = str(error).splitlines() or [""]
        raise NotCopiedError(f"{type(error).__name__}: {lines[0]}") from error
    return [
        MicroBatch(indices=batch.indices, batch=other)
        for batch, other in zip(batches, copies, strict=True)
    ]


class Ahead:
    """Holds one step's batches that were loaded early, until they are taken."""

    def __init__(self) -> None:
        self._step = -1
        self._batches: list[MicroBatch] = []

    def keep(self, step: int, batches: list[MicroBatch]) -> None:
        """Keep the batches of ``step``."""
        self._step, self._batches = step, batches

    def drop(self) -> None:
        """Drop the batches: they are not needed any more."""
        self._step, self._batches = -1, []

    def take(self, step: int) -> list[MicroBatch] | None:
        """``step``'s, which are gone then; None where there are none, or another step's."""
        if step != self._step:
            return None
        batches = self._batches
        self.drop()
        return batches
