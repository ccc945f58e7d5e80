"""Owns ``metrics.csv``: a row for each logged step of each rank, as it stands. Made from the files at each start."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from ddp_runner.features.trackers.follow import EVENTS, Position, Record
from ddp_runner.features.trackers.rules import Course, Values
from ddp_runner.system.run_files import left_over, open_new, reading, temporary_path

FIXED = ("step", "rank", "utc")
_OPEN_ROWS = 1024  # the newest, to which figures of an evaluation may still come


class CsvTracker:
    """Rows stand in the order in which they came. A step that is done again takes the place of what stood."""

    def __init__(self, log_dir: Path) -> None:
        self._path = log_dir / "metrics.csv"
        _remove_left_over(self._path)
        self._position = Position(
            log_dir, "csv"
        )  # for its link: how far it is, the file itself shows
        self._columns: list[str] = list(FIXED)
        self._courses: dict[int, Course] = {}
        # Rows that are not in the file, or are in its end; and the bytes before the first of them.
        self._open: dict[tuple[int, int], dict[str, object]] = {}
        self._lines: dict[
            tuple[int, int], bytes
        ] = {}  # what the file has of these, where they are unchanged
        self._closed_bytes = 0
        self._is_changed = True
        self._is_published = False
        self._temporary, self._file = self._new_file()
        self._write_header()

    @property
    def link(self) -> str:
        """The path of the file."""
        return str(self._path)

    def take(self, record: Record) -> None:
        """Take one line of the run's files."""
        fields = record.fields
        if record.kind == EVENTS:
            if fields.get("event") == "run_begins":
                self._begin(int(fields["resumed_step"]))
            return
        rank, step = int(fields["rank"]), int(fields["step"])
        values: Values = {k: v for k, v in fields.items() if k not in FIXED}
        change = self._courses.setdefault(rank, Course()).take(step, values)
        if change.undo_after is not None:
            self._undo({rank: change.undo_after})
        new = [name for name in change.values if name not in self._columns]
        if new:
            self._columns += new
            self._write_again({})
        row = self._open.setdefault((step, rank), {"step": step, "rank": rank, "utc": record.utc})
        row.update(change.values)
        self._lines.pop((step, rank), None)
        self._is_changed = True

    def flush(self) -> None:
        """Have the file hold all rows."""
        if not self._is_changed:
            return
        self._write_open_rows()
        self._file.flush()
        self._publish()
        self._is_changed = False

    def _write_open_rows(self) -> None:
        """Write the rows from the first changed one on; the oldest of too many are closed."""
        keys = list(self._open)
        at, is_same = self._closed_bytes, True
        for number, key in enumerate(keys):
            line = self._lines.get(key)
            if line is None:
                line = self._lines[key] = self._line(self._open[key])
                if is_same:
                    self._cut_at(at)
                is_same = False
            if not is_same:
                self._file.write(line)
            at += len(line)
            if number < len(keys) - _OPEN_ROWS:
                self._closed_bytes = at
                del self._open[key], self._lines[key]
        if is_same:
            self._cut_at(at)

    def _cut_at(self, size_bytes: int) -> None:
        self._file.seek(size_bytes)
        self._file.truncate()

    def close(self, exit_code: int) -> None:
        """Write what is left."""
        del exit_code
        self.flush()
        self._file.close()

    def _begin(self, step: int) -> None:
        undone = {rank: course.begin(step) for rank, course in self._courses.items()}
        last = {rank: after for rank, after in undone.items() if after is not None}
        if last:
            self._undo(last)

    def _undo(self, last: dict[int, int]) -> None:
        """Take out, of each of these ranks, the rows behind its step."""
        self._open = {
            (step, rank): row
            for (step, rank), row in self._open.items()
            if step <= last.get(rank, step)
        }
        self._write_again(last)

    def _write_again(self, last: dict[int, int]) -> None:
        """Make the file again without those rows, with all columns that are known by now."""
        old_path = self._path if self._is_published else self._temporary
        old_file, old_bytes = self._file, self._closed_bytes
        old_file.flush()
        self._temporary, self._file = self._new_file()
        self._is_published = False
        self._write_header()
        for row in _rows(old_path, old_bytes):
            step, rank = int(row["step"]), int(row["rank"])
            if step <= last.get(rank, step):
                self._closed_bytes += self._file.write(self._line(row))
        old_file.close()
        if old_path != self._path:
            old_path.unlink(missing_ok=True)
        self._is_changed = True

    def _new_file(self) -> tuple[Path, BinaryIO]:
        path = temporary_path(self._path)
        return path, os.fdopen(open_new(path), "wb")

    def _write_header(self) -> None:
        self._lines.clear()
        self._closed_bytes = self._file.write(_encoded(self._columns))

    def _line(self, row: dict[str, object] | dict[str, str]) -> bytes:
        return _encoded(["" if (v := row.get(name)) is None else v for name in self._columns])

    def _publish(self) -> None:
        if not self._is_published:
            self._temporary.replace(self._path)
            self._is_published = True
            self._position.save(link=self.link)


def _remove_left_over(path: Path) -> None:
    """Remove the file that a previous process was writing when it was killed."""
    for leftover in left_over(path.parent)[0]:
        if leftover.name.startswith(f".{path.name}."):
            leftover.unlink(missing_ok=True)


def _rows(path: Path, size_bytes: int) -> Iterator[dict[str, str]]:
    """The rows in the beginning of a file of ours."""
    with reading(path) as file:
        columns: list[str] = []
        left = size_bytes
        for line in file:
            if left <= 0:
                return
            left -= len(line)
            cells = next(csv.reader([line.decode()]))
            if columns:
                yield dict(zip(columns, cells, strict=True))
            else:
                columns = cells


def _encoded(cells: Sequence[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
