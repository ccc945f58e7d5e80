"""An iterable dataset as a loader's source, which every rank reads whole; resumed exactly or by skipping.

Every rank reads the whole stream and keeps its share of each global batch. So the position is the
same on all ranks: any of them can hand it on, and all end an epoch at the same step.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from ddp_runner.data.loader_faults import fault_of_failure
from ddp_runner.data.loader_repair import DataRepair
from ddp_runner.data.order import SampleOrder
from ddp_runner.data.permutation import Indices
from ddp_runner.data.source import Cut, MicroBatch, NotCopiedError, Source, copied, micro_batches_of
from ddp_runner.data.unshared import Unshared
from ddp_runner.data.workers.fetch import SampleFailed, failed, seed_generators, seeding_base
from ddp_runner.data.workers.shard_reader import ShareKey
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.values.generators import generators_kept
from ddp_runner.values.plain import from_plain, to_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Self

    from ddp_runner.data.loader_faults import LoaderKills
    from ddp_runner.kernel.rules.faults import Fault

_PROGRESS_S = 5.0  # between lines while skipping
_FIRST = -1  # seeds what a dataset draws when its iterator is made
_SLOW_SHARE = 0.25  # of the time, spent waiting for data: worth a line
READ_AGAIN = (
    "a stream without a state, read again, gave other items: give it state_dict and load_state_dict, or have the order of"
    " an epoch follow from set_epoch(epoch)"
)
_HASHED_BYTES = 4096  # of one tensor, array or text, so that a step costs microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder(SampleOrder):
    """Items by the number under which the run takes them: what an epoch's end drops has none.

    ``is_sharded``: each rank reads shards of its own.
    """

    is_sharded: bool = False

    def batch_size(self, step: int) -> int:  # noqa: ARG002 - all are alike
        """Return the number of samples of ``step`` over all ranks, which is the same for all steps."""
        return self.global_batch_size

    def in_version(self, version: int) -> Self:  # noqa: ARG002 - the stream says what comes next
        """Itself."""
        return self

    def _part_of(self, step: int, *, first: int, count: int) -> Indices:
        begin = (step - self.first_step) * self.global_batch_size + first
        return np.arange(begin, begin + count, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """The position of the stream before ``step``; ``state``: the dataset's own, None if it has none.

    ``first`` and ``newest``: hashes of the epoch's first item and of the one drawn last; empty if
    there is none, or if its type cannot be hashed.
    """

    step: int
    epoch: int
    items: int  # drawn in this epoch
    state: Any  # plain
    first: str = ""
    newest: str = ""

    def to_record(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class StreamPosition:
    """Part of a run's state: the marks before the last step that was taken and after it."""

    def __init__(self) -> None:
        self._marks: dict[int, _Mark] = {}

    def note(self, mark: _Mark) -> None:
        """The stream stands there now."""
        self._marks = {step: old for step, old in self._marks.items() if step == mark.step - 1}
        self._marks[mark.step] = mark

    def before(self, step: int) -> _Mark | None:
        """Return the position before ``step``, if that is known."""
        return self._marks.get(step)

    def to_record(self, step: int) -> dict[str, Any]:
        """Plain values, and the dataset's own state, for checkpoint and wire; empty if unknown."""
        mark = self._marks.get(step)
        return {} if mark is None else mark.to_record()

    def restore(self, record: Mapping[str, Any]) -> None:
        """Take over a record; nothing else is known then. Raises ValueError for one of a stream of shards."""
        self._marks = {}
        if "deal" in record:
            raise ValueError("the run was trained on a stream that was cut into shards")
        if record:  # one of an earlier version has what the dataset held, too
            self.note(_Mark(**{key: one for key, one in record.items() if key != "begin"}))


class _ItemFailedError(Exception):
    """The dataset has raised, or its collate function."""

    def __init__(self, failure: SampleFailed) -> None:
        super().__init__(failure.error)
        self.failure = failure


