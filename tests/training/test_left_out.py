"""Files without the weights that stay as their run has begun with them, and those weights put in again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.checkpoint.codec import weights_sha256
from ddp_runner.checkpoint.left_out import left_out, start_record, start_sha256
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.checkpoint.weights import load_weights, read_weights
from ddp_runner.config import from_flat
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.training.components import start_weights
from ddp_runner.training.components.start_weights import completed
from ddp_runner.training.saves.final_weights import publish_final
from ddp_runner.training.saves.last_save import checkpoint_bytes
from ddp_runner.training.starting.resume import load_start, restore_newest
from tests.checkpoint.states import facts_of

from .building import bits_of, build_model, build_state
from .test_build import WORKLOAD, build
from .test_final_weights import parts_of
from .test_state import advance

FROZEN = ("0.weight", "0.bias", "3.weight", "3.bias")


def frozen_model(**kinds):
    model = build_model()
    for part in (model[0], model[3]):
        part.requires_grad_(False)
    return model.to(**kinds) if kinds else model


def begun(model=None, *, ema=True, later=()):
    state = build_state(model=model or frozen_model(), ema=ema)
    state.only_trained = True
    state.note_start(init_from="base.pt", later=later)
    return state


@pytest.mark.parametrize("ema", [True, False])
def test_frozen_weights_and_their_averages_are_left_out_and_come_back(ema, tmp_path):
    """From a plain file, with what another process begins with; the next steps have equal bits."""
    source = begun(ema=ema)
    advance(source, 4)
    torch.save(source.capture_for_file(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    assert left_out(saved) == FROZEN
    assert not saved["model"].keys() & set(FROZEN)
    assert "1.running_mean" in saved["model"], "buffers change, and stay in"
    if ema:
        assert not saved["ema"]["parameters"].keys() & set(FROZEN)
    own = {name: source.model.state_dict()[name] for name in FROZEN}
    assert start_sha256(saved) == weights_sha256(own)
    assert left_out(source.capture()) == (), "what is sent to a replacement is whole"
    other = begun(ema=ema)
    other.restore(completed(saved, other.weights()))
    assert bits_of(other) == bits_of(source)
    for state in (source, other):
        advance(state, 2)
    assert bits_of(other) == bits_of(source)


def test_nothing_is_left_out_unless_it_is_asked_for():
    state = begun()
    state.only_trained = False
    assert state.capture_for_file()["model"].keys() == state.weights().keys()
    assert start_sha256(state.capture_for_file()) == ""


def test_a_frozen_weight_that_is_written_is_in_the_file_again():
    """By whatever does not count as a change for torch; the others stay left out, by a SHA-256 of theirs."""
    state = begun()
    advance(state, 2)
    whole = start_sha256(state.capture_for_file())
    state.model[0].weight.data[0, 0] += 1.0
    saved = state.capture_for_file()
    assert left_out(saved) == FROZEN[1:]
    assert torch.equal(saved["model"]["0.weight"], state.model[0].weight)
    assert start_sha256(saved) not in ("", whole)
    assert "0.weight" in saved["ema"]["parameters"], "its average follows it from now on"
    other = begun()
    other.restore(completed(saved, other.weights()))
    assert bits_of(other)["model"] == bits_of(state)["model"]
    state.model[0].weight.data[0, 0] -= 1.0
    assert start_sha256(state.capture_for_file()) == whole, "a bit that was healed is no change"


def test_what_is_unfrozen_later_is_in_every_file():
    """Its size does not jump when that step comes."""
    state = begun(later=("3.weight", "3.bias"))
    assert left_out(state.capture_for_file()) == FROZEN[:2]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head.weight = self.embed.weight
        self.embed.weight.requires_grad_(False)
        self.out = nn.Linear(6, 1)

    def forward(self, inputs):
        return self.out(self.head(self.embed(inputs)))


def test_tied_frozen_weights_are_left_out_by_both_names():
    torch.manual_seed(3)
    source = begun(Tied())
    advance(source, 2)
    saved = copy.deepcopy(source.capture_for_file())
    assert left_out(saved) == ("embed.weight", "head.weight")
    torch.manual_seed(3)
    other = begun(Tied())
    other.restore(completed(saved, other.weights()))
    assert bits_of(other) == bits_of(source)
    assert other.model.head.weight is other.model.embed.weight


def test_an_average_of_half_precision_comes_back_in_float32():
    source = begun(frozen_model(dtype=torch.bfloat16))
    source.ema.update(source.model)
    source.ema.update(source.model)
    saved = copy.deepcopy(source.capture_for_file())
    other = begun(frozen_model(dtype=torch.bfloat16))
    other.restore(completed(saved, other.weights()))
    assert bits_of(other) == bits_of(source)


def test_an_average_that_is_not_its_weight_to_the_bit_stays_in():
    """0.0 for -0.0, say: no file may make it otherwise."""
    source = begun()
    with torch.no_grad():
        source.model[3].bias.fill_(-0.0)
    source.note_start(init_from="", later=())
    advance(source, 3)
    source.ema.state_dict()["parameters"]["3.bias"].fill_(0.0)
    saved = copy.deepcopy(source.capture_for_file())
    assert left_out(saved) == FROZEN
    assert not saved["ema"]["parameters"]["3.bias"].signbit().any()
    assert "3.weight" not in saved["ema"]["parameters"]


@pytest.mark.parametrize(
    "change", [lambda w: w["3.bias"].add_(1e-3), lambda w: w.pop("0.bias")], ids=["value", "none"]
)
def test_other_weights_complete_no_file(change):
    state = begun()
    saved, own = state.capture_for_file(), copy.deepcopy(dict(state.weights()))
    assert completed(saved, own) is not None
    change(own)
    assert completed(saved, own) is None


def test_a_file_is_announced_at_the_size_that_it_has():
    """Before the first step, with moments and averages to come: about what is written after it."""
    state = begun()
    announced = checkpoint_bytes(state)
    state.only_trained = False
    assert announced < checkpoint_bytes(state) / 10, "the middle layer is nearly all of it"


def test_the_weights_at_the_end_are_whole(tmp_path):
    parts = parts_of(tmp_path, model=frozen_model())
    parts.state.only_trained = True
    parts.state.note_start(init_from="", later=())
    publish_final(parts)
    for name in ("final.pt", "final_ema.pt"):
        assert (
            torch.load(tmp_path / name, weights_only=True).keys()
            == build_model().state_dict().keys()
        )


PACED = {"name": "PacedTask", "file": WORKLOAD, "ema_decay": 0.9, "train_layers": "4"}
LEFT_OUT = ("0.weight", "0.bias", "1.weight", "1.bias")


def based(path, *, seed):
    """A file to begin with, of other numbers than the task's own."""
    model = build(**PACED)[1].model
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    torch.save(model.state_dict(), path)
    return str(path)


