"""DDPTrainer as a user meets it: in a plain script, in several processes, stopped, resumed."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from ddp_runner import DDPTrainer
from ddp_runner.config import from_flat
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import FaultError, FaultKind
from ddp_runner.kernel.step.runtime import RankInfo
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.memory.manager import MemoryManager
from ddp_runner.memory.readings import SystemReader
from ddp_runner.training.local_runtime import LocalRuntime
from ddp_runner.training.saves import saving as training_saving
from ddp_runner.training.task import Datasets
from ddp_runner.training.trainer import device_record
from tests.processes import hosted_store, ranks, run_ranks

SAMPLES, BATCH = 40, 4  # ten steps an epoch for one rank
STEPS = 14


class Samples(Dataset):
    """Each sample draws from torch's generator, so that seeding shows in the weights."""

    def __init__(self, size):
        self._size = size

    def __len__(self):
        return self._size

    def __getitem__(self, index):
        inputs = torch.randn(5, generator=torch.Generator().manual_seed(index))
        return inputs + 0.01 * torch.randn(5), inputs.sum().unsqueeze(0)


class _WithUnusedLayer(nn.Module):
    def __init__(self, used):
        super().__init__()
        self.used = used
        self.unused = nn.Linear(2, 2)

    def forward(self, inputs):
        return self.used(inputs)


class SmallTask:
    """Loaded by ``--task`` as any user's file; raises at ``raises_at`` on rank ``raises_on``."""

    def __init__(self, raises_at=-1, raises_on=0, width=16, unused_layer=False):
        self._raises_at = raises_at
        self._raises_on = raises_on
        self._width = width
        self._unused_layer = unused_layer
        self._calls = 0

    def build_model(self):
        model = nn.Sequential(
            nn.Linear(5, self._width),
            nn.BatchNorm1d(self._width),
            nn.Dropout(0.1),
            nn.Linear(self._width, 1),
        )
        return _WithUnusedLayer(model) if self._unused_layer else model

    def build_datasets(self):
        return Datasets(train=Samples(SAMPLES), validation=Samples(9), fingerprint="small")

    def loss(self, model, batch):
        inputs, targets = batch
        if model.training:
            self._calls += 1
            if (
                self._calls == self._raises_at
                and int(os.environ.get("RANK", "0")) == self._raises_on
            ):
                raise RuntimeError("a mistake in user code")
        return nn.functional.mse_loss(model(inputs), targets)

    def figures(self, loss):
        return {"twice_the_loss": 2 * loss}

    def sample(self, model):
        return f"training: {model.training}"


def settings(folder, **changes):
    """Flat and dotted keys, as a script writes them."""
    return {
        "task": f"{__file__}:SmallTask",
        "log_dir": str(folder / "logs"),
        "checkpoint_dir": str(folder / "checkpoints"),
        "device": "cpu",
        "batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": 0.02,
        "warmup_steps": 2,
        "num_workers": 0,
        "ema_decay": 0.9,
        "use_amp": False,
        "display": "none",
        **changes,
    }


def _train_alone(me, config):
    return replace(DDPTrainer(rank=0, world_size=1, config=config).train(), model=None)


def train_alone(config):
    """One run in a process of its own."""
    return run_ranks(_train_alone, 1, config)[0]


def test_a_plain_script_trains_and_reports(tmp_path):
    """A dict of flat keys is enough; the report says what was done, and its checkpoint exists."""
    report = train_alone(settings(tmp_path))
    assert (report.reason, report.steps, report.epochs) == (StopReason.COMPLETED, STEPS, 1)
    assert report.samples == STEPS * BATCH
    assert 0 < report.loss < 10
    assert report.figures["validation_twice_the_loss"] == pytest.approx(
        2 * report.figures["validation_loss"]
    )
    assert report.sample == "training: False"
    assert len(report.weights_sha256) == 64
    assert report.checkpoint.endswith(f"step_{STEPS:08d}.pt")
    assert report.peaks["peak_rss_bytes"] > 10_000_000
    saved = torch.load(report.checkpoint, weights_only=True)
    assert saved["counters"]["committed_step"] == STEPS


def test_a_setting_that_a_task_does_not_read_is_said(tmp_path):
    """As the command says it."""
    train_alone({**settings(tmp_path), "vocab_size": 9})
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert "does not read model.vocab_size: it has no effect; task=synthetic does" in log


