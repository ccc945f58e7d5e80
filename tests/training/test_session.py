"""What a generation does between its steps: logs, evaluates, saves, makes up for what was cut."""

from __future__ import annotations

import errno
import itertools
import math
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from ddp_runner import DDPTrainer
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.config import from_flat
from ddp_runner.core import checkpoint_interval as pacing
from ddp_runner.core.checkpoint_interval import CheckpointInterval
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import (
    CheckpointSaved,
    FaultTolerated,
    RankFormed,
    RepairedInPlace,
    TuningChanged,
)
from ddp_runner.kernel.wire.messages import Built, Finished, Metrics
from ddp_runner.training.local_runtime import LocalRuntime
from ddp_runner.training.saves import saving as training_saving
from ddp_runner.training.task import Datasets
from tests.processes import run_ranks
from tests.temporaries import of_a_dead_writer

SAMPLES, BATCH = 24, 4  # six steps an epoch
STEPS = 12


class Samples(Dataset):
    """Constant inputs, so that nothing depends on the order."""

    deterministic = True

    def __init__(self, size):
        self._size = size

    def __len__(self):
        return self._size

    def __getitem__(self, index):
        return torch.full((3,), float(index % 5)), torch.tensor([1.0])


class Task:
    """``nan_at`` lists the training steps, from 0, whose loss is not a number, the first time each.

    It counts by what is no state: a step that is done again after a roll-back is a later call.
    """

    def __init__(self, nan_at="", validation=8):
        self._nan_at = {int(step) for step in str(nan_at).split("+") if step}
        self._validation = validation
        self._calls = itertools.count(-1)  # the first step is computed twice

    def build_model(self):
        return nn.Linear(3, 1)

    def build_datasets(self):
        validation = Samples(self._validation) if self._validation else None
        return Datasets(train=Samples(SAMPLES), validation=validation, fingerprint="constant")

    def loss(self, model, batch):
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        if not model.training:
            return loss
        return loss * (math.nan if next(self._calls) in self._nan_at else 1.0)


def settings(folder, **changes):
    """Short epochs, a line and a checkpoint by steps."""
    return {
        "task": f"{__file__}:Task",
        "log_dir": str(folder / "logs"),
        "checkpoint_dir": str(folder / "checkpoints"),
        "device": "cpu",
        "batch_size": BATCH,
        "epochs": 2,
        "num_workers": 0,
        "use_amp": False,
        "log_interval": 5,
        **changes,
    }


class RecordingRuntime(LocalRuntime):
    """Keeps what the trainer reports, with the step and phase on the board at that moment."""

    def __init__(self, config, *, stop_in_evaluation=-1, save_at=()):
        made = from_flat(config)
        rank_info = RankInfo(
            rank=0, local_rank=0, world_size=1, local_world_size=1, device="cpu", loads=True
        )
        super().__init__(rank_info=rank_info, log_dir=Path(made.run.log_dir), debug=False)
        self.reported = []
        self._stop_in_evaluation = stop_in_evaluation
        self._save_at = set(save_at)

    def report(self, message):
        reading = self.slot.read()
        self.reported.append((message, reading.committed_step, reading.phase))

    def stop_asked(self):
        reading = self.slot.read()
        stop = (
            reading.phase is Phase.EVALUATE and reading.committed_step == self._stop_in_evaluation
        )
        return StopReason.PREEMPTED if stop else None

    def save_asked(self):
        step = self.slot.get(Cell.COMMITTED_STEP)
        is_asked = step in self._save_at
        self._save_at.discard(step)
        return is_asked

    def of(self, kind):
        """The messages of one kind."""
        return [message for message, _, _ in self.reported if isinstance(message, kind)]


def _train(me, config, options, breaks_saving):
    training_saving.PATIENCE_S = 30.0  # a slow disk puts no save off: each is of its own step
    runtime = RecordingRuntime(config, **options)
    if breaks_saving:
        _break_saving(breaks_saving)
    try:
        # The class of the model is known to that process only.
        report = replace(DDPTrainer(config=config, runtime=runtime).train(), model=None)
    except FaultError as error:
        report = error.fault
    return report, runtime.reported, runtime.slot.read()


