"""Ranks that hang, stop or wait where it is hard to see who lets the others wait."""

from __future__ import annotations

import re
import signal

import pytest

from tests.ready import ZYGOTES
from tests.scenarios.conftest import STEPS
from tests.scenarios.harness import WORKLOAD, Run, poll
from tests.scenarios.workload import HOLD_NAME, TROUBLE_NAME

HOOKED = """
import os, pathlib, time
from tests.scenarios.workload import PacedTask

flag = pathlib.Path({flag!r})

def hang_once():
    if flag.exists():
        flag.unlink()
        time.sleep(1000)

os.register_at_fork(before=hang_once)

class HookedTask(PacedTask):
    pass
"""
QUICK = (
    *("-b", 8, "num_workers=0", "task.pace_s=0.01", "log.display=plain", "--audit"),
    *("save_every_steps=10", "save_interval=0", "evaluate_interval=0"),
    "recovery.hang_min_s=1",
    *(
        "recovery.replica_check_steps=5",
        "evaluate_every_steps=25",
        "recovery.evaluation_timeout_s=2",
        "recovery.checkpoint_timeout_s=3",
    ),
)
ENDLESS = ("--max-steps", 100_000)  # it goes on until the test has done what it is about


def end_repaired(run, *, times=1):
    """Stop the run once it trains again; it has saved, and ends as such a run does."""

    def repaired():
        assert run.process.poll() is None, f"ended early:\n{run.console}"
        return len(run.events("repaired")) >= times

    poll(repaired, what="the repair")
    run.wait_for_step(run.committed() + 2)
    run.signal(signal.SIGTERM)
    assert run.wait() == 75, run.console


def test_who_waits_for_an_evaluation_or_a_comparison_is_not_blamed(tmp_path):
    """Rank 1 hangs in each: it alone is replaced, though all are past the same deadline by then."""
    pace = ("task.pace_s=0.03",)
    with Run(tmp_path, *QUICK, *ENDLESS, *pace, world=3, task=f"{WORKLOAD}:HashedTask") as run:
        run.wait_for_step(5)
        (tmp_path / TROUBLE_NAME).write_text("state_dict 1 sleep1000")
        run.wait_for_event("repaired")
        (tmp_path / TROUBLE_NAME).write_text("evaluation 1 sleep1000")
        end_repaired(run, times=2)
    faults = run.events("fault")
    causes = [(f["kind"], f["rank"], f["phase"]) for f in faults if f["kind"] == "rank_hung"]
    assert causes == [("rank_hung", 1, "compare"), ("rank_hung", 1, "evaluate")], faults
    assert [plan["replaced"] for plan in run.events("plan")] == [[1], [1]]
    waited = {f["phase"] for f in faults if f["kind"] == "collective_failed"}
    assert waited == {"reduce"}
    # Who hangs has been made to say where before it was killed, who waits before it was freed.
    for rank, where in enumerate(("compute", "make_trouble", "compute")):
        log = (run.logs / f"rank_{rank}.log").read_text(encoding="utf-8")
        assert "(most recent call first):" in log
        assert f" in {where}\n" in log, log


def test_a_rank_that_hangs_once_the_world_has_formed_is_found(tmp_path):
    """Between forming and the first step, where the ranks settle what must be made up for."""
    hang = ("recovery.replica_check_steps=0", "--inject", "hang:rank=1,step=0,phase=compare")
    with Run(tmp_path, *QUICK, "--max-steps", 12, *hang) as run:
        assert run.wait() == 0, run.console
    [fault] = run.summary()["faults"]
    assert (fault["kind"], fault["rank"], fault["steps_lost"]) == ("rank_hung", 1, 0)
    assert [plan["replaced"] for plan in run.events("plan")] == [[1]]


def test_a_rank_that_is_stopped_while_it_starts_or_forms_is_replaced(tmp_path):
    """Long before either is overdue; its stacks are in its log, though it had none of its own yet."""
    # Who is killed has let the others catch up: the state that they go on with is as new.
    harms = ("slow:rank=1,step=12,phase=forward,seconds=0.25",)
    harms += ("kill:rank=1,step=12,phase=backward", "stop:rank=1,step=12,phase=startup")
    harms += ("slow:rank=0,step=24,phase=forward,seconds=0.25",)
    harms += ("kill:rank=0,step=24,phase=backward", "stop:rank=1,step=24,phase=forming")
    asked = [word for harm in harms for word in ("--inject", harm)]
    with Run(tmp_path, *QUICK, "--max-steps", 40, *asked, world=3) as run:
        assert run.wait() == 0, run.console
    faults = run.summary()["faults"]
    assert [(fault["kind"], fault["rank"]) for fault in faults] == [
        ("rank_killed", 1),
        ("rank_hung", 1),
        ("rank_killed", 0),
        ("rank_hung", 1),
    ], faults
    assert sum(fault["steps_lost"] for fault in faults) == 0
    log = (run.logs / "rank_1.log").read_text(encoding="utf-8")
    assert "(most recent call first)" in log
    assert " in _prepare\n" in log


def test_a_zygote_that_is_stopped_is_replaced(tmp_path):
    """It would fork nobody; the rank that dies just then gets its successor from another one."""
    how = {"variables": {ZYGOTES: "2"}}
    with Run(tmp_path, *QUICK, *ENDLESS, "recovery.warm_spare=false", **how) as run:
        run.wait_for_step(10)
        run.signal(signal.SIGSTOP, run.named("ddp:zygote").pid)
        run.signal(signal.SIGKILL, run.rank_pid(1))
        end_repaired(run)
    assert [fault["kind"] for fault in run.summary()["faults"]] == ["rank_killed"]
    assert len(run.events("zygote_ready")) == 2


