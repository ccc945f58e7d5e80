"""What guards the numbers, in worlds of real ranks: replicas that differ, gradients that are broken."""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import IterableDataset

from ddp_runner import DDPTrainer
from ddp_runner.config import from_flat
from ddp_runner.core.save_policy import SavePolicy
from ddp_runner.data.loader import MicroBatch
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import FaultError, FaultKind
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.step.durable import Trust
from ddp_runner.kernel.step.session import StepResult
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.training.components.loss_monitor import Verdict
from ddp_runner.training.guard import NumericsGuard
from ddp_runner.training.local_runtime import LocalRuntime
from ddp_runner.training.saves import saving as training_saving
from ddp_runner.training.task import Datasets
from tests.kernel.group.joining import join
from tests.processes import hosted_store, poll, ranks, run_ranks
from tests.training.building import build_state, make_slot
from tests.training.test_trainer import (
    SAMPLES,
    STEPS,
    Samples,
    SmallTask,
    _train_in_a_world,
    make_runtime,
    settings,
)


class WrongTask(SmallTask):
    """On rank 1 a weight is changed in the training calls that ``at`` lists, or from ``since`` on."""

    def __init__(self, at="", since=1_000):
        super().__init__()
        self._at = {int(call) for call in str(at).split("+") if call}
        self._since = since
        self._own_calls = (
            itertools.count()
        )  # no state: it goes on over roll-backs; 0 is the rehearsal

    def loss(self, model, batch):
        call, wrong = next(self._own_calls) if model.training else 0, os.environ["RANK"] == "1"
        assert call < 10 * STEPS, "rolled back for ever"
        if model.training and wrong and (call in self._at or call >= self._since):
            with torch.no_grad():
                model[3].bias += 0.125
        return super().loss(model, batch)


def _end_in_a_world(me, port, config):
    try:
        return _train_in_a_world(me, port, config).steps
    except FaultError as error:
        return error.fault.kind, error.fault.cause, error.fault.may_retry


def _ends(folder, **task):
    """How both ranks end that compare and save every five steps, and the log of rank 0."""
    config = settings(
        folder, task=f"{__file__}:WrongTask", replica_check_steps=5, save_every_steps=5,
        **{f"task.{name}": value for name, value in task.items()},
    )  # fmt: skip
    with hosted_store() as port:
        ends = run_ranks(_end_in_a_world, 2, port, config)
    return ends, (folder / "logs" / "rank_0.log").read_text()


def test_replicas_that_always_differ_again_end_the_run(tmp_path):
    """A device that computes wrongly every time is not repaired by going back: two tries, then the end."""
    ends, log = _ends(tmp_path, since=7)
    for kind, cause, may_retry in ends:
        assert kind is FaultKind.REPLICA_DIVERGED
        assert "again after going back to step 5: suspect a device" in cause
        assert not may_retry
    assert log.count("no majority agrees: rolled back to step 5") == 2


@pytest.mark.parametrize(
    ("at", "back_to"),
    [("7+12", [5, 5]), ("7+12+24", [5, 5, 10])],
    ids=["twice", "and once more, after a newer checkpoint"],
)
def test_replicas_that_differ_now_and_then_do_not_end_it(tmp_path, at, back_to):
    """Control: what goes away is repaired, however often, as long as there are new checkpoints."""
    ends, log = _ends(tmp_path, at=at)
    assert ends == [STEPS, STEPS]
    assert [log.count(f"no majority agrees: rolled back to step {step}") for step in (5, 10)] == [
        back_to.count(5), back_to.count(10)
    ]  # fmt: skip


class BrokenTask(SmallTask):
    """In a process that is asked to, the fourth and fifth training calls of rank 1 give no number."""

    def __init__(self):
        super().__init__()
        self._own_calls = (
            itertools.count()
        )  # no state: it goes on over roll-backs; 0 is the rehearsal

    def loss(self, model, batch):
        call = next(self._own_calls) if model.training else 0
        broken = os.environ["RANK"] == "1" and "BROKEN" in os.environ
        loss = super().loss(model, batch)
        return loss * float("nan") if broken and call in (4, 5) else loss