def _break_saving(steps):
    """Have the store fail as a full disk makes it fail, at these steps; the next save learns of it."""
    real = CheckpointStore.save

    def save(self, state, facts, **rest):
        if facts.step not in steps:
            return real(self, state, facts, **rest)
        raise FaultError(
            Fault(
                kind=FaultKind.STORAGE_FAILED,
                rank=0,
                step=facts.step,
                cause=f"cannot write: {errno.errorcode[errno.ENOSPC]}",
            )
        )

    CheckpointStore.save = save


def train(config, *, breaks_saving=(), **options):
    """A run in a process of its own: its report or fault, its messages, its last board."""
    return run_ranks(_train, 1, config, options, breaks_saving)[0]


def messages_of(messages, kind):
    return [message for message, _, _ in messages if isinstance(message, kind)]


def test_metrics_come_at_the_first_step_each_interval_and_the_end(tmp_path):
    """Each with loss, rate, norm and speed, all finite."""
    _, messages, _ = train(settings(tmp_path))
    lines = [message for message in messages_of(messages, Metrics) if "loss" in message.values]
    assert [line.step for line in lines] == [1, 5, 10, 12]
    for line in lines:
        assert {"loss", "learning_rate", "grad_norm", "samples_per_s", "step_s"} <= set(line.values)
        assert all(math.isfinite(value) for value in line.values.values())
        assert 0 <= line.values["data_wait_share"] <= 1


def test_evaluation_and_checkpoint_come_at_each_epoch_s_end(tmp_path):
    """In this order, once per epoch, the last one with the end of the run."""
    report, messages, _ = train(settings(tmp_path))
    evaluated = [m.step for m in messages_of(messages, Metrics) if "validation_loss" in m.values]
    assert evaluated == [6, 12]
    assert [saved.step for saved in messages_of(messages, CheckpointSaved)] == [6, 12]
    assert isinstance(next(m for m, *_ in messages if not isinstance(m, Built)), RankFormed)
    assert isinstance(messages[-1][0], Finished)
    assert report.figures["validation_loss"] > 0


@pytest.mark.parametrize("part", ["8", "4 of 8"])
def test_the_log_lines_of_evaluations_and_saves_have_their_step(tmp_path, part):
    """Where only a part of the samples is evaluated, the line says of how many."""
    train(settings(tmp_path, evaluate_batches=1 if " " in part else 0))
    log = (tmp_path / "logs" / "rank_0.log").read_text(encoding="utf-8")
    found = re.findall(r"evaluated at step (\d+): validation_loss \d\.\d{4}  \((.*) samples, ", log)
    assert found == [("6", part), ("12", part)]
    assert re.findall(r"saved \S*step_0*(\d+)\.pt \(blocked", log) == ["6", "12"]


def test_a_roll_back_keeps_what_was_learnt_since_the_checkpoint(tmp_path):
    """DDP and loader are made for it: learnt once, said once, and the rate alone is changed."""
    config = settings(
        tmp_path,
        **{"task.nan_at": "7+8", "ddp.find_unused_parameters": "auto", "relax_after_steps": 6},
        max_errors_per_epoch=1,
    )
    report, messages, _ = train(config)
    assert report.steps == STEPS
    assert [m.steps_lost for m in messages_of(messages, RepairedInPlace)] == [3], (
        "it was rolled back"
    )
    actions = [m.action for m in messages_of(messages, TuningChanged)]
    assert [action.split(" after")[0] for action in actions] == [
        "find_unused_parameters=False",
        "going back to an older state",
    ]


def test_checkpoints_by_steps_come_besides_those_by_epochs(tmp_path):
    """Where both are asked for, both hold; a step that both name is saved once."""
    both = {"save_every_steps": 4, "save_interval": 1}
    _, messages, _ = train(settings(tmp_path, keep_last=9, **both))
    assert [saved.step for saved in messages_of(messages, CheckpointSaved)] == [4, 6, 8, 12]


def test_a_checkpoint_that_was_asked_for_is_made_after_the_step(tmp_path):
    """Between the intervals, without stopping."""
    report, messages, _ = train(settings(tmp_path), save_at=[2])
    assert [saved.step for saved in messages_of(messages, CheckpointSaved)] == [3, 6, 12]
    assert report.steps == STEPS


@pytest.mark.parametrize(("save_at", "saved"), [([8], [9, 10, 11, 12]), ([], [12])])
def test_a_checkpoint_that_was_asked_for_ends_the_pause_after_failed_ones(tmp_path, save_at, saved):
    """Three failures leave out the rest of the run, unless a person wants to try again."""
    config = settings(tmp_path, save_every_steps=1, keep_last=9)
    _, messages, _ = train(config, breaks_saving=(1, 3, 7), save_at=save_at)
    assert [one.step for one in messages_of(messages, CheckpointSaved)] == saved


