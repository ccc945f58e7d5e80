"""The runs that a page shows. What is asked for is looked up by name, never made into a path."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from ddp_runner.observe.history.run_history import ROOT, RunHistory, modified_s, runs_below

_LOOK_AGAIN_S = 1.0
_READ_AGAIN_S = 0.5
RUNS_LISTED_MAX = 500


class KnownRuns:
    """The runs in one folder, each with one reader for all who look on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs: dict[str, RunHistory] = {}
        self._looked_s = self._listed_s = float("-inf")
        self._lock = threading.Lock()

    def get(self, key: str) -> RunHistory | None:
        """The run of that name; None for any other word."""
        return self.all().get(key)

    def all(self) -> dict[str, RunHistory]:
        """Every run, by the name of its folder."""
        with self._lock:
            if time.monotonic() - self._looked_s >= _LOOK_AGAIN_S:
                found = runs_below(self.root)
                for key in set(self._runs) - set(found):
                    del self._runs[key]
                for key, folder in found.items():
                    if key not in self._runs:
                        name = self.root.resolve().name if key == ROOT else key
                        self._runs[key] = RunHistory(folder, name=name)
                self._looked_s = time.monotonic()
            return dict(self._runs)

    def listed(self) -> list[tuple[str, RunHistory]]:
        """Each as it stands now: those that run first, then the newest."""
        found = list(self.all().items())
        with self._lock:
            if time.monotonic() - self._listed_s >= _READ_AGAIN_S:
                for _, run in found:
                    run.read_status()
                self._listed_s = time.monotonic()
        found.sort(key=lambda one: (not one[1].state.is_live, -_changed_s(one[1].folder)))
        return found[:RUNS_LISTED_MAX]


def _changed_s(folder: Path) -> float:
    return max(modified_s(folder / "status.json"), modified_s(folder / "summary.json"))
