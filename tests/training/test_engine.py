"""What the engine promises the loop that it is in: what breaks in a block goes no further, and comes again."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_runner import DDPTrainer
from ddp_runner.config import from_flat
from ddp_runner.core.events import Faulted
from ddp_runner.core.faults import FaultKind
from ddp_runner.training import engine
from ddp_runner.training.engine import Engine
from ddp_runner.training.local_runtime import LocalRuntime
from ddp_runner.training.runtime import RankInfo
from ddp_runner.training.task_client import TaskClient
from tests.processes import run_ranks

from . import test_session
from .test_session import STEPS, settings

_held: list[weakref.ref] = []  # what a step that broke had in memory


class BreakingTask(test_session.Task):
    """Raises ``what`` in the training or evaluation forward number ``at``; it counts by what is no state."""

    def __init__(self, at=-1, what="", training=True):
        super().__init__()
        self._at, self._what, self._training = at, what, training
        self._seen = itertools.count(1)

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if model.training == self._training and next(self._seen) == self._at:
            self._break(loss, batch)
        return loss

    def _break(self, loss, batch):
        if self._what == "Ctrl-C":
            raise KeyboardInterrupt
        activations = torch.ones(1000)
        _held.extend(map(weakref.ref, (loss, activations, *batch)))
        try:
            self._break_inside(activations * 2)
        except ValueError as error:
            raise RuntimeError(self._what) from error

    def _break_inside(self, activations):
        _held.append(weakref.ref(activations))
        raise ValueError("the cause of what is raised")


class Reforming(LocalRuntime):
    """Forms the next generation after each fault, as a supervisor would."""

    def __init__(self, config):
        made = from_flat(config)
        rank_info = RankInfo(
            rank=0, local_rank=0, world_size=1, local_world_size=1, device="cpu", loads=True
        )
        super().__init__(rank_info=rank_info, log_dir=Path(made.run.log_dir), debug=False)
        self.formed_at, self.faults, self.alive = [], [], []

    def next_generation(self, ready):
        self.formed_at.append(ready.committed_step)
        assert len(self.formed_at) < 5, "each fault here comes once"
        self._formed, self.generation = False, len(self.formed_at)
        return super().next_generation(ready)

    def report(self, message):
        if isinstance(message, Faulted):
            self.faults.append((message.generation, message.fault.kind, message.fault.cause))
            self.alive.append(sum(one() is not None for one in _held))

    def survives(self, fault):
        return True


def _train(me, config):
    del me
    runtime = Reforming(config)
    report = replace(DDPTrainer(BreakingTask, config=config, runtime=runtime).train(), model=None)
    return report, runtime.formed_at, runtime.faults, (len(_held), runtime.alive)


def train(folder, **broken):
    """A run whose task breaks once: its report, where it formed, its faults, what was held then."""
    options = {f"task.{name}": value for name, value in broken.items()}
    config = settings(folder, **options)
    return run_ranks(_train, 1, config)[0]


@pytest.mark.parametrize(
    ("broken", "formed_at"),
    [
        ({"at": 5}, [0, 3]),  # the first step is computed twice
        ({"at": 1}, [0, 0]),  # before any step, while it forms
        ({"at": 2, "training": False}, [0, 6]),  # between two steps
    ],
    ids=["in a step", "forming", "evaluating"],
)
def test_what_breaks_goes_no_further_and_comes_again(tmp_path, broken, formed_at):
    """The loop sees nothing of it; the weights are those of a run without faults."""
    whole, *_ = train(tmp_path / "whole")
    report, formed, faults, _ = train(tmp_path / "broken", what="a mistake", **broken)
    assert formed == formed_at
    ((rank, kind, cause),) = faults
    assert (rank, kind) == (1, FaultKind.RANK_RAISED)
    assert cause.startswith("RuntimeError: a mistake (test_engine.py:")
    assert (report.steps, report.weights_sha256) == (STEPS, whole.weights_sha256)
    assert report.figures == whole.figures


def _train_and_note(me, config):
    noted = []
    engine.empty_device_cache = lambda device: noted.append(device.type)
    return *_train(me, config), noted


def test_a_rank_empties_its_device_cache_before_it_forms_again(tmp_path):
    """Once for each fault: NCCL's buffers come from what torch's cache does not hold."""
    config = settings(tmp_path, **{"task.at": 5, "task.what": "a mistake"})
    *_, formed, faults, _, noted = run_ranks(_train_and_note, 1, config)[0]
    assert (len(formed), len(faults), noted) == (2, 1, ["cpu"])


@pytest.mark.parametrize("training", [True, False])
def test_a_step_that_broke_holds_nothing_when_its_fault_is_reported(tmp_path, training):
    """Neither its batch nor the frames of its error and of the error's cause, though loop and errors still are there."""
    *_, (held, alive) = train(
        tmp_path, at=5 if training else 2, what="a mistake", training=training
    )
    assert (held, alive) == (5, [0])


def _interrupted(me, config):
    del me
    runtime = Reforming(config)
    try:
        DDPTrainer(BreakingTask, config=config, runtime=runtime).train()
    except KeyboardInterrupt:
        return dist.is_initialized(), runtime.faults
    return None


@pytest.mark.parametrize("broken", [{"at": 5}, {"at": 2, "training": False}])
def test_an_interrupt_passes_and_the_group_is_left(tmp_path, broken):
    """Ctrl-C in a plain script is no fault: whoever asked gets it."""
    options = {f"task.{name}": value for name, value in {**broken, "what": "Ctrl-C"}.items()}
    config = settings(tmp_path, **options)
    assert run_ranks(_interrupted, 1, config) == [(False, [])]


def _left_early(me, config):
    """A loop of another's: it makes no step at first, and leaves before the end."""
    del me
    began = []
    with contextlib.ExitStack() as ending:
        trainer = DDPTrainer(config=config, runtime=Reforming(config))
        parts, run_id = trainer._prepare(ending)
        task = TaskClient(parts)
        with Engine(parts, task, run_id=run_id) as engine:
            for micro_batches in engine.steps():
                began.append((parts.state.committed_step, micro_batches[0].indices))
                with engine.step() as step:
                    if len(began) > 1:
                        step.result = task.train_step(micro_batches, votes=step.votes)
                if parts.state.committed_step == 3:
                    break
            was_in = dist.is_initialized()
    return began, was_in, dist.is_initialized()


def test_a_loop_may_leave_a_step_out_and_be_left_itself(tmp_path):
    """The step comes again with the same samples; the group is left with the engine."""
    [(began, was_in, is_in)] = run_ranks(_left_early, 1, settings(tmp_path))
    assert [step for step, _ in began] == [0, 0, 1, 2]
    assert began[0] == began[1]
    assert (was_in, is_in) == (True, False)