def _break_in_a_world(me, port, config, environment=()):
    os.environ.update(environment, BROKEN="1")
    return _end_in_a_world(me, port, config)


@pytest.mark.parametrize(
    ("resumed", "aside", "back_to"),
    [
        ("{}/step_00000004.pt", [8, 12], 4),
        ("{}/elsewhere/step_00000008.pt", [4, 12], 8),
        ("{}/elsewhere", [4, 12], 8),
        ("auto", [], 12),
    ],
    ids=["an older one", "from elsewhere", "from a folder that goes on", "the newest"],
)
def test_a_roll_back_before_the_first_save_reads_no_other_branch(tmp_path, resumed, aside, back_to):
    """What lies beside the file that is resumed is set aside, once; control: beside the newest is nothing."""
    folder = tmp_path / "checkpoints"
    config = settings(
        tmp_path, task=f"{__file__}:LateTask", max_errors_per_epoch=1, keep_last=9,
        save_every_steps=4, save_interval=0, max_steps=12,
    )  # fmt: skip
    with hosted_store() as port:
        run_ranks(_train_in_a_world, 2, port, config)
    asked = folder.parent / resumed.format(folder)
    if "elsewhere" in resumed:
        (folder / "elsewhere").mkdir()
        for path in folder.glob("step_00000008.*"):
            path.rename(folder / "elsewhere" / path.name)
    goes_on = {"GOES_ON": str(asked)} if asked.is_dir() else {}
    config |= {"resume": "auto" if resumed == "auto" else str(asked), "max_steps": 20}
    with hosted_store() as port:
        ends = run_ranks(_break_in_a_world, 2, port, config, goes_on)
    moved = [path.stem for path in folder.glob("set_aside_*/step_*.pt")]
    assert sorted(int(stem.removeprefix("step_")) for stem in moved) == aside
    assert len(list(folder.glob("set_aside_*"))) == (1 if aside else 0)
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert log.count("does not resume from were moved to") == (1 if aside else 0)
    assert ends == [20, 20]
    assert f"rolled back to step {back_to}, learning rate x 0.5" in log


class LateTask(BrokenTask):
    """Resumed from a folder, it finds there what it has set aside, as the next save of another run."""

    def loss(self, model, batch):
        folder = Path(os.environ.get("GOES_ON", "."))
        if model.training and os.environ["RANK"] == "0" and "GOES_ON" in os.environ:
            for path in folder.parent.glob("set_aside_*/step_00000012.*"):
                shutil.copy(path, folder / path.name)
        return super().loss(model, batch)


class KeepsModelTask(BrokenTask):
    """Its loss uses the model that it keeps, not the one that it is given."""

    def build_model(self):
        self._model = super().build_model()
        return self._model

    def loss(self, model, batch):
        return super().loss(self._model, batch)


class ForgetfulTask(BrokenTask):
    """Where it is told to, rank 0 removes the file that the run began with, once that is read."""

    def loss(self, model, batch):
        if model.training and os.environ["RANK"] == "0" and "FORGETS" in os.environ:
            Path(os.environ["FORGETS"]).unlink(missing_ok=True)
        return super().loss(model, batch)


class OneModelTask(BrokenTask):
    """Makes its model once, for good."""

    def __init__(self):
        super().__init__()
        self._model = super().build_model()

    def build_model(self):
        return self._model


class StreamTask(BrokenTask):
    """From one stream of samples, which every rank reads in turn."""

    def build_datasets(self):
        return Datasets(train=_Stream())


class _Stream(IterableDataset):
    def __iter__(self):
        samples = Samples(SAMPLES)
        return (samples[index] for index in range(SAMPLES))


def _train_broken_in_a_world(me, port, config):
    os.environ["BROKEN"] = "1"
    return _train_in_a_world(me, port, config)


