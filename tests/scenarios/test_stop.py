"""Runs that are stopped at any step and resumed by the same command: nothing of them is lost."""

from __future__ import annotations

import contextlib
import signal
import time

from tests.scenarios.conftest import LONG, LONG_STEPS, NO_SPARE, STEPS
from tests.scenarios.conftest import WITHOUT_WORKERS as SETTINGS
from tests.scenarios.harness import Run, poll

CODES = {
    signal.SIGINT: (130, "interrupted"),
    signal.SIGTERM: (75, "preempted"),
    signal.SIGHUP: (75, "preempted"),
    signal.SIGUSR1: (75, "preempted"),
}


def to_supervisor(run, number):
    run.signal(number)


def to_one_rank(run, number):
    """As a scheduler may that signals a rank and not the supervisor."""
    run.signal(number, run.rank_pid(1))


def to_everybody(run, number):
    """As container runtimes and systemd do: none of the processes must fall over it."""
    run.wait_for_event("spare_ready")
    everybody = {process.pid for process in run.processes()}
    # Supervisor, guardian, zygote, store, spare, saver, and two ranks with a loader worker each.
    assert len(everybody) == 10
    for pid in sorted(everybody, reverse=True):  # the supervisor, the oldest, comes last
        # Should this test be held up here, the first rank has asked for the stop and it is done.
        with contextlib.suppress(ProcessLookupError):
            run.signal(number, pid)


def stop_at(run, step, number, *, deliver=to_supervisor):
    """Have the run stopped at ``step`` and check everything that a stopped run promises."""
    run.wait_for_step(step)
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


def finish(folder, *, settings=SETTINGS, steps=STEPS):
    """The same command again, to its end."""
    with Run(folder, *settings, NO_SPARE) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["steps"] == steps
    return run


def test_a_launch_ends_in_time_and_the_next_goes_on(fault_free, tmp_path):
    """By its own limit, then before the end that SLURM has announced."""
    settings = (*SETTINGS, *LONG, "task.pace_s=0.3", NO_SPARE)
    with Run(tmp_path, *settings, "--max-time", "3s") as run:
        assert run.wait(hurries=False) == 75, run.console
    assert "run.max_time has passed" in run.console
    first = run.summary()["steps"]
    announced = {"SLURM_JOB_END_TIME": str(int(time.time()) + 6)}
    with Run(tmp_path, *settings, variables=announced) as run:
        assert run.wait(hurries=False) == 75, run.console
    assert "SLURM ends the job in" in run.console
    assert 0 < first <= run.summary()["steps"] < LONG_STEPS
    run = finish(tmp_path, settings=settings, steps=LONG_STEPS)
    assert run.digest == fault_free(2, *LONG).digest


# To whom: the supervisor, a rank alone, then all processes at once.
STOPS = (
    *((2, signal.SIGINT, to_supervisor), (3, signal.SIGUSR1, to_supervisor)),
    *((3, signal.SIGTERM, to_one_rank), (3, signal.SIGHUP, to_everybody)),
)


def test_a_run_stopped_at_any_step_ends_as_without_stops(fault_free, tmp_path):
    """Each launch starts at the exact next step, and takes every step's samples as without faults."""
    # Each signal must come well before the end; an evaluation has loader workers of its own.
    settings = (*SETTINGS, "task.pace_s=0.24", "evaluate_interval=0")
    reached, names = 0, set()
    for steps, number, deliver in STOPS:
        workers = ("num_workers=1",) if deliver is to_everybody else (NO_SPARE,)
        with Run(tmp_path, *settings, *workers) as run:
            reached = stop_at(run, reached + steps, number, deliver=deliver)
            assert not run.events("zygote_ended")
        names.add(run.summary()["run_id"])
    run = finish(tmp_path, settings=settings)
    assert run.digest == fault_free(2).digest
    assert {run.summary()["run_id"]} == names
    taken, expected = (
        [{step: line["indices"] for step, line in audit.items()} for audit in one.audit(2)]
        for one in (run, fault_free(2))
    )
    assert taken == expected


