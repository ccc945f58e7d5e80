"""Tasks with state where one would not look for it: how each is made, stepped and read."""

from __future__ import annotations

import array
import collections
import contextlib
import enum
import functools
import multiprocessing
import queue
import random
import threading
import types

import numpy as np
import torch


class Task:
    """With whatever attributes."""


class Node:
    def __init__(self, n=0):
        self.n = n


class Dice(random.Random):
    """A generator of one's own."""

    def __init__(self, seed):
        super().__init__(seed)
        self.thrown = 0

    def throw(self):
        self.thrown += 1
        return self.random()


def _with(held):
    task = Task()
    task.held = held
    return task


def held(make, step, read):
    """``step`` and ``read`` get what is held."""
    return lambda: _with(make()), lambda task: step(task.held), lambda task: read(task.held)


def grown(values):
    values.append(len(values))


def put(items):
    items.put(items.qsize())


def nested(depth):
    inner = [0]
    for _ in range(depth):
        inner = [inner]
    return inner


def innermost(value):
    while isinstance(value[0], list):
        value = value[0]
    return value


def chained(length):
    first = at = Node()
    for _ in range(length):
        at.next = Node()
        at = at.next
    return first


def last_of(node):
    while hasattr(node, "next"):
        node = node.next
    return node


def add_one(node):
    node.n += 1


def objects():
    found = np.empty(2, dtype=object)
    found[:] = [[1], {"a": 2}]
    return found


def counted_function():
    def count():
        count.n += 1

    count.n = 0
    return count


def remembered():
    def loss(value, seen=[], *, of={"n": 0}):  # noqa: B006 - as people write it
        seen.append(value)
        of["n"] += 1

    return loss


def warmed_up(function):
    calls = 0

    @functools.wraps(function)
    def warm(*arguments):
        nonlocal calls
        calls += 1
        return calls, function(*arguments)

    warm.calls = lambda: calls
    return warm


def global_count():
    global_count.n += 1


def decorated():
    """A method that is a closure."""
    return type("Made", (), {"loss": warmed_up(lambda self: 0)})()


def with_attribute_of_its_method():
    def loss(self):
        kind = type(self)
        kind.loss.calls = getattr(kind.loss, "calls", 0) + 1

    return type("Made", (), {"loss": loss})()


def calling_a_global():
    global_count.n = 0

    def loss(self):
        global_count()

    return type("Made", (), {"loss": loss})()


def counting_class():
    return type("Counting", (), {"n": 0})


def of_a_metaclass():
    meta = type("Meta", (type,), {"made": 0})
    return meta("OfMeta", (), {})()


def step_metaclass(held):
    type(type(held)).made += 1


def local():
    made = threading.local()
    made.n = 0
    return made


def bound():
    """A method that is stored without its object."""
    return random.Random(3).random


def step_value(value):
    value.value += 1


def step_array(values):
    values[1] += 1


def proxied():
    under = {"n": 0}
    view = types.MappingProxyType(under)
    return types.SimpleNamespace(view=view, step=Stepper(under))


class Counted:
    """No object of it is held: a function calls it by its name."""

    n = 0

    @classmethod
    def count(cls):
        cls.n += 1


def counting():
    Counted.n = 0

    def count():
        Counted.count()

    return count


class Stepper:
    __slots__ = ("of",)

    def __init__(self, of):
        self.of = of

    def __call__(self):
        self.of["n"] += 1


