"""A rank's part in a fire drill: what it writes and reports, and what it leaves alone."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.config import from_flat
from ddp_runner.data.loader import MicroBatch
from ddp_runner.features.proof import notes as drill_notes
from ddp_runner.features.proof.notes import Drills
from ddp_runner.features.proof.rules import STATE_FOLDER, folder_name
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.step.session import WrapAgainError
from ddp_runner.kernel.system.disk import RealDisk
from ddp_runner.kernel.system.run_files import temporary_path
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.messages import DrillAt, DrillPart, NotKept
from ddp_runner.training.exactness.own_share import OwnShare, ShareNotes, batch_hash
from ddp_runner.training.exactness.own_update import Sums, hashes_after
from ddp_runner.training.local_state.by_value import taken_over
from ddp_runner.training.local_state.local_state import LocalState, unpacked
from tests.checkpoint.states import facts_of
from tests.processes import poll
from tests.training.building import CPU, build_state, make_slot

FAULT = Fault(kind=FaultKind.RANK_RAISED, rank=0, step=1, cause="", at_ns=0)


def group_of(rank=0, *, world_size=1, each=1):
    """A group of machines with so many ranks each, as one rank sees it."""
    membership = SimpleNamespace(
        world_size=world_size,
        local_rank=rank % each,
        local_world_size=each,
        generation=1,
        owes_drill=-1,
    )
    return SimpleNamespace(rank=rank, world_size=world_size, membership=membership)


class Bench:
    """Drills of one rank, with a stepper whose steps do nothing but commit."""

    def __init__(self, folder, *, room_bytes=1 << 40, is_watched=True, group=None, **settings):
        self.reported = []
        self.group = group = group or group_of()
        self.folder = folder
        self.state = build_state()
        self.state.begun_step = 0
        self.releases = 0
        self.state.readers.append(self._count)
        runtime = SimpleNamespace(
            is_watched=is_watched,
            rank_info=SimpleNamespace(
                rank=group.rank,
                world_size=group.world_size,
                local_world_size=group.membership.local_world_size,
            ),
            slot=make_slot(),
            disk=RealDisk(),
            report=self.reported.append,
        )
        workload = SimpleNamespace(
            length=SimpleNamespace(total_steps=100), device=CPU, norms=SimpleNamespace(names=())
        )
        saving = SimpleNamespace(
            captured=lambda: {**self.state.capture(), "versions": {}},
            facts=lambda *_: facts_of(self.state.committed_step),
        )
        parts = SimpleNamespace(
            settings=from_flat({"task": "synthetic", "checkpoint_dir": str(folder), **settings}),
            workload=workload,
            state=self.state,
            loader=SimpleNamespace(shares=()),
            saving=saving,
            memory=SimpleNamespace(room_bytes=lambda: room_bytes),
            runtime=runtime,
        )
        self.drills = Drills(parts)

    def _count(self):
        self.releases += 1

    def noted(self):
        return _Noted(self.state)

    def share_again(self, micro_batches):
        self.given = micro_batches
        return OwnShare(samples=("s",), losses=("l",), gradients={})

    def step(self, *, commits=True, batches=()):
        with self.drills.beside(self, self.group, batches):
            self.state.before_change()
            if commits:
                for parameter in self.state.model.parameters():
                    parameter.data.add_(1.0)
                self.state.committed_step += 1

    def until_reported(self, count):
        def all_there():
            self.step()
            return len(self.reported) >= count

        poll(all_there, what=f"{count} messages, not {self.reported}")
        return self.reported


def held_saves(monkeypatch):
    """Have each save wait for the event that is returned."""
    goes_on, save = threading.Event(), CheckpointStore.save

    def saves(*args, **how):
        assert goes_on.wait(60)
        return save(*args, **how)

    monkeypatch.setattr(CheckpointStore, "save", saves)
    return goes_on


class _Noted:
    def __init__(self, state):
        self._notes = ShareNotes.of(state)

    def __enter__(self):
        return self._notes

    def __exit__(self, *exception):
        pass


def test_state_and_share_of_a_step_are_written_beside_it(tmp_path):
    """The state is that of before the step, whatever the step does to it; both are reported."""
    bench = Bench(tmp_path, drill_at="2")
    bench.step()
    bench.step()
    before = {name: value.clone() for name, value in bench.state.weights().items()}
    reported = bench.until_reported(2)
    assert {one.part: one for one in reported} == {
        part: DrillPart(rank=0, step=2, part=part) for part in ("share", "state")
    }
    folder = tmp_path / folder_name(2)
    loaded = CheckpointStore(folder / STATE_FOLDER, keep_last=1).load("auto")
    assert loaded.manifest.step == 2
    for name, value in loaded.state["model"].items():
        assert torch.equal(value, before[name]), name
    record = json.loads((folder / "share.json").read_text(encoding="utf-8"))
    assert (record["rank"], record["world_size"]) == (0, 1)
    assert OwnShare.from_record(record["share"]).gradients == {}


def test_a_state_is_reported_although_no_step_follows(tmp_path):
    """A loop may wait between two steps, or a step take minutes: the drill of the one before is made meanwhile."""
    bench = Bench(tmp_path, drill_at="1")
    bench.step()
    bench.step()
    poll(lambda: len(bench.reported) == 2, what=f"both parts, not {bench.reported}")
    assert {one.part for one in bench.reported} == {"share", "state"}


@pytest.mark.parametrize("is_short", [False, True])
def test_what_an_update_begins_with_is_written_where_there_is_room(tmp_path, is_short):
    """With hashes of what it has made; without them a drill compares the share alone."""
    bench = Bench(tmp_path, drill_at="2")
    while bench.state.committed_step < 2:
        bench.step()
    bench.drills._lacks_memory = lambda size_bytes: "memory is short" * is_short
    notes = bench.noted()._notes
    bench.noted = lambda: contextlib.nullcontext(notes)
    with bench.drills.beside(bench, bench.group, ()):
        for parameter in bench.state.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        notes.summed(torch.ones(3))
        notes.update_begins(is_relaid=False)
        bench.state.before_change()
        bench.state.committed_step += 1
    folder = tmp_path / folder_name(2)
    record = json.loads((folder / "share.json").read_text(encoding="utf-8"))
    assert record["handed"] == ["sums.pt"] * (not is_short)
    assert ("after" in record) is not is_short
    if not is_short:
        assert record["after"] == hashes_after(bench.state)
        found = Sums.from_record(torch.load(folder / "sums.pt", weights_only=True))
        assert all((one == 0.5).all() for one in found.gradients.values())
        assert found.signals.tolist() == [1.0] * 3


def test_what_drills_have_found_is_carried_and_lost_with_a_repair(tmp_path, monkeypatch):
    """It is in the state from the next step on; a process that has begun again says so at once."""
    lost = []
    monkeypatch.setattr(
        drill_notes, "report_lost_carried", lambda parts: lost.extend(parts.state.take_carried())
    )
    bench = Bench(tmp_path, drill_at="90")
    bench.drills._take_not_kept(NotKept(what="a count"))
    assert "carried" not in bench.state.capture()
    bench.step()
    assert bench.state.capture()["carried"] == ["a count"]
    bench.state.drop_evaluation()
    bench.state.drop_evaluation()
    assert lost == bench.state.take_carried() == []
    other = build_state()
    other.restore(bench.state.capture())
    assert other.take_lost() == ["a count"]
    assert other.take_lost() == []
    bench.state.began_again = True
    bench.drills._take_not_kept(NotKept(what="a count"))
    bench.step()
    assert lost == ["a count"]


@pytest.mark.parametrize(
    ("rank", "parts"),
    [
        (0, {(2, "share"), (2, "state"), (3, "state"), (10, "state")}),
        (1, {(3, "share"), (10, "share")}),
        (2, {(4, "share"), (4, "state"), (5, "state"), (20, "state")}),
        (3, {(5, "share"), (20, "share")}),
    ],
)
def test_the_first_rank_of_its_machine_writes_the_state(tmp_path, rank, parts):
    """Of two machines with two ranks each all ranks are drilled in turn, and then 1 and 3 as they are asked for."""
    group = group_of(rank, world_size=4, each=2)
    bench = Bench(tmp_path, drill_at="2,3,4,5", group=group)
    for step in range(30):
        if step in (10, 20):
            bench.drills._take_asked(DrillAt(rank=1 if step == 10 else 3, step=step))
        bench.step()
        if bench.drills._saver is not None:
            bench.drills._collect(bench.drills._saver, timeout_s=60)
    assert {(one.step, one.part) for one in bench.reported if not one.problem} == parts


def test_a_drill_is_skipped_while_an_earlier_state_is_written(tmp_path, monkeypatch):
    """The supervisor hears why, and asks again; the drill of a later step is whole."""
    goes_on = held_saves(monkeypatch)
    bench = Bench(tmp_path, drill_at="1,2")
    for _ in range(3):
        bench.step()
    [skipped] = [one for one in bench.reported if one.problem]
    assert (skipped.step, skipped.part) == (2, "state")
    assert skipped.problem == "the state of an earlier drill is still being written"
    goes_on.set()
    bench.until_reported(4)
    step = bench.state.committed_step
    bench.drills._take_asked(DrillAt(rank=0, step=step))
    whole = [one for one in bench.until_reported(6) if not one.problem]
    parts = {(one.step, one.part) for one in whole}
    assert parts == {(1, "share"), (1, "state"), (2, "share"), (step, "share"), (step, "state")}


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_step_that_begins_twice_is_drilled(tmp_path, monkeypatch, is_asked):
    """A loss that freezes a part has DDP wrap the model again, while the drill's state is being written."""
    goes_on = held_saves(monkeypatch)
    bench = Bench(tmp_path, drill_at="90" if is_asked else "1")
    bench.step()
    if is_asked:
        bench.drills._take_asked(DrillAt(rank=0, step=1))
    bench.step(commits=False)
    bench.step()
    goes_on.set()
    reported = bench.until_reported(2)
    bench.step()
    assert {(one.step, one.part, one.problem) for one in reported} == {
        (1, "share", ""),
        (1, "state", ""),
    }


