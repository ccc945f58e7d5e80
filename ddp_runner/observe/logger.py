"""DDPLogger: writes and reads a run's text log, a line per event. A failing disk never raises.

``2026-11-20 19:47:20.123 INFO    rank 1 step 60 | message`` in local time; further lines of a
message are indented by two spaces. Of a rank the milliseconds are followed by the run's seal.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import secrets
import sys
import traceback
import warnings
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ddp_runner.kernel.rules.secrets import without_secrets
from ddp_runner.kernel.system.run_files import is_named, open_to_append, open_to_append_anywhere
from ddp_runner.observe.files import Outage, ends_torn

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from ddp_runner.observe.files import Warn

LEVELS = ("DEBUG", "STEP", "DETAIL", "INFO", "WARNING", "ERROR")
CONTINUATION = "  "
SEAL_DIGITS = 3  # so that the time has microseconds to whoever reads it
HELD_BACK = "the rest is not shown on the console:"  # of a rank's output, behind this record
FIRST_LINE_MAX = 8_000  # characters of a sealed record: a reader cuts lines that are far longer
_RECORD = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}(?P<seal>\d*) (?P<level>DEBUG|STEP|DETAIL|INFO|WARNING|ERROR) +"
    r"(?:rank (?P<rank>\d+)|supervisor)(?: step (?P<step>\d+))? \| (?P<message>.*)",
    re.DOTALL,
)

_RECORD_HEAD = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}(?P<seal>\d*) (?:DEBUG|STEP|DETAIL|INFO|WARNING|ERROR) +(?:rank \d|supervisor )"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of the log, read back. ``rank`` is None for the supervisor's own lines."""

    level: str
    rank: int | None
    step: int | None
    message: str


def new_seal() -> str:
    """Return random digits that end the time of each record of a run; nobody can guess them.

    They distinguish a record from what a task prints in the same format, such as an older log: one in a
    thousand of those has the same digits. Code that reads them in a rank can imitate them.
    """
    return f"{secrets.randbelow(10**SEAL_DIGITS):0{SEAL_DIGITS}d}"


def parse_line(text: str, *, seal: str = "") -> LogLine | None:
    """The record that begins on this line; None for raw output and continuation lines.

    Only what has the ``seal`` is a record.
    """
    match = _RECORD.fullmatch(text)
    if match is None or match["seal"] != seal:
        return None
    rank, step = match["rank"], match["step"]
    return LogLine(
        level=match["level"],
        rank=None if rank is None else int(rank),
        step=None if step is None else int(step),
        message=match["message"],
    )


def split_records(text: str, *, seal: str = "") -> list[str]:
    """``text`` cut where a record begins in mid-line: the writer before was killed there."""
    found = _RECORD_HEAD.finditer(text)
    starts = [match.start() for match in found if match["seal"] == seal]
    cuts = [0, *(start for start in starts if start > 0), len(text)]
    return [text[first:last] for first, last in pairwise(cuts)]


def format_record(
    level: str, message: str, *, rank: int | None, step: int | None, at: datetime, seal: str = ""
) -> str:
    """Return one record of the log with its newline; ``seal`` ends its time."""
    who = "supervisor" if rank is None else f"rank {rank}"
    where = who if step is None else f"{who} step {step}"
    text = message.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")
    first, *rest = text.split("\n")
    stamp = f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03d}"
    if seal:
        quoted = _RECORD_HEAD.search(first)  # what looks like a record is not taken for one
        cut = min(FIRST_LINE_MAX, quoted.start() if quoted else FIRST_LINE_MAX)
        rest = [first[cut:], *rest] if len(first) > cut else rest
        first = first[:cut]
    lines = [f"{stamp}{seal} {level:<7} {where} | {first}", *(CONTINUATION + line for line in rest)]
    return "\n".join(lines) + "\n"