FOLLOWED = {
    "array.array": held(lambda: array.array("i", [1]), grown, list),
    "Queue": held(queue.Queue, put, lambda one: list(one.queue)),
    "PriorityQueue": held(queue.PriorityQueue, put, lambda one: list(one.queue)),
    "ChainMap": held(
        lambda: collections.ChainMap({"n": 0}),
        lambda one: one.update(n=one["n"] + 1),
        dict,
    ),
    "MappingProxyType": held(proxied, lambda one: one.step(), lambda one: dict(one.view)),
    "array of objects": held(
        objects, lambda one: one[0].append(one[1].update(a=5)), lambda one: one.tolist()
    ),
    "function's attribute": held(counted_function, lambda one: one(), lambda one: one.n),
    "attribute of a method": (
        with_attribute_of_its_method,
        lambda task: task.loss(),
        lambda task: getattr(type(task).loss, "calls", 0),
    ),
    "attribute of a global function": (
        calling_a_global,
        lambda task: task.loss(),
        lambda _: global_count.n,
    ),
    "class that a function names": held(counting, lambda one: one(), lambda _: Counted.n),
    "defaults": held(
        remembered, lambda one: one(1), lambda one: (one.__defaults__, one.__kwdefaults__)
    ),
    "decorated method": (
        decorated,
        lambda task: task.loss(),
        lambda task: type(task).loss.calls(),
    ),
    "class": held(counting_class, lambda one: setattr(one, "n", one.n + 1), lambda one: one.n),
    "metaclass": held(of_a_metaclass, step_metaclass, lambda one: type(type(one)).made),
    "subclass of Random": held(
        lambda: Dice(2), Dice.throw, lambda one: (one.getstate(), one.thrown)
    ),
    "bits of numpy": held(
        lambda: np.random.PCG64(1), lambda one: one.random_raw(), lambda one: one.state
    ),
    "threading.local": held(local, add_one, lambda one: one.n),
    "multiprocessing.Value": held(
        lambda: multiprocessing.Value("i", 0), step_value, lambda one: one.value
    ),
    "multiprocessing.Array": held(lambda: multiprocessing.Array("d", 3), step_array, list),
    "ten lists deep": held(lambda: nested(10), lambda one: grown(innermost(one)), innermost),
    "ten objects deep": held(
        lambda: chained(10),
        lambda one: add_one(last_of(one)),
        lambda one: last_of(one).n,
    ),
    "method of a generator": held(bound, lambda one: one(), lambda one: one.__self__.getstate()),
    "partial": held(
        lambda: functools.partial(print, seen=[]),
        lambda one: grown(one.keywords["seen"]),
        lambda one: one.keywords["seen"],
    ),
}


class Phase(enum.Enum):
    WARM, HOT = 1, 2


def step_phase(task):
    task.phase = Phase.HOT if task.phase is Phase.WARM else Phase.WARM


def phased():
    task = Task()
    task.phase = Phase.WARM
    return task


@functools.singledispatch
def dispatched(value):
    return value


@functools.lru_cache
def remembering(value):
    return value


@contextlib.contextmanager
def around():
    yield


class Wrapped:
    """Uses wrappers of libraries, some of which remember something."""

    def __init__(self):
        self.steps = 0

    @torch.no_grad()
    def loss(self):
        with around():
            dispatched(3), dispatched([])
            remembering(self.steps)
        return self.later

    @functools.cached_property
    def later(self):
        return 5


class Unset:
    """Refuses to be written by anybody."""

    def __init__(self):
        object.__setattr__(self, "items", [])
        object.__setattr__(self, "n", 0)

    def __setattr__(self, name, value):
        raise TypeError(f"{name} is read-only")

    def __delattr__(self, name):
        raise TypeError(f"{name} is read-only")


def step_unset(unset):
    object.__setattr__(unset, "n", unset.n + 1)


class Unread:
    """Gives no state."""

    def __init__(self):
        self.n = 0

    def state_dict(self):
        raise RuntimeError("not yet")

    def load_state_dict(self, state):
        raise RuntimeError("not yet")


class Endless(list):
    """Does not know how long it is."""

    def __len__(self):
        raise TypeError("endless")


class Rowdy:
    """Says nothing about itself."""

    def __getattribute__(self, name):
        raise RuntimeError(name)

    __slots__ = ("n",)


FOLLOWED |= {
    "enum": (phased, step_phase, lambda task: task.phase),
    "refuses attributes": held(Unset, step_unset, lambda one: one.n),
    "length unknown": held(
        lambda: Endless([1]), lambda one: list.append(one, 2), lambda one: [*list.__iter__(one)]
    ),
}


def step_middle(values):
    values[len(values) // 2] += 1


def step_object(values):
    values[len(values) // 2].n += 1


def simple_queue():
    items = queue.SimpleQueue()
    items.put(1)
    return items


def no_read(_):
    return object()  # another one each time


# What a step changes here is named after a repair or a resume.
NAMED = {
    "200,000 numbers": held(lambda: [0] * 200_000, step_middle, no_read),
    "150,000 in a deque": held(lambda: collections.deque([0] * 150_000), step_middle, no_read),
    "5,000 objects": held(lambda: [Node() for _ in range(5_000)], step_object, no_read),
    "SimpleQueue": held(simple_queue, lambda one: one.put(one.get()), no_read),
    "state_dict raises": held(Unread, add_one, no_read),
    "30 lists deep": held(
        lambda: [*nested(30)[:1], Node()],
        lambda one: grown(innermost(one)),
        innermost,
    ),
    "30 objects deep": held(lambda: chained(30), lambda one: add_one(last_of(one)), no_read),
    "in a list of many": held(
        lambda: [[Node()] for _ in range(12_000)],
        lambda one: add_one(one[11_000][0]),
        lambda one: one[11_000][0].n,
    ),
}
