"""What a loop's own dataset, sampler or collate function remembers, and a replaced rank would lack, is named."""

from __future__ import annotations

import collections
import io
import random
import tracemalloc
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
)

from ddp_runner.training.exactness.held_values import DataWatch, watched_in
from ddp_runner.training.own_loop.batches import GivenBatches, OwnBatches, length_of

SAMPLES, BATCH = 8, 2
PER_PASS = SAMPLES // BATCH


class Samples(Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.scale, self.count, self.cache, self.slots, self.file = (
            1.0,
            0,
            {},
            [None] * SAMPLES,
            None,
        )

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor(float(index)) * self.scale


class Counting(Samples):
    def __getitem__(self, index):
        self.count += 1
        return super().__getitem__(index)


class Drawing(Samples):
    def __getitem__(self, index):
        return super().__getitem__(index) + self.rng.normal()


class Caching(Samples):
    """Reads a file that it opens late, and keeps what it has loaded."""

    def __getitem__(self, index):
        if self.file is None:
            self.file = io.StringIO()
        self.file.write("x")
        if index not in self.cache:
            self.slots[index] = self.cache[index] = super().__getitem__(index)
        return self.cache[index]


class Bounded(Samples):
    """Drops the oldest entry of its cache for a new one, and loads that again later."""

    def __init__(self, kind):
        super().__init__()
        self.cache = kind()

    def __getitem__(self, index):
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index), {"path": str(index)}
        if len(self.cache) > 3:
            self.cache.pop(next(iter(self.cache)))
        return self.cache[index][0]


class Pseudo(Samples):
    """Has labels that the loop makes."""

    def __init__(self):
        super().__init__()
        self.labels = {0: torch.zeros(1)}


class InPlace(Sampler):
    def __init__(self, length=SAMPLES):
        self.order = list(range(length))

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        random.shuffle(self.order)
        return iter([one % SAMPLES for one in self.order[:SAMPLES]])


class OfEpoch(InPlace):
    """Makes its order of the epoch, as DistributedSampler does."""

    def set_epoch(self, epoch):
        self.epoch, self.order = epoch, list(range(SAMPLES))


class Stream(IterableDataset):
    def __init__(self):
        self.items = [torch.tensor(float(one)) for one in range(SAMPLES)]

    def __iter__(self):
        random.shuffle(self.items)
        return iter(self.items)


class CountingCollate:
    def __init__(self):
        self.n = 0

    def __call__(self, items):
        self.n += 1
        return torch.stack(items) * self.n


class OwnLoader:
    def __init__(self):
        self.passes = 0

    def __len__(self):
        return PER_PASS

    def __iter__(self):
        self.passes += 1
        return iter(torch.ones(PER_PASS) * self.passes)


def loader(dataset=None, **how):
    return DataLoader(dataset or Samples(), batch_size=BATCH, **how)


def names_in(batches, *, passes=3, between=lambda step: None):
    """What is named over so many passes; ``between`` stands for the loop's body."""
    found = []
    length = length_of(batches, accumulate=1, max_steps=passes * PER_PASS, epochs=0)
    given = GivenBatches(batches=batches, length=length, accumulate=1)
    own = OwnBatches(
        given, seed=0, rank=0, say=lambda _: None, warn=lambda _: None, alive=lambda: None
    )
    own.watch = DataWatch(watched_in(batches), note=found.extend)
    for step in range(length.total_steps):
        own.take(step)
        between(step)
    return found


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: loader(Counting()), "`dataset.count`"),
        (lambda: loader(Drawing()), "`dataset.rng`"),
        (lambda: loader(sampler=InPlace()), "`sampler.order`"),
        (lambda: loader(sampler=InPlace(50_000)), "`sampler.order`"),
        (lambda: DataLoader(Stream(), batch_size=BATCH), "`dataset.items`"),
        (lambda: loader(collate_fn=CountingCollate()), "`collate_fn.n`"),
        (OwnLoader, "`batches.passes`"),
    ],
)
def test_what_a_pass_leaves_behind_is_named(make, name):
    assert names_in(make()) == [name]


@pytest.mark.parametrize(
    "make",
    [
        loader,
        lambda: loader(Caching()),
        lambda: loader(Bounded(dict)),
        lambda: loader(Bounded(collections.OrderedDict), shuffle=True),
        lambda: loader(Subset(Bounded(collections.OrderedDict), range(SAMPLES))),
        lambda: loader(shuffle=True),
        lambda: loader(shuffle=True, generator=torch.Generator()),
        lambda: loader(sampler=DistributedSampler(Samples(), 2, 0)),
        lambda: loader(sampler=OfEpoch()),
        lambda: loader(Counting(), num_workers=1),
        lambda: [torch.ones(2)] * PER_PASS,
    ],
)
def test_data_without_a_memory_is_not_named(make):
    assert names_in(make()) == []


@pytest.mark.parametrize("at", [PER_PASS - 1, 1])
def test_what_the_loop_changes_in_its_data_is_named(at):
    """Also within a pass: a replacement draws that again without the change."""
    data = Samples()
    found = []

    def body(step):
        if step == at:
            data.scale *= 0.5
        found.append(step)

    assert names_in(loader(data), passes=2, between=body) == ["`dataset.scale`"]


@pytest.mark.parametrize("is_new", [False, True])
def test_labels_that_the_loop_makes_are_no_cache(is_new):
    data = Pseudo()

    def body(_):
        changed = data.labels[0] + 1.0
        data.labels[0] = changed if is_new else data.labels[0].copy_(changed)

    assert names_in(loader(data), between=body) == ["`dataset.labels`"]


class Rising(Samples):
    level = 0.0