class DDPLogger:
    """Writes records to ``path``, else to ``stream``, else to standard error.

    Each record is one write(2) on an appending descriptor, so that records of several processes
    and threads never interleave and no lock can be left held by a fork. ``step`` is the default
    step of a record; ``seal`` (``new_seal``) shows that it is one. A record that a failing disk refuses is counted in ``records_lost``. Raises
    OSError where ``path`` cannot be opened or is not a regular file.
    """

    def __init__(
        self,
        *,
        rank: int | None,
        path: Path | None = None,
        stream: TextIO | None = None,
        debug: bool = False,
        seal: str = "",
    ) -> None:
        self.rank = rank
        self._seal = seal
        self.step: int | None = None
        self._outage = Outage(path or Path("standard error"), None)
        self.hidden: tuple[str, ...] = ()  # secrets: shown as *** wherever a record holds one
        self.is_debug = debug
        self._stream: TextIO | None = stream
        self._fd: int | None = None
        self._path = path
        if path is not None:
            torn = ends_torn(path)
            self._fd = open_to_append(path)
            if torn:
                with contextlib.suppress(OSError):
                    self._write("\n")
        elif stream is None:
            self._fd, self._stream = _standard_error()

    @property
    def records_lost(self) -> int:
        """The number of records given up so far."""
        return self._outage.lost_total

    def report_outages(self, path: Path, warn: Warn) -> None:
        """Have ``warn`` say once when records are lost, and when that ends; ``path``: the log file."""
        self._outage = Outage(path, warn)

    def debug(self, message: str, *, step: int | None = None) -> None:
        """Log a message for debugging; it is written with ``--debug`` only."""
        if self.is_debug:
            self._record("DEBUG", message, step)

    def progress(self, message: str, *, step: int | None = None) -> None:
        """A step's figures: for the file; the console has a display of its own for them."""
        self._record("STEP", message, step)

    def detail(self, message: str, *, step: int | None = None) -> None:
        """Log what only some readers want; the console shows it with ``--verbose``."""
        self._record("DETAIL", message, step)

    def info(self, message: str, *, step: int | None = None) -> None:
        """Worth reading; the console shows those of rank 0."""
        self._record("INFO", message, step)

    def warning(self, message: str, *, step: int | None = None) -> None:
        """Something is not as it should be; the console shows those of every rank."""
        self._record("WARNING", message, step)

    def error(self, message: str, *, step: int | None = None) -> None:
        """Something failed; the console shows those of every rank."""
        self._record("ERROR", message, step)

    def log(self, level: str, message: str) -> None:
        """Write at a level of :data:`LEVELS`, given in any case."""
        name = level.upper()
        if name not in LEVELS:
            raise ValueError(f"log level {level!r}: one of {', '.join(LEVELS)}")
        if name != "DEBUG" or self.is_debug:
            self._record(name, message, None)

    def close(self) -> None:
        """Close the file, if this logger opened one; standard error stays open."""
        if self._path is not None and self._fd is not None:
            os.close(self._fd)
        self._fd, self._stream = None, None

    def __enter__(self) -> DDPLogger:  # noqa: PYI034 - Self needs 3.11
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _record(self, level: str, message: str, step: int | None) -> None:
        where = self.step if step is None else step
        message = without_secrets(message, self.hidden)
        text = format_record(
            level, message, rank=self.rank, step=where, at=_local_now(), seal=self._seal
        )
        try:
            self._write(text)
        except OSError as error:  # a full disk or a closed stream: counted, and training goes on
            self._outage.failed(error)
        else:
            self._outage.ended()

    def _write(self, text: str) -> None:
        """Raises OSError where not all of it is written."""
        if self._fd is not None:
            if self._path is not None and not is_named(self._fd, self._path):
                self._reopen(self._path)
            data = text.encode(errors="backslashreplace")
            written = os.write(self._fd, data)
            if written < len(data):
                raise OSError(f"only {written} of {len(data)} bytes were written")
            return
        if self._stream is None:
            raise OSError("it is closed")
        try:
            self._stream.write(text)
            self._stream.flush()
        except ValueError as error:
            raise OSError(str(error)) from error

    def _reopen(self, path: Path) -> None:
        """Write to a new file where ours was removed or moved away. Raises OSError, and keeps ours then."""
        new = open_to_append_anywhere(path)
        assert self._fd is not None
        os.dup2(new, self._fd, inheritable=False)  # at once, for every thread that writes
        os.close(new)


def _local_now() -> datetime:
    return datetime.now(timezone.utc).astimezone()


def _standard_error() -> tuple[int | None, TextIO | None]:
    """The descriptor of ``sys.stderr``, or the stream itself where it has none (notebooks)."""
    try:
        return sys.stderr.fileno(), None
    except (io.UnsupportedOperation, AttributeError, ValueError):
        return None, sys.stderr


class _RootHandler(logging.Handler):
    def __init__(self, logger: DDPLogger) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = f"{record.name}: {record.getMessage()}"
        except Exception:  # noqa: BLE001 - a user's bad format string must not end the training
            text = f"{record.name}: {record.msg} (its arguments do not fit: {record.args!r})"
        if record.exc_info and record.exc_info[1] is not None:
            text += "\n" + "".join(traceback.format_exception(record.exc_info[1]))
        self._logger.log(_level_of(record.levelno), text)


def _level_of(number: int) -> str:
    for name, lowest in (("ERROR", 40), ("WARNING", 30), ("INFO", 20)):
        if number >= lowest:
            return name
    return "DEBUG"


def install_root_handler(logger: DDPLogger, *, level: int = logging.WARNING) -> Callable[[], None]:
    """Route python ``logging`` (from ``level`` up) and ``warnings`` into ``logger``.

    Returns the function that undoes it. Handlers that stood on the root logger are taken off
    meanwhile, so that no record is written twice.
    """
    root = logging.getLogger()
    old_handlers, old_level, old_show = root.handlers[:], root.level, warnings.showwarning
    handler = _RootHandler(logger)

    def show(  # noqa: PLR0917 - the signature that `warnings` calls
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is not None:
            old_show(message, category, filename, lineno, file, line)
        else:
            text = f"{category.__name__}: {message} ({filename}:{lineno})"
            logger.warning(text)

    def undo() -> None:
        root.handlers[:] = old_handlers
        root.setLevel(old_level)
        warnings.showwarning = old_show

    root.handlers[:] = [handler]
    root.setLevel(level)
    warnings.showwarning = show
    return undo
