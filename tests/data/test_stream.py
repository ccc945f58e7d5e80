"""A whole stream: every step gets the same items, whatever the world size and wherever it resumes."""

from __future__ import annotations

import enum
import io
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import NamedTuple

import numpy as np
import pytest
import torch

from ddp_runner.checkpoint.codec import stored_bytes
from ddp_runner.data.source import Cut
from ddp_runner.data.stream import READ_AGAIN, StreamOrder, StreamPosition, StreamSource
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import FaultError, FaultKind
from ddp_runner.values.plain import from_plain, to_plain
from tests.data.mapped import loader_of

BATCH = 6
LENGTH = 20  # three global batches an epoch, and two items that are dropped


class Stream(torch.utils.data.IterableDataset):
    """Items with noise from python's and torch's generators; counts how many were drawn."""

    def __init__(self, length=LENGTH):
        self.length = length
        self.epoch = 0
        self._drawn = memoryview(bytearray(1))  # nothing that is put back

    @property
    def drawn(self):
        return self._drawn[0]

    @drawn.setter
    def drawn(self, number):
        self._drawn[0] = number

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in range(self.length):
            self.drawn += 1
            yield torch.tensor(
                [1000.0 * self.epoch + number, random.random(), float(torch.rand(()))]
            )


class Stateful(Stream):
    """Goes on where its own state says, also when a new iterator is made."""

    def __init__(self, length=LENGTH):
        super().__init__(length)
        self._next = 0

    def state_dict(self):
        return {"next": self._next, "seen": torch.tensor([self._next])}

    def load_state_dict(self, state):
        self._next = state["next"]
        assert int(state["seen"]) == self._next

    def __iter__(self):
        while self._next < self.length:
            self._next += 1
            self.drawn += 1
            yield torch.tensor(
                [1000.0 * self.epoch + self._next - 1, random.random(), float(torch.rand(()))]
            )


class _StatefulIterator:
    def __init__(self, dataset):
        self._dataset = dataset
        self._next = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self._next == self._dataset.length:
            raise StopIteration
        self._next += 1
        self._dataset.drawn += 1
        number = 1000.0 * self._dataset.epoch + self._next - 1
        return torch.tensor([number, random.random(), float(torch.rand(()))])

    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state):
        self._next = state["next"]


class StatefulIterator(Stream):
    """Its iterator has the state."""

    def __iter__(self):
        return _StatefulIterator(self)


KINDS = pytest.mark.parametrize("kind", [Stream, Stateful, StatefulIterator])


def make(
    dataset=None,
    *,
    position=None,
    rank=0,
    world_size=1,
    reported=None,
    on_wait=lambda: None,
    collate_fn=None,
    on_other=lambda _: None,
):
    order = StreamOrder(seed=3, dataset_size=10 * BATCH, global_batch_size=BATCH, shuffle=False)
    source = StreamSource(
        Stream() if dataset is None else dataset,
        Cut(order=order, rank=rank, world_size=world_size, micro_batch_size=4),
        position=StreamPosition() if position is None else position,
        log=(lambda _: None) if reported is None else reported.append,
        collate_fn=collate_fn,
        on_other=on_other,
    )
    return loader_of(source, total_steps=10**6, num_workers=0, on_wait=on_wait)


def rows(batches):
    return torch.cat([one.batch for one in batches]) if batches else torch.zeros(0, 3)


def all_steps(loader, steps):
    return [rows(loader.take(step)) for step in steps]


def test_an_epoch_ends_with_its_last_whole_batch():
    """The rest is dropped, and the next epoch begins with its own numbers and noise."""
    with_epochs = all_steps(make(), range(4))
    numbers = [step[:, 0].tolist() for step in with_epochs]
    assert numbers == [[*range(6)], [*range(6, 12)], [*range(12, 18)], [*range(1000, 1006)]]
    assert not torch.equal(with_epochs[0][:, 1:], with_epochs[3][:, 1:])


