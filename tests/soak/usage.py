"""What the processes of a run hold, sampled from /proc while it trains. Judges growth, nothing else."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

from tests.scenarios.leftovers import shared_memory

INTERVAL_S = 1.0
SAMPLES_LEAST = 24  # fewer say nothing about growth
DESCRIPTORS_MORE = 3
THREADS_MORE = 1
RESIDENT_SHARE_MORE = 0.05
RESIDENT_BYTES_MORE = 6_000_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One look at a process."""

    descriptors: int
    threads: int
    resident_bytes: int


def usage_of(pid):
    """What the process holds now. Raises OSError once it is gone."""
    base = Path("/proc", str(pid))
    return Usage(
        descriptors=sum(1 for _ in (base / "fd").iterdir()),
        threads=sum(1 for _ in (base / "task").iterdir()),
        resident_bytes=int((base / "statm").read_text().split()[1]) * _PAGE_BYTES,
    )


class Sampler:
    """A thread that looks at every process of a run once a second, between enter and exit."""

    def __init__(self, run):
        self._run = run
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.names = {}
        self.usages = defaultdict(list)
        self.segments = []  # entries of /dev/shm

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._ended.set()
        self._thread.join()

    def _sample(self):
        while not self._ended.wait(INTERVAL_S):
            self.segments.append(len(shared_memory()))
            for process in self._run.processes():
                with contextlib.suppress(OSError):
                    self.usages[process.pid].append(usage_of(process.pid))
                    self.names[process.pid] = process.name

    def long_lived(self, name):
        """The samples of the process of this name that lived longest."""
        mine = [usages for pid, usages in self.usages.items() if self.names[pid] == name]
        return max(mine, key=len, default=[])


def growth(usages):
    """``{what: (early, late)}``: medians of the first and the last quarter, warm-up left out."""
    settled = usages[len(usages) // 10 :]
    quarter = max(1, len(settled) // 4)
    return {
        field.name: (
            median(getattr(usage, field.name) for usage in settled[:quarter]),
            median(getattr(usage, field.name) for usage in settled[-quarter:]),
        )
        for field in fields(Usage)
    }


def assert_no_growth(name, usages):
    """The late medians lie within the stated bounds of the early ones."""
    assert len(usages) >= SAMPLES_LEAST, f"{name}: {len(usages)} samples"
    found = growth(usages)
    print(f"{name}: {len(usages)} samples, {found}")
    early, late = found["descriptors"]
    assert late <= early + DESCRIPTORS_MORE, (name, found)
    early, late = found["threads"]
    assert late <= early + THREADS_MORE, (name, found)
    early, late = found["resident_bytes"]
    assert late <= early * (1 + RESIDENT_SHARE_MORE) + RESIDENT_BYTES_MORE, (name, found)
