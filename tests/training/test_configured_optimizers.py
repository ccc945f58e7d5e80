"""A task makes its own optimizer and schedule."""

from __future__ import annotations

import textwrap

import pytest
import torch

from ddp_runner.config import described_key
from ddp_runner.kernel.rules.errors import BadInputError
from tests.scenarios.harness import ROOT
from tests.test_documented import blocks_of
from tests.training.test_build import build

TASK = """
import torch
from ddp_runner import Datasets

class Own:
    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))

    def build_datasets(self):
        return Datasets(train=torch.utils.data.TensorDataset(torch.ones(40, 2)))

    def loss(self, model, batch):
        return model(batch[0]).mean()

    def configure_optimizers(self{arguments}):
        optimizer = torch.optim.SGD([
            {{"params": model[0].parameters(), "lr": 0.5}}, {{"params": model[1].parameters()}}
        ], lr=0.1) if {makes!r} else None
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2) if {makes!r} else None
        return {returned}
"""


def built(folder, returned, *, arguments=", model", makes=True, **settings):
    file = folder / "own.py"
    file.write_text(TASK.format(returned=returned, arguments=arguments, makes=makes))
    return build("Own", file, **settings)


def rates(state, steps):
    """The learning rates of both groups at each step."""
    found = []
    for step in range(steps):
        state.committed_step = step
        state.own_rate(factors=())
        state.apply_own_rate()
        found.append([group["lr"] for group in state.optimizer.param_groups])
    return found


@pytest.mark.parametrize(
    ("returned", "every"),
    [
        ("optimizer", 0),
        ("optimizer, scheduler", 1),
        ("{'optimizer': optimizer}", 0),
        ("{'optimizer': optimizer, 'scheduler': scheduler}", 1),
        ("{'optimizer': optimizer, 'scheduler': scheduler, 'interval': 'epoch'}", 5),
    ],
)
def test_rates_of_all_groups_are_those_of_the_scheduler(tmp_path, returned, every):
    """A scheduler is stepped after each step or, of an epoch of five steps, after each epoch."""
    workload, state = built(tmp_path, returned)
    assert workload.order.steps_per_epoch == 5
    usual = torch.optim.SGD(
        [{"params": [torch.zeros(1)], "lr": 0.5}, {"params": [torch.zeros(1)]}], lr=0.1
    )
    scheduler = torch.optim.lr_scheduler.StepLR(usual, 2)
    expected = []
    for step in range(12):
        expected.append([group["lr"] for group in usual.param_groups])
        usual.step()
        if every and (step + 1) % every == 0:
            scheduler.step()
    assert rates(state, 12) == expected
    assert workload.resume_key[described_key("optimizer")] == "SGD"
    assert "lr 0.5" in workload.recipe["optimizer"]


def test_the_documents_optimizer_is_built(tmp_path):
    """It stands in a task with a backbone and a head."""
    marked = "test_the_documents_optimizer_is_built"
    [block] = [one for one in blocks_of(ROOT / "docs" / "training.md") if marked in one.mark]
    head, _, _ = TASK.partition("    def configure_optimizers")
    model = "torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))"
    named = "OrderedDict(backbone=torch.nn.Linear(2, 3), head=torch.nn.Linear(3, 1))"
    file = tmp_path / "own.py"
    file.write_text(
        "from collections import OrderedDict\n"
        + head.replace(model, f"torch.nn.Sequential({named})")
        + textwrap.indent(block.text, "    ")
    )
    _, state = build("Own", file)
    assert rates(state, 1) == [[1e-4, 1e-3]]


@pytest.mark.parametrize(
    "returned",
    [
        "None",
        "torch.optim.SGD",
        "[optimizer]",
        "[optimizer], [scheduler]",
        "optimizer, optimizer",
        "{'optimizer': optimizer, 'lr_scheduler': scheduler}",
    ],
)
def test_what_is_no_optimizer_is_refused_with_the_legal_forms(tmp_path, returned):
    """Exit 2 with one line, before anything trains."""
    with pytest.raises(BadInputError, match="must return one torch optimizer"):
        built(tmp_path, returned)


def test_an_interval_without_a_scheduler_is_refused(tmp_path):
    """It would say nothing."""
    with pytest.raises(BadInputError, match="needs scheduler="):
        built(tmp_path, "{'optimizer': optimizer, 'interval': 'epoch'}")


def test_a_method_without_the_model_is_refused(tmp_path):
    """As Lightning has it."""
    with pytest.raises(BadInputError, match="must take the model"):
        built(tmp_path, "None", arguments="", makes=False)


@pytest.mark.parametrize(
    "changed", [{"learning_rate": 0.5}, {"schedule": "linear"}, {"optimizer": "sgd"}]
)
def test_settings_of_the_optimizer_are_refused_beside_it(tmp_path, changed):
    """It is not silently ignored."""
    with pytest.raises(BadInputError, match="configure_optimizers\\(\\) of the task decides that"):
        built(tmp_path, "optimizer", **changed)


def test_parameters_that_it_lacks_are_frozen_and_named(tmp_path):
    """DDP would wait for their gradients."""
    workload, state = built(tmp_path, "torch.optim.SGD(model[1].parameters(), lr=0.1)")
    assert [p.requires_grad for p in state.model.parameters()] == [False, False, True, True]
    assert "optimizer: 9 parameters are not in it, and are frozen" in workload.notes