class StreamSource(Source[ShareKey]):
    """Serves an iterable dataset, in the rank itself; a key is this rank's share of a step.

    A dataset, or an iterator of it, with ``state_dict`` and ``load_state_dict`` resumes exactly
    (BadInputError for a state that cannot be kept);
    of any other the items of the epoch before are drawn again and dropped. ``on_other`` hears once, in a line, of items that
    are not those of before. Python's, numpy's and torch's CPU
    generator are seeded for each item from ``(seed, epoch, its number)``. A partial global batch
    at the end of an epoch is dropped; ``set_epoch`` is called if there is one.

    A step that is taken again, as a repair does, is drawn again from the stream's state before it. Of a stream
    without one a copy of the last step's batches is kept instead. Any other step but the next means a new iterator.
    What the dataset raises ends the step. Raises BadInputError if an epoch does not hold one global batch.
    """

    def __init__(
        self,
        dataset: Any,
        cut: Cut,
        *,
        position: StreamPosition,
        log: Callable[[str], None],
        collate_fn: Callable[[list[Any]], Any] | None = None,
        on_other: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """``position``: part of the run's state."""
        super().__init__(cut)
        self._dataset = dataset
        self._position = position
        self._on_sample: Callable[[int], None] = lambda _number: None  # of the read in hand
        self._log = log
        self._on_other = on_other
        self._has_warned = False
        self._has_said_slow = False
        self._collate = Unshared(collate_fn or default_collate)
        self._iterator: Iterator[Any] | None = None
        self._mark = _Mark(step=cut.order.first_step, epoch=0, items=0, state=None)
        self._has_state = _has_state(dataset)
        # Where an epoch begins; the dataset itself may go on where it was left.
        self._initial = to_plain(dataset.state_dict()) if self._has_state else None
        self._first = ""  # a hash of the first item of all, once it was drawn here
        self._copy: tuple[int, list[MicroBatch]] | None = None  # of a step's batches, for no state
        self._keeps_copies: bool | None = None  # None: nothing was taken yet

    def suits(self, workers: int) -> int:  # noqa: ARG002 - whatever is asked for
        """None: each would read the whole stream."""
        return 0

    def due(self, step: int) -> int:
        """Return 1: a step has one share; a rank that keeps none of it must also move past it."""
        del step
        return 1

    def keys(self, steps: Iterable[int]) -> Iterator[ShareKey]:
        """The share of this rank in each."""
        for step in steps:
            indices, sizes = self.cut.numbers(step)
            yield ShareKey(step, 0, indices, sizes)

    def reader(self) -> NoReturn:
        """Raise AssertionError: a stream without shards has no workers."""
        raise AssertionError("a stream is read whole, in the rank itself")

    def read(self, key: ShareKey, *, on_sample: Callable[[int], None]) -> Any | SampleFailed:
        """The share's batches."""
        self._on_sample = on_sample
        try:
            with generators_kept():
                if self._iterator is None or self._mark.step != key.step:
                    self._open_before(key.step)
                items = iter(self._draw_batch())
                return [self._collated([next(items) for _ in range(size)]) for size in key.sizes]
        except _ItemFailedError as error:
            return error.failure

    def go_to(self, step: int) -> None:
        """The next read finds the place: to draw what is behind it may take long."""
        self.step = step

    def taken(self, step: int, read: Sequence[tuple[ShareKey, Any]]) -> list[MicroBatch]:
        """See :meth:`Source.taken`; a copy is kept if the stream could return to the step only by skipping items."""
        ((key, found),) = read
        batches = micro_batches_of(key.indices, key.sizes, found)
        self.step = step + 1
        self._keep_copy(step, batches)
        return batches

    def given_again(
        self,
        step: int,
        load: Callable[[tuple[ShareKey, ...]], list[tuple[ShareKey, Any]] | None],
    ) -> list[MicroBatch] | None:
        """The last step's batches, where they were copied."""
        del load
        if self._copy is None or self._copy[0] != step:
            return None
        return copied(self._copy[1])

    def gives_again(self, step: int) -> bool:
        """Return True if ``step`` can be served again without skipping the items before it."""
        if self._copy is not None and self._copy[0] == step:
            return True
        mark = self._position.before(step)
        return mark is not None and (mark.state is not None or mark.items == 0)

    def use(self, cut: Cut) -> None:
        """See :meth:`Source.use`."""
        self.cut, self._copy = cut, None

    def lose(self) -> None:
        """The iterator may stand anywhere now."""
        self._iterator = None

    def fault_of(self, failed: SampleFailed, *, key: ShareKey, step: int) -> Fault:
        """See :meth:`Source.fault_of`; a fault while skipping is of an earlier step."""
        del key, step
        mark = self._mark
        return fault_of_failure(failed, rank=self.cut.rank, step=mark.step, epoch=mark.epoch)

    def repair_with(
        self, *, timeout_s: float, on_wait: Callable[[], None], kills: LoaderKills
    ) -> DataRepair:
        """Return a repair that does nothing: an iterator that has raised may continue anywhere."""
        del timeout_s, on_wait
        return DataRepair(kills)

    def place(self) -> tuple[int, int, str]:
        """Empty hash for an item of a type of its own."""
        return self._mark.epoch, self._mark.items, self._mark.newest

    def slow_line(self, data_wait_share: float) -> str:
        """Return a line, once, if ranks wait for data that each of them reads in whole."""
        ranks = self.cut.world_size
        if self._has_said_slow or ranks == 1 or data_wait_share < _SLOW_SHARE:
            return ""
        self._has_said_slow = True
        return (
            f"{data_wait_share:.0%} of the time goes to waiting for data: each of {ranks} ranks reads the whole"
            " stream, without workers; one that is cut into shards has workers: docs/streams.md"
        )

    def _keep_copy(self, step: int, batches: list[MicroBatch]) -> None:
        """Keep a copy of ``batches`` for a repeated step, if the stream could return to it only by skipping items."""
        self._copy = None
        if self._mark.state is not None or self._keeps_copies is False:
            return
        says_so, self._keeps_copies = self._keeps_copies is None, True
        try:
            self._copy = step, copied(batches)
        except NotCopiedError as error:
            self._keeps_copies = False
            self._log(
                f"the stream has no state_dict, and its batches cannot be copied ({error}):"
                " for a step that is done again the items before it are skipped"
            )
            return
        if says_so:
            self._log(
                "the stream has no state_dict: a copy of each step's batches is kept,"
                " for the case that the step is done again"
            )

    def _collated(self, items: list[Any]) -> Any:
        try:
            return self._collate(items)
        except Exception as error:
            raise self._failure(error) from error

    def _open_before(self, step: int) -> None:
        """Have the iterator stand before ``step``."""
        mark = self._position.before(step)
        if mark is None:
            self._open(epoch=0, state=None)
            first_step = self.cut.order.first_step
            self._mark = _Mark(step=first_step, epoch=0, items=0, state=None)
            self._note(first_step)
            logged_s = time.monotonic()
            while self._mark.step < step:
                logged_s = self._log_progress(self._mark.step, step, "steps", logged_s)
                self._draw_batch()
            return
        self._open(epoch=mark.epoch, state=mark.state)
        self._mark = mark
        if mark.state is None and mark.items:
            self._skip(mark)

    def _skip(self, mark: _Mark) -> None:
        self._mark = replace(mark, items=0)
        self._log(f"the stream has no state_dict: skipping {mark.items:,} items of its epoch")
        logged_s, newest = time.monotonic(), None
        while self._mark.items < mark.items:
            logged_s = self._log_progress(self._mark.items, mark.items, "items", logged_s)
            newest = self._draw()
            if newest is None:
                raise BadInputError("--task", "", f"its stream ends before item {mark.items} now")
        assert newest is not None
        # INVARIANT same-items: a stream that is read again gives the items that it gave before, or
        # the run is not exact. Broken if: what was skipped is not compared.
        # Guarded by: test_a_stream_that_gives_other_items_again_is_reported.
        if _are_others(self._mark.first, mark.first) or _are_others(
            _content(newest[0]), mark.newest
        ):
            self._warn_of_others(READ_AGAIN)
        self._mark = mark

    def _warn_of_others(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._on_other(text)

    def _log_progress(self, done: int, total: int, what: str, logged_s: float) -> float:
        now_s = time.monotonic()
        if now_s - logged_s < _PROGRESS_S:
            return logged_s
        self._log(f"skipped {done:,} of {total:,} {what} of the stream")
        return now_s

    def _open(self, *, epoch: int, state: Any) -> None:
        """Make an iterator."""
        dataset = self._dataset
        begins = state is None
        if begins and self._has_state:
            dataset.load_state_dict(from_plain(self._initial))
        if hasattr(dataset, "set_epoch"):  # after the state of the first epoch, which may name it
            dataset.set_epoch(epoch)
        if not begins and self._has_state:
            dataset.load_state_dict(from_plain(state))
        seed_generators(seeding_base(seed=self.cut.order.seed, epoch=epoch), index=_FIRST)
        try:
            self._iterator = iter(dataset)
        except Exception as error:
            raise self._failure(error) from error
        iterator: Any = self._iterator
        if state is not None and not self._has_state:
            iterator.load_state_dict(from_plain(state))

    def _draw_batch(self) -> list[Any]:
        """The rank's items of the next global batch; the stream stands behind it afterwards."""
        total = self.cut.order.global_batch_size
        first, size = self.cut.span(self.cut.order.first_step)
        while True:
            kept: list[Any] = []
            drawn, newest = 0, None
            while drawn < total and (item := self._draw()) is not None:
                if first <= drawn < first + size:
                    kept.append(item[0])
                drawn, newest = drawn + 1, item[0]
            if drawn == total:
                self._mark = replace(self._mark, newest=_content(newest))
                self._note(self._mark.step + 1)
                return kept
            if self._mark.items < total:
                expected = f"its stream gave {self._mark.items} items in an epoch, fewer than one"
                raise BadInputError("--task", "", f"{expected} global batch of {total}")
            self._on_sample(0)
            self._open(epoch=self._mark.epoch + 1, state=None)
            self._mark = replace(self._mark, epoch=self._mark.epoch + 1, items=0)

    def _draw(self) -> tuple[Any] | None:
        """The next item, in a tuple; None at the end of the epoch."""
        assert self._iterator is not None
        mark = self._mark
        self._on_sample(mark.items)  # outside the boundary: what it raises is not the dataset's
        base = seeding_base(seed=self.cut.order.seed, epoch=mark.epoch)
        seed_generators(base, index=mark.items)
        try:
            item = next(self._iterator)
        except StopIteration:
            return None
        except Exception as error:
            raise self._failure(error) from error
        if mark.items == 0:
            mark = replace(mark, first=_content(item))
            if mark.epoch == 0 and _are_others(mark.first, self._first):
                self._warn_of_others(READ_AGAIN)
            self._first = self._first or mark.first
        self._mark = replace(mark, items=mark.items + 1)
        return (item,)

    def _note(self, step: int) -> None:
        """Remember that the stream stands before ``step``."""
        known = self._position.before(step)  # where a step is drawn once more
        if known is not None and _are_others(self._mark.newest, known.newest):
            self._warn_of_others(
                "a stream gave other items when a step was drawn again from its state"
            )
        self._mark = replace(self._mark, step=step, state=self._state())
        self._position.note(self._mark)

    def _state(self) -> Any:
        owner: Any = self._dataset if self._has_state else self._iterator
        return to_plain(owner.state_dict()) if _has_state(owner) else None

    def _failure(self, error: Exception) -> _ItemFailedError:
        return _ItemFailedError(failed(error, indices=(self._mark.items,)))


def _has_state(owner: object) -> bool:
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


def _are_others(now: str, before: str) -> bool:
    """Return True if the two hashes differ and neither is empty; an empty one is of unknown content."""
    return bool(now and before and now != before)


def _content(item: Any) -> str:
    """A hash of tensors, arrays, numbers and texts, also in lists, tuples and dicts; "" for others.

    Of what is long it takes pieces: it is to distinguish two items, not to find a flipped bit.
    """
    digest = hashlib.sha256()
    pending = [item]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if isinstance(value, (np.ndarray, np.generic)):
            if value.dtype.hasobject:
                return ""
            flat = value.reshape(-1)
            digest.update(flat[:: max(1, flat.nbytes // _HASHED_BYTES)].tobytes())
        elif isinstance(value, dict):
            pending += [part for pair in value.items() for part in pair]
        elif isinstance(value, (list, tuple)):
            pending += value
        elif isinstance(value, (str, bytes)):
            digest.update(repr((len(value), value[:_HASHED_BYTES])).encode())
        elif isinstance(value, (bool, int, float, type(None))):
            digest.update(repr(value).encode())
        else:
            return ""
    return digest.hexdigest()[:16]