@pytest.mark.parametrize("is_owed", [False, True])
def test_a_launch_that_owes_a_proof_awaits_its_drills_state(tmp_path, monkeypatch, is_owed):
    """Nothing has broken in it, but the launch before it has left a repair that is not proved."""
    saves_now = held_saves(monkeypatch)
    bench = Bench(tmp_path, drill_at="1")
    bench.group.membership.owes_drill = 0 if is_owed else -1
    bench.step()
    bench.step()
    timer = threading.Timer(0.2, saves_now.set)
    timer.start()
    bench.drills.conclude(bench.group)
    parts = {one.part for one in bench.reported}
    timer.join()
    assert parts == ({"share", "state"} if is_owed else {"share"})
    bench.until_reported(2)


def test_a_step_that_is_asked_for_is_drilled(tmp_path):
    """Once; one that is behind is not, nor is any where drills are off."""
    bench = Bench(tmp_path, drill_at="90")
    bench.step()
    bench.drills._take_asked(DrillAt(rank=0, step=3))
    for _ in range(3):
        bench.step()
    parts = {(one.step, one.part) for one in bench.until_reported(2)}
    assert parts == {(3, "share"), (3, "state")}
    bench.drills._take_asked(DrillAt(rank=0, step=1))
    off = Bench(tmp_path, drill_at="off")
    off.drills._take_asked(DrillAt(rank=0, step=off.state.committed_step))
    for one in (bench, off):
        one.step()
        one.step()
    assert (len(bench.reported), off.reported) == (2, [])