@KINDS
def test_ranks_share_each_global_batch_and_agree_on_the_epochs(kind):
    """No item is lost or doubled at any world size; shares may be unequal; numbers are unique."""
    alone = all_steps(make(kind()), range(8))
    for world_size in (2, 4, 8):
        loaders = [make(kind(), rank=r, world_size=world_size) for r in range(world_size)]
        for step, expected in enumerate(alone):
            taken = [loader.take(step) for loader in loaders]
            assert torch.equal(torch.cat([rows(batches) for batches in taken]), expected)
            indices = [i for batches in taken for one in batches for i in one.indices]
            assert indices == list(range(step * BATCH, (step + 1) * BATCH))
            assert all(len(one.indices) == len(one.batch) for b in taken for one in b)


@KINDS
@pytest.mark.parametrize("step", [0, 2, 3, 5, 7])
def test_another_process_goes_on_exactly_there(kind, step):
    """From what a state holds: at once where the stream has a state, else by skipping its epoch."""
    before = StreamPosition()
    first = make(kind(), position=before)
    expected = all_steps(first, range(8))[step:]
    source = make(kind(), position=before)
    all_steps(source, range(step + 1))  # a survivor has taken the step that is in progress
    position, dataset, reported = StreamPosition(), kind(), []
    position.restore(before.to_record(step))
    again = all_steps(make(dataset, position=position, reported=reported), range(step, 8))
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    skips = kind is Stream and step > 0
    assert any("skipping" in line for line in reported) == skips
    if kind is not Stream and step == 5:
        assert dataset.drawn == 20 - 12 + 12, "nothing before the mark was drawn"


def test_skipping_shows_how_far_it_is(monkeypatch):
    """It may take long: a line for each stretch of time; control: none when it is quick."""
    before = StreamPosition()
    all_steps(make(position=before), range(3))
    reported = {}
    for name, interval_s in (("slow", 0.0), ("quick", 60.0)):
        monkeypatch.setattr("ddp_runner.data.stream._PROGRESS_S", interval_s)
        position, reported[name] = StreamPosition(), []
        position.restore(before.to_record(2))
        make(position=position, reported=reported[name]).take(2)
    first = "the stream has no state_dict: skipping 12 items of its epoch"
    skipped = [line for line in reported["slow"] if "skip" in line]
    assert skipped == [first] + [f"skipped {n} of 12 items of the stream" for n in range(12)]
    assert [line for line in reported["quick"] if "skip" in line] == [first]