def settings_of(**given):
    return from_flat({"resume": "auto", "only_trained": True, "train_layers": "4", **given})


def saved_run(folder, **given):
    """A run begun with these settings and saved after a step; its store, workload and state."""
    settings = settings_of(**given)
    store = CheckpointStore(folder, keep_last=3)
    workload, state = build(**PACED, only_trained=True)
    assert load_start(settings, workload, state, store) is None
    batch = next(iter(torch.utils.data.DataLoader(workload.datasets.train, batch_size=8)))
    workload.task.loss(state.model, batch).backward()
    state.optimizer.step()
    state.committed_step = 1
    state.ema.update(state.model)
    state.buffers.keep()
    captured = state.capture_for_file()
    facts = facts_of(1, meaning=dict(workload.resume_key), start_sha256=start_sha256(captured))
    store.save(captured, facts)
    return store, workload, state


@pytest.mark.parametrize("has_base", [True, False], ids=["--init-from", "build_model()"])
def test_a_resume_needs_the_same_begin(tmp_path, has_base):
    """With it every bit is there; with another or none it is one line that names it, and nothing is touched."""
    base = {"init_from": based(tmp_path / "base.pt", seed=1)} if has_base else {}
    store, _, state = saved_run(tmp_path / "run", **base)
    manifest = Catalog(tmp_path / "run").entries()[0].manifest
    assert len(manifest.start_sha256) == 64
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    for word in (True, False):  # files may be whole from now on
        workload, again = build(**PACED, only_trained=word)
        load_start(settings_of(**base, only_trained=word), workload, again, store)
        assert bits_of(again) == {**bits_of(state), "counters": bits_of(again)["counters"]}
        assert bool(left_out(again.capture_for_file())) is word
    others = [{"init_from": based(tmp_path / "other.pt", seed=2)}, {}][: 1 + has_base]
    for other in others:
        workload, again = build(**PACED, only_trained=True)
        with pytest.raises(BadInputError) as raised:
            load_start(settings_of(**other), workload, again, store)
        assert raised.value.option == "--init-from"
        begin = (
            f"--init-from {base['init_from']}" if has_base else "the model as it was built, without"
        )
        assert f"never changed, from {begin}" in str(raised.value)
        assert manifest.start_sha256[:16] in str(raised.value)
        assert str(raised.value).isprintable()
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_file_with_hashes_of_an_older_kind_resumes(tmp_path, monkeypatch):
    """Its SHA-256 names what it leaves out; hashes of single weights only say what has changed, and are made again."""
    with monkeypatch.context() as older:
        older.setattr(start_weights, "state_hashes", lambda weights: dict.fromkeys(weights, "old"))
        store, _, state = saved_run(tmp_path / "run")
        assert left_out(state.capture_for_file()) == LEFT_OUT
    for word in (True, False):
        workload, again = build(**PACED, only_trained=word)
        load_start(settings_of(only_trained=word), workload, again, store)
        found, saved = bits_of(again), bits_of(state)
        others = {name for name in saved if found[name] != saved[name]}
        assert others <= {"counters", "start"}, "weights, optimizer and all else are equal"
        captured = again.capture_for_file()
        assert left_out(captured) == (LEFT_OUT if word else ())
        assert ("old" in start_record(captured)["hashes"].values()) is not word


