"""Files that a process of its own writes of copies in memory: finished, or refused, whenever it is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from ddp_runner.checkpoint.memory_slots import MemorySlots
from ddp_runner.checkpoint.snapshot import HostMemory
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.checkpoint.writer import CopyWriter, NobodyWritesError, saved_of
from ddp_runner.kernel.rules.faults import FaultError, FaultKind
from ddp_runner.kernel.system.disk import RealDisk
from ddp_runner.kernel.wire.messages import PACKET_BYTES_MAX, CopyWritten, WriteCopy, decode, encode

from .states import facts_of

NUMBERS = 300_000  # more than one piece of a file
PHASES = ("open", "write", "sync", "replace", "sync directory", "publish", "answer")


def state_of(step, *, count=NUMBERS):
    """Its step in each byte; without torch's threads, which no fork has."""
    return {"weight": torch.from_numpy(np.full(count, float(step), np.float32)), "step": step}


@dataclass
class Place:
    """Two memory files as a supervisor has them, and whoever makes copies in them."""

    files: list
    folder: object

    def __post_init__(self):
        self.slots = MemorySlots(self.files)
        self.memory = HostMemory(self.slots)
        self.store = CheckpointStore(self.folder, keep_last=2)

    def order(self, step, state=None, **facts):
        """As a rank does once a copy is proven."""
        made = self.memory.snapshot(state or state_of(step), steady=[])
        made.copy_steady()
        sealed = self.slots.seal(made.content, facts_of(step, **facts))
        return WriteCopy(
            rank=0, sealed=sealed, step=step, directory=str(self.folder), keep_last=2, keep_every=0
        )

    def write(self, order, disk=None):
        """As a saver does, in this process; what its rank makes of the answer."""
        return saved_of(self.answer(order, disk), self.store)

    def answer(self, order, disk=None):
        writer = CopyWriter(MemorySlots(self.files), disk=disk or RealDisk())
        return writer.write(order)

    def loaded_step(self):
        loaded = CheckpointStore(self.folder, keep_last=2).load()
        if loaded is None:
            return None
        assert loaded.rejected == ()
        assert bool((loaded.state["weight"] == float(loaded.manifest.step)).all())
        return loaded.manifest.step


@pytest.fixture
def place(tmp_path):
    made = Place([os.memfd_create(f"slot{number}") for number in (0, 1)], tmp_path)
    yield made
    for one in made.files:
        os.close(one)


