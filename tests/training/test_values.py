"""What an attribute holds can be remembered, compared, put back in place, and sent to another process."""

from __future__ import annotations

import io
import random
from collections import Counter, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from ddp_runner.training.exactness.values import ENTRIES_MAX, NotPlainError, from_wire, kept_of

Point = namedtuple("Point", "x y")  # noqa: PYI024 - as people write them


def _optimizer():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter], 0.1)
    parameter.grad = torch.ones(3)
    optimizer.step()
    return optimizer


def _schedule():
    """It holds a Counter, and calls that one's ``elements()`` in its second step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], 0.1)
    warming = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    falling = lr_scheduler.MultiStepLR(optimizer, [2, 4])
    schedule = lr_scheduler.SequentialLR(optimizer, [warming, falling], [2])
    optimizer.step()
    return schedule


class _History:
    """Needs the classes of what it holds."""

    def __init__(self):
        self.seen, self.best = defaultdict(list), Point(1, [])

    def step(self):
        self.seen[len(self.seen)].append(self.best.x)
        self.best = Point(self.best.x / 2, [])

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def _step(one):
    one.step()


VALUES = {
    "tensor": (lambda: torch.arange(6.0), lambda one: one.mul_(2)),
    "bfloat16": (lambda: torch.ones(3, dtype=torch.bfloat16), lambda one: one.add_(1)),
    "written by numpy": (lambda: torch.arange(6.0), lambda one: np.multiply(one, 2, out=one.numpy())),
    "nan": (lambda: torch.tensor([float("nan"), 1.0]), lambda one: one.mul_(3)),
    "array": (lambda: np.arange(5.0), lambda one: one.__imul__(3)),
    "list": (lambda: [1, "two", None, 3.5], lambda one: one.append(4)),
    "list of tensors": (lambda: [torch.zeros(2), torch.ones(2)], lambda one: one[1].add_(1)),
    "dict": (lambda: {"a": 1, 2: torch.ones(2)}, lambda one: one[2].sub_(1)),
    "counter": (lambda: Counter(a=3), lambda one: one.update("ab")),
    "set": (lambda: {1, 2, 3}, lambda one: one.discard(2)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda one: one.append(3)),
    "tuple of lists": (lambda: ([1], [2]), lambda one: one[0].append(9)),
    "namedtuple": (lambda: Point([1], 2), lambda one: one.x.append(9)),
    "torch generator": (lambda: torch.Generator().manual_seed(3), lambda one: torch.rand(1, generator=one)),
    "random": (lambda: random.Random(3), lambda one: one.random()),
    "numpy generator": (lambda: np.random.default_rng(3), lambda one: one.random()),
    "numpy state": (lambda: np.random.RandomState(3), lambda one: one.rand()),
    "optimizer": (_optimizer, _step),
    "schedule": (_schedule, _step),
    "history": (_History, _step),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_what_is_changed_in_place_is_put_back_in_place(name):
    """Whoever else refers to the object has the old values too."""
    make, change = VALUES[name]
    value = make()
    kept = kept_of(value)
    assert kept.is_in(value)
    change(value)
    assert not kept.is_in(value)
    assert kept.given_back(value) is value
    assert kept.is_in(value)
    change(value)  # it works as before


@pytest.mark.parametrize("name", VALUES)
def test_what_is_sent_arrives_in_a_process_that_has_made_its_own(name):
    """As plain values that a checkpoint can hold; two equal ones have one digest."""
    make, change = VALUES[name]
    value, other = make(), make()
    change(value)
    kept = kept_of(value)
    assert kept.digest() != kept_of(other).digest()
    file = io.BytesIO()
    torch.save(kept.plain(), file)
    file.seek(0)
    received = from_wire(torch.load(file, weights_only=True))
    arrived = received.given_back(other)
    assert kept.is_in(arrived)
    assert kept_of(arrived).digest() == kept.digest()
    change(arrived)  # it works as before
    if name not in ("counter", "namedtuple"):
        has_state = name in ("optimizer", "schedule", "history")
        assert type(arrived if has_state else received.given_back(None)) is type(value)


def test_what_a_stateful_object_receives_is_on_its_devices():
    """It was sent in host memory; an object that takes over what it loads is not moved there."""

    class Taking:
        def __init__(self, device):
            self.held = {"sums": [torch.zeros(2, device=device)], "count": torch.ones(1)}

        def state_dict(self):
            return self.held

        def load_state_dict(self, state):
            self.held.clear()
            self.held.update(state)

    other = Taking("meta")
    sent = Taking("cpu")
    sent.held["sums"].append(torch.full((1,), 3.0))
    from_wire(kept_of(sent).plain()).given_back(other)
    assert [one.device.type for one in other.held["sums"]] == ["meta", "cpu"]
    assert other.held["count"].item() == 1.0


def test_a_tensor_that_was_replaced_comes_back_itself():
    """Not a copy of it: the old one, with its values."""
    old = torch.arange(4.0)
    kept = kept_of(old)
    new = old * 2
    old.add_(7)
    assert kept.given_back(new) is old
    assert old.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_without_contents_a_tensor_is_known_by_torch_s_count():
    """Which says that it has changed, and cannot put it back."""
    tensor = torch.zeros(3)
    seen = kept_of(tensor, with_contents=False)
    assert seen.is_in(tensor)
    assert not seen.is_in(tensor.clone())
    tensor.add_(1)
    assert not seen.is_in(tensor)
    with pytest.raises(NotPlainError):
        seen.given_back(tensor)


def test_of_other_objects_only_who_they_are_is_known():
    """They are reported by the name of their type where they would have to be sent."""
    value = object()
    kept = kept_of(value)
    assert kept.is_in(value)
    assert not kept.is_in(object())
    assert kept.given_back(None) is value
    with pytest.raises(NotPlainError, match="object"):
        kept.plain()
    assert kept_of([0] * (ENTRIES_MAX + 1)).is_in([0] * (ENTRIES_MAX + 1)) is False


def test_memory_of_a_copy_is_used_again():
    """A queue that is kept after each step costs its copying, not an allocation."""
    tensor = torch.zeros(8)
    first = kept_of(tensor)
    tensor.add_(1)
    second = kept_of(tensor, before=first)
    assert second.plain().data_ptr() == first.plain().data_ptr()
    assert second.is_in(tensor)
