"""Saves beside training: of exactly one step, one at a time, and never at training's expense."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from ddp_runner.checkpoint.snapshot import Snapshot
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.config import from_flat
from ddp_runner.core.step_schedule import RunLength
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.kernel.step.durable import Keep, Trust
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.kernel.step.session import Votes
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import CheckpointSaved
from ddp_runner.kernel.wire.messages import NotSaved
from ddp_runner.training.local_runtime import LocalRuntime
from ddp_runner.training.saves import saving as training_saving
from ddp_runner.training.saves.save_room import SaveRoom
from ddp_runner.training.saves.saving import Saving
from ddp_runner.training.state import Progress
from ddp_runner.training.workload import Workload
from tests.checkpoint.states import facts_of
from tests.kernel.group.joining import join
from tests.processes import hosted_store, poll, run_ranks

from .building import CPU, as_plain, bits_of, build_replica, build_state, build_stepper
from .building import micro_batches as batches

GIVE_UP_S = 30.0


class Room:
    """What saving asks of the memory manager."""

    def __init__(self, room_bytes=2**40, *, host_is_short=False):
        self._room_bytes = room_bytes
        self.host_is_short = host_is_short

    def room_bytes(self):
        return self._room_bytes


class RecordingRuntime(LocalRuntime):
    """Keeps the messages."""

    def __init__(self, folder):
        rank_info = RankInfo(
            rank=0, local_rank=0, world_size=1, local_world_size=1, device="cpu", loads=True
        )
        super().__init__(rank_info=rank_info, log_dir=folder / "logs", debug=False)
        self.saved_steps = []
        self.waited_s = {}
        self.not_saved = []
        self._log = folder / "logs" / "rank_0.log"

    def report(self, message):
        super().report(message)
        if isinstance(message, CheckpointSaved):
            self.saved_steps.append(message.step)
            self.waited_s[message.step] = message.blocked_s
        elif isinstance(message, NotSaved):
            self.not_saved.append(message)

    def log(self):
        return self._log.read_text()


def make_saving(folder, state, *, room_bytes=2**40, **settings):
    """A rank's saving around ``state``; also its runtime and store."""
    store = CheckpointStore(folder / "checkpoints", keep_last=9)
    runtime = RecordingRuntime(folder)
    workload = Workload(
        order=None, global_batch=4, device=CPU, backend="gloo",
        length=RunLength(steps_per_epoch=10, total_steps=20),
        resume_key={}, recipe={}, settings_digest="", parameters=0,
    )  # fmt: skip
    saving = Saving(
        settings=from_flat({"log_dir": str(folder / "logs"), "save_every_steps": 0, **settings}), workload=workload, state=state,
        room=SaveRoom(store, Room(room_bytes), runtime), runtime=runtime, progress=Progress(),
    )  # fmt: skip
    return saving, runtime, store


class Gate:
    """Holds a thread until it is opened; a closed one is a failure, never a hang."""

    def __init__(self):
        self._event = threading.Event()
        self.open = self._event.set

    def __call__(self):
        assert self._event.wait(GIVE_UP_S), "nobody opened the gate"


def hold(owner, name, gate):
    """Have calls of a method wait at the gate first."""
    real = getattr(owner, name)

    def held(self, *arguments, **options):
        gate()
        return real(self, *arguments, **options)

    setattr(owner, name, held)


def due(saving):
    """A save comes due of a state that is known to be sound."""
    saving.keep(Keep.FILE)
    saving.judge(Trust.SOUND)


def wants_file(saving):
    """Whether the rank that leads votes for a save."""
    return saving.vote(is_asked=False).file


def boundary(saving):
    """What a session does between two steps, were there no ranks to compare."""
    if wants_file(saving):
        due(saving)


def _loaded(store):
    state = dict(store.load().state)
    del state["versions"]
    return as_plain(state)


def _step(stepper, state):
    stepper.run(batches(state.committed_step, 0), votes=Votes())