class StoppingDisk(RealDisk):
    """Waits for ever in one of its operations, of which it says that it has come there."""

    def __init__(self, phase, there):
        self._phase, self._there = phase, there

    def _at(self, phase):
        if phase == self._phase:
            self._there.set()
            time.sleep(1000)

    def open_temporary(self, path):
        handle = super().open_temporary(path)
        self._at("open")
        return handle

    def write(self, handle, data):
        super().write(handle, data[: data.nbytes // 2])
        self._at("write")
        super().write(handle, data[data.nbytes // 2 :])

    def sync_file(self, handle):
        super().sync_file(handle)
        self._at("sync")

    def replace(self, source, target):
        if target.suffix == ".json":
            self._at("publish")
        super().replace(source, target)
        if target.suffix == ".pt":
            self._at("replace")
        if target.name == "last":
            self._at("answer")

    def sync_directory(self, directory):
        super().sync_directory(directory)
        self._at("sync directory")


@contextlib.contextmanager
def stands_in(place, order, phase):
    """A process that writes the file, up to a phase where it stands until it is killed."""
    context = multiprocessing.get_context("fork")
    there = context.Event()
    disk = StoppingDisk(phase, there)
    process = context.Process(target=place.write, args=(order, disk))
    process.start()
    try:
        assert there.wait(60)
        yield
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()


@pytest.mark.parametrize("phase", PHASES)
def test_a_writer_killed_in_any_phase_is_made_up_for(place, phase):
    """What is on disk is whole throughout, nothing half written stays, and the file is there in the end."""
    assert place.write(place.order(1)).manifest.step == 1
    order = place.order(2)
    with stands_in(place, order, phase):
        assert place.loaded_step() in (1, 2)
    assert place.loaded_step() in (1, 2)
    saved = place.write(order)
    assert (saved.manifest.step, saved.path.parent) == (2, place.folder)
    assert place.loaded_step() == 2
    assert list(place.folder.glob(".*tmp*")) == []


def test_the_file_is_the_one_that_its_rank_would_have_written(place, tmp_path):
    """To the last byte of the state, tied tensors and all; so is its manifest."""
    weight = torch.arange(20.0)
    state = {
        "a": weight,
        "b": weight.view(4, 5).t()[1:],
        "words": {"x": [1, ("y", None)]},
        "step": 3,
    }
    saved = place.write(place.order(3, state))
    own = CheckpointStore(tmp_path / "own", keep_last=2).save(state, facts_of(3))
    found, expected = (torch.load(one.path, weights_only=True) for one in (saved, own))
    assert found["a"].data_ptr() == found["b"].data_ptr() - 4 * 1
    assert found["a"].tolist() == expected["a"].tolist()
    assert found["b"].tolist() == expected["b"].tolist()
    assert (found["words"], found["step"]) == (expected["words"], 3)
    assert saved.path.stat().st_size == own.path.stat().st_size
    (written,) = place.store.catalog.entries()
    assert written.manifest.facts() == own.manifest.facts()
    assert (saved.manifest.size_bytes, saved.manifest.sha256) == (
        written.manifest.size_bytes,
        written.manifest.sha256,
    )


def test_an_answer_fits_into_one_packet_whatever_the_run_says(place):
    """A task that describes itself at length, and a refusal of any length, end no saver."""
    long = "x" * PACKET_BYTES_MAX
    order = place.order(1, about={"settings": long}, meaning={"task": long}, changes=(long,))
    answers = [place.answer(order), place.answer(place.order(2), WordyDisk(long))]
    assert [decode(encode(one)) for one in answers] == answers
    assert [one.problem for one in answers] == ["", "disk"]
    (written,) = place.store.catalog.entries()
    assert written.manifest.meaning == {"task": long}


def _order_and_die(files, folder, pipe):
    pipe.send(Place(files, folder).order(5))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_file_is_finished_though_its_maker_was_killed(place):
    """Its order has left it by then."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    maker = context.Process(target=_order_and_die, args=(place.files, place.folder, theirs))
    maker.start()
    order = mine.recv()
    maker.join()
    assert maker.exitcode == -signal.SIGKILL
    assert place.write(order).manifest.step == 5
    assert place.loaded_step() == 5


@pytest.mark.parametrize("where", ["a tensor", "what describes it"])
def test_a_copy_with_flipped_bytes_becomes_no_file(place, where):
    """Its order is answered so; the file before stands, and the next save works."""
    place.write(place.order(1))
    order = place.order(2)
    (header, slot) = place.slots._by_age()[-1]
    at = 5000 if where == "a tensor" else header.payload_bytes + header.described_bytes - 40
    byte = os.pread(slot._descriptor, 1, at)
    os.pwrite(slot._descriptor, bytes([byte[0] ^ 16]), at)
    with pytest.raises(RuntimeError):
        place.write(order)
    assert place.loaded_step() == 1
    assert place.write(place.order(3)).manifest.step == 3


def test_what_describes_a_copy_is_proved_before_it_is_believed(place):
    """Else it could be of any form, and what comes of that would be taken for a mistake in the state."""
    order = place.order(1)
    (header, slot) = place.slots._by_age()[-1]
    text = b"\x80\x04}]s.".ljust(header.described_bytes, b".")  # a TypeError to read
    os.pwrite(slot._descriptor, text, header.payload_bytes)
    with pytest.raises(RuntimeError, match="its bytes are not those"):
        place.write(order)


class WordyDisk(RealDisk):
    def __init__(self, words):
        self._words = words

    def open_temporary(self, path):
        raise OSError(5, self._words, str(path))


class FullDisk(RealDisk):
    def write(self, handle, data):
        raise OSError(28, os.strerror(28), "the disk")


def test_what_the_disk_refuses_is_refused_as_in_a_rank(place):
    """With the same fault and words; so is a state that could not be read again."""
    with pytest.raises(FaultError) as raised:
        place.write(place.order(1), FullDisk())
    assert raised.value.fault.kind is FaultKind.STORAGE_FAILED
    assert "No space left on device" in raised.value.fault.cause
    assert raised.value.fault.step == 1
    with pytest.raises(TypeError, match=r"is a builtins.set"):
        place.write(place.order(2, {"odd": {1, 2}}))
    assert not list(place.folder.glob("*.pt"))


def test_what_is_given_up_while_it_is_written_does_not_appear(place):
    """A roll-back must not find it on disk afterwards."""

    class Forgetting(RealDisk):
        def open_temporary(self, path):
            place.slots.clear()
            return super().open_temporary(path)

    order = place.order(1)
    for disk in (Forgetting(), RealDisk()):
        assert place.write(order, disk) is None
    assert list(place.folder.glob("step_*")) == []


def test_a_copy_of_the_same_step_after_a_roll_back_is_another(place):
    """No answer to the one before is taken for its own."""
    first = place.order(1)
    place.slots.clear()
    assert place.order(1).sealed > first.sealed


def test_where_nobody_writes_its_maker_does(place):
    """The answer says so."""
    answer = CopyWritten(sealed=1, step=1, problem="nobody", text="none is there")
    with pytest.raises(NobodyWritesError, match="none is there"):
        saved_of(answer, place.store)