def test_a_checkpoint_asked_for_before_a_roll_back_is_made(tmp_path):
    """Asked for in the second bad step, after which the state is that of step 3 again."""
    config = settings(
        tmp_path, **{"task.nan_at": "8+9"}, max_errors_per_epoch=1, save_interval=0,
        save_every_steps=0, keep_last=9,
    )  # fmt: skip
    _, messages, _ = train(config, save_at=[2, 9])
    assert [m.steps_lost for m in messages_of(messages, RepairedInPlace)] == [7], (
        "it was rolled back"
    )
    assert [saved.step for saved in messages_of(messages, CheckpointSaved)] == [3, 4, STEPS]


def _paced_steps(me, config):
    del me
    seen, went_on = [], threading.Event()
    real, real_save = CheckpointInterval.stepped, CheckpointStore.save

    def stepped(self, step_s, *, beside_save):
        seen.append((step_s, beside_save))
        real(self, step_s, beside_save=beside_save)
        if len(seen) == 8:
            went_on.set()

    def save(self, state, facts, **rest):
        assert went_on.wait(30.0), "training waited for the write"
        return real_save(self, state, facts, **rest)

    CheckpointInterval.stepped, CheckpointStore.save = stepped, save
    DDPTrainer(config=config, runtime=RecordingRuntime(config)).train()
    return seen


def test_the_steps_beside_a_save_are_distinguished_from_the_others(tmp_path):
    """Each step once: those before a save, and those while its file is written."""
    seen = run_ranks(_paced_steps, 1, settings(tmp_path))[0]
    assert len(seen) == STEPS
    assert [beside_save for _, beside_save in seen[:8]] == [False] * 6 + [True] * 2
    assert all(0 < step_s < 60 for step_s, _ in seen)


def _train_by_time(me, config):
    del me
    # Due at once, and again until its cost is known: then, at the learnt pace, after the end.
    pacing.FIRST_INTERVAL_S, pacing.STEPS_MIN = 0.0, 0
    runtime = RecordingRuntime(config)
    DDPTrainer(config=config, runtime=runtime).train()
    return [saved.step for saved in runtime.of(CheckpointSaved)]


@pytest.mark.parametrize(("every", "first"), [("auto", 1), (0, STEPS)])
def test_a_save_whose_time_has_come_is_made_after_the_next_step(tmp_path, every, first):
    """Rank 0 asks for it before the step; where nothing is saved by time, nobody asks."""
    config = settings(tmp_path, save_interval=0, save_every_steps=every)
    saved = run_ranks(_train_by_time, 1, config)[0]
    assert (saved[0], saved[-1]) == (first, STEPS)


def test_without_validation_data_nothing_is_evaluated(tmp_path):
    """Control: no figure is invented."""
    report, messages, _ = train(settings(tmp_path, **{"task.validation": 0}))
    assert report.figures == {}
    assert not [m for m in messages_of(messages, Metrics) if "validation_loss" in m.values]


class Counting(nn.Linear):
    """Counts its forwards, in place and by assignment, in evaluations too."""

    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("in_place", torch.zeros(1))
        self.register_buffer("assigned", torch.zeros(1))

    def forward(self, inputs):
        self.in_place += 1
        self.assigned = self.assigned + 1
        return super().forward(inputs)


class CountingTask(Task):
    """Its model has a state that an evaluation changes."""

    def build_model(self):
        return Counting()


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_an_evaluation_leaves_no_trace_in_the_state(tmp_path, ema_decay):
    """What is saved after it is what the steps before it made, whatever eval mode changed."""
    config = settings(tmp_path, task=f"{__file__}:CountingTask", keep_last=9, ema_decay=ema_decay)
    report, messages, _ = train(config)
    assert "validation_loss" in report.figures
    for saved in messages_of(messages, CheckpointSaved):
        path = tmp_path / "checkpoints" / f"step_{saved.step:08d}.pt"
        model = torch.load(path, weights_only=True)["model"]
        assert (int(model["in_place"]), int(model["assigned"])) == (saved.step, saved.step)


