"""Trackers beside a run whose ranks and trackers are killed, and which is stopped and resumed."""

from __future__ import annotations

import signal
from importlib.util import find_spec

from tests.observe.test_trackers import read_back, rows, scalars, stands
from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import Run, poll

NAMES = ["csv", *(["tensorboard"] if find_spec("tensorboard") else [])]
SETTINGS = (
    *("-b", 8, "num_workers=0", "save_every_steps=10", "evaluate_every_steps=10", "log_interval=1"),
    *(f"log.trackers={','.join(NAMES)}", "--audit", *PATIENT),
)


def kill_tracker(run, name):
    """And wait until another one has taken its place."""
    dead = run.named(f"ddp:{name}"[:15]).pid
    run.signal(signal.SIGKILL, dead)
    poll(
        lambda: [p for p in run.processes() if p.name == f"ddp:{name}"[:15] and p.pid != dead],
        what=f"another {name}",
    )


def assert_written(run, *, steps):
    """Every step of every rank stands in each tracker, once, as metrics.jsonl has it."""
    expected = stands(run.logs)
    assert {(step, rank) for step, rank in expected} == {
        (step, rank) for step in range(1, steps + 1) for rank in range(2)
    }
    assert rows(run.logs) == expected
    if "tensorboard" in NAMES:
        assert read_back(run.logs) == scalars(run.logs)
    assert run.summary()["trackers"]["csv"] == str(run.logs / "metrics.csv")


def test_trackers_lose_no_point_though_they_and_ranks_are_killed(tmp_path):
    """Each tracker's process, then rank 0, then all at once; then stopped and resumed."""
    with Run(tmp_path, *SETTINGS, "--max-steps", 1_000_000) as run:
        run.wait_for_step(5)
        for name in NAMES:
            kill_tracker(run, name)
        run.signal(signal.SIGKILL, run.rank_pid(0))
        run.wait_for_event("repaired")
        run.signals_at_once(
            *((signal.SIGKILL, run.rank_pid(rank)) for rank in (0, 1)),
            *((signal.SIGKILL, run.named(f"ddp:{name}"[:15]).pid) for name in NAMES),
        )
        run.wait_for_step(run.committed() + 3)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    assert "the tracker csv has ended: signal 9; it is started again" in run.console
    stopped_at = run.summary()["steps"]
    assert_written(run, steps=stopped_at)
    with Run(tmp_path, *SETTINGS, "--max-steps", stopped_at + 25) as run:
        assert run.wait() == 0, run.console
    assert_written(run, steps=stopped_at + 25)
    assert run.status()["trackers"]["csv"] == str(run.logs / "metrics.csv")
