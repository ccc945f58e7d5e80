"""The coordinator is lost, and a machine that shares its folder of checkpoints takes its place."""

from __future__ import annotations

import signal

from tests.features.machines.whole_runs.test_two_nodes import SLOW
from tests.scenarios.harness import assert_every_sample_once, ended, poll


def test_a_machine_takes_the_coordinators_place_and_the_lost_one_follows(nodes, one_machine):
    """Ranks keep their memory, the same files go on, and the same command on the lost machine finds the new one."""
    shared = nodes.folder / "shared"
    words = (SLOW, "-c", shared / "kept", "-l", shared / "logs", "save_interval=0")
    words += ("recovery.drill_at=40",)
    first, second = (nodes.start(number, *words) for number in (0, 1))
    for run in (first, second):
        run.logs, run.checkpoints = shared / "logs", shared / "kept"
    first.wait_for_step(12)
    assert "if the coordinator is lost, another machine takes over" in second.console
    pids = second.rank_pid(2), second.rank_pid(3)
    first.signal(signal.SIGKILL)
    first.assert_gone()
    poll(lambda: "this machine coordinates from here on" in second.console, what="the new one")
    first = nodes.start(0, *words)
    first.logs, first.checkpoints = shared / "logs", shared / "kept"
    second.wait_for_step(30)
    assert (second.rank_pid(2), second.rank_pid(3)) == pids
    assert ended(first, second) == (0, 0), first.console + second.console
    assert "has taken this machine's place: following it" in first.console
    summary = second.summary()
    assert (summary["exact"], second.digest) == (True, one_machine(4)), summary
    assert summary["exact_proof"]["repairs_proved"] == "1 of 1"
    assert_every_sample_once(second, 4, samples=192)
    assert [one.get("took_over", False) for one in second.events("run_begins")] == [False, True]


def test_a_machine_that_is_asked_to_stop_saves_as_the_new_coordinator(nodes):
    """SIGKILL of the coordinator, SIGTERM of the machine that is left: what its ranks hold is on disk, and it ends with 75."""
    shared = nodes.folder / "shared"
    words = (SLOW, "-c", shared / "kept", "-l", shared / "logs", "save_interval=0")
    words += ("save_every_steps=1000",)
    first, second = (nodes.start(number, *words, ranks=1) for number in (0, 1))
    for run in (first, second):
        run.logs, run.checkpoints = shared / "logs", shared / "kept"
    first.wait_for_step(12)
    poll(lambda: "another machine takes over" in second.console, what="a shared lock")
    first.signal(signal.SIGKILL)
    first.assert_gone()
    poll(lambda: "the ranks here wait for it" in second.console, what="parked ranks")
    second.signal(signal.SIGTERM)
    assert second.wait() == 75, second.console
    assert "this machine coordinates from here on" in second.console
    (kept,) = (shared / "kept").glob("step_*.pt")
    assert int(kept.stem.removeprefix("step_")) >= 12
    assert f"is saved in {kept}: run the same command again to resume" in second.console