def _save_beside_a_step(me, port, folder, waits):
    """A save whose copy begins only when the next step has run forward and backward."""
    gate, state = Gate(), build_state()
    saving, runtime, store = make_saving(folder, state)
    with join(me, port) as group:
        stepper = build_stepper(state, build_replica(state, group), rank=0, world_size=1)
        for _ in range(2):
            _step(stepper, state)
        begun_at = bits_of(state)
        store.save({**state.capture(), "versions": {}}, facts_of(1))
        at_once = _loaded(store)
        hold(Snapshot, "copy_steady", gate)
        due(saving)
        if waits:
            state.readers.insert(0, gate.open)
        else:
            state.readers.clear()
        _step(stepper, state)
        gate.open()
        saving.settle()
        written = _loaded(store)
        # Resumed from the file and trained on, the run is the one that was never saved.
        resumed = build_state()
        resumed.restore(store.load().state)
        other = build_stepper(resumed, build_replica(resumed, group), rank=0, world_size=1)
        _step(other, resumed)
        return begun_at, at_once, written, bits_of(state), bits_of(resumed), runtime.saved_steps


def _in_rank(function, *arguments):
    with hosted_store() as port:
        return run_ranks(function, 1, port, *arguments)[0]


def test_a_save_beside_the_next_step_holds_its_own_step(tmp_path):
    """Bit for bit what a save at once holds, though forward changed buffers; it resumes exactly."""
    begun_at, at_once, written, after, resumed, saved = _in_rank(
        _save_beside_a_step, tmp_path, True
    )
    assert written == begun_at == at_once
    assert saved == [2]
    assert after != begun_at
    assert resumed == after


def test_without_the_wait_before_the_optimizer_a_save_is_of_two_steps(tmp_path):
    """Control: what the wait protects is really in danger, and the test above would see it."""
    begun_at, _, written, after, _, _ = _in_rank(_save_beside_a_step, tmp_path, False)
    assert written != begun_at
    assert written["optimizer"]["state"] == after["optimizer"]["state"]
    assert written["counters"] == begun_at["counters"]


def _restore_during_a_copy(me, folder):
    del me
    gate, state = Gate(), build_state()
    saving, runtime, store = make_saving(folder, state)
    begun_at = bits_of(state)
    other = build_state()
    other.committed_step = 7
    hold(Snapshot, "copy_steady", gate)
    due(saving)
    threading.Timer(0.05, gate.open).start()
    for parameter in other.model.parameters():
        parameter.data.fill_(5.0)
    state.restore(other.capture())
    saving.settle()
    return begun_at == _loaded(store), bits_of(state) == bits_of(other), runtime.saved_steps


def test_a_state_that_is_received_waits_for_the_copy(tmp_path):
    """A rank that is brought up to date while its last save is copied harms neither."""
    assert run_ranks(_restore_during_a_copy, 1, tmp_path)[0] == (True, True, [0])


def _saves_that_take_long(me, folder):
    del me
    gate, state = Gate(), build_state()
    saving, runtime, _ = make_saving(folder, state)
    hold(CheckpointStore, "save", gate)
    waited_s, began_s = [], time.monotonic()
    for step in range(1, 5):
        state.committed_step = step
        boundary(saving)
        due(saving)
        waited_s.append(time.monotonic() - began_s)
    before = list(runtime.saved_steps)
    gate.open()

    def reported():
        boundary(saving)
        return runtime.saved_steps

    poll(reported, what="the first save")
    saving.settle()
    threads = [thread.name for thread in threading.enumerate() if "checkpoint" in thread.name]
    return before, runtime.saved_steps, waited_s, runtime.log(), threads


def test_a_save_due_during_another_is_made_after_it(tmp_path):
    """One at a time, one wait and one line; what is saved in the end is the newest state."""
    before, saved, waited_s, log, threads = run_ranks(_saves_that_take_long, 1, tmp_path)[0]
    assert before == []
    assert saved == [1, 4]
    assert waited_s[-1] < GIVE_UP_S / 2, "it waited for the write"
    assert log.count("still being written") == 1
    assert threads == []


