"""A run resumes its own checkpoints whatever its model is wrapped in, and files name the bare model."""

from __future__ import annotations

import signal
from pathlib import Path

import torch

from ddp_runner.checkpoint.codec import weights_sha256
from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import Run

WRAPPING = Path(__file__).with_name("wrapping.py")
STEPS = 24
SETTINGS = (
    *("-b", 8, "--max-steps", STEPS, "num_workers=0", "save_every_steps=5", "--audit"),
    *("ema_decay=0.9", *PATIENT),
)
SLOWLY = "task.pace_s=0.05"


def newest(run):
    name = (run.checkpoints / "last").read_text().strip()
    return torch.load(run.checkpoints / name, weights_only=True)


def test_a_wrapped_model_goes_on_from_its_checkpoints(made_once, tmp_path):
    """After a stop, and when all ranks are killed at once, it ends with the weights of a run without faults.

    Every other form of a model: tests/checkpoint/test_entry_names.py.
    """
    calm = made_once(*SETTINGS, task=f"{WRAPPING}:PlainTask")
    task = f"{WRAPPING}:WrappedTask"
    with Run(tmp_path, *SETTINGS, SLOWLY, task=task) as run:
        run.wait_for_checkpoint(5)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    with Run(tmp_path, *SETTINGS, SLOWLY, "--resume", "last", task=task) as run:
        run.wait_for_checkpoint(10)
        run.signals_at_once(*((signal.SIGKILL, run.rank_pid(rank)) for rank in (0, 1)))
        assert run.wait() == 0, run.console
    assert run.events("run_begins")[-1]["resumed_step"] >= 5
    # One fault, or two where the kernel took its time to end the second one.
    assert {fault["kind"] for fault in run.summary()["faults"]} == {"rank_killed"}
    ours, theirs = newest(run), newest(calm)
    for part in (lambda state: state["model"], lambda state: state["ema"]["parameters"]):
        assert list(part(ours)) == [f"module.module.{key}" for key in part(theirs)]
        renamed = dict(zip(part(theirs), part(ours).values(), strict=True))
        assert weights_sha256(renamed) == weights_sha256(part(theirs))
    assert run.digest == weights_sha256(ours["model"])
