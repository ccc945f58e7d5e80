"""What of ``--init-from`` is loaded, and what is said of it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ddp_runner.checkpoint.safetensors_file import write_safetensors
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.config import from_flat
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.starting.begin import fit, table
from ddp_runner.training.starting.resume import load_start, restore_newest
from tests.checkpoint.states import facts_of

from .test_build import build
from .test_left_out import PACED


def settings_of(path, **settings):
    return from_flat({"resume": "none", "init_from": str(path), **settings})


def begin(tmp_path, path, **settings):
    workload, state = build(**PACED)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    load_start(settings_of(path, **settings), workload, state, store)
    return workload, state


def other_weights(seed=9):
    with torch.random.fork_rng():
        _, state = build(**PACED, seed=seed)
        return {name: one.clone() for name, one in state.weights().items()}


def test_what_fits_is_loaded_and_the_rest_stays(tmp_path):
    """With ``run.init_strict=false``; the table names what is missing, too much and of another shape."""
    _, plain = build(**PACED)
    built = {name: one.clone() for name, one in plain.weights().items()}
    weights = other_weights()
    first, second = list(weights)[:2]
    del weights[first]
    weights[second] = torch.zeros(3)
    weights["head.weight"] = torch.zeros(2)
    torch.save(weights, tmp_path / "w.pt")
    _, state = begin(tmp_path, tmp_path / "w.pt", init_strict=False)
    own = state.weights()
    for name in own:
        expected = built if name in (first, second) else weights
        assert torch.equal(own[name], expected[name]), name
    where, loaded, missing, unexpected, mismatched = state.begun_with
    assert where == str(tmp_path / "w.pt")
    assert loaded.startswith(f"loaded {len(own) - 2}: ")
    assert missing == f"missing 1: {first}"
    assert unexpected == "unexpected 1: head.weight"
    size = "x".join(map(str, own[second].shape))
    assert mismatched == f"mismatched 1: {second} 3 (float32), the model has {size} (float32)"


@pytest.mark.parametrize(
    ("prefix", "holds", "said"),
    [
        ("model.", "state_dict", ["the prefix 'model.' is taken off all of its names"]),
        ("net.model.", None, ["the prefix 'net.model.' is taken off all of its names"]),
        ("model._orig_mod.", None, ["the prefix 'model._orig_mod.' is taken off all of its names"]),
        ("module.", "model_state_dict", []),
        ("_orig_mod.", "model", []),
    ],
)
def test_a_foreign_file_under_one_prefix_is_taken(tmp_path, prefix, holds, said):
    """All of it is loaded, and a line says so; what torch itself wraps needs no line."""
    weights = other_weights()
    renamed = {prefix + name: one for name, one in weights.items()}
    torch.save({holds: renamed, "epoch": 3} if holds else renamed, tmp_path / "w.pt")
    _, state = begin(tmp_path, tmp_path / "w.pt")
    assert all(torch.equal(one, weights[name]) for name, one in state.weights().items())
    assert state.begun_with[1].startswith(f"loaded {len(weights)}: ")
    assert list(state.begun_with[5:]) == said


def test_a_file_under_two_prefixes_is_refused(tmp_path):
    """One of them may be another model's."""
    weights = other_weights()
    first, *others = weights
    renamed = {f"model.{name}": weights[name] for name in others}
    torch.save({**renamed, f"other.{first}": weights[first]}, tmp_path / "w.pt")
    with pytest.raises(BadInputError, match="missing: "):
        begin(tmp_path, tmp_path / "w.pt")


def test_strictly_a_weight_too_few_is_refused_and_the_cure_named(tmp_path):
    """Nothing of the model is touched."""
    weights = other_weights()
    first = next(iter(weights))
    del weights[first]
    torch.save(weights, tmp_path / "w.pt")
    with pytest.raises(BadInputError) as caught:
        begin(tmp_path, tmp_path / "w.pt")
    cure = f"run.init_strict=false loads the {len(weights)} that fit"
    assert str(caught.value).endswith(f"holds another model: missing: {first}; {cure}")


@pytest.mark.parametrize("strict", [True, False])
def test_weights_of_which_none_fits_are_bad_input(tmp_path, strict):
    """Also where what fits would be loaded: in one line, with names of both."""
    torch.save({"other.weight": torch.zeros(1)}, tmp_path / "w.pt")
    with pytest.raises(BadInputError) as caught:
        begin(tmp_path, tmp_path / "w.pt", init_strict=strict)
    assert "other.weight" in str(caught.value)
    assert "init_strict" not in str(caught.value)
    assert str(caught.value).isprintable()


