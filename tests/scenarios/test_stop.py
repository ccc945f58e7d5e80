"""Runs that are stopped at any step and resumed by the same command: nothing of them is lost."""

from __future__ import annotations

import random
import signal

import pytest

from tests.scenarios.conftest import SETTINGS, STEPS
from tests.scenarios.harness import Run, poll

CODES = {
    signal.SIGINT: (130, "interrupted"),
    signal.SIGTERM: (75, "preempted"),
    signal.SIGHUP: (75, "preempted"),
    signal.SIGUSR1: (75, "preempted"),
}


def stop_at(run, step, number, *, deliver=None):
    """Have the run stopped at ``step`` and check everything that a stopped run promises."""
    run.wait_for_step(step)
    if deliver is None:
        run.signal(number)
    else:
        deliver(run, number)
    code, status = CODES[number]
    assert run.wait() == code, run.console
    summary = run.summary()
    assert (summary["status"], summary["exit_code"]) == (status, code)
    assert step <= summary["steps"] < STEPS
    assert summary["faults"] == []
    assert summary["checkpoint"] == str(run.checkpoints / f"step_{summary['steps']:08d}.pt")
    assert run.status()["state"] == "done"
    return summary["steps"]


def finish(folder, *, world, settings=SETTINGS, steps=STEPS):
    """The same command again, to its end."""
    with Run(folder, *settings, world=world) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["steps"] == steps
    return run


@pytest.mark.parametrize(
    ("world", "number"),
    [
        (1, signal.SIGTERM),
        (1, signal.SIGINT),
        (2, signal.SIGINT),
        (2, signal.SIGHUP),
        (3, signal.SIGUSR1),
    ],
)
def test_a_run_stopped_at_any_step_ends_as_if_it_had_not_been(peace, tmp_path, world, number):
    """Stop, the same command again: the weights and every step's samples are those of peace."""
    step = random.Random(f"{world}{number}").randrange(3, STEPS - 20)
    with Run(tmp_path, *SETTINGS, world=world) as run:
        stop_at(run, step, number)
    run_id = run.summary()["run_id"]
    run = finish(tmp_path, world=world)
    assert run.digest == peace(world).digest
    assert run.summary()["run_id"] == run_id
    of_peace = [
        {step: line["indices"] for step, line in a.items()} for a in peace(world).audit(world)
    ]
    assert [
        {step: line["indices"] for step, line in a.items()} for a in run.audit(world)
    ] == of_peace


def test_a_run_stopped_several_times_ends_as_if_it_had_not_been(peace, tmp_path):
    """Each launch starts at the exact next step, however many there are."""
    reached = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        with Run(tmp_path, *SETTINGS) as run:
            reached = stop_at(run, reached + 11, number)
        assert (run.checkpoints / f"step_{reached:08d}.pt").exists()
    assert finish(tmp_path, world=2).digest == peace(2).digest


def test_sigterm_to_one_rank_stops_the_whole_run(peace, tmp_path):
    """A scheduler that signals a rank and not the supervisor gets the same saved end."""
    with Run(tmp_path, *SETTINGS) as run:
        stop_at(
            run,
            17,
            signal.SIGTERM,
            deliver=lambda run, number: run.signal(number, run.rank_pid(1)),
        )
    assert finish(tmp_path, world=2).digest == peace(2).digest


def test_sigterm_to_every_process_at_once_stops_the_run_in_order(peace, tmp_path):
    """Container runtimes signal all processes: ranks and loader workers must not fall over it."""

    def to_everybody(run, number):
        # The zygote and the store have no state; they take a SIGTERM as their end at any time.
        spared = {run.named("ddp:zygote").pid, run.named("ddp:store").pid}
        everybody = {process.pid for process in run.processes()} - spared
        assert len(everybody) == 5, "supervisor, two ranks, a loader worker each"
        for pid in sorted(everybody, reverse=True):  # the supervisor, the oldest, comes last
            run.signal(number, pid)

    with Run(tmp_path, *SETTINGS) as run:
        stop_at(run, 10, signal.SIGTERM, deliver=to_everybody)
    assert finish(tmp_path, world=2).digest == peace(2).digest


def test_a_stop_during_evaluation_does_not_wait_for_its_end(tmp_path):
    """A long evaluation is cut short; the resumed run makes it good and ends with the same weights."""
    short = (*SETTINGS, "--max-steps", 24, "evaluate_interval=0", "task.validation_samples=240")
    slow = (*short, "evaluate_every_steps=12", "task.validation_s=0.2")
    with Run(tmp_path / "stopped", *slow) as run:
        run.wait_for_step(12)
        poll(lambda: run.phase(0) == "evaluate", what="the evaluation")
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
        assert run.summary()["steps"] == 12
        assert not evaluations(run, step=12)
    resumed = finish(tmp_path / "stopped", world=2, settings=slow, steps=24)
    assert evaluations(resumed, step=12) == 1
    with Run(tmp_path / "peace", *short) as run:
        assert run.wait() == 0, run.console
    assert resumed.digest == run.digest


def test_a_stop_during_a_save_keeps_both_the_save_and_the_stop(tmp_path):
    """A signal that lands in the middle of a save neither tears the file nor gets lost."""
    settings = (*SETTINGS, "--max-steps", 24, "save_every_steps=1", "task.width=100000")
    with Run(tmp_path / "stopped", *settings) as run:
        run.wait_for_step(9)
        poll(lambda: list(run.checkpoints.glob(".*tmp*")), what="a save", every_s=0.0005)
        run.signal(signal.SIGINT)
        assert run.wait() == 130, run.console
    resumed = finish(tmp_path / "stopped", world=2, settings=settings, steps=24)
    with Run(tmp_path / "peace", *settings) as run:
        assert run.wait() == 0, run.console
    assert resumed.digest == run.digest


def evaluations(run, *, step):
    """How often rank 0 has logged the result of an evaluation at ``step``."""
    lines = (run.logs / "rank_0.log").read_text(encoding="utf-8").splitlines()
    return sum(f"step {step} | evaluated:" in line for line in lines)
