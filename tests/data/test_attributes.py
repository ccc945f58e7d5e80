"""What a dataset holds in its attributes, noted in one process and put back in another."""

from __future__ import annotations

import copy
import io
import itertools
import random
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch

from ddp_runner.data.attributes import Attributes, unknown_in


class Sampler:
    def __init__(self, items):
        self.items = items
        self.rng = np.random.default_rng(4)


class Owner:
    """Everything that a dataset may carry from one epoch to the next."""

    def __init__(self):
        self.python = random.Random(0)
        self.numpy = np.random.default_rng(1)
        self.old = np.random.RandomState(2)
        self.torch = torch.Generator().manual_seed(3)
        self.late = None
        self.number, self.text, self.scale = 0, "a", float("nan")
        self.files = [f"file {n}" for n in range(500)]
        self.rows = [{"row": n} for n in range(100)]
        self.order = np.arange(50)
        self.weights = torch.arange(4.0)
        self.counts, self.recent, self.seen = Counter(), deque(maxlen=3), {1}
        self.named = OrderedDict(a=1)
        self.pools = {"easy": [1, 2, 3], "hard": [4, 5, 6]}
        self.sampler = Sampler(self.files)
        self.again = self.files
        self.parts = [Sampler([1]), Sampler([2])]


def shown(owner):
    """All that an epoch's order may depend on; draws from copies."""
    owner = copy.deepcopy(owner)
    rngs = [owner.sampler.rng, *(part.rng for part in owner.parts)]
    return repr(
        [
            {
                k: v
                for k, v in vars(owner).items()
                if isinstance(v, (int, str, list, dict, set, deque))
            }
            | {"sampler": None, "parts": [part.items for part in owner.parts]},
            owner.order.tolist(),
            owner.weights.tolist(),
            owner.sampler.items,
            owner.again is owner.files is owner.sampler.items,
            [owner.python.random(), owner.numpy.random(), owner.old.rand()],
            [float(torch.rand((), generator=owner.torch)), [rng.random() for rng in rngs]],
            None if owner.late is None else owner.late.random(),
            hasattr(owner, "new") and owner.new,
        ]
    )


def _shuffles_all(owner):
    owner.python.shuffle(owner.files)
    owner.python.shuffle(owner.rows)
    owner.numpy.shuffle(owner.order)
    owner.old.rand()
    owner.weights.mul_(float(torch.rand((), generator=owner.torch)))
    for part in (owner.sampler, *owner.parts):
        part.rng.random()
    owner.python.shuffle(owner.pools["hard"])
    owner.parts.reverse()
    owner.number += 1
    owner.text += "b"
    owner.counts["x"] += 1
    owner.recent.append(owner.number)
    owner.named["b"] = 2
    owner.late = owner.late or random.Random(7)
    owner.late.random()
    owner.new = [*getattr(owner, "new", ()), owner.number]


def _stored(noted):
    """As a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(noted, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_what_an_epoch_began_with_is_put_back_in_any_process():
    """Generators, numbers, orders of lists, arrays; shared ones stay shared, new ones go."""
    owner = Owner()
    attributes = Attributes(owner)
    noted, expected = [], []
    for _ in range(4):
        noted.append(_stored(attributes.note()))
        expected.append(shown(owner))
        _shuffles_all(owner)
    assert noted[0] == {}
    assert len(set(expected)) == 4
    assert unknown_in(noted[3]) == []
    for epoch in (2, 0, 3, 1, 1):
        attributes.put_back(noted[epoch])
        assert shown(owner) == expected[epoch]
        _shuffles_all(owner)
    for epoch in (3, 1):
        other = Owner()
        Attributes(other).put_back(noted[epoch])
        assert shown(other) == expected[epoch]
        _shuffles_all(other)
        if epoch == 1:
            assert shown(other) == expected[2]


def test_to_note_changes_nothing():
    """A fault-free run is only looked at."""
    owner = Owner()
    before = shown(owner)
    attributes = Attributes(owner)
    attributes.note()
    assert shown(owner) == before


class Reader:
    def __init__(self):
        self.file = io.StringIO("a\nb\n")
        self.ids = itertools.count()
        self.large = np.zeros(20_000_000, dtype=np.uint8)
        self.number = 0


def test_what_cannot_be_kept_is_named_and_left_alone():
    """An open file stands where it stands."""
    reader = Reader()
    attributes = Attributes(reader)
    noted = attributes.note()
    assert unknown_in(noted) == ["file", "ids"]
    reader.file.readline()
    reader.number = 5
    attributes.put_back(_stored(noted))
    assert (reader.file.readline(), reader.number) == ("b\n", 0)
    reader.large = np.ones(20_000_000, dtype=np.uint8)
    assert unknown_in(attributes.note()) == ["file", "ids", "large"]


def test_a_list_of_other_length_is_refused():
    """A dataset that has grown since is another one."""
    owner = Owner()
    attributes = Attributes(owner)
    owner.rows.reverse()
    noted = attributes.note()
    other = Owner()
    del other.rows[50:]
    with pytest.raises(LookupError):
        Attributes(other).put_back(noted)
