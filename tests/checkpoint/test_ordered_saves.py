"""Files that a process of its own writes of copies in memory: finished, or refused, whichever side is killed when."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from ddp_runner.checkpoint import ordered_saves, save_orders
from ddp_runner.checkpoint.disk import RealDisk
from ddp_runner.checkpoint.memory_slots import MemorySlots
from ddp_runner.checkpoint.ordered_saves import NobodyWritesError, OrderedSaves, OrderedWriter
from ddp_runner.checkpoint.snapshot import HostMemory
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.core.faults import FaultError, FaultKind
from ddp_runner.training.components.tensor_hash import tensor_hash

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
        self.slots = MemorySlots(self.files, checksum=tensor_hash)
        self.memory = HostMemory(self.slots)
        self.store = CheckpointStore(self.folder, keep_last=2)
        self.rings = []
        self.orders = OrderedSaves(self.slots, self.store, ring=lambda: self.rings.append(1))

    def order(self, step, state=None):
        """As a rank does once a copy is proven; its number."""
        made = self.memory.snapshot(state or state_of(step), steady=[])
        made.copy_steady()
        return self.slots.seal(made.content, facts_of(step), for_file=self.orders.for_file)

    def loaded_step(self):
        loaded = CheckpointStore(self.folder, keep_last=2).load()
        if loaded is None:
            return None
        assert loaded.rejected == ()
        assert bool((loaded.state["weight"] == float(loaded.manifest.step)).all())
        return loaded.manifest.step

    def reopened(self):
        """As another process has the files: with locks of its own."""
        return [os.open(f"/proc/self/fd/{one}", os.O_RDWR) for one in self.files]


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


def _write(files, phase, there):
    writer = OrderedWriter(
        MemorySlots(files, checksum=tensor_hash), disk=StoppingDisk(phase, there)
    )
    while writer.write_next():
        pass


@contextlib.contextmanager
def writing(place, phase=None):
    """A process that writes what is ordered, up to a phase where it stands until it is killed."""
    context = multiprocessing.get_context("fork")
    there = context.Event()
    files = place.reopened()
    process = context.Process(target=_write, args=(files, phase, there))
    process.start()
    for one in files:
        os.close(one)
    try:
        if phase is not None:
            assert there.wait(60)
        yield process
    finally:
        if phase is not None:
            os.kill(process.pid, signal.SIGKILL)
        process.join()


@pytest.mark.parametrize("phase", PHASES)
def test_a_writer_killed_in_any_phase_is_made_up_for(place, phase):
    """What is on disk is whole throughout, nothing half written stays, and the file is there in the end."""
    number = place.order(1)
    with writing(place):
        assert place.orders.wait(number).manifest.step == 1
    number = place.order(2)
    with writing(place, phase):
        assert place.loaded_step() in (1, 2)
    assert place.loaded_step() in (1, 2)
    assert place.orders.oldest().tries == 1
    with writing(place):
        saved = place.orders.wait(number)
    assert (saved.manifest.step, saved.path.parent) == (2, place.folder)
    assert place.loaded_step() == 2
    assert list(place.folder.glob(".*tmp*")) == []
    assert place.orders.oldest() is None


def test_the_file_is_the_one_that_its_rank_would_have_written(place, tmp_path):
    """To the last byte of the state, tied tensors and all; so is its manifest."""
    weight = torch.arange(20.0)
    state = {
        "a": weight,
        "b": weight.view(4, 5).t()[1:],
        "words": {"x": [1, ("y", None)]},
        "step": 3,
    }
    number = place.order(3, state)
    with writing(place):
        saved = place.orders.wait(number)
    own = CheckpointStore(tmp_path / "own", keep_last=2).save(state, facts_of(3))
    found, expected = (torch.load(one.path, weights_only=True) for one in (saved, own))
    assert found["a"].data_ptr() == found["b"].data_ptr() - 4 * 1
    assert found["a"].tolist() == expected["a"].tolist()
    assert found["b"].tolist() == expected["b"].tolist()
    assert (found["words"], found["step"]) == (expected["words"], 3)
    assert saved.path.stat().st_size == own.path.stat().st_size
    assert saved.manifest.facts() == own.manifest.facts()


def _order_and_die(files, folder):
    made = Place(files, folder)
    made.order(5)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_file_is_finished_though_its_maker_was_killed(place):
    """Whoever comes next in its place finds what is still to be written, waits, and makes no copy there."""
    maker = multiprocessing.get_context("fork").Process(
        target=_order_and_die, args=(place.files, place.folder)
    )
    maker.start()
    maker.join()
    assert maker.exitcode == -signal.SIGKILL
    order = place.orders.oldest()
    assert order.step == 5
    with writing(place):
        assert place.orders.wait(order.sealed).manifest.step == 5
    assert place.loaded_step() == 5


def test_no_copy_is_made_in_what_is_still_to_be_written(place):
    """There is one place beside it; when that is whole as well, who wants a third one is refused."""
    numbers = [place.order(1), place.order(2)]
    with pytest.raises(MemoryError, match="still to be written"):
        place.memory.snapshot(state_of(3), steady=[])
    place.slots.reserve([4])
    with writing(place):
        assert [place.orders.wait(one).manifest.step for one in numbers] == [1, 2]
    place.order(3)


@pytest.mark.parametrize("at", [5000, -40], ids=["a tensor", "what describes it"])
def test_a_copy_with_flipped_bytes_becomes_no_file(place, at):
    """Its order is answered so; the file before stands, and the next save works."""
    first = place.order(1)
    with writing(place):
        place.orders.wait(first)
    number = place.order(2)
    descriptor = save_orders.open_orders(place.files)[0][1]
    place_of = at if at > 0 else save_orders.read(descriptor).answer_at + at
    byte = os.pread(descriptor, 1, place_of)
    os.pwrite(descriptor, bytes([byte[0] ^ 16]), place_of)
    with writing(place), pytest.raises(RuntimeError):
        place.orders.wait(number)
    assert place.loaded_step() == 1
    number = place.order(3)
    with writing(place):
        assert place.orders.wait(number).manifest.step == 3


def test_what_describes_a_copy_is_proved_before_it_is_believed(place):
    """Else it could be of any form, and what comes of that would be taken for a mistake in the state."""
    number = place.order(1)
    descriptor = save_orders.open_orders(place.files)[0][1]
    payload_bytes = place.slots._slots[place.files.index(descriptor)].header.payload_bytes
    length = save_orders.read(descriptor).answer_at - payload_bytes
    os.pwrite(descriptor, b"\x80\x04}]s.".ljust(length, b"."), payload_bytes)  # a TypeError to read
    with writing(place), pytest.raises(RuntimeError, match="its bytes are not those"):
        place.orders.wait(number)


class FullDisk(RealDisk):
    def write(self, handle, data):
        raise OSError(28, os.strerror(28), "the disk")


def test_what_the_disk_refuses_is_refused_as_in_a_rank(place):
    """With the same fault and words; so is a state that could not be read again."""
    for step, state, error in (
        (1, None, FaultError),
        (2, {"odd": {1, 2}}, TypeError),
    ):
        number = place.order(step, state)
        files = place.reopened()
        writer = OrderedWriter(MemorySlots(files, checksum=tensor_hash), disk=FullDisk())
        assert writer.write_next()
        with pytest.raises(error) as raised:
            place.orders.wait(number)
        for one in files:
            os.close(one)
        if error is FaultError:
            assert raised.value.fault.kind is FaultKind.STORAGE_FAILED
            assert "No space left on device" in raised.value.fault.cause
            assert raised.value.fault.step == 1
        else:
            assert "is a builtins.set" in str(raised.value)
    assert not list(place.folder.glob("*.pt"))


def test_an_order_that_ends_every_writer_is_given_up(place):
    """The fourth one refuses it, and goes on with what comes after."""
    number = place.order(1)
    for _ in range(save_orders.TRIES_MAX):
        with writing(place, "write"):
            pass
    with writing(place), pytest.raises(RuntimeError, match="3 processes in a row have ended"):
        place.orders.wait(number)
    number = place.order(2)
    with writing(place):
        assert place.orders.wait(number).manifest.step == 2


def test_where_nobody_writes_the_order_is_withdrawn(place, monkeypatch):
    """Whoever has made the copy then writes it; a writer that comes later finds nothing to do."""
    monkeypatch.setattr(ordered_saves, "PATIENCE_S", 1.0)
    number = place.order(1)
    with pytest.raises(NobodyWritesError):
        place.orders.wait(number)
    assert len(place.rings) > 1
    files = place.reopened()
    assert not OrderedWriter(MemorySlots(files, checksum=tensor_hash), disk=RealDisk()).write_next()
    for one in files:
        os.close(one)


def test_after_nobody_wrote_one_the_next_is_not_waited_for_as_long(place, monkeypatch):
    """Until somebody writes again."""
    monkeypatch.setattr(ordered_saves, "PATIENCE_S", 4.0)
    monkeypatch.setattr(ordered_saves, "NO_PATIENCE_S", 0.0)
    took_s = []
    for step in (1, 2):
        number, began_s = place.order(step), time.monotonic()
        with pytest.raises(NobodyWritesError):
            place.orders.wait(number)
        took_s.append(time.monotonic() - began_s)
    assert took_s[0] >= 4.0
    assert took_s[1] < took_s[0] - 1.0
    number = place.order(3)
    with writing(place):
        assert place.orders.wait(number).manifest.step == 3
    number, began_s = place.order(4), time.monotonic()
    with pytest.raises(NobodyWritesError):
        place.orders.wait(number)
    assert time.monotonic() - began_s >= 4.0


def test_a_writer_at_work_is_waited_for_however_long(place, monkeypatch):
    """Control: nothing is withdrawn while anything is being written."""
    monkeypatch.setattr(ordered_saves, "PATIENCE_S", 0.0)
    place.order(1)
    number = place.order(2)
    ended = []

    def wait():
        with contextlib.suppress(RuntimeError):
            ended.append(place.orders.wait(number))

    with writing(place, "write"):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(2.5)
        assert thread.is_alive()
        assert place.orders.oldest().is_open
        place.slots.clear()  # as a roll-back does: nothing of the course that is left may be gone back to
        thread.join()
    assert ended == []


def test_what_is_given_up_while_it_is_written_does_not_appear(place):
    """A roll-back must not find it on disk afterwards."""
    place.order(1)
    files = place.reopened()

    class Forgetting(RealDisk):
        def open_temporary(self, path):
            place.slots.clear()
            return super().open_temporary(path)

    writer = OrderedWriter(MemorySlots(files, checksum=tensor_hash), disk=Forgetting())
    assert writer.write_next()
    assert not writer.write_next()
    for one in files:
        os.close(one)
    assert list(place.folder.glob("step_*")) == []


def test_a_record_that_is_torn_is_no_order(place):
    """Nor is one beside a copy of another number."""
    place.order(1)
    descriptor = save_orders.open_orders(place.files)[0][1]
    order = save_orders.read(descriptor)
    save_orders.place(
        descriptor, save_orders.SaveOrder(sealed=9, step=1, answer_at=order.answer_at)
    )
    assert save_orders.read(descriptor) is None
    save_orders.place(descriptor, order)
    assert save_orders.read(descriptor) == order
    os.pwrite(descriptor, json.dumps({}).encode(), save_orders.HEADER_BYTES + 70)
    assert save_orders.read(descriptor) is None


@pytest.mark.parametrize("torn", [0, save_orders.HEADER_BYTES])
def test_a_record_that_is_just_being_written_is_read_again(place, monkeypatch, torn):
    """A reader may come between the bytes of one that is written over; the answer to it would be lost."""
    monkeypatch.setattr(save_orders, "_LOOK_AGAIN_S", 0.2)
    place.order(1)
    descriptor = save_orders.open_orders(place.files)[0][1]
    order, whole = save_orders.read(descriptor), os.pread(descriptor, 40, torn)
    os.pwrite(descriptor, b"x" * 40, torn)
    writer = threading.Timer(0.1, os.pwrite, (descriptor, whole, torn))
    writer.start()
    assert save_orders.read(descriptor) == order
    writer.join()


def test_the_answer_has_its_room_from_when_the_copy_is_whole(place):
    """So that no file is written and then not known for want of memory."""
    place.order(1)
    order, descriptor = save_orders.open_orders(place.files)[0]
    held_bytes = os.fstat(descriptor).st_blocks * 512
    save_orders.answer(descriptor, order, {"problem": "other", "text": "x" * 60_000})
    assert os.fstat(descriptor).st_blocks * 512 == held_bytes
