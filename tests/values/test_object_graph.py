"""The walker of object graphs: where it goes, by which paths, how far, and what an object is said to hold."""

from __future__ import annotations

import functools
import io
import types

import pytest
import torch
from torch import nn

from ddp_runner.values import object_graph
from ddp_runner.values.object_graph import (
    Closed,
    Reach,
    Walk,
    attributes_of,
    is_opaque,
    objects_in,
    remove_attribute,
    state_in,
    write_attribute,
)


class Thing:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("__own", "shared")

    def __init__(self):
        self.__own = 1


class Named:
    names: list[str] = []  # noqa: RUF012 - state of a class

    def method(self):
        return self.names


def inside(path, value):
    """Of lists alone."""
    if not isinstance(value, list):
        return None
    return [(f"{path}{number}", one) for number, one in enumerate(value)]


def found(roots, **rules):
    return [(path, reach) for path, _, reach in Walk(inside=inside, **rules).over(roots)]


SHARED: list = [1]
TREE = [[SHARED, 2], 3, SHARED]


def test_the_newest_that_was_found_comes_first():
    """Also of the roots the last one; what is inside twice has the path that led there first."""
    assert [path for path, _ in found([("a", TREE), ("b", [4])])] == [
        *("b", "b0", "a", "a2", "a20", "a1", "a0", "a01")
    ]


def test_breadth_first_the_path_of_fewest_steps_counts():
    """Each level in its order, a shared one at the place nearest to the root."""
    paths = [path for path, _ in found([("a", TREE)], breadth_first=True)]
    assert paths == ["a", "a0", "a1", "a2", "a01", "a20"]


def test_a_leaf_is_found_by_each_path_and_a_list_once():
    """Small numbers are one object wherever they stand."""
    paths = dict(found([("a", [SHARED, SHARED, 1])]))
    assert [path for path, reach in paths.items() if reach is Reach.LEAF] == ["a2", "a10"]
    assert [path for path, reach in paths.items() if reach is Reach.ENTERED] == ["a", "a1"]


def test_a_list_that_holds_itself_is_gone_into_once():
    """And the walk ends."""
    own: list = []
    own.append(own)
    assert found([("a", own)]) == [("a", Reach.ENTERED)]


def test_what_is_somebody_elses_is_passed_by():
    """With all that only it leads to."""
    assert found([("a", [SHARED])], without={id(SHARED)}) == [("a", Reach.ENTERED)]


def test_at_a_limit_values_are_named_and_not_gone_into():
    """By their number, those that do not count apart, and by how deep they are; leaves are no matter."""
    chain = [[[[5]]], 6]
    at_most = {"breadth_first": True}
    assert dict(found([("a", chain)], objects_max=2, **at_most)) == {
        "a": Reach.ENTERED,
        "a0": Reach.ENTERED,
        "a1": Reach.LEAF,
        "a00": Reach.LEFT,
    }
    assert dict(found([("a", chain)], depth_max=1, **at_most))["a00"] is Reach.LEFT
    counted = found([("a", chain)], objects_max=2, counts=lambda one: len(one) == 1, **at_most)
    assert dict(counted)["a"] is Reach.PASSED
    assert dict(counted)["a00"] is Reach.ENTERED
    assert dict(counted)["a000"] is Reach.LEFT


def test_values_made_on_the_way_are_not_taken_for_one_another():
    """One that nobody holds would give its id to the next one."""

    def made(path, value):
        return [(f"{path}{n}", [value[0] - 1]) for n in range(3)] if value[0] else []

    assert len([*Walk(inside=made).over([("a", [3])])]) == 1 + 3 + 9 + 27


def closure():
    seen = [1]

    def function(memo={}):  # noqa: B006 - state
        return memo, seen

    function.note = 2
    return function


def test_attributes_are_read_of_every_kind_of_object():
    """Slots by their real names, a class's state without its code, what a function keeps; nothing of torch's own."""
    assert attributes_of(Slotted()) == {"_Slotted__own": 1}
    assert attributes_of(Named) == {"names": Named.names}
    assert attributes_of(closure()) == {"note": 2, "__defaults__": ({},), "seen": [1]}
    module = nn.Linear(1, 1)
    module.count = 3
    assert attributes_of(module) == {"in_features": 1, "out_features": 1, "count": 3}
    assert attributes_of(nn.LSTM(1, 1)).keys().isdisjoint({"_flat_weights", "_all_weights"})
    assert attributes_of(torch.no_grad()(closure())) == {}  # a wrapper of a library's


@pytest.mark.parametrize("name", ["seen", "note"])
def test_an_attribute_is_written_and_removed_as_it_is_read(name):
    """A variable of the function around another one, too."""
    function = closure()
    write_attribute(function, name, 7)
    assert attributes_of(function)[name] == 7
    remove_attribute(function, name)
    assert name not in attributes_of(function)


def test_what_moves_as_it_is_used_is_opaque():
    """An iterator and a file that is read; not a list, nor a set of numbers."""
    assert all(map(is_opaque, (iter([1]), io.StringIO("a"), {Thing(), Thing()})))
    closed = io.StringIO("a")
    closed.close()
    assert not any(map(is_opaque, ([1], {1, 2}, {Thing()}, Thing(), closed)))


def test_objects_are_found_in_attributes_of_every_kind():
    """By the names that people use: attributes, keys of dicts, places in lists."""
    one = Thing(n=1)
    held = Thing(
        plain=[1, "a"],
        listed=[0, one],
        by_name={"x": one, one: one},
        partial=functools.partial(print, one),
        bound=Named().method,
        proxy=types.MappingProxyType({"p": one}),
        tensor=torch.zeros(1),
        module=torch,
    )
    assert [path for path, _ in objects_in(held, "t")] == [
        *("t.listed[1]", "t.by_name['x']", "t.by_name[1]", "t.partial[1][0]"),
        *("t.bound.__self__", "t.proxy['p']"),
    ]


def test_what_is_too_much_or_too_deep_is_closed(monkeypatch):
    """The attribute as a whole, or the list in which the depth ends."""
    monkeypatch.setattr(object_graph, "OBJECTS_MAX", 3)
    monkeypatch.setattr(object_graph, "CONTAINERS_DEEP", 2)
    held = Thing(many=[Thing() for _ in range(4)], deep=[[[[Thing()]]]])
    assert [*objects_in(held, "t")] == [
        ("t.many", Closed(held.many)),
        ("t.deep[0][0]", Closed(held.deep[0][0])),
    ]


def test_state_is_what_an_object_and_its_class_hold():
    """Nothing is inside what cannot be looked into."""
    assert state_in("t", iter([1])) is None
    assert state_in("t", Closed([1])) is None
    assert [path for path, _ in state_in("t", Named())] == ["Named"]
    assert [path for path, _ in state_in("Named", Named)] == ["Named.method"]
