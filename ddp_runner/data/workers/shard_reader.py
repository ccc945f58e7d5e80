"""Reads lanes of a sharded stream, in a loader worker or in the rank itself. Never decides what is due."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from torch.utils.data._utils import worker

from ddp_runner.data.sample_hash import sample_hash
from ddp_runner.data.shards import Lane, LaneMark, Part
from ddp_runner.data.workers.fetch import (
    SampleFailed,
    failed,
    seed_generators,
    seeding_base,
    unobserved,
)

_ITEMS_MAX = 2**32  # of a shard, so that each item has a number of its own
_CURE = " (data.on_bad_sample=substitute would leave it out)"
_OPENING = _ITEMS_MAX - 1  # in the place of an item's number, while a shard is opened


class ShareKey(NamedTuple):
    """A rank's share of a step: ``sizes`` of its micro-batches, from this ``lane``.

    ``indices`` number its items over the run; ``epoch``: which the lane is to be in at least, or -1 for its own.
    """

    step: int
    lane: int
    indices: tuple[int, ...]
    sizes: tuple[int, ...]
    epoch: int = -1


class Left(NamedTuple):
    """An item that could not be read and was left out: its number over all shards, and why."""

    number: int
    reason: str


class Share(NamedTuple):
    """The collated micro-batches of a share, where its lane stands behind it, and a hash of its last item."""

    batches: list[Any]
    mark: LaneMark
    newest: str
    left_out: list[Left]


class LaneEmptyError(Exception):
    """A lane has no item to give."""


class _LaneReader:
    """Reads one lane."""

    def __init__(self, dataset: Any, lane: Lane, mark: LaneMark, *, left_out_max: int) -> None:
        self._at = mark  # but for the next two, which each item changes
        self._position, self._drawn = mark.position, mark.drawn
        self.left_out: list[Left] = []
        self.is_spoilt = False  # by an item that might have been left out
        self._dataset = dataset
        self._lane = lane
        self._left_out_max = left_out_max
        self._is_seeded = not getattr(dataset, "deterministic", False)
        self._items: Iterator[tuple[Any, Any]] | None = None
        self._parts: Sequence[Part] = ()
        self._drawing = 0  # the number of an item in its shard
        self._base, self._first = 0, 0  # what the seeds of the shard's items follow from

    @property
    def mark(self) -> LaneMark:
        """The current position of the lane."""
        return self._at._replace(position=self._position, drawn=self._drawn)

    def _go_to(self, mark: LaneMark) -> None:
        self._at, self._position, self._drawn = mark, mark.position, mark.drawn

    def begin(self) -> list[int]:
        """A share: for each item that is owed first, the epoch in which it was."""
        at, self._at = self._at, self._at._replace(owed=0, later=())
        self.left_out.clear()
        owed = ((at.epoch, at.owed), *at.later)
        return [epoch for epoch, items in owed for _ in range(items)]

    def enter(self, epoch: int) -> None:
        """Drop what is left of the epochs before this one; a lane that has ended early is in it, or beyond."""
        if self._at.epoch < epoch:
            self._items = None
            self._go_to(LaneMark(epoch=epoch))

    def draw(self) -> Any:
        """The next item that can be read. Raises what the dataset raises, or gives in the place of one.

        Raises LaneEmptyError where a whole epoch has none.
        """
        while True:
            item = self._draw_any()
            if not isinstance(item, Exception):
                return item
            if len(self.left_out) >= self._left_out_max:
                self.is_spoilt = not self._left_out_max
                raise item
            reason = f"{self.where()}: {failed(item, indices=()).error}"
            self.left_out.append(Left(self._first + self._drawing, reason))

    def where(self) -> str:
        """Return a description of the item that was drawn last, or is being drawn."""
        if self._at.place >= len(self._parts):
            return f"lane {self._lane.number}"
        shard, names = self._parts[self._at.place].shard, getattr(self._dataset, "names", None)
        named = f" ({names[shard]})" if names else ""
        return f"item {self._drawing} of shard {shard}{named}"

    def _draw_any(self) -> Any:
        times_over = 0
        while True:
            if self._items is None and not self._open():
                times_over += 1
                if times_over > 2:
                    names = getattr(self._dataset, "names", range(self._dataset.shards))
                    empty = ", ".join(str(names[shard]) for shard in self._lane.own)
                    raise LaneEmptyError(f"no item in {empty}: leave empty shards out")
                continue
            assert self._items is not None
            self._drawing = self._drawn
            if self._is_seeded:
                seed_generators(self._base, index=self._first + self._drawing)
            try:
                item, self._position = next(self._items)
            except StopIteration:
                self._items = None
                self._go_to(LaneMark(epoch=self._at.epoch, place=self._at.place + 1))
                continue
            self._drawn += 1
            return item

    def _open(self) -> bool:
        """Begin with the shard that is due; False where the epoch was over, and the next one begins."""
        self._parts = self._lane.parts(self._at.epoch)
        if self._at.place >= len(self._parts):
            self._go_to(LaneMark(epoch=self._at.epoch + 1))
            return False
        part = self._parts[self._at.place]
        if not self._drawn:
            self._position, self._drawn = part.position, part.drawn
        self._base = seeding_base(seed=self._lane.seed, epoch=self._at.epoch)
        self._first = part.shard * _ITEMS_MAX
        seed_generators(self._base, index=self._first + _OPENING)
        self._items = iter(self._dataset.read(part.shard, self._position))
        return True


@contextmanager
def _as_no_worker() -> Iterator[None]:
    """A shard is this worker's alone: what asks for torch's ``get_worker_info`` is not to share it out again."""
    of_worker: Any = worker
    info, of_worker._worker_info = of_worker._worker_info, None  # noqa: SLF001 - there is no public seam
    try:
        yield
    finally:
        of_worker._worker_info = info  # noqa: SLF001 - as above


class ShardReader:
    """Reads the shares of one rank, each lane's in order.

    ``left_out_max``: so many items of a share that cannot be read may be left out, for the next ones.
    """

    dataset = None  # see Reader

    def __init__(
        self,
        dataset: Any,
        *,
        lanes: Sequence[Lane],
        marks: Sequence[LaneMark],
        collate: Callable[[list[Any]], Any],
        left_out_max: int = 0,
    ) -> None:
        self._dataset = dataset
        self._lanes = lanes
        self._marks = marks
        self._collate = collate
        self._left_out_max = left_out_max
        self._readers: dict[int, _LaneReader] = {}

    def enter_worker(self, worker: int) -> None:
        """See :meth:`Reader.enter_worker`."""

    def load(
        self, key: ShareKey, *, on_sample: Callable[[int], None] = unobserved
    ) -> Share | SampleFailed:
        """The share, or why there is none; no ``Exception`` of the dataset escapes."""
        with _as_no_worker():
            return self._load(key, on_sample)

    def _load(self, key: ShareKey, on_sample: Callable[[int], None]) -> Share | SampleFailed:
        reader = self._reader(key.lane)
        items: list[Any] = []
        first = key.indices[0] if key.indices else 0
        due = [(first, epoch) for epoch in reader.begin()]
        owed = len(due)
        for number, epoch in (*due, *((number, key.epoch) for number in key.indices)):
            on_sample(number)  # outside the boundary: what it raises is not the dataset's
            reader.enter(epoch)
            try:
                items.append(reader.draw())
            except Exception as error:  # noqa: BLE001 - the loader-fetch boundary
                found = failed(error, indices=(number,))
                cure = _CURE if reader.is_spoilt else ""
                return replace(found, error=f"{reader.where()}: {found.error}{cure}")
            if owed:
                owed -= 1
                items.clear()
                reader.left_out.clear()  # who drew these before has said so
        try:
            newest = sample_hash(items[-1]) if items else ""
            left = iter(items)
            batches = [self._collate([next(left) for _ in range(size)]) for size in key.sizes]
        except Exception as error:  # noqa: BLE001 - as above
            return failed(error, indices=key.indices)
        return Share(batches, reader.mark, newest, list(reader.left_out))

    def _reader(self, lane: int) -> _LaneReader:
        if lane not in self._readers:
            self._readers[lane] = _LaneReader(
                self._dataset,
                self._lanes[lane],
                self._marks[lane],
                left_out_max=self._left_out_max,
            )
        return self._readers[lane]
