"""Where a save's copy is made, as the state grows and memory becomes short."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ddp_runner.training.saves.save_room import SaveRoom
from tests.checkpoint.states import facts_of
from tests.processes import run_ranks

from .test_memory_copies import files
from .test_saving import RecordingRuntime, Room

SMALL, LARGE = 1_000, 1_000_000  # numbers of 4 bytes


class Saves:
    """A rank's, of states of any size, which are written nowhere but in a list."""

    def __init__(self, folder, **room):
        self.files, paths = files()
        runtime = RecordingRuntime(folder)
        runtime.rank_info = replace(runtime.rank_info, memory_slots=paths)
        self.runtime, self.written, self.manager = runtime, [], Room(**room)
        store = SimpleNamespace(save=self._write)
        self.room = SaveRoom(store, self.manager, runtime)

    def _write(self, content, facts):
        del facts
        self.written.append(content["w"].numel())

    def save(self, count, *, is_file=True):
        """Where the copy lay: "slots", "own" or "borrowed"; None where none was made."""
        weight = torch.ones(count)
        self.room.begin({"w": weight}, facts_of(1), steady=[weight], is_file=is_file)
        if not self.room.saver.is_busy:
            return None
        save = self.room.saver.undecided
        borrows = save._snapshot.borrows
        save.prove()
        assert self.room.saver.take_ended(None).result() is None
        if is_file:
            self.room.file_is_there()
        if borrows:
            return "borrowed"
        return "own" if self.room.slots is None else "slots"

    @property
    def held_bytes(self):
        return sum(os.fstat(one).st_blocks * 512 for one in self.files)


def _grows(me, folder):
    del me
    saves = Saves(folder, room_bytes=16 * LARGE)
    found = [saves.save(SMALL), saves.save(LARGE)]
    saves.manager._room_bytes = (
        8 * LARGE
    )  # for two copies less than the half that may be taken, for one enough
    found += [saves.save(LARGE), saves.save(2 * LARGE, is_file=False)]
    before_bytes = saves.held_bytes
    found.append(saves.save(LARGE))
    return found, saves.written, (before_bytes, saves.held_bytes), saves.runtime.log()


def test_a_state_that_grows_is_asked_again_whether_two_copies_fit(tmp_path):
    """As where a stage trains more layers: memory that is not there would end rank after rank."""
    found, written, held_bytes, log = run_ranks(_grows, 1, tmp_path)[0]
    assert found == ["slots", "slots", "slots", None, "own"]
    assert written == [SMALL, LARGE, LARGE, LARGE]
    before_bytes, after_bytes = held_bytes
    assert before_bytes >= 4 * LARGE, "until a file is there"
    assert after_bytes == 0, "what was held is given back"
    assert log.count("no room in memory for 2 copies") == 1


def _is_short(me, folder):
    del me
    saves = Saves(folder)
    found = [saves.save(LARGE)]
    held_bytes = saves.held_bytes
    saves.manager.host_is_short = True
    found.append(saves.save(LARGE))
    saves.manager.host_is_short = False
    found.append(saves.save(LARGE))
    saves.manager.host_is_short = True
    found += [saves.save(LARGE), saves.save(LARGE), saves.save(LARGE)]
    return found, held_bytes, saves.held_bytes


def test_copies_give_their_memory_back_where_it_becomes_short(tmp_path):
    """At two saves in a row: training needs it more; files are written as without them."""
    found, before_bytes, after_bytes = run_ranks(_is_short, 1, tmp_path)[0]
    assert found == ["slots", "slots", "slots", "slots", "own", "own"]
    assert before_bytes >= 4 * LARGE
    assert after_bytes == 0


def _is_refused(me, folder):
    del me
    saves = Saves(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))  # of a memory file too
    try:
        return [saves.save(SMALL), saves.save(LARGE), saves.save(SMALL)], saves.held_bytes
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_where_the_machine_refuses_the_memory_one_copy_is_this_process_s(tmp_path):
    """For good: it would refuse it each time, and training would wait for each save."""
    found, held_bytes = run_ranks(_is_refused, 1, tmp_path)[0]
    assert found == ["slots", "own", "own"]
    assert held_bytes == 0


@pytest.mark.parametrize("room_bytes", [4 * LARGE, 0])
def test_without_room_the_state_itself_is_written(tmp_path, room_bytes):
    """Training waits for it, which is said once."""
    found, log = run_ranks(_is_borrowed, 1, tmp_path, room_bytes)[0]
    assert found == ["borrowed", "borrowed"]
    assert log.count("training waits for each checkpoint") == 1


def _is_borrowed(me, folder, room_bytes):
    del me
    saves = Saves(folder, room_bytes=room_bytes)
    return [saves.save(LARGE), saves.save(LARGE)], saves.runtime.log()