@pytest.mark.parametrize("task", ["BrokenTask", "StreamTask", "KeepsModelTask"])
@pytest.mark.parametrize("starts_from", ["", "elsewhere.pt"], ids=["fresh", "others' weights"])
def test_a_roll_back_before_the_first_save_starts_once_more(tmp_path, task, starts_from):
    """All that the first steps changed is gone: it ends as a run that began with the lower rate."""
    common = {
        "task": f"{__file__}:{task}", "max_errors_per_epoch": 1, "save_interval": 0,
        "learning_rate": 0.01, "max_steps": 9,
    }  # fmt: skip
    if starts_from:
        common["init_from"] = str(tmp_path / starts_from)
        torch.manual_seed(3)
        torch.save(SmallTask().build_model().state_dict(), common["init_from"])
    with hosted_store() as port:
        fault_free = run_ranks(
            _train_in_a_world, 2, port, settings(tmp_path / "fault_free", **common)
        )
    common["learning_rate"] = 0.02
    with hosted_store() as port:
        ends = run_ranks(_train_broken_in_a_world, 2, port, settings(tmp_path, **common))
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert log.count("rolled back to step 0, learning rate x 0.5") == 1
    assert {end.weights_sha256 for end in ends} == {fault_free[0].weights_sha256}
    assert [end.samples for end in ends] == [fault_free[0].samples] * 2


def test_a_task_that_has_but_one_model_cannot_start_once_more(tmp_path):
    """Its weights of step 0 are gone, and a later step is not called that one."""
    config = settings(
        tmp_path, task=f"{__file__}:OneModelTask", max_errors_per_epoch=1, save_interval=0
    )
    with hosted_store() as port:
        ends = run_ranks(_break_in_a_world, 2, port, config)
    assert ends[0][0] is FaultKind.CHECKPOINT_BAD
    assert "gives the model that was trained instead of a new one" in ends[0][1]


@pytest.mark.parametrize(
    ("option", "kind"),
    [("init_from", FaultKind.CHECKPOINT_BAD), ("resume", FaultKind.NON_FINITE)],
)
def test_what_the_run_began_with_may_be_gone(tmp_path, option, kind):
    """That ends it for a reason of the run's, as no command line is wrong."""
    task = f"{__file__}:ForgetfulTask"
    first = settings(tmp_path / "first", task=task, max_steps=4)
    with hosted_store() as port:
        (report, _) = run_ranks(_train_in_a_world, 2, port, first)
    config = settings(
        tmp_path, task=task, max_errors_per_epoch=1, save_interval=0, **{option: report.checkpoint}
    )
    with hosted_store() as port:
        ends = run_ranks(_break_in_a_world, 2, port, config, {"FORGETS": report.checkpoint})
    assert ends[0][0] is kind
    assert "the start weights of the run are gone" in ends[0][1] or option == "resume"


def test_replicas_that_differ_before_the_first_save_start_once_more(tmp_path):
    """Nothing else is there to go back to."""
    config = settings(
        tmp_path, task=f"{__file__}:WrongTask", replica_check_steps=5, save_interval=0,
        **{"task.at": 3},
    )  # fmt: skip
    with hosted_store() as port:
        ends = run_ranks(_end_in_a_world, 2, port, config)
    assert ends == [STEPS, STEPS]
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert log.count("no majority agrees: rolled back to step 0") == 1


class WrongModelTask(WrongTask):
    """Makes its model once, for good."""

    def __init__(self, at):
        super().__init__(at)
        self._model = super().build_model()

    def build_model(self):
        return self._model


def test_replicas_that_differ_with_no_way_back_are_named(tmp_path):
    """The run ends because they differ, not for want of a checkpoint: none of their states is known to be right."""
    config = settings(
        tmp_path, task=f"{__file__}:WrongModelTask", replica_check_steps=5, save_interval=0,
        **{"task.at": 3},
    )  # fmt: skip
    with hosted_store() as port:
        ends = run_ranks(_end_in_a_world, 2, port, config)
    kind, cause, may_retry = ends[0]
    assert (kind, may_retry) == (FaultKind.REPLICA_DIVERGED, False)
    assert cause.startswith("the replicas differ, no majority agrees, and ")
    assert "gives the model that was trained instead of a new one" in cause


