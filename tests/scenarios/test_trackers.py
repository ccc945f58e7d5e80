"""Trackers and looks at what is used, beside a run with every kind of fault, which is stopped and resumed."""

from __future__ import annotations

import json
import signal
from importlib.util import find_spec

from tests.features.trackers.test_trackers import read_back, rows, scalars, stands
from tests.scenarios.conftest import LONG, LONG_STEPS, WITHOUT_WORKERS
from tests.scenarios.harness import Run, poll
from tests.scenarios.workload import HOLD_NAME

NAMES = ["csv", *(["tensorboard"] if find_spec("tensorboard") else [])]
WRITTEN = ("log_interval=1", f"log.trackers={','.join(NAMES)}")
WATCHED = (*WITHOUT_WORKERS, *LONG, *WRITTEN, "log.gpu_watch_s=0.2")


def kill_tracker(run, name):
    """And wait until another one has taken its place."""
    dead = run.named(f"ddp:{name}"[:15]).pid
    run.signal(signal.SIGKILL, dead)
    poll(
        lambda: [p for p in run.processes() if p.name == f"ddp:{name}"[:15] and p.pid != dead],
        what=f"another {name}",
    )


def assert_same_points(run):
    """Each tracker has what metrics.jsonl comes to, and each point once."""
    assert rows(run.logs) == stands(run.logs)
    if "tensorboard" in NAMES:
        assert read_back(run.logs) == scalars(run.logs)


def assert_written(run, *, steps):
    """Every step of every rank stands in each tracker, once, as metrics.jsonl has it."""
    expected = stands(run.logs)
    assert {(step, rank) for step, rank in expected} == {
        (step, rank) for step in range(1, steps + 1) for rank in range(2)
    }
    assert_same_points(run)
    assert run.summary()["trackers"]["csv"] == str(run.logs / "metrics.csv")


def injected(*specs):
    return [word for spec in specs for word in ("--inject", spec)]


def use_of(run, rank, *, after=0):
    """What metrics.jsonl has of a rank's use in steps beyond ``after``: rss_bytes and cpu_share, by step."""
    lines = (run.logs / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [one for one in map(json.loads, lines) if one["rank"] == rank and "loss" in one]
    return {
        one["step"]: (one.get("rss_bytes"), one.get("cpu_share"))
        for one in steps
        if one["step"] > after
    }


def wait_for_use(run, rank, pid):
    """Until status.json has the memory of this process of the rank, and the cores that it has used."""

    def is_known():
        view = run.status()["ranks"][rank]
        return view["pid"] == pid and view["rss_bytes"] and view["cpu_share"] is not None

    poll(is_known, what=f"a look at rank {rank}")


def assert_use_is_summed_up(run):
    """Means and peaks of each rank, of this launch."""
    use = run.summary()["rank_use"]
    assert sorted(use) == ["0", "1"]
    for rank in use.values():
        assert 0 < rank["rss_bytes"]["mean"] <= rank["rss_bytes"]["peak"]
        assert 0 <= rank["cpu_share"]["mean"] <= rank["cpu_share"]["peak"]


def test_points_and_figures_of_use_are_exact_through_faults_of_every_kind(fault_free, tmp_path):
    """An exception, kills of the last rank and of each tracker, and a stop; then a resume, all of them killed at
    once, a roll-back and a kill.
    """
    hold = tmp_path / HOLD_NAME
    # Rank 0, whose process is new at step 6, waits in step 24.
    hold.write_text("20", encoding="utf-8")
    first = injected("raise:rank=0,step=5,phase=backward", "kill:rank=1,step=9,phase=backward")
    with Run(tmp_path, *WATCHED, *first) as run:
        run.wait_for_step(15)
        wait_for_use(run, 1, run.rank_pid(1))
        for name in NAMES:
            kill_tracker(run, name)
        hold.write_text("24", encoding="utf-8")  # step 28: the second launch comes to the roll-back
        run.wait_for_step(27)
        run.signal(signal.SIGTERM)
        run.wait_for_event("stop_asked")
        hold.unlink()
        assert run.wait() == 75, run.console
    kinds = [fault["kind"] for fault in run.summary()["faults"]]
    assert (kinds, run.summary()["exact"]) == (["rank_raised", "rank_killed"], True)
    stopped_at = run.summary()["steps"]
    assert_written(run, steps=stopped_at)
    of_replacement = use_of(run, 1, after=10)
    assert all(rss_bytes for rss_bytes, _ in of_replacement.values()), of_replacement
    assert of_replacement[stopped_at][1] is not None, of_replacement
    assert_use_is_summed_up(run)
    assert "the tracker csv has ended: signal 9; it is restarted" in run.console
    second = injected("diverge:rank=1,step=36", "kill:rank=1,step=43,phase=backward")
    hold.write_text("4", encoding="utf-8")
    with Run(tmp_path, *WATCHED, *second) as run:
        poll(lambda: run.status()["state"] == "running", what="its begin")
        for rank in (0, 1):
            wait_for_use(run, rank, run.rank_pid(rank))
        everybody = [run.rank_pid(rank) for rank in (0, 1)]
        everybody += [run.named(f"ddp:{name}"[:15]).pid for name in NAMES]
        run.signals_at_once(*((signal.SIGKILL, pid) for pid in everybody))
        run.wait_for_event("repaired")
        hold.unlink()
        assert run.wait() == 0, run.console
    kinds = [fault["kind"] for fault in run.summary()["faults"]]
    assert kinds == ["rank_killed", "replica_diverged", "rank_killed"]
    assert run.summary()["faults"][0]["all_ranks_dead"]
    assert "rolled back to step" in run.console
    assert_written(run, steps=LONG_STEPS)
    assert all(rss_bytes for rank in (0, 1) for rss_bytes, _ in use_of(run, rank).values())
    assert_use_is_summed_up(run)
    assert (run.digest, run.summary()["exact"]) == (fault_free(2, *LONG).digest, True)