@pytest.mark.parametrize(("change", "named"), [(0.5, ["`data.level`"]), (0.0, [])])
def test_a_call_that_changes_an_attribute_of_its_class_is_named(change, named):
    data, found = Rising(), []
    watch = DataWatch({"data": data}, note=found.extend)
    for _ in range(3):
        with watch.around_call():
            data.level = data.level + change
    assert found == named


class Inner:
    calls = 0  # an attribute of the class, until the first call

    def __call__(self, rows):
        self.calls += 1
        return rows


class Around:
    """As transformers' Trainer wraps the collator that it is given."""

    def __init__(self):
        self.inner = Inner()

    def __call__(self, rows):
        return self.inner(rows)


def test_a_count_that_begins_in_a_class_is_named_after_one_pass():
    assert names_in(loader(collate_fn=Around()), passes=2) == ["`collate_fn.inner`"]


def test_what_loading_alone_changes_is_no_change_by_a_loss():
    data, found = Counting(), []
    watch = DataWatch({"data": data}, note=found.extend)
    for index in range(SAMPLES):
        watch.draws()
        data[index]
        watch.drawn()
    assert found == []


def test_an_epoch_that_a_framework_sets_before_the_pass_is_not_named():
    """As Lightning does: the run then sets the same one, and so does a replaced rank."""
    sampler = DistributedSampler(Samples(), 1, 0)

    def body(step):
        if (step + 1) % PER_PASS == 0:
            sampler.set_epoch((step + 1) // PER_PASS)

    assert names_in(loader(sampler=sampler), between=body) == []


def named_in_calls(data, change, **how):
    """What is named of ``data`` over calls that ``change`` it."""
    found = []
    watch = DataWatch({"data": data}, note=found.extend, **how)
    for _ in range(3):
        with watch.around_call():
            change()
    return found


class Wrapping(Samples):
    def __init__(self, *inner):
        super().__init__()
        self.inner = inner


@pytest.mark.parametrize(
    ("wrap", "place"),
    [
        (lambda data: Subset(data, range(4)), "dataset"),
        (lambda data: Subset(Subset(data, range(4)), range(2)), "dataset.dataset"),
        (lambda data: ConcatDataset([Counting(), data]), "datasets[1]"),
        (lambda data: Wrapping({"clean": data}), "inner[0]['clean']"),
    ],
)
def test_data_behind_other_datasets_is_looked_at(wrap, place):
    data = Rising()
    data.level = 0.0

    def change():
        data.level += 0.5

    assert named_in_calls(wrap(data), change) == [f"`data.{place}.level`"]


class Owner:
    def __init__(self):
        self.steps = 0

    def transformed(self, sample):
        return sample


def test_an_object_of_the_kept_state_is_no_data():
    """A transform is often a method of the task, whose own state is kept."""
    owner, data = Owner(), Samples()
    data.transform = owner.transformed

    def change():
        owner.steps += 1

    assert named_in_calls(data, change, is_kept=lambda value: value is owner) == []
    assert named_in_calls(owner, change, is_kept=lambda value: value is owner) == []
    assert named_in_calls(data, change) == ["`data.transform`"]


class Unasked:
    @property
    def __class__(self):
        raise RuntimeError("its settings are not loaded")


class ReadLate(list):
    def __len__(self):
        return 50_000

    def __iter__(self):
        raise RuntimeError("it would read all of it")


def test_an_object_that_cannot_be_asked_ends_nothing():
    data, owner = Rising(), Owner()
    data.level, data.settings, data.frames = 0.0, Unasked(), ReadLate()
    data.owner = weakref.proxy(owner)
    del owner

    def change():
        data.level += 0.5

    assert named_in_calls(data, change) == ["`data.level`"]


def test_a_look_at_large_data_copies_little_of_it():
    data = Samples()
    data.volumes = [np.ones(1_000_000, dtype=np.uint8) for _ in range(30)]
    data.turned = np.ones((2_000, 5_000), dtype=np.float32).T
    tracemalloc.start()

    def change():
        data.volumes[3][:] += 1
        data.turned += 1

    try:
        assert named_in_calls(data, change) == ["`data.volumes`", "`data.turned`"]
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("loads_here", [False, True])
def test_what_is_changed_once_is_named(loads_here):
    """Where samples are loaded here, a look is before and after the step that changes it."""
    data, found = Counting(), []
    watch = DataWatch({"data": data}, loads_here=lambda: loads_here, note=found.extend)
    for step in range(32):
        watch.draws()
        data.count += loads_here
        watch.drawn()
        if step == (15 if loads_here else 10):
            data.scale = 0.5
    assert found == ["`data.scale`"]


@pytest.mark.parametrize("data", [[{"weight": 1.0} for _ in range(9)], {0: [1.0], 1: [2.0]}])
def test_data_that_is_a_list_or_a_dict_is_looked_at(data):
    def change():
        key = next(iter(data[1])) if isinstance(data, list) else 0
        data[1][key] += 1.0

    assert named_in_calls(data, change) == ["`data`"]
    assert named_in_calls(data, lambda: None) == []


def test_what_drawing_from_a_sampler_changes_is_no_change_by_a_loss():
    """The next epoch may be drawn in the middle of a step, for loader workers."""
    order, found, times = OfEpoch(), [], []
    owners = {"data": Samples(), "sampler": order}
    watch = DataWatch(owners, sampled=lambda: len(times), note=found.extend)
    for epoch in range(3):
        watch.draws()
        watch.drawn()
        order.set_epoch(epoch)
        times.append(epoch)
    watch.draws()
    assert found == []
    watch.drawn()
    order.order[0] = 1
    watch.draws()
    assert found == ["`sampler.order`"]