class _Asking(LocalRuntime):
    """Asks once for what the test says, when so many steps are committed; a stop is asked for ever."""

    request, at_step = "", -1

    def save_asked(self):
        if self.request != "save" or self.slot.get(Cell.COMMITTED_STEP) != self.at_step:
            return False
        self.request = ""
        return True

    def stop_asked(self):
        reached = self.request == "stop" and self.slot.get(Cell.COMMITTED_STEP) >= self.at_step
        self.at_step = 0 if reached else self.at_step
        return StopReason.PREEMPTED if reached else None


def _ask_in_a_world(me, port, config, *asking):
    training_saving.PATIENCE_S = 30.0  # a slow disk puts no save off: each is of its own step
    os.environ.update(RANK=str(me.rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    runtime = make_runtime(config, me.rank, me.world_size, kind=_Asking)
    rank, request, at_step = asking
    if me.rank == rank:
        runtime.request, runtime.at_step = request, at_step
    return DDPTrainer(config=config, runtime=runtime).train().steps


@pytest.mark.parametrize(
    ("asking", "asked", "at_step", "saved"),
    [
        (1, "save", 10, [5, 6, 10, STEPS]),
        (0, "save", 7, [5, 6, 10, STEPS]),
        (1, "stop", 10, [5, 6]),
    ],
    ids=["in the step given up", "begun before", "with the end"],
)
def test_a_checkpoint_asked_for_is_made_after_a_roll_back_as_well(
    tmp_path, asking, asked, at_step, saved
):
    """Asked for in the step that is given up, or begun of the state that is: of the step after 5."""
    config = settings(
        tmp_path, task=f"{__file__}:WrongTask", replica_check_steps=5, save_every_steps=5,
        keep_last=9, **{"task.at": 7},
    )  # fmt: skip
    with hosted_store() as port:
        ends = run_ranks(_ask_in_a_world, 2, port, config, asking, asked, at_step)
    assert ends == [saved[-1]] * 2
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert log.count("no majority agrees: rolled back to step 5") == 1
    files = sorted((tmp_path / "checkpoints").glob("step_*.pt"))
    assert [int(path.stem.removeprefix("step_")) for path in files] == saved


def _remember_in_a_world(me, port, config, wanted_step):
    real = SavePolicy.__init__

    def remembers(self, settings, **rest):
        real(self, settings, **rest)
        self.wanted_step = wanted_step * me.rank

    SavePolicy.__init__ = remembers
    return _train_in_a_world(me, port, config).steps


@pytest.mark.parametrize(("wanted_step", "saved"), [(3, [0, STEPS]), (0, [STEPS])])
def test_a_checkpoint_that_died_with_rank_0_is_made_up_for(tmp_path, wanted_step, saved):
    """The others have heard that it was wanted, and the new one has none as new; control: none was."""
    config = settings(tmp_path, save_every_steps=0, save_interval=0, keep_last=9)
    with hosted_store() as port:
        assert run_ranks(_remember_in_a_world, 2, port, config, wanted_step) == [STEPS] * 2
    files = sorted((tmp_path / "checkpoints").glob("step_*.pt"))
    assert [int(path.stem.removeprefix("step_")) for path in files] == saved


def _broken_step():
    return StepResult(
        step=3, loss=1.0, grad_norm=float("nan"), learning_rate=0.1, applied=False, explosion="",
        overflowed=False, broken_ranks=(), waited_ns=0,
    )  # fmt: skip


def _trace(me, port, norms, waits, batches=((), ())):
    """Look for where a broken gradient came from; rank 1 computes until it is told to stop."""
    slot, lines = make_slot(), []
    logger = SimpleNamespace(warning=lines.append)
    rank_info = SimpleNamespace(rank=me.rank)
    runtime = SimpleNamespace(
        slot=slot, logger=logger, rank_info=rank_info, report=lambda message: None
    )
    parts = {
        "settings": from_flat({}),
        "state": build_state(),
        "durable": None,
        "runtime": runtime,
    }

    def recompute():
        slot.stamp(Phase.BACKWARD, 1)
        if waits and me.rank == 1:
            me.hear()
        return norms[me.rank]

    def watch():
        poll(lambda: slot.get(Cell.PHASE) == Phase.REDUCE, what="waiting for rank 1")
        me.say("waits")

    watcher = threading.Thread(target=watch)
    with join(me, port) as group:
        if waits and me.rank == 0:
            watcher.start()
        guard = NumericsGuard(group, **parts)
        assert not guard.skipped(
            _broken_step(), Verdict.CONTINUE, list(batches[me.rank]), recompute=recompute
        )
        if waits and me.rank == 0:
            watcher.join()
    return lines


def test_who_waits_for_another_s_gradient_is_not_late_itself():
    """It stands in the reduction, so that of the two only the one that computes is late."""
    with hosted_store() as port, ranks(_trace, 2, port, (1.0, 1.0), True) as world:
        assert world[0].hear() == "waits"
        world[1].say("go on")
        for process in world:
            assert "on no rank when computed once more" in process.result()[0]


GOOD = MicroBatch(indices=(4, 9), batch={"x": torch.ones(2, 3), "label": torch.tensor([1, 2])})
HAS_INF = MicroBatch(indices=(5, 8), batch=[torch.tensor([[1.0], [math.inf]]), "text"])
HAS_NAN = MicroBatch(indices=(3, 7), batch={"x": torch.tensor([[math.nan, 1], [math.inf, 1]])})
OF_ALL = MicroBatch(
    indices=(1, 2), batch=torch.tensor([0.5, math.nan, 1])
)  # no row is one sample's


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (((GOOD,), (HAS_INF, HAS_NAN)), "; the batch has NaN already, in samples 3: step skipped"),
        (((GOOD, HAS_INF), (HAS_INF,)), "; the batch has inf already, in samples 8, 8: step"),
        (((OF_ALL,), (GOOD,)), "; the batch has NaN already, in samples 1, 2: step skipped"),
        (((GOOD,), (GOOD,)), "on no rank when computed once more: step skipped"),
    ],
)
def test_a_batch_that_is_not_finite_itself_is_named_with_its_samples(batches, words):
    """Every rank says the same; control: good batches are not blamed."""
    with hosted_store() as port:
        for (line,) in run_ranks(_trace, 2, port, (1.0, 1.0), False, batches):
            assert words in line