def test_a_run_of_several_epochs_can_evaluate_at_its_end_only(tmp_path):
    """Interval 0."""
    _, messages, _ = train(settings(tmp_path, evaluate_interval=0, save_interval=0))
    assert [m.step for m in messages_of(messages, Metrics) if "validation_loss" in m.values] == [12]
    assert [saved.step for saved in messages_of(messages, CheckpointSaved)] == [12]


def test_an_evaluation_that_a_stop_cut_short_is_made_up_for(tmp_path):
    """Stopped inside it, the run saves; resumed, it evaluates first and saves what was due."""
    stopped, messages, _ = train(settings(tmp_path), stop_in_evaluation=6)
    assert (stopped.reason, stopped.steps) == (StopReason.PREEMPTED, 6)
    assert not [m for m in messages_of(messages, Metrics) if "validation_loss" in m.values]
    assert [saved.step for saved in messages_of(messages, CheckpointSaved)] == [6]
    resumed, messages, _ = train(settings(tmp_path))
    evaluated = [m.step for m in messages_of(messages, Metrics) if "validation_loss" in m.values]
    assert evaluated == [6, 12]
    assert resumed.steps == STEPS


def test_a_stop_amid_the_last_evaluation_is_made_up_for(tmp_path):
    """The launch ends stopped; the next one trains nothing, evaluates, and has the figure in the last file."""
    stopped, _, _ = train(
        settings(tmp_path, max_steps=6, load_best_at_end=True), stop_in_evaluation=6
    )
    assert stopped.reason is StopReason.PREEMPTED
    assert not (tmp_path / "checkpoints" / "final.pt").exists()
    report, messages, _ = train(settings(tmp_path, max_steps=6, load_best_at_end=True))
    assert report.reason is StopReason.COMPLETED
    (figures,) = messages_of(messages, Metrics)
    assert [saved.step for saved in messages_of(messages, CheckpointSaved)] == [6]
    manifest = CheckpointStore(tmp_path / "checkpoints", keep_last=9).load("last").manifest
    assert (manifest.step, manifest.monitored) == (6, figures.values["validation_loss"])
    assert (tmp_path / "checkpoints" / "best").read_text() == "step_00000006.pt\n"
    assert (tmp_path / "checkpoints" / "final.pt").exists()


def test_a_complete_run_saves_nothing_again(tmp_path):
    """Control: started again, it has nothing to make up for."""
    train(settings(tmp_path, max_steps=6))
    _, messages, _ = train(settings(tmp_path, max_steps=6))
    assert not messages_of(messages, CheckpointSaved)


def _leave_a_mess(folder):
    """What crashes leave: half a file, a file without its manifest, pointers cut short."""
    checkpoints = folder / "checkpoints"
    half = of_a_dead_writer(checkpoints / "step_00000009.pt")
    (checkpoints / "step_00000006.json").unlink()
    (checkpoints / "last").write_text("step_000")
    (checkpoints / "best").write_text("step_00000099.pt\n")
    return half


def test_what_a_crash_left_is_recovered_or_cleaned_and_said(tmp_path):
    """In the log of the rank that found it; a run in order says none of it."""
    train(settings(tmp_path, max_steps=6))
    log = tmp_path / "logs" / "rank_0.log"
    half = _leave_a_mess(tmp_path)
    resumed, _, _ = train(settings(tmp_path))
    said = log.read_text()
    assert resumed.steps == STEPS
    for line in (
        "step_00000006.pt is whole, by its archive: no manifest",
        "pointer 'last' is torn: it holds 'step_000': nothing is lost",
        "pointer 'best' names step_00000099.pt, which does not exist: nothing is lost",
        f"removed {half}",
    ):
        assert said.count(line) == 1, line
    assert not half.exists()
    train(settings(tmp_path, epochs=3))
    quiet = log.read_text()[len(said) :]
    assert "removed" not in quiet
    assert "nothing is lost" not in quiet
    assert "by its archive" not in quiet


def test_a_save_that_fails_leaves_training_going_on(tmp_path):
    """A full disk in the middle of a run costs a warning, not the run."""
    report, messages, _ = train(settings(tmp_path), breaks_saving=(6,))
    assert report.steps == STEPS
    assert [saved.step for saved in messages_of(messages, CheckpointSaved)] == [12]
    (tolerated,) = messages_of(messages, FaultTolerated)
    assert tolerated.line.endswith("; training continues; skipping the next checkpoint")


