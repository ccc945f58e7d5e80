"""Memory and tokens in a logged step: there with a watch, and without one no line has anything of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddp_runner import DDPTrainer
from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.config import from_flat
from ddp_runner.core.messages import Finished, Metrics
from ddp_runner.core.settings import Settings
from ddp_runner.memory.readings import Reading
from ddp_runner.training import use_figures
from ddp_runner.training.local_runtime import LocalRuntime
from ddp_runner.training.runtime import RankInfo
from ddp_runner.training.use_figures import UseFigures, speed_report, tokens_of
from tests.processes import run_ranks
from tests.training.test_trainer import BATCH, STEPS, SmallTask, settings

TOKENS = 5
WATCHED = {"rss_bytes", "loader_bytes", "tokens_per_s"}


class TokenTask(SmallTask):
    tokens_per_sample = TOKENS


def _train(me, config):
    resolved = from_flat(config)
    heard = []

    class Heard(LocalRuntime):
        def report(self, message):
            heard.append(message)

    place = RankInfo(
        rank=0, local_rank=0, world_size=1, local_world_size=1, device="cpu", loads=True
    )
    runtime = Heard(rank_info=place, log_dir=Path(resolved.run.log_dir), debug=False)
    report = DDPTrainer(config=resolved, runtime=runtime).train()
    lines = [one.values for one in heard if isinstance(one, Metrics)]
    (finished,) = (one.report for one in heard if isinstance(one, Finished))
    return report.weights_sha256, lines, finished


def train(folder, **changes):
    folder.mkdir()
    config = settings(folder, log_interval=1, **changes)
    config["task"] = f"{__file__}:TokenTask"
    config["log_dir"] = str(folder)
    return run_ranks(_train, 1, config)[0]


def test_a_watch_adds_figures_and_changes_no_weight(tmp_path):
    """With it a step's line has memory and tokens; without it, what it had before there was one."""
    on_weights, on, on_report = train(tmp_path / "on")
    off_weights, off, off_report = train(tmp_path / "off", gpu_watch_s=0)
    assert on_weights == off_weights
    steps_on = [values for values in on if "step_s" in values]
    steps_off = [values for values in off if "step_s" in values]
    assert len(steps_on) == len(steps_off) == STEPS
    assert {*steps_on[-1]} - {*steps_off[-1]} == WATCHED
    last = steps_on[-1]
    assert last["rss_bytes"] > 10_000_000
    assert last["tokens_per_s"] == pytest.approx(TOKENS * last["samples_per_s"], rel=0.2)
    assert on_report["all_tokens"] == STEPS * BATCH * TOKENS
    assert "all_tokens" not in off_report
    assert [one["tokens"] for one in (last, steps_off[-1], on_report, off_report)] == [
        STEPS * BATCH * TOKENS
    ] * 4
    newest = Catalog(Path(settings(tmp_path / "off")["checkpoint_dir"])).entries()[0]
    assert newest.manifest.about["tokens"] == newest.step * BATCH * TOKENS


class Parts:
    """What figures are made of, on a device whose peak is known."""

    def __init__(self, *, tokens=None, task=None, trained=True):
        self.settings = Settings()
        model = nn.Linear(10, 10, bias=False).requires_grad_(trained)
        self.state = SimpleNamespace(
            tokens=tokens, samples=0, model=model, precision=SimpleNamespace(name="bf16")
        )
        cuda = torch.device("cuda:0")
        self.workload = SimpleNamespace(
            device=cuda, devices=(cuda,), task=task or SimpleNamespace()
        )
        self.memory = SimpleNamespace(newest=lambda: READING)


READING = Reading(
    rss_bytes=1,
    rss_peak_bytes=2,
    loader_bytes=3,
    available_bytes=4,
    ceiling_bytes=5,
    ceiling_source="",
    device_allocated_bytes=6,
    device_reserved_bytes=7,
    device_free_bytes=30,
    device_total_bytes=100,
)


@pytest.fixture
def h100(monkeypatch):
    name = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(use_figures.torch.cuda, "get_device_name", lambda device: name)


def test_utilization_is_what_tokens_need_of_the_peak(h100):
    """6 FLOP a parameter and token, over what all ranks could do."""
    parts = Parts(tokens=100.0)
    use = UseFigures(parts, world_size=2)
    parts.state.tokens = 300.0
    values = use.take(seconds=0.5)
    assert values["tokens_per_s"] == 400.0
    assert values["flops_utilization"] == pytest.approx(400 * 600 / (989.4e12 * 2))
    assert values["device_used_bytes"] == 70
    assert (values["device_allocated_bytes"], values["device_reserved_bytes"]) == (6, 7)
    parts.state.tokens = 50.0  # a roll-back
    assert use.take(seconds=0.5)["tokens_per_s"] == 0.0
    assert speed_report(parts)["peak_flops"] == 989.4e12


def test_frozen_parameters_need_less(h100):
    """Forward alone."""
    parts = Parts(tokens=0.0, trained=False)
    use = UseFigures(parts, world_size=1)
    parts.state.tokens = 1.0
    values = use.take(seconds=1.0)
    assert values["flops_utilization"] == pytest.approx(200 / 989.4e12)


def test_a_rank_of_several_devices_has_the_peak_of_all(h100):
    """As with run.mode=data_parallel."""
    parts = Parts(tokens=0.0)
    parts.workload.devices *= 2
    assert speed_report(parts)["peak_flops"] == 2 * 989.4e12


def test_memory_efficiency_is_the_peak_of_tensors_over_that_of_the_cache():
    """Of the process's own: what others take on the device is none of it."""
    taken = replace(READING, device_peak_bytes=12, device_taken_peak_bytes=63 + 16)  # 63: by others
    assert taken.memory_efficiency == 0.75
    assert READING.memory_efficiency is None
    assert replace(taken, device_peak_bytes=0).memory_efficiency is None


def test_an_unknown_device_has_no_utilization(monkeypatch):
    """Absent, not guessed."""
    monkeypatch.setattr(use_figures.torch.cuda, "get_device_name", lambda device: "GPU X")
    assert "flops_utilization" not in UseFigures(Parts(tokens=1.0), world_size=1).take(seconds=1.0)


@pytest.mark.parametrize("each", [None, 0, -3, True, "7", float("nan"), float("inf")])
def test_tokens_that_nobody_counts_are_none(each, h100):
    """Neither by the loss nor by the task."""
    parts = Parts(task=SimpleNamespace(tokens_per_sample=each))
    assert tokens_of(parts) is None
    values = UseFigures(parts, world_size=1).take(seconds=1.0)
    assert not {"tokens_per_s", "flops_utilization"} & {*values}
