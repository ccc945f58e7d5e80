"""What forward and loss change beside the optimizer is found wherever it hangs, and treated as state."""

from __future__ import annotations

import copy
import io
import json
import random
from collections import deque

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_runner import start
from ddp_runner.training.components.optimizer_state import hidden_state
from ddp_runner.training.exactness.side_state import LOOKS_AT_FIRST, SideState


class Meter:
    """An average as people write it."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def add(self, value):
        self.total += value
        self.count += 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("saved", torch.zeros(3))
        self.register_buffer("unsaved", torch.zeros(3), persistent=False)
        self.calls = 0
        self.level = 1.0

    def get_extra_state(self):
        return {"level": self.level}

    def set_extra_state(self, state):
        self.level = state["level"]

    def forward(self, x):
        self.calls += 1
        self.level *= 0.5
        self.unsaved = self.unsaved + 1
        self.saved += 1
        return self.layer(x)


class Task:
    def __init__(self):
        self.rng = random.Random(5)
        self.recent = deque(maxlen=3)
        self.meters = {"loss": Meter()}
        self.teacher = nn.Linear(3, 3)
        self.critic = nn.Linear(3, 1)
        self.opt = torch.optim.Adam(self.critic.parameters())
        self.data = TensorDataset(torch.zeros(2))
        self.never = [1, 2, 3]

    def loss(self, model, x):
        self.recent.append(self.rng.random())
        self.meters["loss"].add(1.5)
        self.made_late = len(self.recent)
        with torch.no_grad():
            self.teacher.weight.mul_(0.9)
        self.opt.zero_grad()
        self.critic(x).sum().backward()
        self.opt.step()
        return model(x).sum()


CHANGED = {
    "model.calls", "model.level", "model.unsaved",
    "task.rng", "task.recent", "task.meters['loss'].total", "task.meters['loss'].count",
    "task.teacher.weight", "task.critic.weight", "task.critic.bias", "task.opt", "task.made_late",
}  # fmt: skip


def _made(task=None):
    torch.manual_seed(1)
    task, model = task or Task(), Net()
    return SideState(model, task), model, task


def _step(model, task):
    task.loss(model, torch.ones(1, 3))


def _digests(side):
    found = side.digests()
    assert found
    return found


def test_a_rehearsal_finds_what_a_step_changes_and_leaves_nothing():
    """Neither the model's own weights and saved buffers nor what stays as it is are among it."""
    side, model, task = _made()
    held = side.hold()
    _step(model, task)
    assert set(side.follow_changed_since(held)) == CHANGED
    assert (model.calls, model.level, model.unsaved.tolist()) == (0, 1.0, [0.0] * 3)
    assert not hasattr(task, "made_late")
    assert (task.meters["loss"].count, len(task.recent)) == (0, 0)
    assert task.rng.random() == random.Random(5).random()


def test_a_step_given_up_twice_and_done_is_as_once_done():
    """Also where it was committed before: what is put back is of the last commit."""
    runs = []
    for gives_up in (0, 2):
        side, model, task = _made()
        held = side.hold()
        _step(model, task)
        side.follow_changed_since(held)
        for step in range(1, 4):
            for _ in range(gives_up):
                _step(model, task)
                side.drop()
            _step(model, task)
            side.keep(step)
        assert side.take_lost() == []
        runs.append(_digests(side))
    assert runs[0] == runs[1]
    assert set(runs[0]) - {"model.extra state"} == CHANGED  # which its attribute covers


def test_a_replacement_has_what_the_others_have():
    """From a record that a checkpoint can hold; what it makes late is reported, not passed over."""
    side, model, task = _made()
    held = side.hold()
    _step(model, task)
    side.follow_changed_since(held)
    for step in range(1, 4):
        _step(model, task)
        side.keep(step)
    file = io.BytesIO()
    torch.save(side.to_record(), file)
    file.seek(0)
    other, other_model, other_task = _made()
    other.restore(torch.load(file, weights_only=True))
    assert other.take_lost() == []
    assert _digests(other) == _digests(side)
    for each in ((model, task), (other_model, other_task)):
        _step(*each)
    side.keep(4), other.keep(4)
    assert _digests(other) == _digests(side)


def test_what_is_written_with_what_it_held_is_never_lost():
    """In place or by a new tensor, as a table that forward computes again; one that nobody writes is not followed."""
    model = nn.Module()
    for name in ("table", "in_place", "made_again"):
        model.register_buffer(name, torch.arange(4.0), persistent=False)

    def forward():
        model.in_place.mul_(1)
        model.made_again = torch.arange(4.0)

    side = SideState(model)
    held = side.hold()
    forward()
    assert side.follow_changed_since(held) == []
    for step in range(1, LOOKS_AT_FIRST + 3):
        forward()
        side.drop()
        assert side.take_lost() == []
        forward()
        side.keep(step)
    assert set(side.followed_names()) == {"model.in_place", "model.made_again"}


