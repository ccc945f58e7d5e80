"""Data that is preloaded: read once a launch, whoever dies, and the run is the one without."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import Run, poll
from tests.scenarios.preloaded import HELD_SAMPLE, HOLD_NAME, READ_NAME

TASKS = Path(__file__).with_name("preloaded.py")
TASK = f"{TASKS}:PreloadedTask"
SETTINGS = (
    *("-b", 8, "--max-steps", 40, "save_every_steps=10", "evaluate_every_steps=15", "--audit"),
    *("num_workers=1", *PATIENT),
)


def readings(folder):
    """Each reading so far, as process, kind and index."""
    path = folder / READ_NAME
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), kind, int(index)) for pid, kind, index in map(str.split, lines)]


def test_nobody_reads_again_whoever_dies_while_it_is_read_or_later(tmp_path, made_once):
    """The one who reads, rank 0 and the last rank in training, and a stop and resume."""
    plain = made_once(*SETTINGS, "num_workers=0", task=TASK)
    slowly = "task.pace_s=0.15"  # each signal must come well before the end
    hold = tmp_path / HOLD_NAME
    hold.touch()
    with Run(tmp_path, *SETTINGS, slowly, "preload_data_to_ram=true", task=TASK) as run:
        reader = poll(
            lambda: [pid for pid, _, index in readings(tmp_path) if index == HELD_SAMPLE],
            what="the sample that is held",
        )[0]
        assert "preloading data" in poll(
            lambda: run.console if "preloading data" in run.console else "", what="what it is at"
        )
        assert not run.logs.exists()
        run.signal(signal.SIGKILL, reader)
        poll(lambda: {pid for pid, _, _ in readings(tmp_path)} - {reader}, what="another reader")
        hold.unlink()
        run.wait_for_step(5)
        before = readings(tmp_path)
        for rank, step in ((0, 8), (1, 17)):
            run.wait_for_step(step)
            run.signal(signal.SIGKILL, run.rank_pid(rank))
        run.wait_for_step(26)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    after = readings(tmp_path)
    assert after == before
    by_others = Counter((kind, index) for pid, kind, index in after if pid != reader)
    assert set(by_others.values()) == {1}
    assert len(by_others) <= 192 + 24
    # Each part by whichever rank comes to it first: the replacement may be the first at the second one.
    readers = Counter(kind for kind, _ in {(kind, pid) for pid, kind, _ in after})
    assert readers == {"train": 2, "validation": 1}
    drilled = ("data.preload=true", "recovery.drill_at=2")
    with Run(tmp_path, *SETTINGS, slowly, *drilled, task=TASK) as again:
        again.wait_for_event("drill")
        assert again.wait() == 0, again.console
    assert again.summary()["exact_proof"]["drilled"], again.console
    by_launch = readings(tmp_path)[len(after) :]
    assert len(by_launch) == len(set(by_launch)) == 192 + 24
    assert "216 samples are preloaded" in again.console
    assert (again.digest, again.summary()["exact"]) == (plain.digest, True)
    assert again.summary()["figures"] == plain.summary()["figures"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("random", "training sample 191 moves the generator of torch"),
        ("huge", "TB of memory for the training data"),
    ],
)
def test_data_that_cannot_be_preloaded_is_one_line(tmp_path, kind, words):
    """Exit 2, and nothing is touched."""
    with Run(tmp_path, *SETTINGS, "preload=true", f"task.kind={kind}", task=TASK) as run:
        assert run.wait() == 2, run.console
    lines = [line for line in run.console.splitlines() if "error" in line]
    assert len(lines) == 1, run.console
    assert words in lines[0]
    assert not run.logs.exists()
    assert not run.checkpoints.exists()
