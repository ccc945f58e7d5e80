"""A note in a follower's log folder that says where its run has its files.

A follower whose folders are not the coordinator's has the logs of its own ranks alone.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp_runner.kernel.system.run_files import from_json, read_small, replace_file

NAME = ".coordinator"


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedRun:
    """The coordinator's host, and its folders there."""

    host: str
    log_dir: str
    checkpoint_dir: str

    def note_in(self, folder: Path) -> None:
        """Write it into a log folder; one that refuses it is not worth a word."""
        with contextlib.suppress(OSError):
            replace_file(folder / NAME, json.dumps(asdict(self)).encode())


def followed_run(folder: Path) -> FollowedRun | None:
    """Return the followed run that a log folder notes; None if it is not a follower's."""
    try:
        found = from_json(read_small(folder / NAME))
        return FollowedRun(**{name: str(value) for name, value in found.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return None
