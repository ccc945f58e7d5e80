"""State in every kind of object that people keep state in: followed, put back, sent, or named where it cannot be."""

from __future__ import annotations

import argparse
import collections
import functools
import io
import itertools
import random
import types
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from ddp_runner.training.exactness.side_state import SideState


@dataclass(slots=True)
class Slotted:
    n: int = 0


@dataclass(frozen=True)
class Frozen:
    items: list


class PrivateSlots:
    __slots__ = ("__n", "other")

    def __init__(self):
        self.__n = 0

    def step(self):
        self.__n += 1
        self.other = self.__n


class Buffer:
    """As a replay buffer."""

    def __init__(self):
        self.items, self.at = [], 0

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]

    def step(self):
        self.items.append(torch.tensor(float(self.at)))
        self.at += 1


class Iterable:
    """An object that can be iterated over, and is not one's own position."""

    def __init__(self):
        self.n = 0

    def __iter__(self):
        return iter(range(self.n))


class Counted:
    seen: ClassVar[int] = 0
    names: ClassVar[list] = []


class Named(dict):
    n = 0


class Stack(list):
    def __init__(self):
        super().__init__()
        self.high = 0


class Node:
    def __init__(self):
        self.n, self.next = 0, None


class Averaging(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.n = 0

    def step(self):
        self.n += 1
        self.mean += 1


def closure():
    n = 0

    def count():
        nonlocal n
        n += 1
        return n

    return count


def ring():
    first, second = Node(), Node()
    first.next, second.next = second, first
    return first


def add(name, by=1):
    def step(held):
        setattr(held, name, getattr(held, name) + by)

    return step


def step_class(held):
    type(held).seen += 1
    type(held).names.append(held.seen)


def set_item(held):
    held["n"] = held.get("n", 0) + 1


def append(held):
    held.append(len(held))


def grow_bytes(held):
    held.extend(b"x")


HOLDERS = {
    "SimpleNamespace": (lambda: types.SimpleNamespace(n=0), add("n")),
    "argparse.Namespace": (lambda: argparse.Namespace(n=0), add("n")),
    "dataclass with slots": (Slotted, add("n")),
    "frozen dataclass": (lambda: Frozen([0]), lambda held: held.items.append(1)),
    "private slots": (PrivateSlots, PrivateSlots.step),
    "replay buffer": (Buffer, Buffer.step),
    "iterable": (Iterable, add("n")),
    "UserList": (collections.UserList, append),
    "UserDict": (collections.UserDict, set_item),
    "class attributes": (Counted, step_class),
    "attribute of a dict": (Named, add("n")),
    "attribute of a list": (Stack, add("high")),
    "in three containers": (lambda: [{"a": (Node(),)}], lambda held: add("n")(held[0]["a"][0])),
    "in a set": (lambda: {Node()}, lambda held: add("n")(next(iter(held)))),
    "closure": (closure, lambda held: held()),
    "partial of a closure": (lambda: functools.partial(closure()), lambda held: held()),
    "method of an object": (lambda: Buffer().step, lambda held: held()),
    "ring": (ring, lambda held: add("n")(held.next)),
    "bytearray": (bytearray, grow_bytes),
    "deque": (lambda: collections.deque(maxlen=3), append),
    "OrderedDict": (collections.OrderedDict, set_item),
    "defaultdict": (lambda: collections.defaultdict(int), set_item),
    "Counter": (collections.Counter, lambda held: held.update("a")),
    "array": (lambda: np.zeros(2), lambda held: held.__setitem__(0, held[0] + 1)),
    "generator of numpy's": (lambda: np.random.default_rng(1), lambda held: held.random()),
    "generator of Python's": (lambda: random.Random(1), lambda held: held.random()),
    "generator of torch's": (
        lambda: torch.Generator().manual_seed(1),
        lambda held: torch.rand(1, generator=held),
    ),
    "module": (Averaging, Averaging.step),
}

OPAQUE = {
    "count": (itertools.count, next),
    "cycle": (lambda: itertools.cycle([1, 2]), next),
    "generator": (lambda: (one for one in range(100)), next),
    "iterator of a list": (lambda: iter([1, 2, 3]), next),
    "enumerate": (lambda: enumerate([1, 2, 3]), next),
    "file": (lambda: io.BytesIO(b"abc"), lambda held: held.read(1)),
}


class Task:
    """Has the holder as an attribute."""

    def __init__(self, held: Any):
        self.held = held


@pytest.fixture(autouse=True)
def fresh_classes():
    """What a test has counted on a class stays out of the next one."""
    Counted.seen, Counted.names, Named.n = 0, [], 0


def sent(record: Any) -> Any:
    """The record as a file gives it back."""
    stream = io.BytesIO()
    torch.save(record, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def shown(value: Any) -> Any:
    """All that is in a value, so that two can be compared."""
    held = Task(value)
    side = SideState(nn.Linear(1, 1), held)
    side.follow(list(side._all(with_contents=True)))
    return side.digests()


@pytest.mark.parametrize("kind", HOLDERS)
def test_what_a_holder_has_is_put_back_with_its_step(kind):
    """And is followed from the step that changed it first."""
    make, step = HOLDERS[kind]
    task = Task(make())
    side = SideState(nn.Linear(1, 1), task)
    step(task.held)
    side.keep(1)
    assert side.followed_names()
    before = shown(task.held)
    step(task.held)
    side.drop()
    assert shown(task.held) == before
    assert side.take_lost() == []
    step(task.held)
    assert shown(task.held) != before


@pytest.mark.parametrize("kind", HOLDERS)
def test_what_a_holder_has_is_another_process_s_after_a_repair(kind):
    """By the record that is sent and saved; the object stays the one that others refer to."""
    make, step = HOLDERS[kind]
    task = Task(make())
    side = SideState(nn.Linear(1, 1), task)
    for number in range(1, 4):
        step(task.held)
        side.keep(number)
    record, expected = sent(side.to_record()), shown(task.held)
    Counted.seen, Counted.names, Named.n = 0, [], 0
    other = Task(make())
    identity = other.held
    received = SideState(nn.Linear(1, 1), other)
    received.restore(record)
    assert received.take_lost() == []
    assert shown(other.held) == expected
    assert other.held is identity


@pytest.mark.parametrize("kind", OPAQUE)
def test_what_cannot_be_looked_into_is_named_once_it_matters(kind):
    """Once a step has used it; not at a run's begin: then nobody has."""
    make, use = OPAQUE[kind]
    task = Task({"inner": make()})
    side = SideState(nn.Linear(1, 1), task)
    use(task.held["inner"])
    side.keep(1)
    other = SideState(nn.Linear(1, 1), Task({"inner": make()}))
    other.restore(sent(side.to_record()))
    [name] = other.doubtful
    assert name.startswith("task.held['inner'] (")
    other = SideState(nn.Linear(1, 1), Task({"inner": make()}))
    other.restore({}, is_begin=True)
    assert other.doubtful == []


@pytest.mark.parametrize("kind", sorted({*OPAQUE} - {"cycle"}))
def test_what_nobody_has_used_is_not_named(kind):
    """Control: an iterator that is where it was when it was made."""
    make, _ = OPAQUE[kind]
    side = SideState(nn.Linear(1, 1), Task({"inner": make()}))
    for step in range(1, 4):
        side.keep(step)
    side.drop()
    assert side.doubtful == []
    side.restore(sent(side.to_record()))
    assert side.doubtful == []


class Quiet:
    """Control: what a task holds besides, and no step depends on."""

    def __init__(self, folder):
        self.log = (folder / "log.txt").open("w")
        self.loss = nn.CrossEntropyLoss()
        self.names = {"a", "b"}
        self.call = print
        self.kind = torch.float32
        self.lines = [1, 2, 3]


def test_what_no_step_uses_is_not_named(tmp_path):
    """A file that is written, functions, types and data that stay as they are."""
    task = Quiet(tmp_path)
    side = SideState(nn.Linear(1, 1), task)
    side.keep(1)
    side.drop()
    side.restore({})
    task.log.close()
    assert (side.doubtful, side.followed_names(), side.take_lost()) == ([], [], [])
