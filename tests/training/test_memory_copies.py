"""Copies of the state in the supervisor's memory: when they are made, refused, and taken or not."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace

import pytest

from ddp_runner import DDPTrainer
from ddp_runner.checkpoint.memory_slots import MemorySlots
from ddp_runner.core import checkpoint_interval as pacing
from ddp_runner.core.checkpoint_interval import CopyInterval
from ddp_runner.kernel.step.durable import Keep, Trust
from ddp_runner.kernel.wire.events import RepairedInPlace
from ddp_runner.training import guard
from ddp_runner.training.saves.saving import Saving
from ddp_runner.training.step import COPY_VOTE, agreed_save
from ddp_runner.training.task_client import TaskSetup
from tests.checkpoint.states import facts_of
from tests.processes import run_ranks

from .building import build_state
from .test_saving import RecordingRuntime, make_saving
from .test_session import STEPS, settings
from .test_session import RecordingRuntime as SessionRuntime

NO_FILES = {"save_interval": 0, "save_every_steps": 0}


def files():
    """As a supervisor has them, and how a rank opens them."""
    found = [os.memfd_create(f"slot{number}") for number in (0, 1)]
    return found, tuple(f"/proc/{os.getpid()}/fd/{one}" for one in found)


def slots_on(found):
    return MemorySlots(found)


class Runtime(SessionRuntime):
    """Keeps what the rank says it has, too."""

    def next_generation(self, ready):
        self.ready = ready
        return super().next_generation(ready)


def trainer(config, paths):
    runtime = Runtime(config)
    runtime.rank_info = replace(runtime.rank_info, memory_slots=paths)
    return DDPTrainer(config=config, runtime=runtime), runtime


def _copied_and_taken(me, folder):
    """A run that copies and saves nothing before its end, and one that finds its copies."""
    del me
    found, paths = files()
    held = []
    ended = Saving.end
    Saving.end = lambda self, reason, **named: (
        held.append(slots_on(found).newest_step) or ended(self, reason, **named)
    )
    first, _ = trainer(settings(folder / "first", **NO_FILES, memory_every=5), paths)
    report = first.train()
    second, runtime = trainer(settings(folder / "second", **NO_FILES, memory_every=5), paths)
    again = second.train()
    began = runtime.ready.committed_step, runtime.ready.is_from_memory
    return held, report.weights_sha256, again.weights_sha256, began


def test_who_is_forked_when_all_are_lost_takes_the_newest_copy(tmp_path):
    """It is of step 10 of 12, as it is due each five steps; what follows is the same."""
    held, first, again, began = run_ranks(_copied_and_taken, 1, tmp_path)[0]
    assert held == [10, 10]
    assert began == (10, True)
    assert first == again


def _files_are_newer(me, folder, damaged):
    """A run's file of its last step stands beside a copy of an earlier one; either may be ``damaged``."""
    del me
    found, paths = files()
    config = settings(folder, **NO_FILES, memory_every=5)
    first, _ = trainer(config, paths)
    first.train()
    if damaged == "file":
        (newest,) = (folder / "checkpoints").glob("step_*.pt")
        content = newest.read_bytes()
        newest.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    elif damaged:
        for file in (folder / "checkpoints").glob("*"):
            file.unlink()
        for one in found:
            os.pwrite(one, b"\1", 5000)
    second, runtime = trainer({**config, "max_steps": STEPS + 2}, paths)
    at_begin = []
    began = TaskSetup._look_back
    TaskSetup._look_back = lambda *all_: (
        at_begin.append(slots_on(found).newest_step) or began(*all_)
    )
    second.train()
    log = (folder / "logs" / "rank_0.log").read_text()
    return runtime.ready.committed_step, runtime.ready.is_from_memory, at_begin, log


@pytest.mark.parametrize("damaged", ["", "copy"])
def test_a_copy_that_is_damaged_is_refused(tmp_path, damaged):
    """Nor is one taken that is older than a file. What is not gone back to is nothing to go back to later."""
    began, is_from_memory, at_begin, log = run_ranks(_files_are_newer, 1, tmp_path, damaged)[0]
    assert (began, is_from_memory) == (0 if damaged else STEPS, False)
    assert at_begin == ([] if damaged else [None])
    assert ("is of no use: its bytes are not those that were written" in log) == bool(damaged)


def test_a_copy_is_taken_where_a_newer_file_is_damaged(tmp_path):
    """That a file is there says nothing yet: it is read before the copy is given up for it."""
    began, is_from_memory, _, log = run_ranks(_files_are_newer, 1, tmp_path, "file")[0]
    assert (began, is_from_memory) == (10, True)
    assert "is unusable: its SHA-256 is not the one in its manifest" in log
    assert (tmp_path / "checkpoints" / f"step_{STEPS:08}.pt.bad.reason").exists()