class Verdicts:
    """Keeps what the guard says of the save under way, and for how long training has waited."""

    def __init__(self, wait):
        self.said, self.waited_s, self._wait = [], [], wait
        self._is_judged = False

    def copies_of(self, tensors):
        self._wait()
        return tensors

    def judge(self, trust, *, compare_s=None):
        if not self._is_judged:
            self.said.append(trust)
        self._is_judged = True
        if compare_s is not None:
            self.waited_s.append(compare_s)


def _late_hash(me, port, every, odd):
    """Rank 1's hash comes when it is told to; ``odd`` ranks have another weight than the others."""
    slot, state = make_slot(), build_state()
    saving = Verdicts(wait=me.hear if me.rank == 1 else lambda: None)
    parts = {
        "settings": from_flat({"replica_check_steps": every}), "state": state, "durable": saving,
        "runtime": SimpleNamespace(slot=slot, rank_info=SimpleNamespace(rank=me.rank)),
    }  # fmt: skip
    if me.rank in odd:
        with torch.no_grad():
            state.model[3].bias[0] += 1.0
    state.committed_step = state.boundary_done_step = 7

    def watch():
        awaited = Phase.COMPARE if me.rank == 1 else Phase.REDUCE
        poll(lambda: slot.get(Cell.PHASE) == awaited, what="the wait for the verdict")
        me.say("waits")

    with join(me, port) as group:
        guard = NumericsGuard(group, **parts)
        assert guard.may_commit(), "nothing is compared at most steps"
        guard.begin_comparison()
        slot.stamp(Phase.BACKWARD, 1)
        watcher = threading.Thread(target=watch)
        if every:
            watcher.start()
        try:
            outcome = guard.may_commit()
        except FaultError as error:
            outcome = error.fault.kind
        if every:
            watcher.join()
        assert guard.may_commit(), "one verdict a comparison"
        guard.close()
        group.exchange("end", "")  # nobody leaves while another one is still joining
    compared_s = slot.get(Cell.COMPARISON_NS) / 1e9
    return outcome, saving.said, saving.waited_s, compared_s, state.boundary_done_step