def _failing_saves(me, folder, failures):
    del me
    state = build_state()
    saving, runtime, _ = make_saving(folder, state)
    real, tried = CheckpointStore.save, []

    def save(self, content, facts, **rest):
        tried.append(facts.step)
        if len(tried) > failures:
            return real(self, content, facts, **rest)
        cause = f"cannot write: {errno.errorcode[errno.ENOSPC]}"
        raise FaultError(
            Fault(kind=FaultKind.STORAGE_FAILED, rank=0, step=facts.step, cause=cause, at_ns=1)
        )

    CheckpointStore.save = save
    for step in range(1, 13):
        state.committed_step = step
        due(saving)
        saving.settle()
    return tried, runtime.saved_steps, runtime.log().count("training continues")


def test_after_a_failed_save_the_interval_doubles_until_one_succeeds(tmp_path):
    """One, then three are left out; a success brings the interval back."""
    tried, saved, warnings = run_ranks(_failing_saves, 1, tmp_path, 2)[0]
    assert tried == [1, 3, 7, 8, 9, 10, 11, 12]
    assert saved == tried[2:]
    assert warnings == 2


def _keeps(me, folder, fails):
    del me
    state = build_state()
    saving, runtime, store = make_saving(folder, state)
    real, tried = CheckpointStore.save, []

    def save(self, content, facts, **rest):
        tried.append(facts.step)
        if len(tried) in fails:
            raise OSError(errno.EIO, "an error of the disk")
        return real(self, content, facts, **rest)

    CheckpointStore.save = save
    state.committed_step = 1
    due(saving)
    saving.settle()
    state.committed_step = 2
    saving.keep(Keep.BEST)
    return tried, runtime.saved_steps, [entry.step for entry in store.catalog.entries()]


@pytest.mark.parametrize(
    ("fails", "tried", "saved"),
    [
        ((), [1, 2], [1, 2]),
        ((1,), [1, 2], [2]),
        ((2,), [1, 2, 2], [1, 2]),
        ((1, 2, 3), [1, 2, 2], []),
    ],
)
def test_what_must_be_kept_is_tried_twice_and_waits_for_no_pause(tmp_path, fails, tried, saved):
    """A failed save before, after which others are left out, is no reason; a disk that stays broken is."""
    answer = run_ranks(_keeps, 1, tmp_path, fails)[0]
    assert answer == (tried, saved, saved[::-1])


def _fail_one_save(me, folder, fenced):
    del me
    state = build_state()
    saving, runtime, _ = make_saving(folder, state)
    state.committed_step = 1

    def save(self, content, facts, **rest):
        runtime.slot.set(Cell.FENCED, int(fenced))
        raise OSError(errno.EPERM, "no more")

    CheckpointStore.save = save
    due(saving)
    saving.settle()
    return runtime.log().count("training continues")


@pytest.mark.parametrize(("fenced", "reported"), [(False, 1), (True, 0)])
def test_a_save_that_ends_with_its_rank_blames_no_disk(tmp_path, fenced, reported):
    """Whoever is being killed is kept from publishing, and says nothing of a disk that is sound."""
    assert run_ranks(_fail_one_save, 1, tmp_path, fenced) == [reported]


def _put_off_behind_one_that_fails(me, folder, asked):
    """Four saves come due after one that fails while the first of them waits for it."""
    del me
    gate, state = Gate(), build_state()
    saving, runtime, _ = make_saving(folder, state)
    real, tried = CheckpointStore.save, []

    def save(self, content, facts, **rest):
        tried.append(facts.step)
        if len(tried) > 1:
            return real(self, content, facts, **rest)
        gate()
        raise OSError(errno.ENOSPC, "no space")

    CheckpointStore.save = save
    for step in (1, 2):
        state.committed_step = step
        due(saving)
    if asked:
        saving.policy.ask()
    gate.open()
    poll(
        lambda: wants_file(saving) or "training continues" in runtime.log(),
        what="the end of the first",
    )
    for step in (3, 4, 5):
        state.committed_step = step
        boundary(saving)  # what was put off
        due(saving)
        saving.settle()
    return tried, runtime.saved_steps


