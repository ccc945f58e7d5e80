"""Nested values: what each user looks into, what becomes of it, and tensors that are taken out and put back."""

from __future__ import annotations

import dataclasses
import pickle
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddp_runner.kernel.values.nested import (
    IN_BATCH,
    OF_BATCH,
    OF_FORWARD,
    PLAIN,
    SENT,
    STORED,
    put_back,
    rebuilt,
    take_out,
    tensors_in,
)

Pair = namedtuple("Pair", "one other")  # noqa: PYI024 - as people write them
ONE = torch.ones(2)


class Listed(list):
    pass


class Holder:
    def __init__(self):
        self.tensor, self.itself = ONE, self


@dataclasses.dataclass
class Record:
    tensor: torch.Tensor
    made: torch.Tensor | None = dataclasses.field(default=None, init=False)

    def __post_init__(self):
        self.made = self.tensor * 10


def kinds():
    """One tensor in each kind of container."""
    return {
        "dict": {"a": ONE},
        "list": [ONE],
        "tuple": (ONE,),
        "ordered": OrderedDict(a=ONE),
        "default": defaultdict(list, a=ONE),
        "mapping": UserDict(a=ONE),
        "named": Pair(ONE, 1),
        "subclass": Listed([ONE]),
        "size": torch.Size([1]),
        "record": Record(ONE),
        "holder": Holder(),
        "namespace": SimpleNamespace(tensor=ONE),
    }


# User -> the kinds of containers that it looks into besides dict, list and tuple -> what becomes of them.
LOOKED_INTO = {
    "stored": (STORED, {"ordered": OrderedDict}),
    "sent": (SENT, {"ordered": dict, "default": dict, "named": Pair, "subclass": Listed}),
    "plain": (PLAIN, {"named": Pair}),
    "of forward": (
        OF_FORWARD,
        {
            "ordered": OrderedDict,
            "default": defaultdict,
            "mapping": UserDict,
            "named": Pair,
            "record": Record,
            "holder": Holder,
            "namespace": SimpleNamespace,
        },
    ),
    "of batch": (
        OF_BATCH,
        {
            "ordered": dict,
            "default": dict,
            "mapping": dict,
            "named": Pair,
            "subclass": Listed,
            "record": Record,
        },
    ),
}


@pytest.mark.parametrize("user", LOOKED_INTO)
def test_each_user_looks_into_its_own_kinds_of_containers(user):
    """All others are left as they are, and the originals stay as they were."""
    containers, becomes = LOOKED_INTO[user]
    becomes = {"dict": dict, "list": list, "tuple": tuple, **becomes}
    for name, value in kinds().items():
        found = rebuilt(value, lambda one: one + 1 if one is ONE else one, containers)
        if name == "size":
            assert found == value
            assert type(found) is torch.Size
            continue
        if name not in becomes:
            assert found is value
            assert list(tensors_in(value, containers)) == []
            continue
        assert type(found) is becomes[name]
        inner = (
            found.tensor
            if name in ("record", "holder", "namespace")
            else next(iter(getattr(found, "values", found.__iter__)()))
        )
        assert torch.equal(inner, ONE + 1)
        assert any(one is ONE for one in tensors_in(value, containers))
    assert torch.equal(ONE, torch.ones(2))


def test_a_batchs_record_is_made_again_and_a_forwards_copied():
    """A batch's class computes its other fields itself; of a forward each field is replaced, as by DDP."""
    made = rebuilt(Record(ONE), lambda one: one + 1, OF_BATCH)
    assert torch.equal(made.made, (ONE + 1) * 10)
    copied = rebuilt(Record(ONE), lambda one: one + 1, OF_FORWARD)
    assert torch.equal(copied.made, ONE * 10 + 1)
    assert len(list(tensors_in(Record(ONE), IN_BATCH))) == 2


def test_an_ordered_dict_keeps_what_torch_hangs_on_it():
    """A state dict of a module has metadata."""
    state = nn.Linear(2, 2).state_dict()
    tensors = []
    skeleton = take_out(state, tensors, STORED, once=False)
    back = put_back(pickle.loads(pickle.dumps(skeleton)), tensors, STORED)
    assert type(back) is OrderedDict
    assert back._metadata == state._metadata
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_tensors_that_are_not_wanted_stay_in_the_skeleton():
    """And one that is there twice is collected as often, if each is to be its own."""
    small, large = torch.ones(1), torch.ones(9)
    tensors = []
    skeleton = take_out(
        {"a": small, "b": [large, large]},
        tensors,
        STORED,
        once=False,
        where=lambda one: len(one) > 1,
    )
    assert skeleton["a"] is small
    assert len(tensors) == 2
    assert skeleton["b"][0] != skeleton["b"][1]


class Moves(UserDict):
    def to(self, device):
        return device


def test_what_is_a_leaf_to_its_user_is_not_looked_into():
    found = rebuilt(
        [Moves(a=ONE)],
        lambda one: one.to("there"),
        OF_BATCH,
        is_leaf=lambda one: hasattr(one, "to"),
    )
    assert found == ["there"]