def test_what_changes_late_is_followed_or_reported():
    """A number is put back all the same; of a tensor nobody has kept what it held."""
    task = type("Late", (), {})()
    task.number, task.queue, task.quiet = 1, torch.zeros(2), 0
    side, *_ = _made(task)
    for step in range(1, LOOKS_AT_FIRST + 2):
        side.keep(step)
    side.look()
    task.number = 2
    task.queue.add_(1)
    side.drop()
    assert task.number == 1
    assert side.take_lost() == ["task.queue"]
    assert set(side.followed_names()) == {"task.number", "task.queue"}
    task.queue.add_(1)
    side.keep(9)
    task.queue.add_(1)
    side.drop()
    assert task.queue.tolist() == [2.0, 2.0]
    assert side.take_lost() == []


def test_what_ranks_have_differently_is_named_when_it_is_taken_over():
    """From a rank, or from a file of one."""
    side, model, task = _made()
    held = side.hold()
    _step(model, task)
    side.follow_changed_since(held)
    side.differing = {"task.recent"}
    other, *_ = _made()
    other.restore(side.to_record())
    assert other.took_over == ["task.recent"]


def test_what_hangs_on_a_parameter_is_state_too():
    """A copy of older weights and a number, made at the start or by a step; not what torch notes there."""
    side, model, _ = _made()
    model.layer.weight.old = torch.zeros(3, 3)
    side.keep()
    held = side.hold()
    model.layer.weight.old.add_(1)
    model.layer.bias.count = 1
    vars(model.layer.bias)["_noted"] = "by a library"
    changed = ["model.layer.weight.old", "model.layer.bias.count"]
    assert side.follow_changed_since(held) == changed
    assert (float(model.layer.weight.old.sum()), vars(model.layer.bias)) == (
        0.0,
        {"_noted": "by a library"},
    )
    model.layer.weight.old.add_(2)
    model.layer.bias.count = 5
    side.keep(1)
    other, other_model, _ = _made()
    other.restore(side.to_record())
    model.layer.weight.old.add_(7)
    side.drop()
    for one in (model, other_model):
        assert torch.equal(one.layer.weight.old, torch.full((3, 3), 2.0))
        assert one.layer.bias.count == 5
    assert (side.take_lost(), other.take_lost()) == ([], [])


class Updates:
    """A target network as tasks write it: at each second step a new copy of the model stands there."""

    def __init__(self):
        self.target, self.steps = None, 0

    def loss(self, model, _):
        self.steps += 1
        if self.steps % 2:
            self.target = copy.deepcopy(model.layer)
        with torch.no_grad():
            self.target.weight += 1
            model.layer.weight *= 0.5


def _after(steps, task=None):
    """The state after so many committed steps, of which the first is followed."""
    side, model, task = _made(task=task or Updates())
    held = side.hold()
    _step(model, task)
    side.follow_changed_since(held)
    for step in range(1, steps + 1):
        _step(model, task)
        side.keep(step)
    return side, model, task


def test_an_object_that_steps_replace_is_put_back_as_it_was():
    """Another one stands there since the last look; the step that is given up replaces it, or writes into it."""
    for steps in (40, 41):
        side, model, task = _after(steps)
        target, before = task.target, copy.deepcopy(task.target.state_dict())
        _step(model, task)
        side.drop()
        assert task.target is target
        assert all(torch.equal(target.state_dict()[name], one) for name, one in before.items())
        assert side.take_lost() == []


def test_a_replacement_gets_an_object_that_steps_have_created():
    """With what is in it, from a record that a checkpoint can hold; both then go on alike."""
    side, model, task = _after(5)
    file = io.BytesIO()
    torch.save(side.to_record(), file)
    file.seek(0)
    other, other_model, other_task = _made(task=Updates())
    other_model.load_state_dict(model.state_dict())
    other.restore(torch.load(file, weights_only=True))
    assert other.take_lost() == []
    for step in range(6, 9):
        for one, at, of in ((side, model, task), (other, other_model, other_task)):
            _step(at, of)
            one.keep(step)
        assert torch.equal(task.target.weight, other_task.target.weight)
        assert _digests(other) == _digests(side)


def test_an_object_of_another_rank_lies_on_the_device_here():
    """Rank 0's copy on its device, where the model is on another one; what is elsewhere stays there."""
    side, _, task = _after(3)
    other, other_model, other_task = _made(task=Updates())
    other_model.to("meta")
    other.restore(side.to_record())
    assert other_task.target.weight.device.type == "meta"
    assert task.target.weight.device.type == "cpu"


def _a_shallow_copy(task, model):
    task.target = copy.copy(model.layer)


def _with_weights_of_the_model(task, model):
    task.target = nn.Linear(3, 3)
    task.target.weight.data = model.layer.weight.data.view(3, 3)


def _in_a_list_too(task, model):
    task.target = copy.deepcopy(model.layer)
    task.all = [{"newest": task.target}]


def _bound_to_the_task(task, model):
    task.target = copy.deepcopy(model.layer)
    task.target.task = task


def _updated_by_an_optimizer(task, model):
    task.target = copy.deepcopy(model.layer)
    task.opt = torch.optim.SGD(task.target.parameters(), lr=0.1)