class NamesItsEpoch(Stateful):
    """Its state holds the epoch, as of loaders that are resumed in the middle of one."""

    def state_dict(self):
        return {**super().state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.epoch = state["epoch"]


def test_a_state_with_its_epoch_does_not_hold_the_stream_back():
    """Each epoch has its own items; another process goes on in the epoch that the state names."""
    loader = make(NamesItsEpoch())
    epochs = [int(step[0, 0]) // 1000 for step in all_steps(loader, range(9))]
    assert epochs == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    position = StreamPosition()
    all_steps(make(NamesItsEpoch(), position=position), range(5))
    other = StreamPosition()
    other.restore(position.to_record(5))
    assert int(rows(make(NamesItsEpoch(), position=other).take(5))[0, 0]) // 1000 == 1


def test_where_a_stream_stands_is_reported_with_its_newest_item():
    """Alike for equal streams, and not for those that give others, wherever each began."""
    position = StreamPosition()
    loaders = [make(Stream(), position=position), make(Stream()), make(Shifted())]
    for step, loader in itertools.product(range(5), loaders):
        loader.take(step)
    first, second, third = (loader.place() for loader in loaders)
    assert first == second
    assert first[:2] == third[:2] == (1, 2 * BATCH)
    assert first[2] != third[2]
    later = StreamPosition()
    later.restore(position.to_record(4))
    loader = make(Stream(), position=later)
    loader.take(4)
    assert loader.place() == first


class Shifted(Stream):
    """Another rank's share."""

    def __iter__(self):
        for item in super().__iter__():
            yield item + 1.0


@KINDS
def test_a_step_taken_again_is_as_it_was_at_first(kind):
    """Drawn again from a state; a stream without one is not drawn from, because a copy is kept."""
    dataset = kind()
    loader = make(dataset, collate_fn=lambda items: {"x": list(items)})
    loader.take(0)
    first = loader.take(1)
    before, drawn = [list(each.batch["x"]) for each in first], dataset.drawn
    before = [[x.clone() for x in each] for each in before]
    for _ in range(2):
        first[0].batch["x"][0].mul_(2)
        first[1].batch.pop("x")
        first = loader.take(1)
        for each, rows_before in zip(first, before, strict=True):
            assert torch.equal(torch.stack(each.batch["x"]), torch.stack(rows_before))
    assert dataset.drawn == drawn + (0 if kind is Stream else 2 * BATCH)
    expected = all_steps(make(kind()), range(3))[2]
    assert torch.equal(
        torch.stack([x for each in loader.take(2) for x in each.batch["x"]]), expected
    )


def test_a_state_is_known_before_and_after_the_last_step():
    """A survivor's and its replacement's."""
    position = StreamPosition()
    all_steps(make(Stateful(), position=position), range(3))
    assert position.to_record(2)["state"]["next"] == 12
    assert position.to_record(3)["state"]["next"] == 18


@pytest.mark.parametrize("kind", [Stream, Stateful])
def test_where_a_copy_is_kept_is_said_once(kind):
    """Only of a stream without a state."""
    reported = []
    all_steps(make(kind(), reported=reported), range(6))
    line = (
        "the stream has no state_dict: a copy of each step's batches is kept, for the case that"
        " the step is done again"
    )
    assert reported == ([line] if kind is Stream else [])


def test_batches_that_cannot_be_copied_are_skipped_to():
    """It is said, and the step is exact all the same."""
    reported, dataset = [], Stream()
    loader = make(
        dataset, reported=reported, collate_fn=lambda items: [*items, (each for each in ())]
    )
    loader.take(0)
    first = loader.take(1)
    before = first[0].batch[0].clone()
    first[0].batch[0].mul_(2)
    assert not loader.gives_again(1)
    assert torch.equal(loader.take(1)[0].batch[0], before)
    assert dataset.drawn == 4 * BATCH
    cannot = (
        "the stream has no state_dict, and its batches cannot be copied (TypeError: cannot pickle"
        " 'generator' object): for a step that is done again the items before it are skipped"
    )
    assert reported == [cannot, "the stream has no state_dict: skipping 6 items of its epoch"]


@KINDS
def test_a_copy_taken_before_a_step_changes_nothing_for_the_step(kind):
    """The pass that is thrown away may change it."""
    expected, loader = all_steps(make(kind()), range(3)), make(kind())
    loader.take(0)
    loader.take_copy(1)[0].batch.zero_()
    assert torch.equal(rows(loader.take(1)), expected[1])
    loader.take_copy(2)[0].batch.zero_()
    assert torch.equal(rows(loader.take(1)), expected[1])
    assert torch.equal(rows(loader.take(2)), expected[2])


@pytest.mark.parametrize(("kind", "gives"), [(Stateful, True), (Stream, False)])
def test_a_step_is_given_again_where_nothing_has_to_be_skipped(kind, gives):
    """The last step always is; another share of it only by a state of the stream's own."""
    loader = make(kind())
    loader.take(0)
    loader.take(1)
    assert loader.gives_again(1)
    loader.assign(rank=0, world_size=2, micro_batch_size=4)
    assert loader.gives_again(1) is gives


class Kept(Stream):
    """Hands out what it keeps."""

    def __init__(self):
        super().__init__()
        self.rows = [torch.full((2,), float(number)) for number in range(LENGTH)]

    def __iter__(self):
        return iter(self.rows)


def test_a_batch_is_no_part_of_the_stream():
    """What a loss does to its batch is not done to the next epoch."""
    loader = make(Kept(), collate_fn=list)
    for step in range(6):
        for each in loader.take(step):
            for index, row in zip(each.indices, each.batch, strict=True):
                assert row.tolist() == [index % (3 * BATCH)] * 2
                row.add_(1.0)


class Shuffled(torch.utils.data.IterableDataset):
    """As people write it: a generator of its own, made once, shuffles the items for each epoch."""

    def __init__(self):
        self.rng = random.Random(0)
        self.numbers = list(range(LENGTH))

    def __iter__(self):
        self.rng.shuffle(self.numbers)
        for number in self.numbers:
            yield torch.tensor([float(number), self.rng.random()])


class ByEpoch(Shuffled):
    """Its order follows from the epoch alone."""

    def set_epoch(self, epoch):
        self.rng, self.numbers = random.Random(epoch), list(range(LENGTH))


@pytest.mark.parametrize("step", [1, 3, 4, 6, 8, 9, 10])
def test_an_order_that_follows_from_the_epoch_comes_again(step):
    """In another process, and in this one, by skipping."""
    expected = all_steps(make(ByEpoch()), range(14))
    assert not torch.equal(expected[0], expected[3]), "control"
    position, reported = StreamPosition(), []
    loader = make(ByEpoch(), position=position, on_other=reported.append)
    all_steps(loader, range(step))
    record = stored(position.to_record(step))
    loader.take(step)
    loader.assign(rank=0, world_size=2, micro_batch_size=4)  # no copy is of any use
    loader.assign(rank=0, world_size=1, micro_batch_size=4)
    elsewhere = StreamPosition()
    elsewhere.restore(record)
    position.restore(record)
    for one in (make(ByEpoch(), position=elsewhere, on_other=reported.append), loader):
        for later, rows_then in enumerate(expected[step:], step):
            assert torch.equal(rows(one.take(later)), rows_then)
    assert reported == []


def test_a_stream_is_read_again_from_its_beginning_or_it_is_said():
    """A roll-back to before the first checkpoint, in a process whose stream has moved on."""
    for kind, says in ((ByEpoch, 0), (Shuffled, 1)):
        position, reported = StreamPosition(), []
        loader = make(kind(), position=position, on_other=reported.append)
        all_steps(loader, range(2))
        loader.assign(rank=0, world_size=2, micro_batch_size=4)
        loader.assign(rank=0, world_size=1, micro_batch_size=4)
        position.restore({})
        loader.take(0)
        assert len(reported) == says


def test_a_record_of_an_earlier_version_is_taken():
    """It has what the dataset held when its epoch began."""
    expected, position = all_steps(make(ByEpoch()), range(3)), StreamPosition()
    all_steps(make(ByEpoch(), position=position), range(2))
    record = {**stored(position.to_record(2)), "begin": {("numbers",): ("moved", [1])}}
    position.restore(record)
    assert torch.equal(rows(make(ByEpoch(), position=position).take(2)), expected[2])


def stored(record):
    file = io.BytesIO()
    torch.save(record, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


_GLOBAL = random.Random(0)


class Hidden(Shuffled):
    """Its generator is none of its attributes."""

    def __iter__(self):
        _GLOBAL.shuffle(self.numbers)
        return iter(torch.tensor(self.numbers).float().unsqueeze(1))


class Numbered(Hidden):
    """What it carries is an iterator, which cannot be looked into."""

    def __init__(self):
        self.ids = itertools.count()

    def __iter__(self):
        epoch = next(self.ids)
        return iter(torch.arange(LENGTH).float().unsqueeze(1) + 100 * epoch)


class Forgetful(Stateful):
    """Its state does not hold all that its items depend on."""

    def __init__(self):
        super().__init__()
        self._salt = itertools.count()

    def load_state_dict(self, state):
        super().load_state_dict(state)
        next(self._salt)

    def __iter__(self):
        for item in super().__iter__():
            yield item + float(repr(self._salt)[6:-1])


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Shuffled, READ_AGAIN),
        (Hidden, READ_AGAIN),
        (Numbered, READ_AGAIN),
        (Forgetful, "gave other items when a step was drawn again from its state"),
    ],
)
def test_a_stream_that_gives_other_items_again_is_reported(kind, why):
    """Once, of a step that is redone and in a process that goes on there."""
    reported, position = [], StreamPosition()
    loader = make(kind(), position=position, on_other=reported.append)
    all_steps(loader, range(5))
    record = position.to_record(4)
    assert reported == [], "control"
    if kind is Forgetful:
        loader.take(4)
        loader.take(4)
    else:
        _GLOBAL.seed(77)
        position.restore(record)
        make(kind(), position=position, on_other=reported.append).take(4)
    assert len(reported) == 1
    assert reported[0].endswith(why)