def _verdicts(world_size, every=500, odd=()):
    with hosted_store() as port, ranks(_late_hash, world_size, port, every, odd) as world:
        if every:
            assert [process.hear() for process in world] == ["waits"] * world_size
            world[1].say("go on")
        return [process.result() for process in world]


def _written_while_hashed(me, port, odd):
    """Forward clamps a weight through ``.data`` after rank 0 has hashed it and before rank 1 has."""
    slot, state, logged = make_slot(), build_state(), []
    may_answer = threading.Event()
    is_late = me.rank == 1 and not odd
    saving = Verdicts(wait=may_answer.wait if is_late else lambda: None)
    logger = SimpleNamespace(info=lambda text, **_: logged.append(text))
    parts = {
        "settings": from_flat({"replica_check_steps": 500}), "state": state, "durable": saving,
        "runtime": SimpleNamespace(slot=slot, rank_info=SimpleNamespace(rank=me.rank), logger=logger),
    }  # fmt: skip
    if me.rank in odd:
        with torch.no_grad():
            state.model[3].weight[0] += 1.0
    state.committed_step = state.boundary_done_step = 7
    with join(me, port) as group:
        guard = NumericsGuard(group, **parts)
        guard.begin_comparison()
        if not is_late:
            guard._hashing._ended.wait()
        state.model[3].bias.data.clamp_(-1e-6, 1e-6)
        may_answer.set()
        try:
            outcome = guard.may_commit()
        except FaultError as error:
            outcome = error.fault.kind
        group.exchange("end", "")
    return outcome, saving.said, state.buffers.followed_names(), len(logged), state.is_in_doubt


def test_what_forward_first_writes_while_hashed_is_no_difference():
    """The ranks have it alike once it is written. It is followed; the save, perhaps torn, is put off."""
    with hosted_store() as port:
        first, second = run_ranks(_written_while_hashed, 2, port, ())
    said = [Trust.UNKNOWN]
    assert first == (True, said, ["3.bias"], 1, False)
    assert second == (True, said, ["3.bias"], 0, False)


def test_a_rank_that_differs_besides_is_found_all_the_same():
    """Control: what forward wrote hides nothing."""
    with hosted_store() as port:
        answers = run_ranks(_written_while_hashed, 3, port, (2,))
    assert answers[2][0] is FaultKind.REPLICA_DIVERGED
    assert [answer[0] for answer in answers[:2]] == [FaultKind.COLLECTIVE_FAILED] * 2


def test_who_waits_for_another_s_hash_is_not_late_itself():
    """Rank 1 alone stands in the comparison; what training has waited is counted, once."""
    for outcome, said, waited_s, compared_s, done_step in _verdicts(2):
        assert (outcome, said, done_step) == (True, [Trust.SOUND], 7)
        assert len(waited_s) == 1
        assert 0 < compared_s == pytest.approx(waited_s[0])


def test_of_ranks_that_differ_only_what_the_majority_has_is_saved():
    """No rank commits the step: its gradient is partly of the odd one; what is due at its boundary is done again.

    The odd one leaves its generation without a good verdict.
    """
    usual, odd, other = _verdicts(3, odd=(1,))
    assert odd[:2] == (FaultKind.REPLICA_DIVERGED, [Trust.UNKNOWN])
    for outcome, said, _, _, done_step in (usual, other):
        assert (outcome, said, done_step) == (FaultKind.COLLECTIVE_FAILED, [Trust.SOUND], 6)