@pytest.mark.parametrize(("asked", "saved"), [(False, [4, 5]), (True, [3, 4, 5])])
def test_a_save_that_waited_for_one_that_fails_belongs_to_the_pause(tmp_path, asked, saved):
    """What was put off is left out with the next ones, unless a person asked for it."""
    tried, written = run_ranks(_put_off_behind_one_that_fails, 1, tmp_path, asked)[0]
    assert sorted({*tried}) == [1, *saved]
    assert sorted({*written}) == saved


def _fails_within_the_wait(me, folder):
    """The save before ends, badly, while the next one waits its moment for it."""
    del me
    training_saving.PATIENCE_S = GIVE_UP_S
    state = build_state()
    saving, runtime, _ = make_saving(folder, state)
    tried = []

    def save(self, content, facts, **rest):
        tried.append(facts.step)
        raise OSError(errno.ENOSPC, "no space")

    CheckpointStore.save = save
    for step in (1, 2, 3):
        state.committed_step = step
        due(saving)
    saving.settle()
    return tried, runtime.log().count("training continues")


def test_the_pause_begins_with_the_save_that_learns_of_the_failure(tmp_path):
    """It is one of those that are left out."""
    assert run_ranks(_fails_within_the_wait, 1, tmp_path) == [([1, 3], 2)]


def _saves_without_means(me, folder, error):
    """The write fails for want of something of the machine's, not because the disk says so."""
    del me
    state = build_state()
    saving, runtime, _ = make_saving(folder, state)
    real, tried = CheckpointStore.save, []

    def save(self, content, facts, **rest):
        tried.append(facts.step)
        if len(tried) > 1:
            return real(self, content, facts, **rest)
        raise error

    CheckpointStore.save = save
    for step in (1, 2, 3):
        state.committed_step = step
        due(saving)
        saving.settle()
    return tried, runtime.saved_steps, runtime.log()


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't start new thread"), OSError(24, "no descriptor")]
)
def test_a_save_without_memory_or_thread_costs_a_warning(tmp_path, error):
    """It is no error of training; the next one but one is tried again."""
    tried, saved, log = run_ranks(_saves_without_means, 1, tmp_path, error)[0]
    assert tried == [1, 3]
    assert saved == [3]
    assert log.count(f"could not be written ({type(error).__name__}") == 1
    assert "training continues; skipping the next checkpoint" in log


def _save_with_a_bug(me, folder):
    del me
    state = build_state()
    saving, _, _ = make_saving(folder, state)

    def save(self, content, facts, **rest):
        raise ValueError("a bug")

    CheckpointStore.save = save
    due(saving)
    try:
        saving.settle()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_a_bug_in_a_save_is_no_warning(tmp_path):
    """Control: what is nobody's lack of means leaves the saving thread as it is."""
    assert run_ranks(_save_with_a_bug, 1, tmp_path) == ["a bug"]


def test_saves_that_succeed_leave_none_out(tmp_path):
    """Control."""
    tried, saved, warnings = run_ranks(_failing_saves, 1, tmp_path, 0)[0]
    assert tried == saved == list(range(1, 13))
    assert warnings == 0


def _saves_without_room(me, folder):
    """The state is about to change while its save waits at the gate."""
    del me
    gate, state = Gate(), build_state()
    saving, runtime, store = make_saving(folder, state, room_bytes=1_000_000)
    hold(CheckpointStore, "save", gate)
    for step in (1, 2):
        state.committed_step = step
        due(saving)
        expected = bits_of(state)
        threading.Timer(0.05, gate.open).start()
        state.before_change()
        with torch.no_grad():
            next(state.model.parameters()).add_(1.0)
        saving.settle()
        assert _loaded(store) == expected, "it was written after the state had changed"
    return runtime.log(), runtime.saved_steps, runtime.slot.get(Cell.CHECKPOINT_NS)