@pytest.mark.parametrize("is_short", [False, True])
def test_a_rank_that_is_diagnosed_hands_over_what_it_computes_from(tmp_path, is_short):
    """Its state outside the model, where there is room, its batch, and what it comes to a second time; once."""
    bench = Bench(tmp_path, drill_at="90")
    bench.state.side.hold_bytes = lambda: (1 << 50) * is_short
    bench.state.model.calls = 3
    bench.step()
    bench.drills._take_asked(DrillAt(rank=0, step=2, diagnoses=True))
    bench.step()
    batch = {"inputs": torch.ones(2)}
    bench.step(batches=(MicroBatch(indices=(0, 1), batch=batch),))
    bench.until_reported(2)
    folder = tmp_path / folder_name(2)
    record = json.loads((folder / "share.json").read_text(encoding="utf-8"))
    assert record["again"]["samples"] == ["s"]
    [given] = taken_over(unpacked(torch.load(folder / "batch.pt", weights_only=True)), like=[])
    assert sorted(record["handed"]) == ["batch.pt"] + ["side.pt"] * (not is_short)
    assert torch.equal(given["inputs"], torch.ones(2))
    assert bench.given[0].batch is not batch, "the step's own stays as it is"
    assert (folder / "side.pt").exists() == (not is_short)
    if not is_short:
        side = torch.load(folder / "side.pt", weights_only=True)
        assert bench.state.side.unlike(side) == []
        bench.state.model.calls = 4
        assert bench.state.side.unlike(side) == ["model.calls"]
        assert bench.state.side.take_over(side, ["model.calls"]) == []
        assert bench.state.model.calls == 3
    bench.drills._take_asked(DrillAt(rank=0, step=bench.state.committed_step))
    step = bench.state.committed_step
    bench.step()
    again = json.loads((tmp_path / folder_name(step) / "share.json").read_text(encoding="utf-8"))
    assert "again" not in again


