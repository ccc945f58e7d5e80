"""Seconds of a repair, part by part, without a spare and with each kind of it: two gloo ranks on one GPU.

The runs start together and train slowly; then one rank is killed at a time, while the others go on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

from tests.gpu.launches import EXACT, Launch, parent_of

SPARES = ("false", "libraries", "device")
KILLS = 2
PARTS = ("group_s", "transfer_s", "rebuild_s")
PACE_S = 0.05
TRAINS_WITHIN_S, SPARE_WITHIN_S, REPAIRED_WITHIN_S = 30.0, 10.0, 15.0
PAUSE_S = 1.0  # between a kill and what was before it
LIMIT_S, LEAST_S = 45, 20


def measure(facts):
    """As a part of its own."""
    folder = Path(tempfile.mkdtemp(prefix="gpu_repairs_"))
    try:
        compare(facts, folder, limit_s=facts.left_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compare(facts, folder, *, limit_s):
    """Kill rank 1 of each run in turn, and note what followed when."""
    if limit_s < LEAST_S:
        raise TimeoutError(f"not begun: {limit_s:.0f} s left")
    by_s = time.monotonic() + limit_s
    words = (*EXACT, "use_amp=false", "num_workers=0", "--max-steps", 1_000_000)
    runs = {
        setting: Launch(
            folder / f"spare_{setting}",
            *(*words, f"task.pace_s={PACE_S}", f"recovery.warm_spare={setting}"),
            task="Normed",
            world=2,
        )
        for setting in SPARES
    }
    try:
        with contextlib.suppress(TimeoutError):  # who trains is measured
            within_s = min(by_s, time.monotonic() + TRAINS_WITHIN_S)
            _await(lambda: all(_trains(run, 0) for run in runs.values()), within_s, "")
        for number in range(KILLS):
            for setting, run in runs.items():
                at = facts.under(f"spare_{setting}")
                if time.monotonic() < by_s:
                    at.measure(f"kill_{number}", _kill, run, setting, number, by_s)
    finally:
        for run in runs.values():
            run.end()
    for setting, run in runs.items():
        held = [event.get("device_bytes") for event in run.events("spare_ready")]
        facts.under(f"spare_{setting}").note("held_bytes", held)


def _kill(run, setting, number, by_s):
    """Seconds from the SIGKILL of rank 1 to each event; ``plan`` to ``form`` is the start of its successor."""
    spares = 0 if setting == "false" else number + 1
    _await(
        lambda: _trains(run, number) and len(run.events("spare_ready")) >= spares,
        min(by_s, time.monotonic() + SPARE_WITHIN_S),
        "it does not train, or has no spare",
    )
    time.sleep(PAUSE_S)
    known = len(run.events())
    formed = [event for event in run.events("rank_formed") if event["rank"] == 1]
    pid = formed[-1]["pid"]
    if parent_of(pid) != run.pid:
        raise RuntimeError(f"rank 1 is no child of the run any more: {pid}")
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):  # how far it came is a fact
        _await(
            lambda: len(run.events("repaired")) > number,
            min(by_s, time.monotonic() + REPAIRED_WITHIN_S),
            "not repaired",
        )
    events = run.events()[known:]
    parts = [event for event in events if event["event"] == "rank_formed" and event["rank"] == 1]
    repaired = [event["mono_s"] for event in events if event["event"] == "repaired"]
    return {
        "repaired_s": repaired[0] - killed_s if repaired else None,
        "after_s": [[_name(event), event["mono_s"] - killed_s] for event in events[:20]],
        "is_spare": any(event["event"] == "spare_taken" for event in events),
        **{name: value for part in parts for name, value in part.items() if name in PARTS},
    }


def _trains(run, number):
    """Whether it does, with rank 1, after so many repairs."""
    is_formed = any(event["rank"] == 1 for event in run.events("rank_formed"))
    return is_formed and len(run.events("repaired")) >= number and not run.is_over()


def _await(check, by_s, late):
    while not check():
        if time.monotonic() > by_s:
            raise TimeoutError(late)
        time.sleep(0.02)


def _name(event):
    rank = event.get("rank")
    return event["event"] if rank is None else f"{event['event']} {rank}"
