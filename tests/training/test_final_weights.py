"""The weights at the end of a run, as files of their own."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.checkpoint.entry_names import load_bare_state
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.config import from_flat
from ddp_runner.core.monitor import Best, Monitor
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.kernel.system.disk import RealDisk
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.training.saves.final_weights import best_weights, publish_final, swapped_in
from tests.checkpoint.states import facts_of, save

from .building import bits_of, build_state, make_slot


class Said:
    """A runtime and a logger that keep what they are given."""

    def __init__(self, disk):
        self.disk, self.slot, self.logger = disk, make_slot(), self
        self.rank_info = SimpleNamespace(rank=0)
        self.lines, self.reports = [], []

    def info(self, text, *, step=None):
        self.lines.append(f"{step}: {text}")

    warning = info

    def report(self, message):
        self.reports.append(message)


class Tied(nn.Module):
    """Two names of one weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def parts_of(folder, *, ema=True, disk=None, model=None):
    state = build_state(ema=ema, model=model)
    state.committed_step, state.begun_step = 8, 2
    if ema:
        state.ema.update(state.model)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.add_(1.0)
    disk = disk or RealDisk()
    store = CheckpointStore(folder, keep_last=2, disk=disk)
    settings = SimpleNamespace(run=SimpleNamespace(checkpoint_dir=str(folder)))
    return SimpleNamespace(state=state, store=store, runtime=Said(disk), settings=settings)


def read(folder, name):
    return torch.load(folder / name, weights_only=True)


def test_both_files_are_bare_state_dicts_of_plain_torch(tmp_path):
    """The weights, and those with the average; the model itself trains on with its own."""
    parts = parts_of(tmp_path)
    own = {name: one.clone() for name, one in parts.state.model.state_dict().items()}
    publish_final(parts)
    plain, averaged = read(tmp_path, "final.pt"), read(tmp_path, "final_ema.pt")
    assert all(torch.equal(plain[name], own[name]) for name in own)
    means = parts.state.ema.state_dict()["parameters"]
    assert all(torch.equal(averaged[name], means[name]) for name in means)
    assert not torch.equal(plain["0.weight"], averaged["0.weight"])
    parts.state.model.load_state_dict(averaged)
    load_bare_state(parts.state.model, plain)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final.pt", "final_ema.pt"]
    assert Catalog(tmp_path).entries() == [], "neither is taken for a checkpoint"


def test_without_an_average_an_old_one_does_not_stay_beside_new_weights(tmp_path):
    """It would be that of another end."""
    publish_final(parts_of(tmp_path))
    publish_final(parts_of(tmp_path, ema=False))
    assert [path.name for path in tmp_path.iterdir()] == ["final.pt"]


def test_tied_weights_are_one_in_the_file(tmp_path):
    """As torch has them, and however many names they have."""
    publish_final(parts_of(tmp_path, model=Tied()))
    for name in ("final.pt", "final_ema.pt"):
        found = read(tmp_path, name)
        assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()


def test_a_launch_that_trains_nothing_writes_nothing(tmp_path):
    """The files of the run's end stand as they are; where one is missing it is made."""
    parts = parts_of(tmp_path)
    publish_final(parts)
    parts.state.begun_step = parts.state.committed_step
    before = (tmp_path / "final.pt").stat().st_mtime_ns
    publish_final(parts)
    assert (tmp_path / "final.pt").stat().st_mtime_ns == before
    (tmp_path / "final_ema.pt").unlink()
    publish_final(parts)
    assert (tmp_path / "final_ema.pt").is_file()


def saved_and_trained_on(tmp_path, *, model=None):
    """The state after its best checkpoint, of step 4, and a later one that is worse."""
    parts = parts_of(tmp_path, model=model)
    state = parts.state
    own = {}
    for step, value in ((4, 0.9), (8, 0.5)):
        state.committed_step = step
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.add_(step)
        state.ema.update(state.model)
        own[step] = {name: one.clone() for name, one in state.model.state_dict().items()}
        facts = facts_of(step, monitored=value, monitor="hits", mode="max")
        parts.store.save(state.capture(), facts)
    parts.settings = from_flat({"load_best_at_end": True})
    parts.workload = SimpleNamespace(monitor=Monitor(name="hits", mode="max"))
    state.best = Best(of="max hits", step=4, value=0.9)
    return parts, own