def diagnose(bench, *batches):
    """The next step, of which the rank is asked for more; returns its record."""
    step = bench.state.committed_step
    bench.drills._take_asked(DrillAt(rank=0, step=step, diagnoses=True))
    bench.step(batches=batches)
    share = bench.folder / folder_name(step) / "share.json"
    return json.loads(share.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), ValueError("of the task's"), WrapAgainError()]
)
def test_a_look_that_fails_is_no_fault_of_the_rank(tmp_path, error):
    """Nor does it leave anything of what it has changed: the step is made, and drilled without more."""
    bench = Bench(tmp_path, drill_at="90")
    dropped, phases = [], []
    bench.state.drop_unfinished_step = lambda: dropped.append(True)

    def share_again(_):
        phases.append(bench.drills._runtime.slot.read().phase)
        raise error

    bench.share_again = share_again
    bench.step()
    record = diagnose(bench, MicroBatch(indices=(0,), batch=torch.ones(2)))
    assert "again" not in record
    assert (record["handed"], dropped, phases) == ([], [True], [Phase.CHECKPOINT])
    assert str(error) in " ".join(record["left_out"].values())


def test_a_fault_in_a_look_is_still_one(tmp_path):
    """As where the generation is aborted meanwhile."""
    bench = Bench(tmp_path, drill_at="90")

    def share_again(_):
        raise FaultError(FAULT)

    bench.share_again = share_again
    bench.step()
    with pytest.raises(FaultError):
        diagnose(bench, MicroBatch(indices=(0,), batch=torch.ones(2)))


def test_what_is_handed_over_is_written_as_a_save_is(tmp_path, monkeypatch):
    """Under the deadline of a checkpoint; the phase of before follows."""
    bench, phases, save = Bench(tmp_path, drill_at="90"), [], torch.save
    slot = bench.drills._runtime.slot

    def saves(*args):
        phases.append(slot.read().phase)
        save(*args)

    monkeypatch.setattr(torch, "save", saves)
    bench.step()
    slot.stamp(Phase.OPTIMIZER, 1)
    before_ns = slot.get(Cell.CHECKPOINT_NS)
    diagnose(bench, MicroBatch(indices=(0,), batch=torch.ones(2)))
    assert phases.count(Phase.CHECKPOINT) >= 2
    assert slot.read().phase is Phase.OPTIMIZER
    assert slot.get(Cell.CHECKPOINT_NS) > before_ns


def test_a_batch_that_nobody_can_pickle_is_not_handed_over(tmp_path):
    """The rest is; what steps change and no other process can have is named."""
    bench = Bench(tmp_path, drill_at="90")
    bench.state.model.seen = (one for one in ())
    bench.step()
    bench.state.side.keep(1)
    bench.state.model.seen = (one for one in ())
    record = diagnose(bench, MicroBatch(indices=(0,), batch=[torch.ones(2), lambda: None]))
    assert record["handed"] == ["side.pt"]
    assert "pickle" in record["left_out"]["batch.pt"].lower()
    assert "model.seen" in " ".join(record["missing"])
    assert record["again"]["samples"] == ["s"]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_changes_its_own_late_hands_it_over(tmp_path, is_late):
    """Rank 0 reads what was sealed; that is not all then."""
    bench, count = Bench(tmp_path, drill_at="2"), [0]
    bench.state.local = local = LocalState({"count": count}, option="keep_local")
    local.belongs_to(
        SimpleNamespace(rank=0, local_rank=0, world_size=1, local_world_size=1, local_slots=())
    )
    local.begin(0)
    for step in (1, 2):
        bench.step()
        count[0] = step
        local.seal(step)
        local.committed(step)
        count[0] += 100 * is_late
        local.settle()
    bench.step()
    folder = tmp_path / folder_name(2)
    record = json.loads((folder / "share.json").read_text(encoding="utf-8"))
    assert record["handed"] == ["local.pt"] * is_late
    assert (folder / "local.pt").exists() == is_late


