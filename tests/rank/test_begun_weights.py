"""Weights that a checkpoint leaves out, found again where its run had them: by their hash, or not at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_runner.checkpoint.left_out import START
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.rank.export import whole_weights
from ddp_runner.training.components.start_weights import record_of, without
from tests.checkpoint.states import facts_of


@pytest.fixture
def model():
    """Its first layer is frozen."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


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
    path = store.save(without(whole, frozen), facts_of(4)).path
    assert not torch.load(path, weights_only=True)["model"].keys() & frozen.keys()
    return path, weights, means


def is_equal(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_weights_are_taken_from_files_that_may_have_them(tmp_path, model):
    """The final weights beside the file; those of --init-from, of the run or given."""
    base, moved = tmp_path / "base.pt", tmp_path / "moved.pt"
    torch.save(model.state_dict(), base)
    path, weights, means = saved(tmp_path / "run", model, init_from=str(base))
    final = path.parent / "final.pt"
    torch.save(weights, final)
    for given, words in (("", final), ("", f"--init-from {base}"), (moved, f"--init-from {moved}")):
        for average, wanted in ((False, weights), (True, means)):
            found, source = whole_weights(path, average=average, init_from=str(given))
            assert is_equal(found, wanted)
            assert source == str(words)
        if final.is_file():
            final.unlink()
        elif not given:
            base.rename(moved)


def test_other_weights_than_the_begin_are_never_taken(tmp_path, model):
    """One line says where it was looked for, what is wrong there, and what to do."""
    path, _, _ = saved(tmp_path / "run", model)
    other = tmp_path / "o.pt"
    torch.save({name: one + 1 for name, one in model.state_dict().items()}, other)
    for given, found in (("", "found: give"), (other, f"--init-from {other}: other weights")):
        with pytest.raises(BadInputError) as error:
            whole_weights(path, average=False, init_from=str(given))
        said = str(error.value)
        assert found in said
        assert "leaves out 2 start weights of the run" in said
        assert said.endswith("or use the run's final.pt, which is complete")
        assert "\n" not in said


def test_a_file_that_has_all_weights_needs_nothing(tmp_path):
    """Whatever it says of its begin."""
    torch.save({"weight": torch.ones(2)}, tmp_path / "w.pt")
    found, source = whole_weights(tmp_path / "w.pt", average=False)
    assert (found["weight"].tolist(), source) == ([1.0, 1.0], "")