@pytest.mark.parametrize("model", [None, Tied()])
def test_the_best_checkpoint_is_the_end_where_that_is_asked_for(tmp_path, model):
    """Its weights and its average; the state goes on as it is; control: not asked for, the last."""
    parts, own = saved_and_trained_on(tmp_path, model=model)
    before = bits_of(parts.state)
    best = best_weights(parts)
    assert parts.runtime.lines == []
    publish_final(parts, best)
    plain, averaged = read(tmp_path, "final.pt"), read(tmp_path, "final_ema.pt")
    assert plain.keys() == own[4].keys()
    assert all(torch.equal(plain[name], own[4][name]) for name in plain)
    means = torch.load(tmp_path / "step_00000004.pt", weights_only=True)["ema"]["parameters"]
    assert all(torch.equal(averaged[name], means[name]) for name in means)
    if model is not None:
        for found in (plain, averaged):
            assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
    with swapped_in(parts.state, best):
        inside = parts.state.model.state_dict()
        assert all(torch.equal(inside[name], averaged[name]) for name in averaged)
    assert bits_of(parts.state) == before
    parts.settings = from_flat({})
    assert best_weights(parts) is None
    publish_final(parts)
    last = read(tmp_path, "final.pt")
    assert all(torch.equal(last[name], own[8][name]) for name in last)


def test_an_end_that_is_not_of_the_best_evaluation_says_so(tmp_path):
    """Its checkpoint is not there: a disk has refused it, or a person has removed it."""
    parts, _ = saved_and_trained_on(tmp_path)
    parts.state.best = Best(of="max hits", step=6, value=0.95)
    assert best_weights(parts).step == 4
    (line,) = parts.runtime.lines
    assert (
        "hits was best after step 6, of which there is no checkpoint; the weights are of step 4"
        in line
    )


def test_without_a_checkpoint_of_use_the_end_is_the_last(tmp_path):
    """With a warning: where none was judged, and where the best one is damaged."""
    parts, _ = saved_and_trained_on(tmp_path)
    (tmp_path / "step_00000004.pt").write_bytes(
        b"x" * (tmp_path / "step_00000004.pt").stat().st_size
    )
    assert best_weights(parts) is None
    assert "step_00000004.pt cannot be used" in parts.runtime.lines[-1]
    for path in tmp_path.glob("step_*"):
        path.unlink()
    assert best_weights(parts) is None
    assert "no checkpoint has been judged" in parts.runtime.lines[-1]


class FullDisk(RealDisk):
    """Takes nothing."""

    def write(self, handle, data):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_refuses_costs_a_warning(tmp_path):
    """The checkpoint is there; what was there before stands, and no temporary file is left."""
    publish_final(parts_of(tmp_path))
    before = (tmp_path / "final.pt").read_bytes()
    parts = parts_of(tmp_path, disk=FullDisk())
    publish_final(parts)
    (message,) = parts.runtime.reports
    assert message.fault.step == 8
    assert "No space left on device" in message.line
    assert "the newest checkpoint has the same weights" in message.line
    assert (tmp_path / "final.pt").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_a_rank_that_is_fenced_leaves_them_to_its_successor(tmp_path):
    """It is about to be killed: what it cannot write is no news of the disk."""
    parts = parts_of(tmp_path, disk=FullDisk())
    parts.runtime.slot.set(Cell.FENCED, 1)
    with pytest.raises(FaultError):
        publish_final(parts)
    assert parts.runtime.reports == []


def test_what_is_set_aside_takes_the_end_with_it(tmp_path):
    """A run that starts fresh, or from an older file, has not ended; one that goes on keeps its files."""
    for step in (10, 20):
        save(tmp_path, step)
    publish_final(parts_of(tmp_path))
    catalog = Catalog(tmp_path)
    assert catalog.set_later_aside(20, "none") is None
    aside = catalog.set_later_aside(10, "later")
    assert {"final.pt", "final_ema.pt", "step_00000020.pt"} <= {p.name for p in aside.iterdir()}
    publish_final(parts_of(tmp_path))
    aside = catalog.set_all_aside("all")
    assert {"final.pt", "final_ema.pt", "step_00000010.pt"} <= {p.name for p in aside.iterdir()}
