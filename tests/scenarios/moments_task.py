"""A task whose processes stay where a test wants one; importing this file is what makes the difference."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

from ddp_runner.checkpoint.memory_slots import MemorySlots, _Slot
from ddp_runner.checkpoint.slot_header import SlotHeader
from ddp_runner.checkpoint.snapshot import Snapshot
from ddp_runner.kernel.system.disk import RealDisk
from ddp_runner.kernel.wire.board import Cell, Slot
from tests.scenarios.moments import DISK, THERE_NAME, WANTED_NAME
from tests.scenarios.workload import PacedTask


class MomentsTask(PacedTask):
    """As the one that it extends."""


class _Here:
    """What this process knows of itself."""

    def __init__(self):
        self.seen = Counter()
        self.board = None
        self.copied_step = 0
        self.sealing = None

    def step(self):
        """Committed by this rank; in the process that writes, of the copy that it has in hand."""
        return self.copied_step if self.board is None else self.board.get(Cell.COMMITTED_STEP)


_HERE = _Here()


def _wanted():
    try:
        return json.loads(Path(WANTED_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"number": -1, "place": ""}


def _come_to(place, step):
    wanted = _wanted()
    if place != wanted["place"] or step < wanted["step"]:
        return
    if os.environ.get("RANK", "") not in ("", str(wanted["rank"])):
        return
    number = wanted["number"]
    _HERE.seen[number] += 1
    if _HERE.seen[number] < wanted["nth"]:
        return
    Path(THERE_NAME).write_text(f"{number} {step}", encoding="utf-8")
    while _wanted()["number"] == number:
        time.sleep(0.002)


def _stay_in_phases():
    stamp, reach, store = Slot.stamp, Slot.reach, Slot.set

    def stamped(slot, phase, now_ns):
        _HERE.board = slot
        stamp(slot, phase, now_ns)
        _come_to(phase.label, slot.get(Cell.COMMITTED_STEP))

    def reached_moment(slot, moment):
        reach(slot, moment)
        _come_to(moment.value, slot.get(Cell.COMMITTED_STEP))

    def stored(slot, cell, value):
        store(slot, cell, value)
        if cell is Cell.DIRTY and value:
            _come_to("commit", slot.get(Cell.COMMITTED_STEP))

    Slot.stamp, Slot.reach, Slot.set = stamped, reached_moment, stored


def _stay_amid_copies():
    make_room, copy_steady = MemorySlots.make_room, Snapshot.copy_steady
    lent = MemorySlots.lent
    seal, to_bytes, read = _Slot.seal, SlotHeader.to_bytes, _Slot.read

    def room_made(slots, sizes):
        _HERE.copied_step = _HERE.step()
        _come_to("before room", _HERE.copied_step)
        pieces = make_room(slots, sizes)
        _come_to("room", _HERE.copied_step)
        return pieces

    def lent_to_writer(slots, sealed):
        found = lent(slots, sealed)
        _HERE.copied_step = found.facts.step
        return found

    def copied(snapshot):
        waiting = snapshot._waiting
        half = len(waiting) // 2
        for part, place in ((waiting[:half], "half copied"), (waiting[half:], "copied")):
            snapshot._waiting = part
            copy_steady(snapshot)
            _come_to(place, _HERE.copied_step)

    def sealed(slot, content, *, step, **how):
        _HERE.sealing, _HERE.copied_step = slot, step
        _come_to("seal", step)
        seal(slot, content, step=step, **how)
        _come_to("sealed", step)

    def described(header):
        whole = header.to_bytes_whole()
        _come_to("described", header.step)
        os.pwrite(_HERE.sealing._descriptor, whole[: len(whole.rstrip(b"\0")) // 2], 0)
        _come_to("half a header", header.step)
        return whole

    def read_from(slot):
        _come_to("reading", 0)
        return read(slot)

    MemorySlots.make_room, Snapshot.copy_steady = room_made, copied
    MemorySlots.lent = lent_to_writer
    _Slot.seal, _Slot.read = sealed, read_from
    SlotHeader.to_bytes_whole, SlotHeader.to_bytes = to_bytes, described


def _stay_at_writes():
    def staying(name):
        operation = getattr(RealDisk, name)

        def come_and_do(disk, *arguments):
            _come_to(name, _HERE.step())
            return operation(disk, *arguments)

        return come_and_do

    for name in DISK:
        setattr(RealDisk, name, staying(name))


_stay_in_phases()
_stay_amid_copies()
_stay_at_writes()