@pytest.mark.parametrize(("asked_at", "stopped_at"), [(0, 1), (5, 6), (9, 10), (10, 10), (12, 13)])
def test_a_run_that_was_stopped_ends_with_the_same_weights(tmp_path, asked_at, stopped_at):
    """Inside an epoch, at its end, in the evaluation after it; average and monitor go on."""
    whole = train_alone(settings(tmp_path / "whole"))
    parts = settings(tmp_path / "parts")
    stopped = run_ranks(_train_until_stopped, 1, parts, asked_at)[0]
    assert (stopped.steps, stopped.reason) == (stopped_at, StopReason.PREEMPTED)
    resumed = train_alone(parts)
    assert resumed.weights_sha256 == whole.weights_sha256
    assert (resumed.steps, resumed.samples) == (whole.steps, whole.samples)
    assert (resumed.loss, resumed.figures) == (whole.loss, whole.figures)
    first, second = (
        torch.load(report.checkpoint, weights_only=True) for report in (whole, resumed)
    )
    assert first["monitor"] == second["monitor"]
    for name, average in first["ema"]["parameters"].items():
        assert torch.equal(average, second["ema"]["parameters"][name])


class _AsksToStop(LocalRuntime):
    """From the moment that ``at_step`` steps are committed."""

    at_step = 0

    def stop_asked(self):
        reached = self.slot.get(Cell.COMMITTED_STEP) >= self.at_step
        return StopReason.PREEMPTED if reached else None


class _AfterADirtyOne(LocalRuntime):
    """Its slot is that of a process that died inside its optimizer."""

    dirty_at_ready = None

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.slot.set(Cell.DIRTY, 1)

    def next_generation(self, ready):
        self.dirty_at_ready = self.slot.get(Cell.DIRTY)
        return super().next_generation(ready)


def _follow_a_dirty_one(me, config):
    runtime = make_runtime(config, 0, 1, kind=_AfterADirtyOne)
    DDPTrainer(config=config, runtime=runtime).train()
    return runtime.dirty_at_ready


def test_the_dirty_mark_of_a_predecessor_is_wiped_off(tmp_path):
    """What the new process holds is whole: it may leave a first generation that fails as it came."""
    assert run_ranks(_follow_a_dirty_one, 1, settings(tmp_path, max_steps=1)) == [0]


def make_runtime(config, rank, world_size, kind=LocalRuntime):
    rank_info = RankInfo(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        device="cpu",
        loads=True,
    )
    made = from_flat(config)
    return kind(rank_info=rank_info, log_dir=Path(made.run.log_dir), debug=False)


def _train_until_stopped(me, config, at_step):
    runtime = make_runtime(config, 0, 1, kind=_AsksToStop)
    runtime.at_step = at_step
    return DDPTrainer(config=config, runtime=runtime).train()


def test_a_run_that_is_complete_trains_no_further(tmp_path):
    """Started again it reports what there is."""
    first = train_alone(settings(tmp_path))
    again = train_alone(settings(tmp_path))
    assert again.steps == STEPS
    assert again.weights_sha256 == first.weights_sha256
    assert again.checkpoint == first.checkpoint


def test_a_target_loss_ends_the_run_when_reached(tmp_path):
    """Evaluated, saved and complete, before the last step."""
    config = settings(tmp_path, max_steps=400, target_loss=2.5, epochs=100, schedule="constant")
    report = train_alone(config)
    assert report.reason is StopReason.COMPLETED
    assert 20 <= report.steps < 400
    assert "validation_loss" in report.figures
    assert report.checkpoint.endswith(f"step_{report.steps:08d}.pt")


def _pids_measured(me, config):
    """Of each look at memory: whether it was in an evaluation, and how many workers it saw."""
    seen, measure, look = [], SystemReader.__call__, MemoryManager.in_evaluation
    evaluating = []

    def measured(self, pids):
        assert len({*pids}) == len(pids)
        assert all(psutil.pid_exists(pid) for pid in pids)
        seen.append((bool(evaluating), len(pids)))
        return measure(self, pids)

    def looked(self, step):
        evaluating.append(step)
        look(self, step)
        evaluating.clear()

    SystemReader.__call__, MemoryManager.in_evaluation = measured, looked
    report = DDPTrainer(config=config).train()
    return seen, report.weights_sha256


def test_the_workers_of_an_evaluation_count_beside_those_of_training(tmp_path):
    """Control: between steps only those of training are there; looking changes no bit."""
    config = settings(
        tmp_path / "run",
        num_workers=1,
        **{"memory.memory_check_interval": 1, "evaluate_every_steps": 5},
    )
    seen, digest = run_ranks(_pids_measured, 1, config)[0]
    assert {*seen} == {(False, 0), (True, 2), (False, 1)}
    assert seen.index((False, 0)) == 0  # what the first step needs, before there are workers
    assert digest == train_alone(settings(tmp_path / "calm", num_workers=1)).weights_sha256


def test_micro_batches_change_only_how_a_step_is_computed(tmp_path):
    """Control of gradient accumulation: same samples, same number of steps."""
    report = train_alone(settings(tmp_path, micro_batch_size=2))
    assert (report.steps, report.samples) == (STEPS, STEPS * BATCH)


