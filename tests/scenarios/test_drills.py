"""Fire drills: what a replacement would compute is known before anything breaks, and costs the run nothing."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.scenarios.conftest import LONG, STEPS, WITHOUT_WORKERS
from tests.scenarios.harness import Run, poll
from tests.scenarios.workload import HOLD_NAME

SETTINGS = (*WITHOUT_WORKERS, *LONG)
HIDDEN = Path(__file__).with_name("hidden.py")
DRILLED = (2, 5)
DRILLS = (*WITHOUT_WORKERS, "drill_at=2,5")


def task(name):
    return f"{HIDDEN}:{name}"


def drill_of(run):
    """The pid of the drill that is under way."""
    poll((run.folder / "lingers").exists, what=f"a drill:\n{run.console}")
    return run.named("ddp:drill").pid


def hold(folder, calls):
    """Have no rank come further than to so many losses before the file is gone that this returns."""
    path = folder / HOLD_NAME
    path.write_text(str(calls))
    return path


def finish(folder, *settings, event="drill", losses=1, **how):
    """A run to its end, which waits some steps behind the second drill until both have come to theirs.

    So it needs no slow steps, however little of a core a drill gets. ``losses``: of a step.
    """
    held = hold(folder, losses * (DRILLED[-1] + 4))
    with Run(folder, *settings, **how) as run:
        for step in DRILLED:
            run.wait_for_event(event, step=step)
        held.unlink()
        assert run.wait() == 0, run.console
    return run


def test_drills_change_no_bit_of_a_run(fault_free, tmp_path):
    """Nor are they a fault; they are reported, and what they have written is gone."""
    run = finish(tmp_path, *DRILLS, "num_workers=1", "log.console=verbose", world=3)
    assert run.digest == fault_free(3).digest
    summary = run.summary()
    assert summary["exact_proof"]["drilled"] == [2, 5], run.console
    assert (summary["exact"], summary["faults"]) == (True, [])
    for step, rank in ((2, 0), (5, 1)):
        words = f"fire drill at step {step}: a replay of rank {rank} gave identical results ("
        assert words in (run.logs / "supervisor.log").read_text(encoding="utf-8")
        assert words in run.console
    assert [event["differs"] for event in run.events("drill")] == ["", ""]


def test_steps_at_random_are_drilled_and_each_repair_is_proved(fault_free, tmp_path):
    """Rank 0 is killed first, then rank 1: each repair by a drill of the other; the last one with the last steps."""
    settings = (*SETTINGS, "drill_at=2", "recovery.proof_share=1", "task.pace_s=0.1")
    with Run(tmp_path, *settings) as run:
        run.wait_for_event("drill", step=2)  # of rank 0: it is no proof of what follows
        for killed in (0, 1):
            passed = len(run.events("drill"))
            run.signal(signal.SIGKILL, run.rank_pid(killed))
            poll(lambda count=passed: len(run.events("drill")) > count, what="a drill")
            assert run.events("drill")[-1]["rank"] == 1 - killed
        assert run.wait() == 0, run.console
    assert run.digest == fault_free(2, *LONG).digest
    summary = run.summary()
    assert summary["exact"], run.console
    assert summary["exact_proof"]["repairs_proved"] == "2 of 2"
    assert 2 in summary["exact_proof"]["drilled"], "what was drilled before a fault counts"


@pytest.mark.parametrize(
    ("name", "differs"),
    [
        ("HoldsAFile", "0.weight"),  # a global: the test behind this one
        ("HoldsALayer", "4.bias"),
    ],
)
def test_what_no_state_holds_is_found_with_a_parameter_s_name(tmp_path, name, differs):
    """The run goes on, and is not exact from then on; it is said once for each rank, as a warning."""
    run = finish(tmp_path, *DRILLS, task=task(name))
    summary = run.summary()
    assert not summary["exact"]
    assert len(summary["inexact_reasons"]) == 2
    for rank, step, reason in zip((0, 1), (2, 5), summary["inexact_reasons"], strict=True):
        assert f"a replacement of rank {rank} would not compute the same at step {step}: " in reason
        assert f"first in {differs} (state in a global, a closure, a file" in reason
    assert summary["exact_proof"]["drilled"] == []
    assert [event["differs"] for event in run.events("drill")] == [differs] * 2
    warned = [line for line in run.console.splitlines() if "WARNING" in line and "drill" in line]
    assert len(warned) == 2, run.console


def test_an_update_by_what_no_state_holds_is_found(tmp_path):
    """No rank has computed anything wrong, and the run is exact until another process makes the updates."""
    held = hold(tmp_path, 9)
    with Run(tmp_path, *DRILLS, task=task("RateByEnvironment")) as run:
        for step in DRILLED:
            run.wait_for_event("drill", step=step)
        first = (
            "rank 0 would not compute the same update at step 2: first in weight_decay of the opt"
        )
        assert run.console.count(first) == 1
        assert "would not compute the same update at step 5" not in run.console
        assert run.events("diagnosed") == []
        for rank in (0, 1):
            run.signal(signal.SIGKILL, run.rank_pid(rank))
        held.unlink()
        assert run.wait() == 0, run.console
    reasons = run.summary()["inexact_reasons"]
    assert any("state that an update uses (in a global" in one for one in reasons), run.console


def test_drills_repeat_the_updates_of_a_task(tmp_path):
    """With its own scheduler, clipping, an average and an accumulated batch: each drill makes the update, and passes."""
    settings = ("optim.max_grad_norm=0.1", "optim.ema_decay=0.9", "micro_batch_size=2")
    run = finish(tmp_path, *DRILLS, *settings, losses=4, task=task("RateByItself"))
    found = [(one["differs"], one.get("updated")) for one in run.events("drill")]
    assert found == [("", True)] * len(found)
    assert len(found) >= 2
    assert run.summary()["exact"], run.console


def test_a_run_that_must_be_exact_ends_when_a_drill_differs(tmp_path):
    """With exit 1; its state is on disk."""
    settings = (*DRILLS, "recovery.require_exact=true", "task.pace_s=0.15")
    with Run(tmp_path, *settings, task=task("HoldsAGlobal")) as run:
        assert run.wait(hurries=False) == 1, run.console
    assert "recovery.require_exact is set: a replacement of rank 0" in run.console
    assert run.summary()["checkpoint_step"] >= 2


def test_a_drill_has_rank_and_world_size_of_its_rank(tmp_path):
    """As torch compares them: no difference is found where there is none."""
    run = finish(tmp_path, *DRILLS, task=task("AsksWhoItIs"))
    assert run.summary()["exact_proof"]["drilled"] == [2, 5], run.console


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("AsksTheOthers", "NeedsOthersError: allreduce needs the other ranks"),
        ("NeedsItsPast", "RuntimeError: it knows nothing of what was before"),
    ],
)
def test_a_drill_that_cannot_be_done_is_said_and_proves_nothing(tmp_path, name, why):
    """It is no fault, and the run stays what it was."""
    run = finish(tmp_path, *DRILLS, event="drill_skipped", task=task(name))
    summary = run.summary()
    assert f"drill at step 2 of rank 0 skipped: {why}" in run.console
    assert (summary["exact"], summary["exact_proof"]["drilled"]) == (True, [])
    assert summary["faults"] == []
    assert "Traceback" in (run.logs / "drill.log").read_text(encoding="utf-8")


def test_a_drill_that_is_killed_or_stopped_is_skipped(fault_free, tmp_path):
    """One that is stopped is ended; no rank is slower for it, and as far as the system lets it, it yields to them."""
    settings = ("drill_at=2,8", "recovery.hang_min_s=0.6", "recovery.hang_factor=40")
    settings += ("task.pace_s=0.08",)
    with Run(tmp_path, *SETTINGS, *settings, task=task("Lingers")) as run:
        for number, step in ((signal.SIGKILL, 2), (signal.SIGSTOP, 8)):
            pid = drill_of(run)
            assert os.sched_getscheduler(pid) == os.SCHED_IDLE
            shown = Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="ascii")
            assert shown.strip() == "1000"
            (tmp_path / "lingers").unlink()  # the next one does, too
            run.signal(number, pid)
            run.wait_for_event("drill_skipped", step=step)
        assert run.wait() == 0, run.console
    assert "drill at step 2 of rank 0 skipped: its process ended (signal 9)" in run.console
    assert re.search(r"drill at step 8 of rank \d skipped: its process was stopped", run.console)
    assert run.digest == fault_free(2, *LONG).digest
    assert run.summary()["faults"] == []
    assert "a drill of rank 0" in (run.logs / "drill.log").read_text(encoding="utf-8")


def test_a_drill_is_ended_when_an_incident_opens(fault_free, tmp_path):
    """It would take from what the repair needs."""
    held = hold(tmp_path, 9)
    with Run(tmp_path, *WITHOUT_WORKERS, "drill_at=2", task=task("Lingers")) as run:
        pid = drill_of(run)
        run.signal(signal.SIGKILL, run.rank_pid(1))
        poll(lambda: not Path(f"/proc/{pid}").exists(), what="the end of the drill")
        held.unlink()
        assert run.wait() == 0, run.console
    assert run.digest == fault_free(2).digest
    summary = run.summary()
    assert [fault["kind"] for fault in summary["faults"]] == ["rank_killed"]
    assert summary["exact"], run.console
    [step] = summary["exact_proof"]["drilled"]
    assert step > 2, "the next generation has made up for it"


def test_a_run_with_a_replacement_ends_once_a_drill_has_passed(fault_free, tmp_path):
    """Killed so late that no step is left to be drilled: what was cut short is done after training."""
    held = hold(tmp_path, STEPS - 2)
    slow = tmp_path / "all_linger"
    slow.touch()
    settings = (*WITHOUT_WORKERS, f"drill_at={STEPS - 6}")
    with Run(tmp_path, *settings, task=task("Lingers")) as run:
        drill_of(run)
        run.wait_for_step(STEPS - 3)
        run.signal(signal.SIGKILL, run.rank_pid(1))
        held.unlink()
        poll(lambda: " is waited for, 30 s at most" in run.console, what="the end of training")
        slow.unlink()
        assert run.wait() == 0, run.console
    assert run.digest == fault_free(2).digest
    summary = run.summary()
    assert summary["exact"], run.console
    assert len(summary["exact_proof"]["drilled"]) == 1
    assert " is waited for, 30 s at most: a rank was replaced" in run.console


def test_a_drill_ends_with_its_supervisor_and_leaves_no_file_for_long(tmp_path):
    """The kernel ends the process; the folder is known by its name."""
    held = hold(tmp_path, 9)
    with Run(tmp_path, *WITHOUT_WORKERS, "drill_at=2", task=task("Lingers")) as run:
        drill_of(run)
        run.signal(signal.SIGKILL)
        run.assert_gone()
    assert (run.checkpoints / ".drill").exists()
    (tmp_path / "lingers").unlink()
    held.unlink()
    with Run(tmp_path, *WITHOUT_WORKERS) as run:
        assert run.wait() == 0, run.console


def test_fewer_ranks_drill_what_is_theirs(tmp_path):
    """With a rank given up, the shares are others; so are they when it is back."""
    settings = ("--min-ranks", 1, "recovery.slot_failures_max=1", "drill_at=2,24")
    held = hold(tmp_path, 6)
    with Run(tmp_path, *SETTINGS, *settings, world=3) as run:
        run.wait_for_event("drill", step=2)
        run.signal(signal.SIGKILL, run.rank_pid(0))
        held.write_text("50")  # two a step, as two have the batch of three
        run.wait_for_event("drill", step=24)
        held.unlink()
        assert run.wait() == 0, run.console
    assert run.summary()["exact_proof"]["drilled"] == [2, 24], run.console
    [event] = run.events("drill")[1:]
    assert event["rank"] == 2  # the second of those that are left