def test_a_final_save_that_fails_is_a_fault(tmp_path):
    """Work that cannot be kept is no success."""
    fault, messages, _ = train(settings(tmp_path, checkpoint_timeout_s=1), breaks_saving=(12,))
    assert fault.kind is FaultKind.STORAGE_FAILED
    assert not messages_of(messages, Finished)


def test_skipped_steps_within_the_budget_are_warned_of(tmp_path):
    """One warning each; the run completes and counts them as steps."""
    config = settings(tmp_path, max_errors_per_epoch=2, **{"task.nan_at": "1+3"})
    report, _, _ = train(config)
    assert report.steps == STEPS
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert log.count("step skipped on all ranks") == 2
    assert math.isfinite(report.loss)


def test_more_skipped_steps_than_allowed_in_an_epoch_end_the_run(tmp_path):
    """Where no roll-back may help; the fault says how many and names the samples of the last one."""
    config = settings(tmp_path, max_errors_per_epoch=2, rollbacks_max=0, **{"task.nan_at": "1+3+4"})
    fault, _, reading = train(config)
    assert fault.kind is FaultKind.NON_FINITE
    assert "max_errors_per_epoch=2" in fault.cause
    assert fault.detail.count(",") == BATCH - 1
    assert reading.committed_step == 5


class ScalesItsBatch(Task):
    """Doubles its inputs in place; at four times what they were, the gradient is no number."""

    def loss(self, model, batch):
        inputs = batch[0].mul_(2.0)
        call = next(self._calls) if model.training else 0
        loss = nn.functional.mse_loss(model(inputs), batch[1])
        breaks = call == 2 or float(inputs.max()) > 8.0  # twice the largest sample
        return loss + torch.sqrt(loss * 0.0) if breaks and model.training else loss


def test_what_is_computed_once_more_has_the_samples_of_the_step(tmp_path):
    """Not what the first try has made of them in place."""
    train(settings(tmp_path, max_steps=6, task=f"{__file__}:ScalesItsBatch"))
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert log.count("gradient norm is nan, on no rank when computed once more") == 1


def test_the_budget_of_skipped_steps_is_per_epoch(tmp_path):
    """Control: as many in all, in two epochs, do not end the run."""
    config = settings(tmp_path, max_errors_per_epoch=2, **{"task.nan_at": "1+3+7+8"})
    report, _, _ = train(config)
    assert report.steps == STEPS


@pytest.mark.parametrize("find_unused_parameters", [True, False])
def test_the_board_adds_up(tmp_path, find_unused_parameters):
    """Counters, times and phases at the end of a run are those of its committed steps."""
    config = settings(tmp_path, find_unused_parameters=find_unused_parameters)
    report, messages, reading = train(config)
    assert (reading.committed_step, reading.samples) == (STEPS, STEPS * BATCH)
    assert (reading.total_steps, reading.generation) == (STEPS, 1)
    assert reading.phase is Phase.FINISHED
    assert not reading.dirty
    assert reading.productive_ns > 0
    assert reading.evaluation_ns > 0
    assert reading.checkpoint_ns > 0
    assert 0 < reading.first_step_ns < reading.last_commit_ns
    assert reading.loss == report.loss
    (formed,) = messages_of(messages, RankFormed)
    assert (formed.committed_step, formed.source) == (0, 0)


def test_a_run_that_reached_its_target_trains_no_further(tmp_path):
    """Started again it reports what there is, as any complete run does."""
    config = settings(tmp_path, target_loss=100.0, epochs=50, learning_rate=0.01, warmup_steps=0)
    first, _, _ = train(config)
    assert first.reason is StopReason.COMPLETED
    assert first.steps < 300
    again, _, _ = train(config)
    assert again.steps == first.steps
    assert again.weights_sha256 == first.weights_sha256


def test_what_a_resume_cannot_keep_is_not_called_a_repair(tmp_path):
    """The task counts with what cannot be looked into; nothing was repaired. Control: the first launch has no reason."""
    reasons = []
    for steps in (6, 12):
        config = settings(tmp_path, max_steps=steps, schedule="constant", warmup_steps=0)
        _, messages, _ = train(config)
        changes = messages_of(messages, TuningChanged)
        reasons.append([one.inexact_reason for one in changes if one.inexact_reason])
    unseen = "task._calls (count), which is kept nowhere, may have been used before a resume"
    assert reasons == [[], [unseen]]