def test_a_rank_slow_in_one_step_is_not_killed_each_epoch(tmp_path):
    """Two hundred times slower than the steps around it: at most the first one is taken for a hang."""
    slow = ("task.slow_at_sample=5", "task.slow_s=2", "evaluate_every_steps=0")
    with Run(tmp_path, *QUICK, *slow, "--max-steps", 36) as run:
        assert run.wait() == 0, run.console
    faults = run.summary()["faults"]
    assert [fault["kind"] for fault in faults] in ([], ["rank_hung"]), faults


@pytest.mark.slow
def test_a_zygote_that_hangs_in_a_fork_is_replaced(tmp_path):
    """In a hook that the user's module has registered; the system calls it asleep like any other."""
    flag, task = tmp_path / "hang", tmp_path / "hooked.py"
    task.write_text(HOOKED.format(flag=str(flag)), encoding="utf-8")
    steps = ("--max-steps", 60, "recovery.warm_spare=false")
    with Run(tmp_path / "run", *QUICK, *steps, task=f"{task}:HookedTask") as run:
        run.wait_for_step(10)
        flag.touch()
        run.signal(signal.SIGKILL, run.rank_pid(1))
        assert run.wait() == 0, run.console
    [fault] = run.summary()["faults"]
    assert (fault["kind"], fault["rank"], fault["steps_lost"]) == ("rank_killed", 1, 0)
    assert len(run.events("zygote_ready")) == 2


def test_a_store_that_is_stopped_is_replaced(tmp_path):
    """The world forms through it; nobody waits until forming is overdue."""
    hold = tmp_path / HOLD_NAME
    hold.write_text("11")  # rank 0 is not behind when rank 1 is killed
    with Run(tmp_path, *QUICK, *ENDLESS, "recovery.form_timeout_s=600") as run:
        run.wait_for_step(10)
        run.signal(signal.SIGSTOP, run.named("ddp:store").pid)
        run.signal(signal.SIGKILL, run.rank_pid(1))
        hold.unlink()
        end_repaired(run)
    faults = run.summary()["faults"]
    assert {event["kind"] for event in run.events("fault")} >= {"rank_killed", "store_died"}
    assert {fault["kind"] for fault in faults} <= {"rank_killed", "store_died"}, faults
    assert sum(fault["steps_lost"] for fault in faults) == 0


def test_a_task_whose_import_never_ends_is_an_error_that_says_where(tmp_path):
    """Within startup_timeout_s, with the stack that it hangs in (which may be torch's own import)."""
    task = tmp_path / "endless.py"
    task.write_text("import time\ntime.sleep(1000)\n", encoding="utf-8")
    wait = ("recovery.startup_timeout_s=5",)
    with Run(tmp_path / "run", *QUICK, *wait, task=f"{task}:Task") as run:
        assert run.wait() == 1
    assert "the process that imports torch was not ready within 5 s" in run.console
    # Of a deep import nothing may be there but modules: faulthandler stops at a hundred frames.
    assert re.search(r'\.py", line \d+ in (<module>|\w+)', run.console), run.console


def test_a_rank_that_hangs_again_where_all_wait_is_replaced_again(fault_free, tmp_path):
    """It is the one that does not leave when all are told to: no disagreement of the ranks, no user's error.

    The second one hangs in its first steps, which have a deadline of their own.
    """
    hangs = ("--inject", "hang:rank=1,step=20,phase=reducing,times=2")
    hangs += ("recovery.first_step_timeout_s=3",)
    with Run(tmp_path, *QUICK, "--max-steps", STEPS, *hangs, world=3) as run:
        assert run.wait() == 0, run.console
    reported = run.summary()["faults"]
    assert [(one["kind"], one["rank"], one["step"]) for one in reported] == [
        ("rank_hung", 1, 20)
    ] * 2
    assert [plan["replaced"] for plan in run.events("plan")] == [[1], [1]]
    assert (run.digest, run.summary()["exact"]) == (fault_free(3).digest, True)


def test_a_collective_that_one_rank_alone_has_begun_is_named_and_left(tmp_path):
    """All wait, so nobody is late: all leave, keep their processes, and do the step again."""
    (tmp_path / TROUBLE_NAME).write_text("loss 1 barriers 12")
    with Run(tmp_path, *QUICK, "--max-steps", 24, world=3) as run:
        assert run.wait() == 0, run.console
    [fault] = run.summary()["faults"]
    assert (fault["kind"], fault["rank"], fault["steps_lost"]) == ("collective_stuck", -1, 0)
    odd = re.search(r"begun in this step has rank 1 (\d+), every other (\d+)$", fault["cause"])
    assert odd, fault["cause"]
    assert int(odd[1]) == int(odd[2]) + 4
    assert odd[0] in run.console
    pids = {(record["rank"], record["pid"]) for record in run.events("rank_formed")}
    assert len(pids) == 3


def test_a_collective_that_one_rank_alone_waits_in_is_named(tmp_path):
    """On the board that rank is the late one, and so is replaced; what it waited in is reported."""
    (tmp_path / TROUBLE_NAME).write_text("loss 1 barrier 12")
    with Run(tmp_path, *QUICK, "--max-steps", 24, world=3) as run:
        assert run.wait() == 0, run.console
    [fault] = run.summary()["faults"]
    assert (fault["kind"], fault["rank"], fault["steps_lost"]) == ("rank_hung", 1, 0)
    reported = (
        r" \(in _make, workload\.py:\d+\); collectives begun in this step: rank 1 2, every other 1$"
    )
    assert re.search(reported, fault["cause"]), fault["cause"]
