"""Owns events.jsonl and metrics.jsonl: a JSON line per event or logged step. Never raises."""

from __future__ import annotations

import contextlib
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ddp_runner.kernel.system.run_files import from_json
from ddp_runner.observe.files import LineFile, Warn, encode_record, read_tail

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_POINTS_BYTES = 256 * 1024  # of the end of metrics.jsonl


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
        """The number of lines that a failing disk has cost."""
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
        self._path = path
        self._file = LineFile(path, warn=warn)
        self._kept: dict[tuple[int, int, str, bool], object] = {}

    def keep_points(self) -> None:
        """Leave out each point that stands there already, as it is written once more with the same values."""
        self._kept = {}
        for line in read_tail(self._path, _POINTS_BYTES).splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                record = from_json(line)
                self._kept[_point(record)] = _values(record)

    def write(self, step: int, rank: int, values: Mapping[str, float], *, stage: str = "") -> None:
        """Append one logged step; a value that is not finite is written as ``null``."""
        of_stage = {"stage": stage} if stage else {}
        record = {"step": step, "rank": rank, "utc": utc_now(), **of_stage, **values}
        encoded = encode_record(record)
        if self._kept:
            written = from_json(encoded)
            if self._kept.pop(_point(written), None) == _values(written):
                return
        self._file.append(encoded)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _point(record: Mapping[str, Any]) -> tuple[int, int, str, bool]:
    """A step or an evaluation after it, in its stage, of a rank."""
    return int(record["step"]), int(record["rank"]), str(record.get("stage", "")), "loss" in record


def _values(record: Mapping[str, Any]) -> object:
    """Return the values that a repeated computation gives again: a step's loss, an evaluation's figures."""
    if "loss" in record:
        return {"loss": record["loss"]}
    return {name: value for name, value in record.items() if name != "utc"}


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