def _rolled_back(me, folder):
    """Two steps in a row give no number after copies were made."""
    del me
    found, paths = files()
    config = settings(
        folder, **NO_FILES, memory_every=2, max_errors_per_epoch=1, **{"task.nan_at": "7+8"}
    )
    before, seen, restored = [], [], Saving.give_back
    forget = Saving.forget

    def look(self):
        before.append(slots_on(found).newest_step)
        forget(self)

    def restore(self):
        seen.append(slots_on(found).newest_step)
        restored(self)

    exchange = guard.NumericsGuard._exchange

    def meet(self, name, value):
        if name.startswith("left/"):
            seen.append(slots_on(found).newest_step)
        return exchange(self, name, value)

    guard.NumericsGuard._exchange = meet
    Saving.forget, Saving.give_back = look, restore
    made, runtime = trainer(config, paths)
    made.train()
    (fault,) = runtime.of(RepairedInPlace)
    return before, seen, fault.action


def test_after_a_roll_back_no_copy_of_the_course_left_is_there(tmp_path):
    """Else all ranks' end would lead back to it, also while they wait for each other to leave."""
    before, seen, action = run_ranks(_rolled_back, 1, tmp_path)[0]
    assert before[0] in (4, 6)
    assert seen == [None, None]
    assert action.startswith("rolled back to step 0")


def _saves_with_copies(me, folder, room_bytes):
    del me
    found, paths = files()
    state, made = build_state(), RecordingRuntime.__init__

    def begin(self, folder):
        made(self, folder)
        self.rank_info = replace(self.rank_info, memory_slots=paths)

    RecordingRuntime.__init__ = begin
    saving, runtime, _ = make_saving(folder, state, room_bytes=room_bytes, save_every_steps=1)
    seen = []
    for step, reason in enumerate(
        ("file", "copy", "copy dropped", "file dropped", "copy"), start=1
    ):
        state.committed_step = step
        saving.keep(Keep.COPY if reason.startswith("copy") else Keep.FILE)
        saving.judge(Trust.UNKNOWN if reason.endswith("dropped") else Trust.SOUND)
        state.before_change()
        saving.settle()
        seen.append((slots_on(found).newest_step, saving.policy.is_put_off))
    return seen, runtime.saved_steps, runtime.log()


def test_each_file_leaves_a_copy_and_a_copy_no_file(tmp_path):
    """What is dropped leaves the one before; only a file that is dropped is to be made up for."""
    seen, saved, log = run_ranks(_saves_with_copies, 1, tmp_path, 2**40)[0]
    assert seen == [(1, False), (2, False), (2, False), (2, True), (5, True)]
    assert saved == [1]
    assert "no room" not in log


def test_without_room_for_two_copies_there_is_one_for_files(tmp_path):
    """It is said once, with what would end that; files are saved as ever."""
    seen, saved, log = run_ranks(_saves_with_copies, 1, tmp_path, 1_000_000)[0]
    assert seen == [(None, False)] * 3 + [(None, True)] * 2
    assert saved == [1]
    assert log.count("no room in memory for 2 copies of the state") == 1
    assert "checkpoint.memory_every=0" in log


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64, 513])
def test_a_vote_for_a_copy_is_no_vote_for_a_file(world_size):
    """Summed, or as a mean that is multiplied again: only rank 0 votes for a copy, any for a file."""
    for saves, copies in ((0, 0), (0, 1), (1, 0), (1, 1), (world_size, 0)):
        votes = saves + COPY_VOTE * copies if saves + copies <= world_size else saves
        assert agreed_save(votes) == agreed_save(votes / world_size * world_size) == (saves > 0)


def test_copies_are_so_far_apart_that_they_cost_half_a_percent():
    """Of what they take from training; before anything is known, and for next to nothing, not at once."""
    interval = CopyInterval(now_s=0.0)
    assert not interval.is_due(now_s=pacing.FIRST_COPY_S - 0.1, step_s=0.01)
    assert interval.is_due(now_s=pacing.FIRST_COPY_S, step_s=0.01)
    interval.began(now_s=10.0)
    for _ in range(pacing.USUAL_STEPS):
        interval.stepped(0.1, beside_save=False)
    interval.compared(0.02)
    interval.stepped(0.15, beside_save=True)  # half as slow again beside it
    interval.measured(blocked_s=0.03, write_s=math.inf)
    assert interval.interval_s(now_s=0.0, step_s=0.1) == pytest.approx((0.02 + 0.03 + 0.05) / 0.005)
    assert not interval.is_due(now_s=29.9, step_s=0.1)
    assert interval.is_due(now_s=30.1, step_s=0.1)