def test_safetensors_begin_a_run_with_the_same_bits(tmp_path):
    """As the pickled file does; all of it is loaded."""
    weights = other_weights()
    with (tmp_path / "w.safetensors").open("wb") as file:
        write_safetensors(file.write, weights)
    _, state = begin(tmp_path, tmp_path / "w.safetensors")
    assert all(torch.equal(one, weights[name]) for name, one in state.weights().items())
    assert state.begun_with[1].startswith(f"loaded {len(weights)}: ")
    assert state.begun_with[2:] == ("missing 0", "unexpected 0", "mismatched 0")


@pytest.mark.parametrize(("known", "is_gone"), [(4, False), (3, True)])
def test_a_folder_names_its_checkpoint_and_a_best_one_that_is_gone(tmp_path, known, is_gone):
    """The newest of a folder is in the start block; that the best was another one is why the run is not exact."""
    _, source = build(**PACED)
    store = CheckpointStore(tmp_path / "source", keep_last=9)
    for step, value in ((4, 0.5), (8, 0.7)):
        source.committed_step = step
        about = {"best": {"step": known, "value": 0.4}}
        store.save(source.capture(), facts_of(step, monitored=value, about=about))
    _, state = begin(tmp_path, tmp_path / "source")
    assert state.begun_with[0] == f"{tmp_path / 'source'} (step_00000008.pt)"
    assert state.changes == ()
    _, state = begin(tmp_path, tmp_path / "source" / "best")
    assert state.begun_with[0] == f"{tmp_path / 'source' / 'best'} (step_00000004.pt)"
    assert [f"after step {known}, of which" in one for one in state.changes] == [True] * is_gone


def test_a_resume_needs_the_file_no_more(tmp_path):
    """Its weights are in the checkpoint, and a roll-back to one needs it neither."""
    torch.save(other_weights(), path := tmp_path / "w.pt")
    workload, state = begin(tmp_path, path)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    state.committed_step = 1
    store.save(state.capture(), facts_of(1, meaning=workload.resume_key))
    path.unlink()
    workload, again = build(**PACED)
    settings = settings_of(path, resume="auto")
    assert load_start(settings, workload, again, store) is not None
    assert again.begun_with == ()
    begun = state.weights()
    assert all(torch.equal(one, begun[name]) for name, one in again.weights().items())
    assert restore_newest(settings, workload, again, store) is not None


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_weight_that_a_file_has_once_is_not_missing():
    """As safetensors have it; two names that are tied here may both be there as well."""
    own = Tied().state_dict()
    values = torch.randn(3, 2)
    fitted = fit({"embed.weight": values}, own, narrows=False)
    assert fitted.missing == ()
    assert fitted.tied == 1
    assert torch.equal(fitted.taken["head.weight"], values)
    assert "1 by a name to which they are tied" in table("w", fitted)[1]
    both = fit(dict.fromkeys(own, values), own, narrows=False)
    assert both.tied == 0


@pytest.mark.parametrize(
    ("stored", "own", "narrows", "is_taken"),
    [
        (torch.bfloat16, torch.float32, False, True),
        (torch.float16, torch.float32, False, True),
        (torch.float32, torch.bfloat16, False, False),
        (torch.float32, torch.bfloat16, True, True),
        (torch.float64, torch.float32, False, False),
        (torch.int64, torch.float32, True, False),
        (torch.float32, torch.int64, True, False),
    ],
)
def test_types_are_converted_only_where_no_value_changes(stored, own, narrows, is_taken):
    """Unless what fits is to be loaded; numbers and counts are never taken for each other."""
    found = {"w": torch.ones(2, dtype=stored)}
    fitted = fit(found, {"w": torch.zeros(2, dtype=own)}, narrows=narrows)
    assert bool(fitted.loaded) is is_taken
    assert len(fitted.mismatched) == (not is_taken)
    if is_taken:
        assert fitted.taken["w"].dtype == own
        assert fitted.converted == 1


def test_many_names_are_counted_and_the_first_shown():
    """So that a table stays a table."""
    own = {f"w{number}": torch.zeros(1) for number in range(9)}
    fitted = fit(copy.deepcopy(own), own, narrows=False)
    assert table("w.pt", fitted)[1] == "loaded 9: w0, w1, w2, w3, ..."