def test_an_audit_names_the_samples_of_each_step(tmp_path):
    """One line per committed step; over an epoch each sample comes once."""
    train_alone(settings(tmp_path, audit=True))
    lines = (tmp_path / "logs" / "audit_rank_0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    first_epoch = [index for record in records[:10] for index in record["indices"]]
    assert sorted(first_epoch) == list(range(SAMPLES))
    assert all(float.fromhex(record["loss_hex"]) > 0 for record in records)


def _error_of(me, config):
    try:
        DDPTrainer(config=config).train()
    except (BadInputError, FaultError) as error:
        fault = getattr(error, "fault", None)
        return type(error).__name__, str(error), fault and (fault.kind, fault.detail)
    return None


def test_a_mistake_in_user_code_is_reported_with_its_traceback(tmp_path):
    """Without a supervisor it ends the run; the fault names kind and line, the log has it once."""
    config = settings(tmp_path, task=f"{__file__}:SmallTask", **{"task.raises_at": 3})
    name, text, (kind, detail) = run_ranks(_error_of, 1, config)[0]
    assert (name, kind) == ("FaultError", FaultKind.RANK_RAISED)
    assert text.startswith("RuntimeError: a mistake in user code (test_trainer.py:")
    *_, raising, shown = (line for line in detail.splitlines() if "^^^" not in line)
    assert raising.strip() == 'raise RuntimeError("a mistake in user code")'
    assert shown == "RuntimeError: a mistake in user code"
    assert "/ddp_runner/" not in detail
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    assert log.count("RuntimeError: a mistake in user code\n") >= 1


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    """Resuming would change what the run means; the error names option and difference."""
    train_alone(settings(tmp_path, max_steps=2))
    name, text, _ = run_ranks(_error_of, 1, settings(tmp_path, max_steps=2, seed=5))[0]
    assert name == "BadInputError"
    assert text.startswith("resume: ")
    assert "seed" in text


def test_resume_none_starts_fresh(tmp_path):
    """The old files are set aside, and the new run is that of a fresh folder."""
    first = train_alone(settings(tmp_path, max_steps=3))
    again = train_alone(settings(tmp_path, max_steps=3, resume="none"))
    assert again.weights_sha256 == first.weights_sha256
    assert again.samples == first.samples


def test_more_ranks_than_samples_is_refused(tmp_path):
    """One line that names the option, before anything is trained."""
    name, text, _ = run_ranks(_error_of, 1, settings(tmp_path, batch_size=SAMPLES + 1))[0]
    assert name == "BadInputError"
    assert "--batch-size=41" in text


def _train_in_a_world(me, port, config, is_said=True):
    training_saving.PATIENCE_S = 30.0  # a slow disk puts no save off: each is of its own step
    os.environ.update(
        RANK=str(me.rank), LOCAL_RANK=str(me.rank), WORLD_SIZE=str(me.world_size),
        LOCAL_WORLD_SIZE=str(me.world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    of_script = {"rank": me.rank, "world_size": me.world_size} if is_said else {}
    report = DDPTrainer(**of_script, config=config).train()
    return replace(report, model=None)  # its class is known to that process only


@pytest.mark.parametrize(
    ("find_unused_parameters", "is_said"), [(True, True), (False, True), (False, False)]
)
def test_two_processes_under_an_outside_launcher_train_together(
    tmp_path, find_unused_parameters, is_said
):
    """They find each other by MASTER_ADDR and MASTER_PORT, and end with the same weights. Rank and number
    need not be said: alone each would write over the other's files."""
    config = settings(tmp_path, max_steps=7, find_unused_parameters=find_unused_parameters)
    with hosted_store() as port:
        first, second = run_ranks(_train_in_a_world, 2, port, config, is_said)
    assert first.weights_sha256 == second.weights_sha256
    assert first.samples == second.samples == 7 * BATCH * 2
    assert first.loss == second.loss
    assert second.checkpoint == ""
    assert first.sample == "training: False"
    assert second.sample == ""


def test_each_process_trains_alone_where_that_is_said(tmp_path, monkeypatch):
    """As separate trainings that one launcher starts."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("DDP_RUNNER_PLAIN_RANK", "0")
    alone = DDPTrainer(SmallTask, config=settings(tmp_path)).info()
    assert (alone["rank"], alone["world_size"]) == (0, 1)


@pytest.mark.parametrize(
    ("place", "mode", "gpus"),
    [
        ({"world_size": 1, "device": "cpu"}, "single", 0),
        ({"world_size": 2, "device": "cpu"}, "distributed", 0),
        ({"world_size": 2, "device": "cuda:0", "mode": "distributed: by NCCL"}, "distributed", 2),
        ({"world_size": 1, "device": "cuda:0", "other_devices": ("cuda:1",)}, "data_parallel", 2),
    ],
)
def test_info_has_the_mode_and_the_number_of_gpus(tmp_path, place, mode, gpus):
    """By the word of run.mode, also where nobody has chosen."""
    info = RankInfo(rank=0, local_rank=0, local_world_size=1, loads=True, **place)
    runtime = LocalRuntime(rank_info=info, log_dir=tmp_path, debug=False)
    found = DDPTrainer(SmallTask, config=settings(tmp_path), runtime=runtime).info()
    assert (found["mode"], found["gpu_count"]) == (mode, gpus)


@pytest.mark.parametrize("world_size", [1, 2])
def test_shares_are_not_measured_without_a_supervisor(tmp_path, world_size):
    """One line where there is something to share out."""
    config = settings(tmp_path, shares="auto")
    where = {"rank": 0, "local_rank": 0, "local_world_size": world_size, "device": "cpu"}
    info = RankInfo(**where, world_size=world_size, loads=True)
    runtime = LocalRuntime(rank_info=info, log_dir=tmp_path, debug=False)
    refused = pytest.raises(BadInputError, match="needs a supervisor, which measures the ranks")
    with refused if world_size > 1 else contextlib.nullcontext():
        DDPTrainer(SmallTask, config=config, runtime=runtime)


def test_info_has_the_memory_of_each_gpu(monkeypatch):
    """Of a rank that shares its batches out, of all its GPUs; as torch says it."""
    found = SimpleNamespace(name="NVIDIA H100", major=9, minor=0)
    for name, given in {
        "get_device_properties": found,
        "mem_get_info": (60, 80),
        "memory_allocated": 5,
        "memory_reserved": 10,
        "max_memory_allocated": 9,
        "max_memory_reserved": 12,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, given=given: given)
    assert device_record(torch.device("cuda:1")) == {
        "device": "cuda:1",
        "name": "NVIDIA H100",
        "compute_capability": "9.0",
        "memory_total_bytes": 80,
        "memory_free_bytes": 60,
        "memory_allocated_bytes": 5,
        "memory_reserved_bytes": 10,
        "memory_efficiency": 0.75,
    }


def test_an_unused_layer_is_trained_around_by_default(tmp_path):
    """The search for unused parameters is on at first, and stays while it finds some."""
    config = settings(tmp_path, max_steps=3, **{"task.unused_layer": True})
    with hosted_store() as port:
        first, second = run_ranks(_train_in_a_world, 2, port, config)
    assert first.weights_sha256 == second.weights_sha256


def _fault_in_a_world(me, port, config):
    try:
        return _train_in_a_world(me, port, config)
    except FaultError as error:
        me.say((error.fault.kind, error.fault.cause))
        return None


def test_an_unused_layer_without_the_search_is_everybody_s_fault(tmp_path):
    """It is found before a step was committed, on all ranks alike, and named for what it is."""
    config = settings(tmp_path, find_unused_parameters=False, **{"task.unused_layer": True})
    with hosted_store() as port, ranks(_fault_in_a_world, 2, port, config) as world:
        kinds = [process.hear()[0] for process in world]
    assert kinds == [FaultKind.REDUCTION_UNFINISHED] * 2
    assert not list((tmp_path / "checkpoints").glob("step_*"))


def test_a_rank_that_raises_frees_its_peer(tmp_path):
    """The culprit is named by its own error, the peer by a lost collective; nobody waits."""
    config = settings(tmp_path, **{"task.raises_at": 4, "task.raises_on": 1})
    with hosted_store() as port, ranks(_fault_in_a_world, 2, port, config) as world:
        faults = [process.hear() for process in world]
    assert faults[1][0] is FaultKind.RANK_RAISED
    assert faults[1][1].startswith("RuntimeError: a mistake in user code (test_trainer.py:")
    assert faults[0][0] is FaultKind.COLLECTIVE_FAILED


def test_a_world_stopped_and_resumed_ends_with_the_same_weights(tmp_path):
    """Three ranks, where summation order shows; one of them alone is asked to stop."""
    whole_config = settings(tmp_path / "whole", max_steps=5)
    parts_config = settings(tmp_path / "parts", max_steps=5)
    with hosted_store() as port:
        whole = run_ranks(_train_in_a_world, 3, port, whole_config)
    with hosted_store() as port:
        stopped = run_ranks(_stop_one_of_a_world, 3, port, parts_config, 1)
    with hosted_store() as port:
        resumed = run_ranks(_train_in_a_world, 3, port, parts_config)
    assert [report.steps for report in stopped] == [2, 2, 2]
    assert {report.weights_sha256 for report in resumed} == {whole[0].weights_sha256}


def _stop_one_of_a_world(me, port, config, at_step):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    kind = _AsksToStop if me.rank == 1 else LocalRuntime
    runtime = make_runtime(config, me.rank, me.world_size, kind=kind)
    runtime.at_step = at_step
    return DDPTrainer(config=config, runtime=runtime).train()
