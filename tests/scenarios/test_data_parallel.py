"""The modes of a run: the same training by one rank, by one rank over several devices, by two ranks."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.scenarios.conftest import NO_SPARE
from tests.scenarios.harness import Run, poll
from tests.scenarios.workload import HOLD_NAME, TROUBLE_NAME

STEPS = 24
TASK = f"{Path(__file__).with_name('alike.py')}:AlikeTask"
SETTINGS = (
    *("--max-steps", STEPS, "num_workers=0", "save_every_steps=8", "keep_last=9", "--audit"),
    *("evaluate_interval=3", "recovery.hang_min_s=20", "run.threads_per_rank=1"),
    *("optim.schedule=constant", "optim.ema_decay=0.9"),
)
OVER_TWO = (*SETTINGS, "-b", 8, "run.mode=data_parallel")
TWO_RANKS = (*SETTINGS, "-b", 8)


def weights(outputs, name="final.pt"):
    return torch.load(outputs.checkpoints / name, weights_only=True)


def assert_alike(one, other):
    """Within what a sum in another order has, their averages too."""
    for name in ("final.pt", "final_ema.pt"):
        found, wanted = weights(one, name), weights(other, name)
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-6)


def resumed_from(outputs, folder, step, settings):
    """A run of other settings that goes on from a checkpoint of ``outputs``, in a folder of its own."""
    checkpoints = Path(folder) / "checkpoints"
    checkpoints.mkdir(parents=True)
    for path in outputs.checkpoints.glob(f"step_{step:08d}.*"):
        shutil.copy(path, checkpoints)
    run = trained(folder, *settings)
    assert f"resumed at step {step}" in " ".join(run.console.split()), run.console
    return run


def trained(folder, *settings, **options):
    with Run(folder, *settings, NO_SPARE, task=TASK, **options) as run:
        assert run.wait() == 0, run.console
    return run


@pytest.fixture
def fault_free_over(made_once):
    """One rank over two devices, undisturbed."""
    return made_once(*OVER_TWO, task=TASK)


def test_one_rank_over_devices_ends_with_the_bits_without_faults(tmp_path, fault_free_over):
    """It is killed and goes on from what was saved last; an exception in the second part of a batch;
    and it is stopped and resumed."""
    hold = tmp_path / "over" / HOLD_NAME
    hold.parent.mkdir()
    hold.write_text("25", encoding="utf-8")  # two parts a step: behind step 12
    with Run(hold.parent, *OVER_TWO, task=TASK) as over:
        over.wait_for_checkpoint(8)
        over.wait_for_step(12)
        # Of the process that takes its place, which is at step 22 then at the latest.
        (hold.parent / TROUBLE_NAME).write_text("loss any raise 12", encoding="utf-8")
        hold.write_text("20", encoding="utf-8")
        over.signal(signal.SIGKILL, over.rank_pid(0))
        poll(lambda: len(over.events("repaired")) == 2, what="both repairs")
        over.signal(signal.SIGTERM)
        hold.unlink()
        assert over.wait() == 75, over.console
    assert "data_parallel: as asked, one rank over 2 parts of the CPU" in over.console
    summary = over.summary()
    kinds = [fault["kind"] for fault in summary["faults"]]
    assert kinds == ["rank_killed", "rank_raised"], summary["faults"]
    again = [line["step"] for line in over.audit_lines(0) if line["generation"] > 1]
    # From step 8's file, or from a copy in memory that is newer.
    assert again[0] >= 9
    assert again == list(range(again[0], summary["steps"] + 1))
    over = trained(hold.parent, *OVER_TWO)
    assert over.digest == fault_free_over.digest
    assert over.summary()["inexact_reasons"] == []


def test_modes_agree_and_resume_one_another(tmp_path, fault_free_over):
    """One rank over two devices, two ranks and one; and each goes on from the other's files, with half the
    batch at a time where memory is short."""
    two = trained(tmp_path / "two", *TWO_RANKS)
    assert_alike(fault_free_over, two)
    one = trained(tmp_path / "one", *SETTINGS, "-b", 16, "run.mode=single", world=1)
    assert_alike(one, two)
    short = ("--inject", "oom:rank=0,step=18,phase=forward")
    from_two = resumed_from(two, tmp_path / "from_two", 16, (*OVER_TWO, *short))
    assert [one["kind"] for one in from_two.summary()["faults"]] == ["out_of_memory"]
    assert_alike(from_two, two)
    assert_alike(resumed_from(fault_free_over, tmp_path / "from_over", 16, TWO_RANKS), two)
