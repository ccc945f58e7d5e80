"""Seconds of a repair, part by part: by the kind of spare, two gloo ranks on one GPU; and by NCCL's class.

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

from tests.gpu.facts import rehearses
from tests.gpu.launches import EXACT, Launch, parent_of

SPARES = ("false", "true")
KILLS = 2
PARTS = ("group_s", "transfer_s", "rebuild_s")
PACE_S = 0.05
TRAINS_WITHIN_S, SPARE_WITHIN_S, REPAIRED_WITHIN_S = 30.0, 10.0, 15.0
PAUSE_S = 1.0  # between a kill and what was before it
LIMIT_S, LEAST_S = 45, 20
NCCL_CLASSES = ("nccl", "nccl2")  # ProcessGroupNCCL, and from torch 2.14 ProcessGroupNCCL2
WORDS = (
    *(*EXACT, "use_amp=false", "num_workers=0", "--max-steps", 1_000_000),
    f"task.pace_s={PACE_S}",
)


def measure(facts):
    """NCCL's classes in turn, where torch has both; ``faster`` names the one with the shorter repairs."""
    import torch
    import torch.distributed as dist

    if not rehearses() and not hasattr(dist, "ProcessGroupNCCL2"):
        facts.note("left_out", f"torch {torch.__version__} has one class for NCCL")
        return
    gpus = 1 if rehearses() else torch.cuda.device_count()
    folder = Path(tempfile.mkdtemp(prefix="gpu_classes_"))
    try:
        found = compare_classes(facts, folder, gpus=gpus, limit_s=facts.left_s - 3)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    facts.note("repaired_s", found)
    if all(found.values()):
        facts.note("faster", min(found, key=lambda name: min(found[name])))


def compare(facts, folder, *, limit_s):
    """By the kind of spare: kill rank 1 of each run in turn, and note what followed when."""
    _compare(
        facts,
        {
            f"spare_{kind}": Launch(
                folder / f"spare_{kind}",
                *(*WORDS, f"recovery.warm_spare={kind}"),
                task="Normed",
                world=2,
            )
            for kind in SPARES
        },
        victim=1,
        limit_s=limit_s,
    )


def compare_classes(facts, folder, *, gpus, limit_s):
    """By NCCL's class, with a rank on each of ``gpus``: the last rank of each run is killed in turn.

    Gives the seconds of each class's repairs.
    """
    where = ("-g", ",".join(str(index) for index in range(gpus)))
    return _compare(
        facts,
        {
            backend: Launch(
                folder / backend,
                *(*WORDS, *(() if rehearses() else (f"ddp.backend={backend}",))),
                task="Normed",
                world=gpus,
                where=where,
            )
            for backend in NCCL_CLASSES
        },
        victim=gpus - 1,
        limit_s=limit_s,
    )


def _compare(facts, runs, *, victim, limit_s):
    """Seconds of the repairs of each run that were seen to end."""
    by_s = time.monotonic() + limit_s
    found = {name: [] for name in runs}
    try:
        if limit_s < LEAST_S:
            raise TimeoutError(f"not begun: {limit_s:.0f} s left")
        with contextlib.suppress(TimeoutError):  # who trains is measured
            within_s = min(by_s, time.monotonic() + TRAINS_WITHIN_S)
            _await(lambda: all(_trains(run, victim, 0) for run in runs.values()), within_s, "")
        for number in range(KILLS):
            for name, run in runs.items():
                if time.monotonic() >= by_s:
                    continue
                killed = facts.under(name).measure(
                    f"kill_{number}", _kill, run, victim, number, by_s
                )
                if killed and killed["repaired_s"] is not None:
                    found[name].append(killed["repaired_s"])
    finally:
        for run in runs.values():
            run.end()
    return found


def _kill(run, victim, number, by_s):
    """Seconds from the SIGKILL of ``victim`` to each event; ``plan`` to ``form`` is the start of its successor."""
    spares = 0 if run.folder.name == "spare_false" else number + 1
    _await(
        lambda: _trains(run, victim, number) and len(run.events("spare_ready")) >= spares,
        min(by_s, time.monotonic() + SPARE_WITHIN_S),
        "it does not train, or has no spare",
    )
    time.sleep(PAUSE_S)
    known = len(run.events())
    formed = [event for event in run.events("rank_formed") if event["rank"] == victim]
    pid = formed[-1]["pid"]
    if parent_of(pid) != run.pid:
        raise RuntimeError(f"rank {victim} is no child of the run any more: {pid}")
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):  # how far it came is a fact
        _await(
            lambda: len(run.events("repaired")) > number,
            min(by_s, time.monotonic() + REPAIRED_WITHIN_S),
            "not repaired",
        )
    events = run.events()[known:]
    parts = [
        event for event in events if event["event"] == "rank_formed" and event["rank"] == victim
    ]
    repaired = [event["mono_s"] for event in events if event["event"] == "repaired"]
    return {
        "repaired_s": repaired[0] - killed_s if repaired else None,
        "after_s": [[_name(event), event["mono_s"] - killed_s] for event in events[:20]],
        "is_spare": any(event["event"] == "spare_taken" for event in events),
        **{name: value for part in parts for name, value in part.items() if name in PARTS},
    }


def _trains(run, victim, number):
    """Whether it does, with its ``victim``, after so many repairs."""
    is_formed = any(event["rank"] == victim for event in run.events("rank_formed"))
    return is_formed and len(run.events("repaired")) >= number and not run.is_over()


def _await(check, by_s, late):
    while not check():
        if time.monotonic() > by_s:
            raise TimeoutError(late)
        time.sleep(0.02)


def _name(event):
    rank = event.get("rank")
    return event["event"] if rank is None else f"{event['event']} {rank}"
