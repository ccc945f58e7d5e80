"""When faults end a run: the budget, the same error again, and what the kernel kills for memory."""

from __future__ import annotations

import itertools

import pytest

from ddp_runner.kernel.processes.memory_limits import KernelKills
from ddp_runner.kernel.rules.exits import ExitCode, RunStatus
from ddp_runner.kernel.rules.faults import FaultKind
from ddp_runner.kernel.rules.lifecycle import RankState
from ddp_runner.kernel.wire.events import RepairedInPlace, TuningChanged
from tests.supervisor.judging import assert_done, lost, plans
from tests.supervisor.simulated import SAVER, SPARE


def made_container(root):
    """A made control group that has killed nobody; returns the file that counts."""
    events = root / "sys/fs/cgroup/memory.events"
    for path, text in ((events, "oom_kill 0\n"), (root / "proc/self/cgroup", "0::/\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return events


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kills", [0, 1, 2])
def test_of_two_ranks_killed_at_once_the_larger_was_killed_for_memory(
    simulate, tmp_path, kills, seed
):
    """Whichever is reaped first; no more of them than the kernel has counted."""
    run, events = simulate(seed=seed), made_container(tmp_path)
    run.node.kernel_kills = KernelKills(tmp_path)
    run.to_step(15)
    for rank, size in ((0, 10), (1, 1), (2, 2)):
        run.world.ranks[rank].rss_bytes = size
    events.write_text(f"oom_kill {kills}\n")
    run.kill(1, 2)
    assert_done(run)
    kinds = {fault["rank"]: fault["kind"] for fault in run.events("fault") if fault["rank"] > 0}
    assert kinds == {
        1: "out_of_memory" if kills == 2 else "rank_killed",
        2: "out_of_memory" if kills else "rank_killed",
    }


@pytest.mark.parametrize(("reported", "kind"), [(3, "rank_killed"), (1, "out_of_memory")])
def test_kills_of_loader_workers_are_not_taken_for_that_of_a_rank(
    simulate, tmp_path, reported, kind
):
    """Three of one search; control: of two of them nobody says whose they were."""
    run, events = simulate(), made_container(tmp_path)
    run.node.kernel_kills = KernelKills(tmp_path)
    run.to_step(15)
    events.write_text("oom_kill 3\n")
    fault = run.fault(run.rank(1), FaultKind.BAD_SAMPLE, "no worker survives it")
    message = RepairedInPlace(rank=1, fault=fault, action="", seconds=1.0, kernel_kills=reported)
    run.send(run.rank(1), message)
    run.pass_time(0.1)
    run.kill(2)
    assert_done(run)
    assert plans(run) == [(2, kind, (2,))]


@pytest.mark.parametrize("helper", [SPARE, SAVER])
@pytest.mark.parametrize("kills", [1, 2])
def test_the_kill_of_a_helper_is_not_taken_for_a_rank_s(simulate, tmp_path, helper, kills):
    """It is no fault; control: the kernel has killed another one."""
    run, events = simulate(steps=300), made_container(tmp_path)
    run.node.kernel_kills = KernelKills(tmp_path)
    run.to_step(15)
    run.run_until(lambda: run.rank(helper) is not None)
    events.write_text(f"oom_kill {kills}\n")
    run.kill(helper)
    run.pass_time(0.1)
    run.kill(2)
    assert_done(run)
    assert plans(run) == [(2, "rank_killed" if kills == 1 else "out_of_memory", (2,))]


@pytest.mark.parametrize("plain_retry", [True, False])
def test_kernel_kills_at_every_step_end_a_run_without_a_way_out(simulate, tmp_path, plain_retry):
    """The budget counts them; control: not while each successor has halved something."""
    events = tmp_path / "sys/fs/cgroup/memory.events"
    for path, text in ((events, "oom_kill 0\n"), (tmp_path / "proc/self/cgroup", "0::/\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    run = simulate(max_restarts=3)
    run.node.kernel_kills = KernelKills(tmp_path)
    for number in range(1, 6):
        run.to_step(10 * number)
        events.write_text(f"oom_kill {number}\n")
        run.kill(1)
        repaired = len(run.events("repaired"))
        run.run_until(lambda count=repaired: run.ending or len(run.events("repaired")) > count)
        if run.ending is not None:
            break
        changed = TuningChanged(
            rank=1,
            step=run.best,
            action="x",
            inexact_reason="",
            fault_free=True,
            plain_retry=plain_retry,
        )
        run.send(run.rank(1), changed)
    if not plain_retry:
        assert_done(run)
        assert len(lost(run)) == 5
        return
    assert (run.ending.status, run.ending.exit_code) == (RunStatus.GAVE_UP, ExitCode.GAVE_UP)
    assert "rank 1 killed by the kernel: out of memory" in run.ending.reason
    assert "4 repairs within" in run.ending.reason
    assert len(lost(run)) == 4


def test_the_budget_ends_the_run_with_the_cause_that_was_not_repaired(simulate):
    """Exit 3; those before it were repaired, so none of them is named."""
    run = simulate(max_restarts=3)
    for number, rank in enumerate((2, 1, 0, 1)):
        run.to_step(10 + 10 * number)
        run.kill(rank)
        if number < 3:
            run.run_until(lambda count=number: len(run.events("repaired")) > count)
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.GAVE_UP, ExitCode.GAVE_UP)
    assert ending.reason.startswith(
        "gave up at step 40: 4 repairs within an hour (--max-restarts 3); the last: rank 1 killed"
    )


def test_a_crash_loop_backs_off_and_ends_with_its_first_cause(simulate):
    """No step is committed: three generations, each later than the one before, then exit 3."""
    run = simulate(max_restarts=100, no_progress_generations=4)
    run.to_step(15)
    run.leave(1, code=7)
    forks = []
    while run.ending is None:
        run.run_until(lambda: run.rank(1) is not None or run.ending)
        if run.ending is None:
            forks.append(run.clock.now_s)
            run.leave(1, code=7)
            run.pass_time(0.2)
    assert run.ending.exit_code == ExitCode.GAVE_UP
    assert "rank 1 exited with code 7" in run.ending.reason
    waits = [later - earlier for earlier, later in itertools.pairwise(forks)]
    assert len(forks) == 3
    assert waits == sorted(waits)
    assert waits[0] >= 0.5


def test_a_rank_killed_at_one_step_again_and_again_spends_the_budget(simulate):
    """Each time a little later, and not for ever: nobody knows who kills it."""
    run = simulate(max_restarts=5)
    run.to_step(15)
    run.is_held = True
    run.kill(1)
    while run.ending is None:
        run.run_until(lambda: run.ending or run.world.ranks[1].state is RankState.FORMING)
        run.kill(1)
        run.pass_time(0.1)
    assert run.ending.exit_code == ExitCode.GAVE_UP
    assert "6 repairs within" in run.ending.reason
    waits = [text.rpartition(" in ")[2] for level, text in run.outputs.said if level == "WARNING"]
    assert waits[2:] == ["0.5 s", "1 s", "2 s"]


def test_the_same_error_at_the_same_step_is_the_users(simulate):
    """Exit 1 with the text, at the second time; the first is retried."""
    run = simulate()
    run.to_step(15)
    run.fail(1)
    run.run_until(lambda: run.events("repaired"))
    run.best = 0
    step = run.supervisor.recorder.accounting.faults[0].incident.culprit.step
    for process in run.processes.values():
        process.committed = min(process.committed, step)
    run.fail(1)
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.FAILED, ExitCode.FAILED)
    assert "ValueError: no" in ending.reason


def test_redoing_lost_steps_is_no_progress(simulate):
    """What hangs at one step again has the time of a start, though a checkpoint lies between."""
    run = simulate(
        steps=60,
        hang_min_s=1.0,
        first_step_timeout_s=30.0,
        max_restarts=100,
        no_progress_generations=100,
    )
    waited = []
    for _ in range(3):
        run.to_step(17)
        run.run_until(lambda: run.rank(0).committed >= 17)
        run.sleep(1)
        since_s, known = run.clock.now_s, len(run.events("fault"))
        run.run_until(lambda known=known: len(run.events("fault")) > known)
        waited.append(run.clock.now_s - since_s)
        run.run_until(lambda: run.rank(1) is not None and not run.rank(1).asleep)
        run.best = 0
        run.kill(0, 1, 2)
        run.run_until(lambda: run.rank(0) is not None and run.best > 0)
    assert [round(seconds) for seconds in waited] == [1, 30, 30]
    assert_done(run)


def test_a_process_that_went_back_has_still_settled(simulate):
    """After a roll-back below the step at which it joined, its own steps count, not the run's."""
    run = simulate(hang_min_s=1.0, first_step_timeout_s=100.0)
    run.to_step(30)
    run.kill(1)
    run.run_until(lambda: run.events("repaired"))
    run.to_step(36)
    for process in run.processes.values():
        process.committed = min(process.committed, 20)
    run.pass_time(0.3)
    assert run.rank(1).committed < 30
    run.sleep(1)
    run.run_until(lambda: len(plans(run)) == 2, within_s=2.0)
    assert_done(run)