def test_a_save_without_room_is_written_before_the_state_changes(tmp_path):
    """The copy never costs the run its memory: training waits for the write instead; it is said once."""
    log, saved, waited_ns = run_ranks(_saves_without_room, 1, tmp_path)[0]
    assert log.count("training waits for each checkpoint") == 1
    assert saved == [1, 2]
    assert waited_ns > 0


def _saves_of_doubtful_states(me, folder, room_bytes):
    """At steps 1 and 3 the verdict is good, at 2 bad, and before 4 the generation ends without one."""
    del me
    state, seen = build_state(), []
    saving, runtime, store = make_saving(folder, state, room_bytes=room_bytes, save_every_steps=1)

    def drop():
        assert saving._saver.undecided
        saving.judge(Trust.UNKNOWN)

    def prove():
        saving.judge(Trust.SOUND)

    def look():
        seen.append(
            (sorted(path.name for path in store.directory.glob("*.pt")), wants_file(saving))
        )

    for step, decide in enumerate((prove, drop, prove, drop), start=1):
        state.committed_step = step
        saving.keep(Keep.FILE)
        saving.copies_of({})  # returns once a copy is made: without the verdict it would be written
        look()
        decide()
        state.before_change()
        saving.settle()
        look()
    makes_up = saving.lead(is_leader=True, is_first_here=True).is_due
    boundary(saving)
    saving.settle()
    return seen, makes_up, runtime.saved_steps, runtime.log()


@pytest.mark.parametrize("room_bytes", [2**40, 1_000_000], ids=["a copy", "no room for one"])
def test_nothing_is_written_before_the_state_is_known_to_be_sound(tmp_path, room_bytes):
    """Nor afterwards where it is not, or nobody knows: a later save is asked for and makes up for it."""
    seen, makes_up, saved, log = run_ranks(_saves_of_doubtful_states, 1, tmp_path, room_bytes)[0]
    first, third = "step_00000001.pt", "step_00000003.pt"
    assert seen == [
        ([], False), ([first], False),
        ([first], False), ([first], True),
        ([first], False), ([first, third], False),
        ([first, third], False), ([first, third], True),
    ]  # fmt: skip
    assert makes_up
    assert saved == [1, 3, 4]
    assert "could not" not in log


def _saves_what_was_dropped(me, folder):
    """The verdict is bad; the state of that very step is known to be sound a little later."""
    del me
    state = build_state()
    saving, runtime, _ = make_saving(folder, state, save_every_steps=1)
    state.committed_step = 1
    saving.keep(Keep.FILE)
    thread = saving._saver._save._thread
    saving.judge(Trust.UNKNOWN)
    thread.join()
    due(saving)
    saving.settle()
    return runtime.saved_steps


def test_a_dropped_save_is_made_up_for_at_the_same_step(tmp_path):
    """Its thread has ended by then; nobody waits a step for that to be noticed."""
    assert run_ranks(_saves_what_was_dropped, 1, tmp_path)[0] == [1]


def _saves_by_time(me, folder, every, clock_s):
    """A boundary a second, by a clock of our own, without any save that a step number asks for."""
    del me
    state = build_state()
    now_s = [0.0]
    training_saving.time = SimpleNamespace(
        monotonic=lambda: now_s[0], monotonic_ns=time.monotonic_ns, time=time.time
    )
    saving, runtime, _ = make_saving(folder, state, save_every_steps=every)
    runtime.slot.set(Cell.STEP_NS, 10**9)
    for step in range(1, clock_s):
        state.committed_step, now_s[0] = step, float(step)
        boundary(saving)
        saving.settle()
    return runtime.saved_steps, runtime.log()