def test_going_back_and_another_share_are_exact():
    """After a roll-back and with fewer ranks: the same items, from the record of that step."""
    expected = all_steps(make(), range(6))
    position = StreamPosition()
    loader = make(position=position, rank=1, world_size=2)
    all_steps(loader, range(2))
    record = position.to_record(2)
    all_steps(loader, range(2, 6))
    position.restore(record)
    assert torch.equal(rows(loader.take(2)), expected[2][3:])
    loader.assign(rank=0, world_size=1, micro_batch_size=4)
    assert torch.equal(rows(loader.take(2)), expected[2])
    assert torch.equal(rows(loader.take(3)), expected[3])


VALUES = {
    "scalar": np.float32(1.5),
    "bool": np.True_,
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "order": np.asfortranarray(np.ones((2, 3))),
    "record": np.zeros(2, dtype=[("a", "<i4"), ("b", "<f8")]),
    "time": np.datetime64("2020-02-02"),
    "generator": np.random.RandomState(5).get_state(),
    "bits": np.random.default_rng(5).bit_generator.state,
    "tensor": torch.arange(3),
    "ordered": OrderedDict(b=1, a=OrderedDict(c=np.zeros(2))),
    "counter": Counter("abca"),
    "deque": deque([1, (2, 3)], maxlen=4),
    "empty": [OrderedDict(), Counter(), deque()],
    "nested": [(1, None, "x", b"y", True), {"a": 1.5}],
    np.int64(3): {(1, "key"): 2},
}


