"""The third argument of a task's loss, and its hooks at the end of epochs and evaluations."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_runner import Datasets, DDPTrainer
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.helpers import call_hook
from ddp_runner.training.task import EpochContext, LossInContext
from ddp_runner.training.workload import start_fresh
from tests.training.test_build import build

SAMPLES, BATCH = 24, 4


def note(*values):
    """Into a file: the run puts back a list that an evaluation or a hook changes."""
    with Path("notes").open("a") as file:
        file.write(json.dumps(values) + "\n")


def noted():
    """All notes since this was called last."""
    file = Path("notes")
    found = [tuple(json.loads(line)) for line in file.read_text().splitlines()]
    file.unlink()
    return found


class Task:
    """Notes what it is given."""

    def build_model(self):
        return nn.Linear(2, 1)

    def build_datasets(self):
        data = torch.arange(2.0 * SAMPLES).reshape(SAMPLES, 2) / SAMPLES
        return Datasets(train=TensorDataset(data), validation=TensorDataset(data[:8]))

    def loss(self, model, batch, context):
        note(context.step, context.epoch, context.is_training, context.total_steps)
        return model(batch[0]).square().mean() * (1 + context.epoch)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trained(task, **config):
    given = {"batch_size": BATCH, "epochs": 2, "num_workers": 0, "name": "noted", **config}
    return DDPTrainer(task, config=given).train()


def without_repeats(seen):
    return [one for before, one in zip([None, *seen], seen, strict=False) if one != before]


def test_a_loss_is_given_its_step_and_epoch():
    """In each micro-batch; evaluations have those of the last step, and the first step is computed twice."""
    trained(Task, accumulation=2)
    notes = noted()
    training = [one for one in notes if one[2]]
    assert without_repeats(training) == [(step, step // 3, True, 6) for step in range(6)]
    assert training.count((4, 1, True, 6)) == 2
    evaluations = without_repeats([one for one in notes if not one[2]])
    assert evaluations == [(2, 0, False, 6), (5, 1, False, 6)]


def test_a_resumed_run_counts_its_steps_on():
    """Not from where this process began."""
    trained(Task, epochs=1)
    noted()
    trained(Task, epochs=2)
    assert next(one for one in noted() if one[2])[:2] == (6, 1)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda model, batch: None, None),
        (lambda model, batch, context: context, "it"),
        (lambda model, batch, where: where, "it"),
        (lambda model, batch, where, /: where, "it"),
        (lambda model, batch, context=None: context, "it"),
        (lambda model, batch, *, context: context, "it"),
        (lambda model, batch, weight=None, context=None: context, "it"),
        (lambda model, batch, scale=None: scale, None),
        (lambda model, batch, *others: others or None, None),
        (lambda model, batch, **others: others or None, None),
    ],
)
def test_only_a_loss_that_takes_a_context_is_given_one(loss, expected):
    """A third argument with a default may mean something else."""
    called = LossInContext(loss)
    assert called(None, None, "it") == expected
    assert called.takes_context is (expected is not None)


class Hooked(Task):
    """Notes the contexts of its hooks."""

    def on_epoch_end(self, context):
        shown = sorted(context.metrics)
        note("epoch", context.epoch, context.step, context.is_first, shown)

    def on_evaluation_end(self, context):
        note("evaluation", context.epoch, context.step, context.is_first)


def test_hooks_are_called_after_each_epoch_and_evaluation():
    """The evaluation of an epoch comes first; a complete run that is started again calls no end of an epoch."""
    trained(Hooked, evaluate_every_steps=4, epochs=2, limit_batches=4)
    called = [one for one in noted() if isinstance(one[0], str)]
    figures = ["loss", "validation_loss"]
    assert called == [
        ("evaluation", 0, 4, True),
        ("epoch", 0, 4, True, figures),
        ("evaluation", 1, 8, True),
        ("epoch", 1, 8, True, figures),
    ]
    trained(Hooked, evaluate_every_steps=4, epochs=2, limit_batches=4)
    assert not [one for one in noted() if one[0] == "epoch"]


class Meddling(Task):
    """Its hook changes what its loss computes with."""

    def __init__(self):
        self.scale = 1.0
        self.seen = []

    def loss(self, model, batch):
        note(self.scale)
        return self.scale * model(batch[0]).square().mean()

    def on_epoch_end(self, context):
        self.scale *= 2
        self.seen.append(torch.rand(1))
        context.model.eval()


def test_changes_by_a_hook_are_put_back(tmp_path):
    """A line names them; the weights are those without the hook."""
    meddled = trained(Meddling, name="meddled")
    text = (tmp_path / "logs" / "meddled" / "rank_0.log").read_text()
    assert "on_epoch_end() changed task.scale, task.seen, which was rolled back" in text
    assert {*noted()} == {(1.0,)}

    class Calm(Meddling):
        on_epoch_end = None

    assert trained(Calm, name="calm").weights_sha256 == meddled.weights_sha256


class Changing:
    """A task whose hook does what it is made with."""

    def __init__(self, hook):
        self.on_epoch_end = hook


def called(hook, state):
    """What a call of the hook warns of."""
    warnings = []
    where = {"epoch": 0, "step": 1, "total_steps": 2, "rank": 0, "world_size": 1, "metrics": {}}
    context = EpochContext(**where, model=state.model)
    call_hook(Changing(hook), "on_epoch_end", context, state, warn=warnings.append)
    return warnings


@pytest.fixture
def state():
    _, found = build(optimizer="sgd")
    start_fresh(Settings(), found)
    return found


def update(model):
    """By an optimizer of its own."""
    with torch.enable_grad():
        sum(one.sum() for one in model.parameters()).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def first(model):
    return next(iter(model.parameters()))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model, _: first(model).clamp_(-1e-3, 1e-3), "parameter 0.weight"),
        (lambda model, _: first(model).data.mul_(0.5), "parameter 0.weight"),
        (lambda model, _: update(model), "parameter 0.weight"),
        (lambda model, _: model.requires_grad_(False), "requires_grad of 0.weight"),
        (
            lambda _, optimizer: optimizer.param_groups[0].update(momentum=0.5),
            "momentum of the optimizer's group 0",
        ),
        (
            lambda _, optimizer: optimizer.param_groups[0]["params"].pop(),
            "params of the optimizer's group 0",
        ),
    ],
)
def test_a_hook_that_changes_what_an_update_does_is_an_error(state, change, named):
    """It would be done twice by some ranks. Nothing is saved of a change that cannot be put back."""
    flags, momentum = state.flags(), state.optimizer.param_groups[0]["momentum"]
    state.committed_step = 3
    with pytest.raises(BadInputError, match=named):
        called(lambda context: change(context.model, state.optimizer), state)
    is_put_back = named.startswith(("requires_grad", "momentum"))
    assert state.committed_step == (3 if is_put_back else EMPTY_STEP)
    assert (state.flags(), state.optimizer.param_groups[0]["momentum"]) == (flags, momentum)


def test_a_hook_that_restores_what_it_changes_is_none(state):
    """As one that looks at averaged weights."""

    def look(context):
        weights = copy.deepcopy(context.model.state_dict())
        first(context.model).mul_(0.5)
        context.model.load_state_dict(weights)

    assert called(look, state) == []


def test_a_hook_has_the_model_in_eval_mode(state):
    """A layer for all ranks' figures would wait for ranks that call no model."""
    state.model.train()
    modes = []
    called(lambda context: modes.append(context.model.training), state)
    assert modes == [False]
    assert state.model.training


