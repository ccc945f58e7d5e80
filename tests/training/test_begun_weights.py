"""Weights that a checkpoint leaves out, found again where its run had them: by their hash, or not at all."""

from __future__ import annotations

import pytest
import torch

from ddp_runner.checkpoint.left_out import START
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.config import from_flat
from ddp_runner.core.faults import BadInputError
from ddp_runner.training.begun_weights import built_model, whole_weights
from ddp_runner.training.components.start_weights import record_of, without
from tests.checkpoint.states import facts_of

TASK = """
import torch
from torch import nn
from ddp_runner import Datasets


class Frozen:
    def build_model(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        model[0].requires_grad_(False)
        return model

    def build_datasets(self):
        torch.rand(7)  # draws what the model is made of, but for the seed behind it
        self.outputs = 2
        return Datasets(train=[0])

    def loss(self, model, batch):
        return model(batch).mean()


class NeedsData(Frozen):
    def build_model(self):
        return super().build_model().append(nn.Linear(2, self.outputs))
"""


@pytest.fixture
def settings_of(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    return lambda name, **more: from_flat({"task": f"{tmp_path / 'task.py'}:{name}", **more})


def saved(folder, model, *, init_from=""):
    """A run's checkpoint that leaves out what is frozen, and all of its weights, with and without the average."""
    frozen = {name: one.clone() for name, one in model.state_dict().items() if name[0] == "0"}
    record = record_of(frozen, init_from=init_from)
    with torch.no_grad():
        for parameter in (one for one in model.parameters() if one.requires_grad):
            parameter.add_(1)
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    means = {name: one if name in frozen else one + 2 for name, one in weights.items()}
    whole = {"model": weights, "ema": {"parameters": means, "buffers": {}}, START: record}
    store = CheckpointStore(folder, keep_last=9)
    path = store.save(without(whole, frozen), **facts_of(4)).path
    assert not torch.load(path, weights_only=True)["model"].keys() & frozen.keys()
    return path, weights, means


def is_equal(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


@pytest.mark.parametrize("name", ["Frozen", "NeedsData"])
def test_the_task_builds_again_what_a_run_has_begun_with(tmp_path, settings_of, name):
    """As a rank does: a model that needs none of the data is built without them."""
    settings = settings_of(name)
    path, weights, means = saved(tmp_path, built_model(settings, with_data=True))
    for average, wanted in ((False, weights), (True, means)):
        found, source = whole_weights(path, average=average, settings=settings)
        assert is_equal(found, wanted)
        assert source == "the task's model as built"


def test_weights_are_taken_from_where_they_cost_least(tmp_path, settings_of):
    """The final weights beside the file; those of --init-from; the model with these, in its own type."""
    settings = settings_of("Frozen")
    model = built_model(settings, with_data=False)
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.bfloat16() * 3)
        model[0].bias.fill_(0.5)
    base, half = tmp_path / "base.pt", tmp_path / "half.pt"
    torch.save(model.state_dict(), base)
    torch.save({name: one.bfloat16() for name, one in model.state_dict().items()}, half)
    path, weights, _ = saved(tmp_path / "run", model, init_from=str(half))
    final = path.parent / "final.pt"
    torch.save(weights, final)
    ways = [(None, "", str(final))]
    ways += [(None, str(base), f"--init-from {base}")]
    ways += [(settings, "", f"the task's model with --init-from {half}")]
    for known, given, words in ways:
        found, source = whole_weights(path, average=False, settings=known, init_from=given)
        assert is_equal(found, weights)
        assert source == words
        final.unlink(missing_ok=True)


def test_other_weights_than_the_begin_are_never_taken(tmp_path, settings_of):
    """One line says where it was looked for, what is wrong there, and what to do."""
    settings = settings_of("Frozen")
    path, _, _ = saved(tmp_path / "run", built_model(settings, with_data=True))
    torch.save(
        built_model(settings_of("Frozen", seed=9), with_data=True).state_dict(), tmp_path / "o.pt"
    )
    with pytest.raises(BadInputError) as error:
        whole_weights(
            path,
            average=False,
            settings=settings_of("Frozen", seed=8),
            init_from=str(tmp_path / "o.pt"),
        )
    said = str(error.value)
    for words in (
        "leaves out 2 weights that its run has begun with",
        f"--init-from {tmp_path / 'o.pt'}: other weights",
        f"the task's model with --init-from {tmp_path / 'o.pt'}: other weights",
        "or take the run's final.pt",
    ):
        assert words in said
    assert "\n" not in said
    with pytest.raises(BadInputError, match=r"\(it does not say of which settings it is\)"):
        whole_weights(path, average=False, settings=None)
    (tmp_path / "task.py").unlink()
    with pytest.raises(BadInputError, match=r"the task's model as built: .*task\.py"):
        whole_weights(path, average=False, settings=settings)


def test_a_file_that_has_all_weights_needs_nothing(tmp_path):
    """Whatever it says of its begin."""
    torch.save({"weight": torch.ones(2)}, tmp_path / "w.pt")
    found, source = whole_weights(tmp_path / "w.pt", average=False, settings=None)
    assert (found["weight"].tolist(), source) == ([1.0, 1.0], "")