@pytest.mark.parametrize("name", VALUES)
def test_a_state_may_hold_what_numpy_and_torch_hold(name):
    """Stored and sent as plain values, given back alike, and cut off from the original."""
    plain = to_plain({name: VALUES[name]})
    assert not any(type(item) in (OrderedDict, Counter, deque) for item in plain.values())
    stored_bytes(plain)
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    (back,) = from_plain(torch.load(file, weights_only=True)).values()
    assert repr(back) == repr(VALUES[name])
    assert type(back) is type(VALUES[name])


class Pair(NamedTuple):
    """A tuple whose names a state would lose."""

    a: int
    b: int


class Mode(enum.IntEnum):
    """A number with a name."""

    FAST = 3


class Split(str, enum.Enum):
    """A string with a name, which str() gives."""

    TRAIN = "train"


class Share(float):
    """A number that shows itself in a way of its own."""

    def __repr__(self):
        return "half"


@pytest.mark.parametrize(
    ("value", "base"), [(Mode.FAST, 3), (Split.TRAIN, "train"), (Share(0.5), 0.5)]
)
def test_of_a_type_of_its_own_a_state_keeps_the_value(value, base):
    """Equal to what it was, as a value and as a key."""
    back = from_plain(to_plain({value: value}))
    assert repr(back) == repr({base: base})
    assert back == {value: value}


def test_a_state_that_was_noted_does_not_change_with_the_dataset():
    """In-place changes of the dataset's own arrays are not seen, in either direction."""
    own = {"a": np.zeros(2), "t": torch.zeros(2)}
    plain = to_plain(own)
    own["a"] += 1
    own["t"] += 1
    given = from_plain(plain)
    given["a"] += 5
    given["t"] += 5
    again = from_plain(plain)
    assert again["a"].tolist() == again["t"].tolist() == [0.0, 0.0]