def _of_another_library(task, _):
    task.target = io.BytesIO(b"abc")


@pytest.mark.parametrize(
    "create",
    [
        _a_shallow_copy,
        _with_weights_of_the_model,
        _in_a_list_too,
        _bound_to_the_task,
        _updated_by_an_optimizer,
        _of_another_library,
    ],
)
def test_an_object_that_something_else_holds_a_part_of_is_not_sent(create):
    """Two would be made of one. Who receives names it."""
    side, model, task = _made(task=type("Odd", (), {"target": None})())
    held = side.hold()
    create(task, model)
    side.follow_changed_since(held)
    create(task, model)
    side.keep(1)
    other, *_ = _made(task=type("Odd", (), {"target": None})())
    other.restore(side.to_record())
    lost = other.take_lost()
    assert {"task.target"} & {name.partition(" ")[0] for name in [*lost, *other.opaque]}, lost


def test_an_object_that_cannot_be_sent_is_reported_by_who_receives():
    """Its attribute is named; here it stays."""
    side, _, task = _made(task=type("Odd", (), {})())
    task.thing = object()
    held = side.hold()
    task.thing = object()
    assert side.follow_changed_since(held) == ["task.thing"]
    other, *_ = _made(task=type("Odd", (), {})())
    other.restore(side.to_record())
    assert other.take_lost() == ["task.thing"]


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_spectral_norm_of_old_and_recurrent_layers_are_not_followed():
    """What hooks compute again before each forward, and lists of parameters, are no state."""
    model = nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(4, 4)), nn.utils.weight_norm(nn.Linear(4, 4))
    )
    recurrent = nn.LSTM(4, 4)
    both = nn.ModuleDict({"first": model, "second": recurrent})
    side = SideState(both)
    held = side.hold()
    both["second"](both["first"](torch.ones(2, 1, 4)))[0].sum().backward()
    assert side.follow_changed_since(held) == []


@pytest.mark.parametrize("steps", [200])
def test_looking_at_what_does_not_change_takes_a_small_share(steps):
    """A bound with much room: after the first steps a look is made when its time has been earned."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(300)))
    side = SideState(model)
    looks = 0
    look = side.look

    def counted():
        nonlocal looks
        looks += 1
        look()

    side.look = counted
    for step in range(steps):
        side.keep(step)
    assert LOOKS_AT_FIRST <= looks <= LOOKS_AT_FIRST + 5


class Lazy:
    """Answers for any name, with an error."""

    def __init__(self):
        self.n = 0

    def __getattr__(self, name):
        raise RuntimeError(name)


def _ring():
    found = [1]
    found.append(found)
    return found


@pytest.mark.parametrize("make", [Lazy, _ring, lambda: {"a": _ring()}, lambda: {Meter()}])
def test_odd_objects_are_looked_into_without_an_error(make):
    """One whose lookup of attributes raises, and lists that hold themselves."""
    task = type("Odd", (), {})()
    task.thing = make()
    side, *_ = _made(task)
    assert side.follow_changed_since(side.hold()) == []
    side.keep(1), side.drop()
    assert (side.take_lost(), side.doubtful) == ([], [])


def test_a_set_of_objects_that_change_is_named():
    """No order of them is the same in two processes."""
    task = type("Odd", (), {})()
    task.meters, task.names = {Meter(), Meter()}, {"a", "b"}
    side, *_ = _made(task)
    side.look()
    assert side.opaque == []
    next(iter(task.meters)).add(1.0)
    side.look()
    assert side.opaque == ["task.meters (set)"]


@pytest.mark.parametrize(
    ("file", "is_followed"),
    [
        ("/home/me/ddp_runner-trials/train.py", True),
        ("/home/me/my-packages/torch/train.py", True),
        ("/usr/lib/python3/site-packages/library/hooks.py", False),
        (torch.__file__, False),
        (json.__file__, False),
        (start.__file__, False),
    ],
)
def test_a_hook_of_the_users_is_known_by_its_place(file, is_followed):
    """Not by words in the path: a folder may be called as it likes."""
    found = {"seen": {"steps": 0}}
    source = "def count(*given):\n    seen['steps'] += 1\n"
    exec(compile(source, file, "exec"), found)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.register_step_pre_hook(found["count"])
    assert list(hidden_state({"optimizer": optimizer})) == ["optimizer: count.seen"] * is_followed


def test_what_an_optimizer_has_besides_its_state_is_named_once_it_changes():
    """Its own attributes, and what its hooks count in: no checkpoint has them. Not what stays as it was."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.count, optimizer.scale = 0, 0.5
    seen = {"steps": 0}

    def count(*given):
        seen["steps"] += 1

    optimizer.register_step_pre_hook(count)
    side = SideState(nn.Linear(2, 2), beside=lambda: hidden_state({"optimizer": optimizer}))
    side.look_again(whole=True)
    assert side.opaque == []
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.count += 1
    side.look_again(whole=True)
    assert side.opaque == ["optimizer.count", "optimizer: count.seen"]
