"""The processes above and beside the ranks die: supervisor, zygote, store."""

from __future__ import annotations

import contextlib
import signal

import psutil
import pytest

from tests.ready import ZYGOTES
from tests.scenarios.conftest import PATIENT, WITHOUT_WORKERS
from tests.scenarios.harness import Run, poll
from tests.scenarios.workload import TROUBLE_NAME

HELD = """
import pathlib, time
from tests.scenarios.workload import PacedTask

while pathlib.Path({held!r}).exists():
    time.sleep(0.01)

class HeldTask(PacedTask):
    pass
"""


def test_a_rank_that_holds_the_interpreter_lock_dies_with_its_supervisor(tmp_path):
    """No thread of such a rank can run, so only the kernel can end it."""
    with Run(tmp_path, *WITHOUT_WORKERS) as run:
        run.wait_for_step(5)
        (tmp_path / TROUBLE_NAME).write_text("loss 1 gil30")
        poll(lambda: not (tmp_path / TROUBLE_NAME).exists(), what="the stuck rank")
        run.signal(signal.SIGKILL)
        run.assert_gone()
        run.assert_machine_clean()


def wait_for_repairs(run, count):
    poll(lambda: len(run.events("repaired")) == count, what=f"repair {count}:\n{run.console}")


def wait_for_spares(run, count):
    poll(lambda: len(run.events("spare_ready")) >= count, what=f"spare {count}:\n{run.console}")


def test_nobody_waits_for_the_import_of_a_zygote_that_replaces_another(tmp_path):
    """The spare takes a rank's place while the next zygote imports; that one forks the next replacement.

    From then on another one stands by: killed with a rank and the spare, a zygote is missed by nobody.
    """
    held, task = tmp_path / "held", tmp_path / "held.py"
    task.write_text(HELD.format(held=str(held)), encoding="utf-8")
    settings = ("-b", 8, "--max-steps", 100000, "num_workers=0", "task.pace_s=0.05", "--audit")
    how = {"task": f"{task}:HeldTask", "variables": {ZYGOTES: "5"}}
    with Run(tmp_path / "run", *settings, *PATIENT, **how) as run:
        run.wait_for_event("spare_ready")
        assert "ddp:standby" not in {process.name for process in run.processes()}
        held.touch()
        zygote, rank = run.named("ddp:zygote").pid, run.rank_pid(1)
        run.signal(signal.SIGKILL, zygote)
        run.wait_for_event("zygote_ended")
        run.signal(signal.SIGKILL, rank)
        wait_for_repairs(run, 1)
        assert len(run.events("zygote_ready")) == 1, "the first one's"
        run.signal(signal.SIGKILL, run.rank_pid(0))
        run.wait_for_event("plan", culprit=0)
        held.unlink()
        wait_for_repairs(run, 2)
        for count, rank in ((2, 1), (3, 0)):
            wait_for_spares(run, count)
            run.named("ddp:standby")
            names = ("ddp:zygote", "ddp:spare", f"ddp:rank{rank}")
            run.signals_at_once(*((signal.SIGKILL, run.named(name).pid) for name in names))
            wait_for_repairs(run, count + 1)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    faults = run.summary()["faults"]
    killed = [(fault["kind"], fault["rank"], fault["steps_lost"]) for fault in faults]
    assert killed == [("rank_killed", rank, 0) for rank in (1, 0, 1, 0)]
    # One that is killed in the same moment may be taken before its end is known.
    assert [event["rank"] for event in run.events("spare_taken")][:1] == [1]
    assert len(run.events("zygote_ready")) == 2, "no other one has imported"
    assert len(run.events("zygote_replaced")) == 2


@pytest.mark.parametrize(("times", "code"), [(1, 0), (3, 1)], ids=["once", "every time"])
def test_a_zygote_killed_while_it_imports_is_replaced(tmp_path, times, code):
    """Nothing has begun yet and nothing is lost: the run starts a little later, or says why not."""
    held, task = tmp_path / "held", tmp_path / "held.py"
    held.touch()  # it imports until it is killed, however long this test takes to find it
    task.write_text(HELD.format(held=str(held)), encoding="utf-8")
    how = {"task": f"{task}:HeldTask", "variables": {ZYGOTES: f"{times + 1}"}}
    with Run(tmp_path / "run", *WITHOUT_WORKERS, "-e", 1, **how) as run:
        for _ in range(times):
            zygote = poll(lambda: importing(run), what="the zygote")
            run.signal(signal.SIGKILL, zygote.pid)
            poll(lambda zygote=zygote: not zygote.is_running(), what="its end")
        held.unlink()
        assert run.wait() == code, run.console
    said = "the zygote died of SIGKILL; starting another one"
    assert run.console.count(said) == min(times, 2)
    if code:
        assert "the process that imports torch died of SIGKILL" in run.console
    else:
        assert run.summary()["faults"] == []


def importing(run):
    """The zygote while it imports: the task holds it there."""
    with contextlib.suppress(psutil.NoSuchProcess, ValueError):
        children = psutil.Process(run.process.pid).children()
        (zygote,) = [child for child in children if child.name() == "ddp:zygote"]
        return zygote
    return None


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_store_is_replaced(fault_free, tmp_path, world):
    """The store may die alone, or together with a rank that needs it for the next generation."""
    # Each kill must come well before the end.
    with Run(tmp_path, *WITHOUT_WORKERS, "task.pace_s=0.24", world=world) as run:
        run.wait_for_step(4)
        run.signal(signal.SIGKILL, run.named("ddp:store").pid)
        run.wait_for_step(10)
        store, rank = run.named("ddp:store").pid, run.rank_pid(0)
        run.signal(signal.SIGKILL, store)
        run.signal(signal.SIGKILL, rank)
        assert run.wait() == 0, run.console
    assert run.digest == fault_free(world).digest
