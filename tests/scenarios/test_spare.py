"""The process that waits for a rank to die: it becomes that rank, and is nobody until then."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.scenarios.conftest import WITHOUT_WORKERS as SETTINGS
from tests.scenarios.harness import Run, poll


def spare_of(run, number=1):
    """The pid of the spare that was ready as the ``number``-th."""
    poll(lambda: len(run.events("spare_ready")) >= number, what=f"spare {number}:\n{run.console}")
    pid = run.events("spare_ready")[number - 1]["pid"]
    assert Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip() == "ddp:spare"
    return pid


def status_with_spare(run):
    status = run.status()
    return status if status and status["spare"] else None


def test_the_spare_becomes_the_rank_that_died(fault_free, tmp_path):
    """It has built data and model, and log and weights are as with a fork; the next one is there for the next.

    Of two ranks that die together one gets it. It was no rank before: in no status, and no process more.
    """
    words = ("recovery.warm_spare=model", "task.pace_s=0.3")
    with Run(tmp_path, *SETTINGS, *words, world=3) as run:
        first = spare_of(run)
        status = poll(lambda: status_with_spare(run), what="a status")  # every half second
        assert status["spare"]["kind"] == "model"
        assert status["spare"]["build_s"] > 0
        assert first not in [rank["pid"] for rank in status["ranks"]]
        run.signal(signal.SIGKILL, run.rank_pid(1))
        second = spare_of(run, 2)
        assert run.rank_pid(1) == first
        run.signals_at_once(*((signal.SIGKILL, run.rank_pid(rank)) for rank in (0, 2)))
        spare_of(run, 3)
        assert second in (run.rank_pid(0), run.rank_pid(2))
        assert run.wait() == 0, run.console
    assert run.digest == fault_free(3).digest
    summary = run.summary()
    assert {fault["kind"] for fault in summary["faults"]} == {"rank_killed"}
    assert sum(fault["steps_lost"] for fault in summary["faults"]) == 0
    assert summary["exact"]
    taken = [(event["rank"], event["pid"]) for event in run.events("spare_taken")]
    assert taken[0] == (1, first)
    assert second in [pid for _, pid in taken]


LEADS_AWAY = """
import os
from tests.scenarios.workload import PacedTask
class LeadsAway(PacedTask):
    def build_model(self):
        print("the model is built")
        self.ends = os.pipe()
        os.dup2(self.ends[1], 1)
        return super().build_model()
"""


def test_a_task_that_leads_its_output_away_becomes_a_rank(fault_free, tmp_path):
    """What it has said before is in the rank's log; nobody waits for what the other end of a pipe may never send."""
    task = tmp_path / "leads_away.py"
    task.write_text(LEADS_AWAY, encoding="utf-8")
    words = ("recovery.warm_spare=model", "task.pace_s=0.16")
    with Run(tmp_path / "run", *SETTINGS, *words, task=f"{task}:LeadsAway") as run:
        spare = spare_of(run)
        run.signal(signal.SIGKILL, run.rank_pid(1))
        run.wait_for_event("repaired")
        assert run.rank_pid(1) == spare
        assert run.wait() == 0, run.console
    assert run.digest == fault_free(2).digest
    log = (run.logs / "rank_1.log").read_text(encoding="utf-8")
    assert log.count("the model is built") == 2


def test_a_spare_that_may_not_build_ahead_becomes_a_rank(fault_free, tmp_path):
    """One that has: the first test. None: test_hangs, where a zygote is stopped."""
    words = ("recovery.warm_spare=process", "task.pace_s=0.16")
    with Run(tmp_path, *SETTINGS, *words) as run:
        spare = spare_of(run)
        run.wait_for_step(6)
        run.signal(signal.SIGKILL, run.rank_pid(1))
        run.wait_for_event("repaired")
        assert run.rank_pid(1) == spare
        assert run.wait() == 0, run.console
    assert run.digest == fault_free(2).digest
    assert run.summary()["exact"]
    assert {event["kind"] for event in run.events("spare_ready")} == {"cpu"}


def test_a_spare_that_is_killed_or_stopped_is_replaced_and_no_fault(fault_free, tmp_path):
    """Nobody trains less for it; a rank that dies meanwhile, or with it, is forked."""
    # A spare that is stopped is soon replaced; a rank of a busy machine is given its time.
    quick = ("task.pace_s=0.36", "recovery.hang_min_s=0.6", "recovery.hang_factor=40")
    with Run(tmp_path, *SETTINGS, *quick) as run:
        run.signal(signal.SIGKILL, spare_of(run))
        run.wait_for_event("spare_ended", signal=signal.SIGKILL)
        stopped = spare_of(run, 2)
        run.signals_at_once((signal.SIGSTOP, stopped), (signal.SIGKILL, run.rank_pid(1)))
        run.wait_for_event("repaired")
        assert run.rank_pid(1) != stopped
        spare = spare_of(run, 3)
        run.signals_at_once((signal.SIGKILL, spare), (signal.SIGKILL, run.rank_pid(0)))
        assert run.wait() == 0, run.console
    assert run.digest == fault_free(2).digest
    summary = run.summary()
    assert [(fault["kind"], fault["rank"]) for fault in summary["faults"]] == [
        ("rank_killed", 1),
        ("rank_killed", 0),
    ]
    assert max(fault["seconds"]["total"] for fault in summary["faults"]) < 10.0, "nobody waits"


def test_a_spare_dies_with_a_supervisor_that_is_killed(tmp_path):
    """By the kernel: one that is stopped could not even read that its channel is closed."""
    with Run(tmp_path, *SETTINGS, "task.pace_s=0.16") as run:
        run.signal(signal.SIGSTOP, spare_of(run))
        run.signal(signal.SIGKILL)
        run.assert_gone()
        run.assert_machine_clean()