def test_one_slow_step_beside_a_copy_puts_no_copy_off_for_long():
    """Some step or other is slow for a reason of its own: half a minute once must not cost the copies of an hour."""
    interval = CopyInterval(now_s=0.0)
    for _ in range(pacing.USUAL_STEPS_MIN):
        interval.stepped(0.1, beside_save=False)
    found = []
    for slow_s in (30.0, 30.0, 0.1, 0.1, 0.1, 30.0, 0.1):
        interval.stepped(slow_s, beside_save=True)
        interval.measured(blocked_s=0.001, write_s=math.inf)
        found.append(interval.interval_s(now_s=0.0, step_s=0.1))
    usual_s = pytest.approx(1.0)
    assert found[:2] == [pacing.UNSURE_COPY_MAX_S] * 2, "before much is known"
    assert found[4:] == [usual_s] * 3


def saving_on(folder, paths, **changes):
    """A rank's saving, of a supervisor with this memory."""
    made = RecordingRuntime.__init__

    def begin(self, folder):
        made(self, folder)
        self.rank_info = replace(self.rank_info, memory_slots=paths)

    RecordingRuntime.__init__ = begin
    try:
        return make_saving(folder, build_state(), **changes)[0]
    finally:
        RecordingRuntime.__init__ = made


def _begun_with(me, folder, ages_s):
    del me
    found, paths = files()
    if ages_s is None:
        slots = slots_on(found)
        slots.make_room([8])
        slots.seal({"model": {}}, facts_of(3))
    now_s = time.time()
    for one, age_s in zip(found, ages_s or (), strict=False):
        os.utime(one, (now_s - age_s, now_s - age_s))
    return saving_on(folder, paths).vote(is_asked=False).copy


@pytest.mark.parametrize(
    ("ages_s", "is_due"), [((1, 1), False), ((9, 8), True), ((9, 1), True), (None, False)]
)
def test_ranks_that_die_one_soon_after_the_other_put_no_copy_off(tmp_path, ages_s, is_due):
    """Who takes over counts from the newest copy, or from where there was none, and not from its own start."""
    assert run_ranks(_begun_with, 1, tmp_path, ages_s) == [is_due]


def _asks(me, folder, every, has_memory):
    del me
    _, paths = files()
    saving = saving_on(folder, paths if has_memory else (), memory_every=every)
    found = [saving.vote(is_asked=False).copy]
    saving.policy._copies.began(now_s=time.monotonic() - pacing.FIRST_COPY_S - 1)
    for step in (6, 9):
        saving._state.committed_step = step
        found.append(saving.vote(is_asked=False).copy)
    return found


@pytest.mark.parametrize(
    ("every", "has_memory", "asks"),
    [
        ("auto", False, [False, False, False]),
        (5, True, [False, False, True]),
        ("auto", True, [False, True, True]),
    ],
)
def test_without_memory_or_by_steps_no_copy_is_due_by_time(tmp_path, every, has_memory, asks):
    """Control: a plain script has no supervisor; with a number of steps the clock says nothing."""
    assert run_ranks(_asks, 1, tmp_path, every, has_memory) == [asks]


def _kept_beside(me, folder):
    """What rank 1 of a generation keeps, as the second rank of rank 0's machine and as the first of another one."""
    del me
    found, paths = files()
    saving = saving_on(folder, paths, memory_every=5)
    kept = []
    for is_first_here in (False, True):
        saving.lead(is_leader=False, is_first_here=is_first_here)
        for how, step in ((Keep.FILE, 10), (Keep.COPY, 11), (Keep.FILE, 12)):
            saving._state.committed_step = step
            saving.keep(how)
            saving.judge(Trust.WRONG if step == 12 else Trust.SOUND)
            saving.settle()
            kept.append(slots_on(found).newest_step)
    files_made = list(folder.rglob("step_*"))
    for step in (11, 10):  # all ranks stand there when the next generation forms
        saving._state.committed_step = step
        saving.lead(is_leader=False, is_first_here=True)
        kept.append(slots_on(found).newest_step)
    return kept, files_made


def test_a_copy_later_than_what_all_agreed_on_is_cleared(tmp_path):
    """The first rank of each other machine copies what rank 0 saves or copies, and makes no file of it."""
    ((kept, files_made),) = run_ranks(_kept_beside, 1, tmp_path)
    assert kept == [None, None, None, 10, 11, 11, 11, None]
    assert files_made == []
