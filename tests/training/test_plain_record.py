"""A trainer in a plain script: what it writes, and what it says of itself."""

from __future__ import annotations

import json

import pytest

from ddp_runner import DDPTrainer
from ddp_runner.__main__ import main
from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.observe.summary import read_summary
from tests.processes import run_ranks
from tests.training.test_trainer import BATCH, STEPS, SmallTask, settings


class InterruptedTask(SmallTask):
    """Ctrl-C comes in the fourth step."""

    def loss(self, model, batch):
        if self._calls == 3:
            raise KeyboardInterrupt
        return super().loss(model, batch)


def _train(me, config, how):
    trainer = DDPTrainer(rank=0, world_size=1, config=config)
    before = (trainer.info(), trainer.performance())
    try:
        report = trainer.train()
    except (FaultError, RuntimeError, KeyboardInterrupt) as error:
        return before, None, trainer.info(), trainer.performance(), type(error).__name__
    return before, report.weights_sha256, trainer.info(), trainer.performance(), ""


def train(folder, how="", **changes):
    return run_ranks(_train, 1, settings(folder, log_interval=1, **changes), how)[0]


def lines(folder):
    text = (folder / "logs" / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_a_plain_trainer_writes_metrics_and_summary(tmp_path, capsys):
    """As a supervised run does, so that the same tools read them; a resume adds to the metrics."""
    _, weights, *_ = train(tmp_path, max_steps=6)
    steps = [line["step"] for line in lines(tmp_path) if "step_s" in line]
    assert steps == [1, 2, 3, 4, 5, 6]
    first = read_summary(tmp_path / "logs" / "summary.json")
    assert (first.status, first.exit_code, first.steps) == (RunStatus.COMPLETED, 0, 6)
    assert (first.weights_sha256, first.exact) == (weights, True)
    assert first.checkpoint.endswith("step_00000006.pt")
    assert first.samples_per_s > 0
    assert first.time_s.productive > 0
    _, weights, *_ = train(tmp_path)
    steps = [line["step"] for line in lines(tmp_path) if "step_s" in line]
    assert steps == list(range(1, STEPS + 1))
    second = read_summary(tmp_path / "logs" / "summary.json")
    assert (second.run_id, second.weights_sha256) == (first.run_id, weights)
    assert second.samples == STEPS * BATCH
    assert any(name.startswith("validation_") for name in lines(tmp_path)[-1])
    train(tmp_path)  # complete: nothing is trained, and the account of before stands
    assert read_summary(tmp_path / "logs" / "summary.json") == second
    assert main(["report", "-l", str(tmp_path / "logs")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "status completed" in shown
    assert "events none: there is no events.jsonl" in shown


def test_an_error_of_the_task_stands_in_the_summary(tmp_path):
    """With its cause and step; the program gets an error of that cause."""
    *_, error = train(tmp_path, **{"task.raises_at": 4})
    assert error == "FaultError"
    summary = read_summary(tmp_path / "logs" / "summary.json")
    assert (summary.status, summary.exit_code) == (RunStatus.FAILED, 1)
    (fault,) = summary.faults
    assert "a mistake in user code" in fault.cause
    assert (fault.recovered_s, summary.steps) == (None, 3)


def test_an_interrupt_stands_in_the_summary(tmp_path):
    """It is the program's own, and goes on to it; what was done until then is written down."""
    *_, error = train(tmp_path, task=f"{__file__}:InterruptedTask")
    assert error == "KeyboardInterrupt"
    summary = read_summary(tmp_path / "logs" / "summary.json")
    assert (summary.status, summary.steps) == (RunStatus.INTERRUPTED, 3)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_a_trainer_says_what_it_trains_and_how_fast(tmp_path):
    """Before anything is built it knows the settings; rates are None, not 0, before the first step."""
    (info, performance), _, after, done, _ = train(tmp_path)
    assert (info["rank"], info["world_size"], info["device"]) == (0, 1, "cpu")
    assert "parameters" not in info
    assert performance["steps"] == 0
    assert performance["samples_per_s"] is None
    assert (after["total_steps"], after["committed_step"]) == (STEPS, STEPS)
    assert (after["global_batch"], after["batch_size"]) == (BATCH, BATCH)
    assert after["parameters"] == after["trained_parameters"] == 5 * 16 + 16 + 32 + 16 + 1
    assert after["precision"] == "fp32"
    assert done["steps"] == STEPS
    assert done["samples_per_s"] == pytest.approx(BATCH * done["steps_per_s"])
    assert done["steps_per_s"] == pytest.approx(STEPS / done["train_s"])
    assert 0 <= done["data_wait_share"] < 1
    assert done["peak_rss_bytes"] > 10_000_000
    assert (done["tokens_per_s"], done["flops_utilization"]) == (None, None)