def _unlike_rates(me, port, odd):
    """The state, and the learning rate, of the odd ranks is another one."""
    state = build_state()
    if me.rank in odd:
        with torch.no_grad():
            state.model[3].bias[0] += 1.0
        state.optimizer.param_groups[0]["lr"] = 0.125
    state.committed_step = 7
    info = SimpleNamespace(rank=me.rank, world_size=2)
    with join(me, port) as group:
        guard = NumericsGuard(
            group,
            settings=from_flat({"replica_check_steps": 5}),
            state=state,
            durable=Verdicts(wait=lambda: None),
            runtime=SimpleNamespace(slot=make_slot(), rank_info=info),
        )
        try:
            outcome = guard.compare_replicas()
        except FaultError as error:
            outcome = error.fault.cause
        group.exchange("end", "")
    return outcome


@pytest.mark.parametrize(("odd", "world_size"), [((1,), 2), ((2,), 3)], ids=["two", "three"])
def test_a_learning_rate_that_differs_by_rank_is_named(odd, world_size):
    """Going back would not help: the program gives it again."""
    with hosted_store() as port:
        cause = run_ranks(_unlike_rates, world_size, port, odd)[odd[0]]
    named = rf"(;|and) lr of the optimizer's group 0 is .* 0.125 on rank {odd[0]}: set it "
    assert re.search(named, cause)


class _Reading:
    """A group's store that says so before each look at another rank's word."""

    def __init__(self, store, before):
        self.set = store.set
        self._store, self._before = store, before

    def get(self, key):
        self._before(key)
        return self._store.get(key)

    def multi_get(self, keys):
        for key in keys:
            self._before(key)
        return self._store.multi_get(keys)


def _held_up(me, port):
    """Rank 1 differs, and is held up when all others can see that and it cannot yet."""
    state, released_ns = build_state(), []

    def before(key):
        if me.rank == 1 and key == "tensors/7/1/0":
            me.say("held up")
            me.hear()
            released_ns.append(time.monotonic_ns())
        if me.rank != 1 and key.startswith("odd"):
            me.say("waits")

    parts = {
        "settings": from_flat({}), "state": state, "durable": Verdicts(wait=lambda: None),
        "runtime": SimpleNamespace(slot=make_slot(), rank_info=SimpleNamespace(rank=me.rank)),
    }  # fmt: skip
    if me.rank == 1:
        with torch.no_grad():
            state.model[3].bias[0] += 1.0
    state.committed_step = state.boundary_done_step = 7
    with join(me, port) as group:
        group._store = _Reading(group._store, before)
        guard = NumericsGuard(group, **parts)
        guard.begin_comparison()
        with pytest.raises(FaultError) as caught:
            guard.may_commit()
        if me.rank != 1:
            me.say("leaves")
        group.exchange("end", "")
    return caught.value.fault.at_ns, released_ns


def test_the_majority_leaves_when_the_odd_one_knows():
    """The first fault makes all leave: an odd rank that was held up would stay with its state."""
    with hosted_store() as port, ranks(_held_up, 3, port) as world:
        assert world[1].hear() == "held up"
        assert [world[rank].hear() for rank in (0, 2)] == ["waits", "waits"]
        world[1].say("go on")
        assert [world[rank].hear() for rank in (0, 2)] == ["leaves", "leaves"]
        (zero_ns, _), (_, (released_ns,)), (two_ns, _) = (process.result() for process in world)
    assert released_ns < min(zero_ns, two_ns)


def test_where_nothing_is_compared_a_save_is_as_good_as_proven():
    """At once: nobody hashes, nobody waits."""
    for outcome, said, waited_s, compared_s, _ in _verdicts(2, every=0):
        assert (outcome, said, waited_s, compared_s) == (True, [Trust.SOUND], [], 0)


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        ((1.0, float("nan")), "gradient norm is nan, first on rank 1: step"),
        ((1.0, None), "gradient norm is nan: step"),
    ],
    ids=["one is broken", "one does not know"],
)
def test_a_broken_gradient_is_traced_where_all_can_compute_theirs(norms, words):
    """Where one rank cannot compute it again nobody is blamed."""
    with hosted_store() as port:
        for (line,) in run_ranks(_trace, 2, port, norms, False):
            assert words in line
