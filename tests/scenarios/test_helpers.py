"""Each helper process of a real run is killed: another one follows, no weight depends on it, and none is left."""

from __future__ import annotations

import signal

from tests.ready import ZYGOTES
from tests.scenarios.conftest import LONG, WITHOUT_WORKERS
from tests.scenarios.harness import Run, poll
from tests.scenarios.workload import HOLD_NAME

# The end of a store is a fault, and a saver follows with a save: while the ranks train. The zygote before the
# standby: once one was lost, the next one stands by.
WHILE_THEY_TRAIN = ("store", "saver")
WHILE_THEY_WAIT = ("zygote", "spare", "csv", "standby")


def pids(run, name):
    """Of the living ones of this name."""
    return {one.pid for one in run.processes() if one.name == f"ddp:{name}"}


def kill_and_await_another(run, name):
    # Seldom: each look goes through all processes of the machine.
    poll(lambda: pids(run, name), timeout_s=60.0, what=f"a {name}", every_s=0.1)
    dead = run.named(f"ddp:{name}").pid
    run.signal(signal.SIGKILL, dead)
    what = f"another {name} than {dead}"
    poll(lambda: pids(run, name) - {dead}, timeout_s=60.0, what=what, every_s=0.1)


def test_whichever_helper_is_killed_is_followed_by_another(fault_free, tmp_path):
    """Their kills are in the journal with their signal; the store's is a fault, which costs no step."""
    settings = (*WITHOUT_WORKERS, *LONG, "task.pace_s=0.06", "log.trackers=csv")
    hold = tmp_path / HOLD_NAME
    how = {"variables": {ZYGOTES: "4"}}  # two follow, of which one stands by, and one follows that
    with Run(tmp_path, *settings, "recovery.hang_min_s=100", **how) as run:
        run.wait_for_event("spare_ready")
        for name in WHILE_THEY_TRAIN:
            kill_and_await_another(run, name)
        hold.touch()
        for name in WHILE_THEY_WAIT:
            kill_and_await_another(run, name)
        hold.unlink()
        assert run.wait() == 0, run.console
        run.assert_machine_clean()
    for name in ("zygote", "standby", "saver", "spare"):
        (event,) = run.events(f"{name}_ended")
        assert event["signal"] == signal.SIGKILL
    assert "the tracker csv has ended: signal 9; it is restarted" in run.console
    faults = [(fault["kind"], fault["steps_lost"]) for fault in run.summary()["faults"]]
    assert faults == [("store_died", 0)]
    assert (run.digest, run.summary()["exact"]) == (fault_free(2, *LONG).digest, True)
