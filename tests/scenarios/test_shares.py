"""Unequal shares of a step: the same samples with the same weight, and as exact as equal ones."""

from __future__ import annotations

import signal
from pathlib import Path

import torch

from ddp_runner.core.batch_sizes import cut
from tests.scenarios.conftest import NO_SPARE, PATIENT
from tests.scenarios.harness import Run, assert_every_sample_once

TASK = f"{Path(__file__).with_name('shared_out.py')}:SharedTask"
STEPS = 36
SETTINGS = (
    *("-b", 8, "--max-steps", STEPS, "save_every_steps=9", "save_interval=0", "--audit"),
    *("num_workers=0", "learning_rate=0.01", *PATIENT),
)
SHARES = "data.shares=3,3,2"


def sizes(run, step):
    """How many samples each rank has given to a step."""
    audits = run.audit(3)
    return [len(audit[step]["indices"]) if step in audit else 0 for audit in audits]


def weights(run):
    return torch.load(run.checkpoints / "final.pt", weights_only=True)


def test_unequal_shares_train_as_equal_ones_whoever_is_lost(tmp_path, made_once):
    """Rank 0 and the last one are killed, and the run is stopped and resumed: the same bits."""
    equal = made_once(*SETTINGS, task=TASK, world=3)
    calm = made_once(*SETTINGS, SHARES, task=TASK, world=3)
    drilled = ("recovery.drill_at=3", "num_workers=1")
    with Run(tmp_path, *SETTINGS, SHARES, *drilled, task=TASK, world=3) as run:
        for rank, step in ((0, 6), (2, 12)):
            run.wait_for_step(step)
            run.signal(signal.SIGKILL, run.rank_pid(rank))
        run.wait_for_step(20)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    with Run(tmp_path, *SETTINGS, SHARES, NO_SPARE, task=TASK, world=3) as again:
        assert again.wait() == 0, again.console
    assert "global batch  24 = 9 + 9 + 6, at most 8 at once" in run.console
    assert (again.digest, again.summary()["exact"]) == (calm.digest, True)
    assert {tuple(sizes(again, step)) for step in range(1, STEPS + 1)} == {(9, 9, 6)}
    assert_every_sample_once(again, 3, samples=240)
    assert calm.digest != equal.digest
    for name, value in weights(equal).items():
        torch.testing.assert_close(weights(calm)[name], value, rtol=1e-4, atol=1e-6)


def test_who_is_left_keeps_its_share_of_the_rest(tmp_path):
    """Rank 1 of three is given up; a run without one of its samples would be another one."""
    options = ("--min-ranks", 2, "recovery.slot_failures_max=1", "evaluate_interval=0")
    with Run(
        tmp_path, *SETTINGS, SHARES, *options, "--inject", "kill:rank=1,step=8", task=TASK, world=3
    ) as run:
        assert run.wait() == 0, run.console
    assert sizes(run, 5) == [9, 9, 6]
    assert sizes(run, STEPS) == [14, 0, 10]
    assert_every_sample_once(run, 3, samples=240)


UNEVEN = f"{Path(__file__).with_name('shared_out.py')}:UnevenTask"


def proposals(run):
    return [one["shares"] for one in run.events() if one["event"] == "shares_proposed"]


def test_auto_shares_are_kept_by_a_resume_taken_by_fresh_starts(tmp_path, made_once):
    """One line says what would even the ranks out; a resume has the bits of the run that nobody stopped."""
    auto = "data.shares=auto"
    calm = made_once(*SETTINGS, task=UNEVEN, world=2)
    with Run(tmp_path, *SETTINGS, NO_SPARE, auto, task=UNEVEN, world=2) as run:
        run.wait_for_step(30)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    assert "data.shares=auto: equal shares, and the first steps are measured" in run.console
    (shares,) = proposals(run)
    assert shares[0] > shares[1]  # by how much depends on what else the machine does
    words = ",".join(map(str, shares))
    assert run.console.count(f"data.shares={words} would even out the ranks") == 1
    with Run(tmp_path, *SETTINGS, NO_SPARE, auto, task=UNEVEN, world=2) as again:
        assert again.wait() == 0, again.console
    assert "data.shares=auto: equal shares, as this run began" in again.console
    assert (again.digest, again.summary()["exact"]) == (calm.digest, True)
    with Run(
        tmp_path, *SETTINGS, NO_SPARE, auto, "--resume", "none", task=UNEVEN, world=2
    ) as fresh:
        assert fresh.wait() == 0, fresh.console
    assert f"data.shares=auto: {words}, as an earlier launch measured" in fresh.console
    first, second = cut(16, shares)
    assert f"global batch  16 = {first} + {second}" in fresh.console
    assert len(proposals(fresh)) == 1
    assert fresh.digest != calm.digest
