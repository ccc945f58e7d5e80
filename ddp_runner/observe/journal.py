"""Owns events.jsonl and metrics.jsonl: a JSON line per event or logged step. Never raises."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ddp_runner.observe.files import LineFile, Warn, encode_record, read_tail
from ddp_runner.system.run_files import from_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Journal:
    """events.jsonl: ``{"id", "utc", "mono_s", "event", "cause", ...}``, appended across relaunches.

    Ids go on from the newest one in the file, so that ``cause`` names one line of the whole file.
    ``mono_s`` compares only between lines of one boot of one machine.
    """

    def __init__(self, path: Path, *, warn: Warn | None = None) -> None:
        self._file = LineFile(path, warn=warn)
        self._next_id = last_id(path) + 1
        self._lost_reported = 0

    @property
    def lines_lost(self) -> int:
        """How many lines a failing disk has cost."""
        return self._file.lines_lost

    def write(self, event: str, *, cause: int | None = None, **fields: object) -> int:
        """Append one event; its id, for use as the ``cause`` of what follows from it."""
        event_id = self._next_id
        written = self._append(event, cause, fields)
        lost = self._file.lines_lost - self._lost_reported
        if written and lost and self._append("journal_lines_lost", None, {"lines": lost}):
            self._lost_reported += lost
        return event_id

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, event: str, cause: int | None, fields: Mapping[str, object]) -> bool:
        head = {
            "id": self._next_id,
            "utc": utc_now(),
            "mono_s": round(time.monotonic(), 6),
            "event": event,
            "cause": cause,
        }
        self._next_id += 1
        # The head stands first in the line, and no field can take the place of its values.
        return self._file.append(encode_record({**head, **fields, **head}))


class MetricsFile:
    """metrics.jsonl: one line per logged step, ``{"step", "rank", "utc", ...values}``."""

    def __init__(self, path: Path, *, warn: Warn | None = None) -> None:
        self._file = LineFile(path, warn=warn)

    def write(self, step: int, rank: int, values: Mapping[str, float], *, stage: str = "") -> None:
        """Append one logged step; a value that is not finite is written as ``null``."""
        of_stage = {"stage": stage} if stage else {}
        record = {"step": step, "rank": rank, "utc": utc_now(), **of_stage, **values}
        self._file.append(encode_record(record))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def utc_now() -> str:
    """The wall time for people, ``2026-11-20T18:47:20.123Z``."""
    now = datetime.now(timezone.utc)
    return f"{now:%Y-%m-%dT%H:%M:%S}.{now.microsecond // 1000:03d}Z"


def last_id(path: Path) -> int:
    """The newest event id in the file; -1 where there is none."""
    ids = (_id_of(line) for line in reversed(read_tail(path).splitlines()))
    return next((found for found in ids if found is not None), -1)


def _id_of(line: bytes) -> int | None:
    try:
        return int(from_json(line)["id"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None  # a line torn by a crash, or by our cut: the one before it counts