class Odd(Stream):
    """Its state cannot be kept."""

    def __init__(self, value):
        super().__init__()
        self._value = value

    def state_dict(self):
        return {"buffer": [self._value]}

    def load_state_dict(self, state):
        del state


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({1, 2}, "builtins.set"),
        (random.Random(1), "random.Random"),
        (defaultdict(int), "collections.defaultdict"),
        (Pair(1, 2), "tests.data.test_stream.Pair"),
        (np.array([object()]), "numpy.ndarray"),
    ],
)
def test_a_state_that_cannot_be_kept_is_named_before_the_first_step(value, name):
    """Not at the first save, hours later."""
    with pytest.raises(BadInputError, match=rf"state_dict\(\)\['buffer'\]\[0\] is a {name}"):
        make(Odd(value))


def test_an_item_that_raises_is_named():
    """The stream cannot go on behind it, so the run ends with its number."""

    class Broken(Stream):
        def __iter__(self):
            yield from (torch.zeros(1) for _ in range(8))
            raise ValueError("broken shard")

    loader = make(Broken())
    loader.take(0)
    with pytest.raises(FaultError, match=r"sample 8 .*ValueError: broken shard") as raised:
        loader.take(1)
    assert (raised.value.fault.kind, raised.value.fault.step) == (FaultKind.BAD_SAMPLE, 1)


@pytest.mark.parametrize("where", ["item", "collate"])
def test_refused_memory_is_no_bad_item(where):
    """A smaller micro-batch may help, and the stream is read again from where the step began."""

    class Greedy(Stream):
        refuses = True

        def __iter__(self):
            for number, item in enumerate(super().__iter__()):
                if where == "item" and number == 8 and Greedy.refuses:
                    np.empty(2**62, dtype=np.uint8)
                yield item

    def collate(items):
        if where == "collate" and items[0][0] == 6 and Greedy.refuses:
            torch.empty(2**62, dtype=torch.uint8)
        return torch.stack(items)

    loader = make(Greedy(), collate_fn=collate)
    loader.take(0)
    with pytest.raises(FaultError) as raised:
        loader.take(1)
    fault = raised.value.fault
    assert (fault.kind, fault.phase) == (FaultKind.OUT_OF_MEMORY, "data")
    Greedy.refuses = False
    assert torch.equal(rows(loader.take(1)), all_steps(make(), range(2))[1])


def test_a_stream_without_one_batch_is_the_users_error():
    """It would never end otherwise."""
    with pytest.raises(BadInputError, match="gave 5 items in an epoch"):
        make(Stream(length=5)).take(0)


def test_the_ranks_own_generators_stay_and_a_wait_can_be_left():
    """Control: drawing moves no generator; leaving in the middle of a batch loses no item."""

    class LeaveError(Exception):
        pass

    calls = []

    def leave_at_the_ninth():
        calls.append(None)
        if len(calls) == 9:
            raise LeaveError

    torch.manual_seed(5)
    random.seed(5)
    loader = make(on_wait=leave_at_the_ninth)
    first = rows(loader.take(0))
    with pytest.raises(LeaveError):
        loader.take(1)
    second = rows(loader.take(1))
    expected = all_steps(make(), range(2))
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])
    after = (random.random(), float(torch.rand(())))
    torch.manual_seed(5)
    random.seed(5)
    assert after == (random.random(), float(torch.rand(())))


def test_a_stream_that_ranks_wait_for_is_said_to_be_slow_once():
    """Not where one rank reads it, who reads nothing for others, nor where nobody waits."""
    loader = make(Stream())
    loader.assign(rank=0, world_size=1, micro_batch_size=2)
    assert loader.slow_line(0.9) == ""
    loader.assign(rank=0, world_size=2, micro_batch_size=2)
    assert loader.slow_line(0.2) == ""
    assert loader.slow_line(0.4).startswith(
        "40% of the time goes to waiting for data: each of 2 ranks reads the whole stream"
    )
    assert loader.slow_line(0.4) == ""
