"""A vision task: MixUp in the training's batches alone, and the same bits whoever computes a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ready
from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import Run
from tests.test_documented import all_blocks

TASK = f"{Path(__file__).with_name('mixing.py')}:MixingTask"
STEPS = ("-b", 8, "--max-steps", 28, "evaluate_every_steps=14", *PATIENT)
GUIDE = "my_images.py"


@pytest.mark.parametrize(("changes", "workers"), [(False, 1), ("preload", 0)])
def test_mixup_in_the_collate_is_repeated_and_evaluations_have_none(
    tmp_path, made_once, changes, workers
):
    """Also where samples are the same each time, so that nothing else seeds what the batch draws."""
    same = (*STEPS, "task.changes=false")
    calm = made_once(*same, "num_workers=0", task=TASK)
    words = [*same, f"num_workers={workers}"]
    words += ["data.preload=true"] * (changes == "preload")
    kills = [
        ("--inject", f"kill:{at},phase=backward") for at in ("rank=1,step=8", "rank=0,step=25")
    ]
    with Run(tmp_path / "run", *words, *kills[0], *kills[1], task=TASK) as run:
        assert run.wait() == 0, run.console
    assert len(run.summary()["faults"]) == 2
    assert (run.digest, run.summary()["exact"]) == (calm.digest, True)
    assert run.console.count("evaluations make batches by torch's default collate") == 1
    for each in (calm, run):
        correct = each.summary()["figures"]["validation_accuracy"] * 50  # a mean over all samples
        assert correct == pytest.approx(round(correct), abs=1e-6)


def test_the_guide_for_images_trains_and_is_exact(tmp_path):
    """As it is written, with torchvision's own transforms, and with a rank that is killed."""
    pytest.importorskip("torchvision")
    (block,) = [each for each in all_blocks() if each.mark == f"saved as {GUIDE}"]
    (tmp_path / GUIDE).write_text(block.text, encoding="utf-8")
    digests = set()
    for name, more in (("calm", []), ("run", ["--inject", "kill:rank=1,step=5,phase=backward"])):
        words = ["train", "--task", GUIDE, "--cpu", "-n", "2", "-b", "16", "--name", name, *more]
        words += ["--max-steps", "8", "learning_rate=0.001", "recovery.drill_at=off"]
        done = subprocess.run(
            [sys.executable, "-m", "ddp_runner", *words],
            cwd=tmp_path,
            env={**os.environ, **ready.environment()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((tmp_path / "logs" / name / "summary.json").read_text())
        assert summary["exact"] is True
        assert 0 <= summary["figures"]["validation_accuracy"] <= 1
        digests.add(summary["weights_sha256"])
    assert len(digests) == 1