@dataclass
class Batch:
    inputs: torch.Tensor
    names: list[str]


def test_samples_are_compared_in_containers_of_every_kind():
    """By their tensors, in order; texts are not compared."""
    one, other = torch.ones(2), torch.zeros(2)
    rows = [[one, other], {"a": one, "b": [other]}, UserDict(a=one, b=(other,))]
    alike = {batch_hash(row) for row in rows}
    assert len(alike) == 1
    assert batch_hash([other, one]) not in alike
    assert batch_hash(Batch(one, ["a"])) == batch_hash(Batch(one, ["b"])) == batch_hash([one])
    assert batch_hash(Batch(other, ["a"])) != batch_hash(Batch(one, ["a"]))


def test_who_waited_before_the_state_changes_still_does(tmp_path):
    """Drills wait beside saves, not in the place of them."""
    bench = Bench(tmp_path, drill_at="2")
    for _ in range(4):
        bench.step()
    assert bench.releases == 4


def test_where_memory_is_short_nothing_is_written(tmp_path):
    """Control: with a little more there is a drill."""
    bench = Bench(tmp_path / "short", drill_at="1", room_bytes=260 << 20)
    reported = bench.until_reported(2)
    assert "memory is short (0.3 GB wanted, 0.3 free)" in reported[0].problem
    assert not list((tmp_path / "short").rglob("*.pt"))
    bench = Bench(tmp_path / "enough", drill_at="1", room_bytes=300 << 20)
    assert [part.problem for part in bench.until_reported(2)] == ["", ""]


def test_a_disk_that_refuses_is_reported_and_the_next_drill_is_tried(tmp_path):
    """A folder that cannot be made: for the share and for the state."""
    (tmp_path / ".drill").write_text("in the way")
    bench = Bench(tmp_path, drill_at="1,30")
    reported = bench.until_reported(2)
    assert all(part.problem for part in reported), reported
    (tmp_path / ".drill").unlink()
    while bench.state.committed_step < 30:
        bench.step()
    del reported[:]
    assert [part.problem for part in bench.until_reported(2)] == ["", ""]


def test_a_save_that_begins_beside_it_takes_no_share_for_left_over(tmp_path, monkeypatch):
    """The first save of a store removes temporary files of its folder, those of its own process too."""
    replace_file = drill_notes.replace_file

    def held_up(path, data):
        temporary = temporary_path(path)
        temporary.write_bytes(data)
        state = path.parent / STATE_FOLDER
        poll(lambda: list(state.glob("step_*.json")), what="the state beside it")
        assert temporary.exists()
        temporary.unlink()
        replace_file(path, data)

    monkeypatch.setattr(drill_notes, "replace_file", held_up)
    bench = Bench(tmp_path, drill_at="1")
    assert [part.problem for part in bench.until_reported(2)] == ["", ""]


def test_a_step_whose_state_was_given_up_has_no_share(tmp_path):
    """It is done again, or another one is."""
    bench = Bench(tmp_path, drill_at="2")
    bench.step()
    bench.step()
    bench.step(commits=False)
    assert bench.reported == []


@pytest.mark.parametrize(
    ("settings", "is_watched", "drills"),
    [
        ({}, True, True),
        ({"drill_at": "off"}, True, False),
        ({}, False, False),
        ({"inject": ["kill:rank=0"]}, True, True),
        ({"inject": ["nan:rank=0"]}, True, False),
        ({"inject": ["random:mtbf_s=5,seed=7,kinds=kill+diverge"]}, True, False),
    ],
)
def test_there_are_drills_where_they_can_show_something(tmp_path, settings, is_watched, drills):
    """Not where nobody forks them, and not where what a step computes is changed on request."""
    bench = Bench(tmp_path, is_watched=is_watched, **settings)
    while bench.state.committed_step < 12:
        bench.step()
    assert bool(list(tmp_path.rglob("share.json"))) == drills
