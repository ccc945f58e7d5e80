"""Faults one after the other while no step is committed, on real runs: from outside, and at the end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import Run, poll

TASK = f"{Path(__file__).with_name('stranger.py')}:Classifier"
SETTINGS = (
    *("--max-steps", 5, "-b", 24, "num_workers=0", "evaluate_interval=0", "save_interval=0"),
    *PATIENT,
)


@pytest.fixture
def calm(made_once):
    """``calm(*settings, world=3)``: the same run without a fault."""
    return lambda *settings, world: made_once(
        *SETTINGS, *settings, "warm_spare=false", world=world, task=TASK
    )


def kill_one_by_one(run, *names):
    """Each by its name, once what was killed before it is repaired: the step in hand is never done."""
    for number, name in enumerate(names):
        if number:
            wait_for_repairs(run, number)
        run.signal(signal.SIGKILL, run.named(name).pid)
    wait_for_repairs(run, len(names))


def wait_for_repairs(run, count):
    poll(lambda: len(run.events("repaired")) >= count, what=f"{count} repairs: {run.console}")


@pytest.mark.parametrize(
    ("world", "names"),
    [
        pytest.param(8, [f"ddp:rank{rank}" for rank in range(8)], marks=pytest.mark.slow),
        (3, ["ddp:rank1", "ddp:store", "ddp:rank2", "ddp:rank0"]),
    ],
    ids=["eight ranks", "ranks and the store"],
)
def test_a_storm_within_one_step_is_repaired(calm, tmp_path, world, names):
    """Nothing repeats, so nothing is a loop: nobody waits, no step is lost, and no bit differs."""
    with Run(tmp_path, *SETTINGS, "--audit", "task.pace_s=0.6", world=world, task=TASK) as run:
        run.wait_for_step(1)
        kill_one_by_one(run, *names)
        assert run.wait() == 0, run.console
    if world == 3:  # eight ranks take their time to start
        assert run.digest == calm(world=world).digest
    summary = run.summary()
    assert (summary["exact"], summary["steps"]) == (True, 5)
    assert [fault["steps_lost"] for fault in summary["faults"]] == [0] * len(names)
    assert " in 0.5 s" not in run.console


def test_nobody_waits_for_a_stopped_rank_nor_for_the_last_answer(calm, tmp_path):
    """It is ended as soon as it is to leave, and who was killed is followed while one is still at work."""
    steps = ("--max-steps", 3)
    with Run(tmp_path, *SETTINGS, *steps, "--audit", "task.pace_s=2", world=3, task=TASK) as run:
        run.wait_for_step(1)
        # It takes two seconds, in which nobody answers; before, a slow machine still loads its samples.
        poll(lambda: run.phase(1) == "forward", what="the next step")
        stopped, killed = (run.rank_pid(rank) for rank in (1, 2))
        run.signals_at_once((signal.SIGSTOP, stopped), (signal.SIGKILL, killed))
        assert run.wait() == 0, run.console
    (hung,) = [event for event in run.events("fault") if event["kind"] == "rank_hung"]
    assert (hung["rank"], hung["text"]) == (1, "rank 1 hung: stopped by a signal")
    (plan,) = run.events("plan")
    assert plan["replaced"] == [1, 2]
    ahead = {rank: event for event in run.events("forked_ahead") for rank in event["ranks"]}
    assert ahead[2]["mono_s"] < plan["mono_s"]
    assert run.digest == calm(*steps, world=3).digest
    assert [fault["steps_lost"] for fault in run.summary()["faults"]] == [0]


# Rank, phase. All of them at the end of the run, where no step can be committed any more.
HARMS_AT_THE_END = (
    *("exit:rank=1,phase=compare", "exit:rank=1,phase=evaluate", "kill:rank=1,phase=evaluate"),
    *("exit:rank=0,phase=checkpoint", "kill:rank=0,phase=checkpoint"),
)


def test_faults_at_the_end_do_not_end_a_run_that_progresses(calm, tmp_path):
    """It ends its comparison, more and more of its evaluation, its save: exits, errors and kills between."""
    # Rounds of 8 batches of 16 samples; every error comes in another one, and none in the first.
    evaluation = ("-b", 8, "evaluate_batches=64", "task.evaluation_samples=512")
    asked = [word for harm in HARMS_AT_THE_END for word in ("--inject", f"{harm},step=4")]
    with Run(
        tmp_path, *SETTINGS, *evaluation, "task.fails_at=150+300+450", *asked, task=TASK
    ) as run:
        assert run.wait() == 0, run.console
    assert run.digest == calm(*evaluation, world=2).digest
    summary = run.summary()
    assert (summary["exact"], summary["steps"]) == (True, 5)
    faults = [(fault["kind"], fault["step"]) for fault in summary["faults"]]
    assert len(faults) == len(HARMS_AT_THE_END) + 3, faults
    assert {step for _, step in faults} <= {4, 5}
    assert [fault["steps_lost"] for fault in summary["faults"]] == [0] * len(faults)


def test_a_repeated_error_in_the_last_evaluation_is_the_users(tmp_path):
    """Control: what came before it was done again, and no more than that."""
    settings = ("-b", 8, "task.evaluation_samples=128", "task.always_fails_at=100")
    with Run(tmp_path, *SETTINGS, *settings, task=TASK) as run:
        assert run.wait() == 1, run.console
    assert "the same error at the same step again" in run.console
    assert len(run.events("plan")) == 2