def test_files_are_left_whole_where_the_run_began_with_other_weights(tmp_path):
    """Turned on later, without the begin of before: what cannot be had again stays in."""
    base = based(tmp_path / "base.pt", seed=1)
    store, _, _ = saved_run(tmp_path / "run", init_from=base, only_trained=False)
    workload, again = build(**PACED, only_trained=True)
    load_start(settings_of(init_from=base), workload, again, store)
    again.only_trained = False
    store.save(again.capture_for_file(), facts_of(2, meaning=dict(workload.resume_key)))
    workload, later = build(**PACED, only_trained=True)
    assert load_start(settings_of(), workload, later, store) is not None
    assert left_out(later.capture_for_file()) == ()


def test_a_run_goes_back_by_what_it_has_or_its_begin(tmp_path):
    """A weight that was hit by a flipped bit is made again; where that cannot be, it is a fault."""
    base = based(tmp_path / "base.pt", seed=1)
    store, workload, state = saved_run(tmp_path / "run", init_from=base)
    good = bits_of(state)["model"]
    settings = settings_of(init_from=base)
    for flip in (0.0, 1.0):
        state.model[4].weight.data += 1.0
        state.model[0].weight.data[0, 0] += flip
        restore_newest(settings, workload, state, store)
        assert bits_of(state)["model"] == good
    state.model[0].weight.data[0, 0] += 1.0
    (tmp_path / "base.pt").unlink()
    with pytest.raises(FaultError, match="leaves out the start weights of the run, which are gone"):
        restore_newest(settings, workload, state, store)


def test_such_a_file_begins_another_run_whose_task_has_the_rest(tmp_path):
    """Weights or average; elsewhere it is one line that names the file which is whole."""
    store, _, state = saved_run(tmp_path / "run")
    path = store.catalog.entries()[0].path
    found = read_weights(path)
    assert set(found.weights) == state.weights().keys() - set(LEFT_OUT)
    assert found.start == start_record(torch.load(path, weights_only=True))
    with pytest.raises(BadInputError, match=r"use final\.pt"):
        load_weights(path)
    fresh = CheckpointStore(tmp_path / "fresh", keep_last=1)
    for word in ("", ":ema"):
        workload, again = build(**PACED)
        load_start(settings_of(init_from=f"{path}{word}", resume="none"), workload, again, fresh)
        kept = state.capture()["ema"]["parameters"] if word else state.weights()
        assert torch.equal(again.model[4].weight, kept["4.weight"])
        assert torch.equal(again.model[0].weight, state.model[0].weight)
    workload, other = build(**PACED, seed=5)
    with pytest.raises(
        BadInputError, match=r"build_model\(\) does not create: use that run's final"
    ):
        load_start(settings_of(init_from=str(path), resume="none"), workload, other, fresh)