class Raising(Task):
    """Its hook has a mistake."""

    def on_epoch_end(self, context):
        raise ZeroDivisionError(f"epoch {context.epoch}")


def test_an_error_in_a_hook_ends_the_run():
    """It is not hidden."""
    with pytest.raises(Exception, match="epoch 0"):
        trained(Raising)


@pytest.mark.parametrize("limit", [1, 4])
def test_a_limited_epoch_has_the_first_batches_of_its_own_order(tmp_path, limit):
    """Each epoch its own ones; the evaluation is limited alike."""
    trained(Task, limit_batches=limit, audit=True, name="limited")
    trained(Task, audit=True, name="whole")
    found = {}
    for name in ("limited", "whole"):
        lines = (tmp_path / "logs" / name / "audit_rank_0.jsonl").read_text().splitlines()
        found[name] = [json.loads(line)["indices"] for line in lines]
    per_epoch = SAMPLES // BATCH
    whole = found["whole"]
    assert found["limited"] == [*whole[:limit], *whole[per_epoch : per_epoch + limit]]
    assert f"({min(8, limit * BATCH)}" in (tmp_path / "logs" / "limited" / "rank_0.log").read_text()


def test_a_stream_has_no_epochs_to_limit():
    """Exit 2 with what to write instead."""
    with pytest.raises(BadInputError, match="limit a stream with --max-steps"):
        build(limit_batches=3)
