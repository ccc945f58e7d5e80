"""What each rank has of its own is written in place: each object gets its own content, and nothing else changes."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from ddp_runner.training.local_state import by_value
from ddp_runner.training.local_state.by_value import KeptLocally
from ddp_runner.training.local_state.local_state import LOCAL
from tests.training.test_local_state import Settled, Slotted, local_of


class SlottedList(list):
    """A list with an attribute that is in no dict, and methods that do something else."""

    __slots__ = ("count",)

    def extend(self, entries):
        raise AssertionError("the list's own method is used")


class Ordered(OrderedDict):
    """A dict that counts what is put into it."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value + 1)


def taken_over(one, change, *, before=lambda _: None):
    """Keep ``one`` as ``before`` leaves it, let ``change`` give a step up, and put it back."""
    kept = KeptLocally({"one": one}, option="keep_local")
    before(one)
    pickled = kept.pickled()
    whole = by_value.Pickled(pickled.text, [memoryview(bytes(b)) for b in pickled.buffers])
    change(one)
    kept.put_back(whole)
    return whole


PAIRS = {
    "list": lambda n: [n],
    "dict": lambda n: {"n": n},
    "array": lambda n: np.full(2, n),
    "tensor": lambda n: torch.full((2,), n),
    "set": lambda n: {n},
    "object": lambda n: SimpleNamespace(n=n),
    "generator": np.random.default_rng,
    "module": lambda n: nn.Linear(1, 1).requires_grad_(n > 1),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_an_alias_of_the_step_that_is_given_up_is_undone(kind):
    """Each of the two has its own content again: as values of a dict, entries of a list and attributes."""

    def shown(one):
        parts = vars(one) if isinstance(one, SimpleNamespace) else one
        parts = list(parts.values()) if isinstance(parts, dict) else parts
        return [KeptLocally({"one": part}, option="").pickled() for part in parts]

    def alias(one):
        if isinstance(one, SimpleNamespace):
            one.best = one.now
        else:
            keys = list(one) if isinstance(one, dict) else [0, 1]
            one[keys[1]] = one[keys[0]]

    make = PAIRS[kind]
    for wrap in (
        lambda now, best: {"now": now, "best": best},
        lambda now, best: [now, best],
        lambda now, best: SimpleNamespace(now=now, best=best),
    ):
        one = wrap(make(1), make(2))
        expected = shown(one)
        taken_over(one, alias)
        assert shown(one) == expected


def test_an_alias_of_a_kept_object_does_not_write_into_it():
    """The step that is given up has put a kept object where another one was."""
    replay, env = [1, 2], SimpleNamespace(best=[0])
    kept = KeptLocally({"replay": replay, "env": env}, option="keep_local")
    pickled = kept.pickled()
    env.best = replay
    kept.put_back(pickled)
    assert (replay, env.best) == ([1, 2], [0])
    assert env.best is not replay


def test_a_view_made_by_the_step_that_is_given_up_is_undone():
    """Two arrays have one memory then, and different content."""
    one = {"all": np.zeros(4), "part": np.ones(2), "t": torch.zeros(4), "u": torch.ones(2)}
    taken_over(one, lambda one: one.update(part=one["all"][:2], u=one["t"][:2]))
    assert [part.tolist() for part in one.values()] == [[0] * 4, [1] * 2, [0] * 4, [1] * 2]


@pytest.mark.parametrize(
    "hold", [lambda a: (a,), lambda a: deque([a]), lambda a: [[a]], lambda a: {"k": a}, Settled]
)
def test_what_was_one_object_is_one_wherever_it_is_held(hold):
    """Also where no object of the program was there to be written."""
    one = {"hold": None, "a": [1]}
    at = one["a"]
    taken_over(
        one,
        lambda one: (one.update(hold=None), at.append(2)),
        before=lambda one: one.update(hold=hold(at)),
    )
    held = one["hold"]
    inner = (
        held.numbers
        if isinstance(held, Settled)
        else next(iter(held.values() if isinstance(held, dict) else held))
    )
    inner = inner[0] if isinstance(inner[0], list) else inner
    assert inner is one["a"] is at
    assert at == [1]


@pytest.mark.parametrize(
    "one",
    [
        Counter(a=2, b=1),
        Ordered(a=1, b=2),
        defaultdict(list, {1: [2]}),
        SlottedList([1, 2]),
        deque([1, 2, 3], maxlen=3),
    ],
    ids=lambda one: type(one).__name__,
)
def test_subclasses_of_containers_are_filled_by_the_base_class(one):
    """Neither to keep nor to put back changes the entries."""
    before = repr(one)
    taken_over(one, lambda one: one.clear())
    assert repr(one) == before


def test_slots_are_kept_also_where_one_is_new_or_gone():
    """Of a subclass of list and of an object; in the same process and in another one."""
    for make in (lambda: SlottedList([1]), lambda: Slotted(0)):
        one, other = make(), make()
        one.count = 0
        pickled = taken_over(
            one, lambda one: setattr(one, "count", 7), before=lambda one: setattr(one, "count", 5)
        )
        KeptLocally({"one": other}, option="keep_local").put_back(pickled)
        assert one.count == other.count == 5
        other.count = 1
        pickled = taken_over(
            one, lambda one: setattr(one, "count", 7), before=lambda one: delattr(one, "count")
        )
        KeptLocally({"one": other}, option="keep_local").put_back(pickled)
        assert not hasattr(one, "count")
        assert not hasattr(other, "count")


def test_a_set_that_has_not_changed_keeps_its_order():
    """Pickle builds a smaller one, in another order: alone, in an object, and where something else changes."""
    sparse = set(range(200)) - set()
    for number in range(200):
        if number % 31:
            sparse.discard(number)
    order = list(sparse)
    KeptLocally({"one": sparse}, option="keep_local")
    assert list(sparse) == order
    one = {"seen": sparse, "n": [0]}
    taken_over(one, lambda one: one["n"].append(1))
    assert one == {"seen": sparse, "n": [0]}
    assert list(sparse) == order
    taken_over(one, lambda one: one["seen"].discard(31))
    assert one["seen"] is sparse
    assert sparse == set(order)


def test_a_new_deque_has_its_own_length():
    """Where the program has built one of another length."""
    one = SimpleNamespace(d=deque(maxlen=3))
    pickled = taken_over(one, vars, before=lambda one: setattr(one, "d", deque([1, 2], maxlen=2)))
    other = SimpleNamespace(d=deque(maxlen=3))
    KeptLocally({"one": other}, option="keep_local").put_back(pickled)
    assert (one.d.maxlen, other.d.maxlen) == (2, 2)


def _shrunk(held):
    """Fill a set, and take most of it out again: its order is that of a large table."""
    for number in range(200):
        held.add(7 * number)
    for number in range(200):
        if number not in (3, 77, 150):
            held.discard(7 * number)


def _frozen():
    """Return a frozenset whose items collide in the small table that a pickle builds."""
    held = set(range(0, 1600, 8))
    for number in list(held)[4:]:
        held.discard(number)
    return frozenset(held)


class Seen:
    def __init__(self):
        self.keys, self.names = set(), ["a", {"b"}]


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (set, _shrunk),
        (lambda: {"seen": [set()]}, lambda d: _shrunk(d["seen"][0])),
        (Seen, lambda seen: _shrunk(seen.keys)),
        (lambda: {"seen": frozenset()}, lambda d: d.update(seen=_frozen())),
    ],
    ids=["the object", "deep", "attribute", "frozen"],
)
@pytest.mark.parametrize("is_shrunk", [True, False])
def test_a_set_that_is_iterated_in_another_order_is_named(make, change, is_shrunk):
    """Once a restored set has the same items in another order; not if it is as before."""
    one = make()
    if is_shrunk:
        change(one)
    local = local_of({"one": one, "count": [0]}, None, ranks=1)
    local.begin(0)
    local.seal(1)
    record = local.of_ranks(1)[LOCAL]
    other = local_of({"one": make(), "count": [0]}, None, ranks=1)
    other.go_to(1, record, is_begin=False)
    lines = other.take_lost()
    assert len(lines) == is_shrunk
    assert all(
        line == "a set in one, count of rank 0 was restored, and now iterates in another order:"
        " loop over sorted(s), or use a dict"
        for line in lines
    )


@pytest.mark.parametrize("has_set", [True, False])
def test_the_order_of_sets_is_compared_for_seconds_at_most(monkeypatch, has_set):
    """Else nobody knows it, and the run is not called exact; without sets there is nothing to compare."""
    monkeypatch.setattr(by_value, "_ORDER_S", 0.0)
    kept = KeptLocally(
        {"one": {"numbers": list(range(50_000)), "set": {1, 2} if has_set else 3}}, option="o"
    )
    pickled = kept.pickled()
    kept.objects["one"]["numbers"].append(1)
    assert kept.has_reordered(pickled) is (None if has_set else False)
    monkeypatch.setattr(by_value, "_ORDER_S", 60.0)
    assert kept.has_reordered(pickled) is False