def test_by_itself_the_saving_rank_chooses_its_interval(tmp_path):
    """After a minute the first, then at the pace that its measured cost allows, said in the log.

    The cost is measured, so a busy machine saves less often than each 10 s. It is said again once it has halved.
    """
    saved, log = run_ranks(_saves_by_time, 1, tmp_path, "auto", 800)[0]
    assert saved[0] == 60
    assert len(saved) >= 3
    least_s = min(int(found) for found in re.findall(r"saving every (\d+) s \(auto\)", log))
    assert least_s >= 10
    assert all(later - earlier >= max(10, least_s // 2) for earlier, later in pairwise(saved))


def test_an_interval_of_zero_saves_nothing_by_time(tmp_path):
    """Control."""
    saved, log = run_ranks(_saves_by_time, 1, tmp_path, 0, 400)[0]
    assert saved == []
    assert "saving every" not in log


def _takes_over(me, folder, generation, age_s):
    """A new rank 0 of a run whose newest checkpoint is ``age_s`` old; None: it has none, "gone": its file went."""
    del me
    state = build_state()
    saving, runtime, store = make_saving(folder, state, save_every_steps="auto", save_interval=0)
    if age_s is not None:
        path = store.save({**state.capture()}, facts_of(3)).path
        if age_s == "gone":
            path.unlink()
            assert [entry.step for entry in store.catalog.entries()] == [3]
        else:
            os.utime(path, (time.time() - age_s,) * 2)
    state.committed_step = 5
    runtime.slot.set(Cell.GENERATION, generation)
    assert not saving.lead(is_leader=True, is_first_here=True).is_due
    boundary(saving)
    saving.settle()
    return runtime.saved_steps


@pytest.mark.parametrize(
    ("generation", "age_s", "saved"),
    [
        *((2, 100.0, [5]), (2, None, [5]), (2, "gone", [5]), (2, 1.0, [])),
        *((1, 100.0, []), (1, None, [])),
    ],
    ids=["old file", "no file", "manifest alone", "new file", "a resumed run", "a new run"],
)
def test_ranks_0_that_die_one_after_the_other_put_no_save_off(tmp_path, generation, age_s, saved):
    """The interval counts from the newest file, whoever wrote it; a new launch begins it again."""
    assert run_ranks(_takes_over, 1, tmp_path, generation, age_s)[0] == saved


def _saves_after_comparisons(me, folder):
    """Each save's own comparison, one while it is written, a save without any, and the last one."""
    del me
    state = build_state()
    saving, runtime, _ = make_saving(folder, state)
    state.committed_step = 3
    saving.keep(Keep.FILE)
    saving.judge(Trust.SOUND, compare_s=1000.0)
    saving.judge(Trust.SOUND, compare_s=7000.0)
    saving.settle()
    state.committed_step = 4
    due(saving)
    saving.settle()
    state.committed_step = 5
    assert saving.end(StopReason.PREEMPTED, compare_s=2000.0) is None
    lines = [line for line in runtime.log().splitlines() if "saved " in line]
    return lines, runtime.waited_s


def test_what_training_waited_for_a_save_has_the_comparison_in_it(tmp_path):
    """In the line, and in what is reported to the supervisor: that of this save, and of no other."""
    lines, waited_s = run_ranks(_saves_after_comparisons, 1, tmp_path)[0]
    for line, step, compared_s in zip(lines, (3, 4, 5), (1000.0, 0.0, 2000.0), strict=True):
        assert compared_s < waited_s[step] < compared_s + 1000.0
        assert line.endswith(f"(blocked training for {waited_s[step]:.2f} s)")


def _cannot_save_alone(_me, _port, folder, is_of_disk):
    state = build_state()
    state.committed_step = 7
    saving, runtime, _ = make_saving(folder, state, checkpoint_timeout_s=0.1)

    def refuse():
        if is_of_disk:
            raise FaultError(
                Fault(kind=FaultKind.STORAGE_FAILED, rank=-1, step=7, cause="a full disk")
            )
        raise RuntimeError("an error of its device")

    state.capture = refuse
    assert saving.end(None) is not None
    return [(one.step, one.is_its_own) for one in runtime.not_saved]


@pytest.mark.parametrize("is_of_disk", [False, True])
def test_another_rank_may_save_before_the_end_what_this_one_cannot(tmp_path, is_of_disk):
    """Only what the disk has refused would be refused to everybody."""
    assert _in_rank(_cannot_save_alone, tmp_path, is_of_disk) == [(7, not is_of_disk)]
