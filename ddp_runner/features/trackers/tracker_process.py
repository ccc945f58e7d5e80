"""A tracker's process: follows the run's files until it is asked to end. It may die at any time."""

from __future__ import annotations

import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ddp_runner.features.trackers.csv_file import CsvTracker
from ddp_runner.features.trackers.follow import Follower, Record
from ddp_runner.features.trackers.mlflow_run import MlflowTracker
from ddp_runner.features.trackers.tensorboard_file import TensorboardTracker
from ddp_runner.features.trackers.wandb_run import WandbTracker
from ddp_runner.kernel.rules.secrets import environment_secrets, without_secrets
from ddp_runner.kernel.system import parent_death

LOOK_EVERY_S = 0.5
_NICE = 10  # ranks come first


class Tracker(Protocol):
    """Writes points. Any method may raise: the process then ends, and is started again."""

    @property
    def link(self) -> str:
        """The address for a person; empty while it is not known."""

    def take(self, record: Record) -> None:
        """Take one line of the run's files, from their beginning on."""

    def flush(self) -> None:
        """Write everything that was taken to its destination."""

    def close(self, exit_code: int) -> None:
        """The run has ended."""


KINDS: dict[str, Callable[[Path], Tracker]] = {
    "csv": CsvTracker,
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def main(words: Sequence[str]) -> int:
    """``NAME LOG_DIR PARENT_PID``; standard input says ``end CODE``."""
    name, log_dir, parent = words
    parent_death.die_with_parent(int(parent))
    parent_death.set_process_name(f"ddp:{name}")
    os.nice(_NICE)
    try:
        _follow(KINDS[name](Path(log_dir)), Follower(Path(log_dir)))
    except Exception:  # noqa: BLE001 - the top of a process: said, and started again by the supervisor
        text = without_secrets(traceback.format_exc(), environment_secrets(os.environ))
        sys.stderr.write(text)
        return 1
    return 0


def _follow(tracker: Tracker, follower: Follower) -> None:
    exit_code: int | None = None
    while True:
        for record in follower.read():
            tracker.take(record)
        if exit_code is not None:
            tracker.close(exit_code)
            return
        tracker.flush()
        exit_code = _asked_to_end()


def _asked_to_end() -> int | None:
    """Wait a while; the run's exit code once it has ended, None while it goes on."""
    ready, _, _ = select.select([0], [], [], LOOK_EVERY_S)
    if not ready:
        return None
    words = os.read(0, 64).split()
    return int(words[1]) if len(words) == 2 else 1