def test_a_stop_during_evaluation_does_not_wait_for_its_end(fault_free, tmp_path):
    """A long evaluation is cut short; the resumed run makes it good and ends with the same weights."""
    slow = (
        *(*SETTINGS, NO_SPARE, "evaluate_interval=0", "evaluate_every_steps=18"),
        *("task.validation_samples=120", "task.validation_s=0.2", "task.pace_s=0"),
    )
    with Run(tmp_path, *slow) as run:
        run.wait_for_step(18)
        poll(lambda: run.phase(0) == "evaluate", what="the evaluation")
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
        assert run.summary()["steps"] == 18
        assert not evaluations(run, step=18)
    resumed = finish(tmp_path, settings=slow)
    assert evaluations(resumed, step=18) == 1
    assert resumed.digest == fault_free(2).digest


def test_a_checkpoint_that_is_asked_for_outlives_its_rank(fault_free, tmp_path):
    """SIGUSR2 to the supervisor: one file of that time, and the run goes on as if nothing were."""
    settings = (*SETTINGS, "save_every_steps=1000", "task.pace_s=0.18")
    with Run(tmp_path, *settings) as run:
        run.wait_for_step(6)
        run.signal(signal.SIGUSR2)
        run.signal(signal.SIGKILL, run.rank_pid(0))
        saved = run.wait_for_event("checkpoint_saved")
        assert run.wait() == 0, run.console
    assert 6 <= saved["step"] < STEPS
    path = f"{run.checkpoints / 'step_'}{saved['step']:08d}.pt"
    # A rank may die when the file is there and nobody knows of it.
    reported = (f"saved {path}", f"{path} is on disk")
    assert any(words in run.console for words in reported), run.console
    assert [fault["rank"] for fault in run.summary()["faults"]] == [0]
    assert run.digest == fault_free(2).digest


def test_who_asks_all_processes_for_a_checkpoint_disturbs_none(fault_free, tmp_path):
    """Only the supervisor acts on it: no other one dies of it, or writes its stacks."""
    settings = (*SETTINGS, "num_workers=1", "save_every_steps=1000", "task.pace_s=0.3")
    with Run(tmp_path, *settings) as run:
        run.wait_for_step(2)
        to_everybody(run, signal.SIGUSR2)
        saved = run.wait_for_event("checkpoint_saved")
        assert run.wait() == 0, run.console
    assert 2 <= saved["step"] < STEPS
    assert not run.events("zygote_ended")
    assert run.summary()["faults"] == []
    logs = [path.read_text() for path in run.logs.glob("rank_*.log")]
    assert "most recent call first" not in "".join(logs)
    assert run.digest == fault_free(2).digest


def test_a_stop_during_a_save_keeps_both_the_save_and_the_stop(tmp_path):
    """A signal that lands in the middle of a save neither tears the file nor gets lost."""
    big = ("task.width=100000", "task.pace_s=0.1")  # there is always a save, and time to see it
    settings = (*SETTINGS, "--max-steps", 12, "save_every_steps=1", *big, NO_SPARE)
    with Run(tmp_path / "stopped", *settings) as run:
        run.wait_for_step(4)
        poll(lambda: list(run.checkpoints.glob(".*tmp*")), what="a save", every_s=0.0005)
        run.signal(signal.SIGINT)
        assert run.wait() == 130, run.console
    resumed = finish(tmp_path / "stopped", settings=settings, steps=12)
    cheap = ("save_every_steps=0", "task.pace_s=0")
    with Run(tmp_path / "fault_free", *settings, *cheap) as run:
        assert run.wait() == 0, run.console
    assert resumed.digest == run.digest


def evaluations(run, *, step):
    """How often rank 0 has logged the result of an evaluation at ``step``."""
    lines = (run.logs / "rank_0.log").read_text(encoding="utf-8").splitlines()
    return sum(f"step {step} | evaluated at step {step}:" in line for line in lines)
