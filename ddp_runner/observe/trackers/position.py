"""How far a tracker has come, in a small file of the log folder: what a process that is started again goes by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_runner.observe.files import encode_record
from ddp_runner.observe.trackers.follow import Record
from ddp_runner.system.run_files import from_json, read_small, replace_file


class Position:
    """``.tracker_NAME.json``. Lines up to the position are at the tracker for certain, later ones perhaps.

    ``kept``: what the tracker itself keeps there.
    """

    def __init__(self, log_dir: Path, name: str) -> None:
        self._path = position_path(log_dir, name)
        record = read_position(self._path)
        # Of each of the run's files: which file it was, and the byte behind the last line.
        self._reached: dict[str, tuple[int, int]] = {
            str(kind): (int(where[0]), int(where[1]))
            for kind, where in dict(record.get("reached", {})).items()
        }
        self._read: dict[str, tuple[int, int]] = dict(self._reached)
        self.kept: dict[str, Any] = dict(record.get("kept", {}))
        self.is_first = not record

    def is_new(self, record: Record) -> bool:
        """Whether this line was not at the tracker for certain when the position was read."""
        self._read[record.kind] = (record.file, record.end)
        file, end = self._reached.get(record.kind, (record.file, 0))
        return file != record.file or record.end > end

    def save(self, *, link: str) -> None:
        """All that was read is at the tracker. Raises OSError."""
        replace_file(
            self._path, encode_record({"link": link, "reached": self._read, "kept": self.kept})
        )


def position_path(log_dir: Path, name: str) -> Path:
    """Where a tracker's position is kept."""
    return log_dir / f".tracker_{name}.json"


def read_position(path: Path) -> Mapping[str, Any]:
    """What stands there; empty where there is nothing of use."""
    try:
        record = from_json(read_small(path))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
