"""Follows ``events.jsonl`` and ``metrics.jsonl`` of a run, in the order of what happened, and keeps how far a tracker is."""

from __future__ import annotations

import abc
import contextlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_runner.features.trackers.rules import Change, Course, Lead, Values
from ddp_runner.kernel.system.run_files import from_json, is_named, open_to_read, replace_file
from ddp_runner.observe.files import encode_record
from ddp_runner.observe.history.json_lines import epoch_s
from ddp_runner.observe.tracker_position import position_path, read_position

METRICS, EVENTS = "metrics", "events"
CHUNK_BYTES = 4 * 1024 * 1024
_HEAD = ("step", "rank", "utc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A line. ``kind``: of which file; ``end``: the byte behind it, ``file``: which file of that name it was."""

    kind: str
    fields: Mapping[str, Any]
    end: int
    file: int

    @property
    def utc(self) -> str:
        """When it was written."""
        return str(self.fields.get("utc", ""))


class LineFollower:
    """Reads whole lines as they come. A file that was removed and made again is read from its beginning."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path = path
        self._kind = kind
        self._fd: int | None = None
        self._begin = 0  # of the first line that was not handed out
        self._file = 0

    def read(self) -> tuple[list[Record], bool]:
        """Return the new records, a chunk at most, and whether these are all."""
        if self._fd is None and not self._open():
            return [], True
        assert self._fd is not None
        data = os.pread(self._fd, CHUNK_BYTES, self._begin)
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and len(data) == CHUNK_BYTES:
            whole = data  # one line that is longer than any of ours: passed over in pieces
        found = list(self._records(whole))
        is_all = len(data) < CHUNK_BYTES
        if is_all and not whole and not is_named(self._fd, self._path):
            self.close()
        return found, is_all

    def close(self) -> None:
        """Close the file; the next look opens what is there then."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> bool:
        with contextlib.suppress(OSError):  # the next look may find one
            self._fd = open_to_read(self._path)
            self._begin, self._file = 0, os.fstat(self._fd).st_ino
        return self._fd is not None

    def _records(self, whole: bytes) -> Iterator[Record]:
        for line in whole.splitlines(keepends=True):
            self._begin += len(line)
            try:
                fields = from_json(line)
            except ValueError:
                continue  # torn by a crash
            if isinstance(fields, dict):
                yield Record(kind=self._kind, fields=fields, end=self._begin, file=self._file)


class Follower:
    """Reads both files as one stream. Owned by a tracker's process."""

    def __init__(self, log_dir: Path) -> None:
        self._metrics = LineFollower(log_dir / "metrics.jsonl", METRICS)
        self._events = LineFollower(log_dir / "events.jsonl", EVENTS)
        # Events that may be newer than metrics still to be read.
        self._held: deque[Record] = deque()

    def read(self) -> Iterator[Record]:
        """Return everything that is new, in order."""
        while True:
            # INVARIANT events-first: an event is handed out after every line of metrics that was written
            # before it. Broken if: metrics are read to their end first.
            # Guarded by: test_an_event_comes_after_the_points_that_were_written_before_it.
            while True:
                found, is_all_events = self._events.read()
                self._held += found
                if is_all_events:
                    break
            found, is_all = self._metrics.read()
            for record in found:
                while self._held and self._held[0].utc <= record.utc:
                    yield self._held.popleft()
                yield record
            if is_all:
                while self._held:
                    yield self._held.popleft()
                return


def values_of(record: Record) -> Values:
    """Return the record's figures; None stands for one that is not finite."""
    return {
        name: None if value is None else float(value)
        for name, value in record.fields.items()
        if name not in _HEAD and (value is None or isinstance(value, (int, float)))
    }


def when_s(record: Record) -> float:
    """When it was written, in seconds since 1970; 0.0 where it does not say so."""
    return epoch_s(record.utc) or 0.0


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
        """Return True unless the tracker certainly had this line when the position was read."""
        self._read[record.kind] = (record.file, record.end)
        file, end = self._reached.get(record.kind, (record.file, 0))
        return file != record.file or record.end > end

    def save(self, *, link: str) -> None:
        """Save the position once the tracker has everything that was read. Raises OSError."""
        replace_file(
            self._path, encode_record({"link": link, "reached": self._read, "kept": self.kept})
        )


class LeadTracker(abc.ABC):
    """Hears of a run from its files, and takes the figures of the rank that stands for it."""

    def __init__(self, log_dir: Path, name: str) -> None:
        self._position = Position(log_dir, name)
        self._course, self._lead = Course(), Lead()

    def take(self, record: Record) -> None:
        """Take one line of the run's files."""
        is_new = self._position.is_new(record)
        if record.kind == EVENTS:
            if record.fields.get("event") == "plan":
                self._lead.given_up.update(record.fields.get("dropped", ()))
            self._hear(record, is_new=is_new)
        elif self._lead.is_it(int(record.fields["rank"])):
            step = int(record.fields["step"])
            self._point(record, step, self._course.take(step, values_of(record)), is_new=is_new)

    @abc.abstractmethod
    def _hear(self, record: Record, *, is_new: bool) -> None:
        """Take an event; without ``is_new`` an earlier process has taken it."""

    @abc.abstractmethod
    def _point(self, record: Record, step: int, change: Change, *, is_new: bool) -> None:
        """Take the figures of a step, and what they undo; without ``is_new`` an earlier process has taken them."""
