"""Console output that can neither block nor raise: a closed or stopped terminal never hurts a run.

A pager that is not scrolled, Ctrl-S, a stalled ssh session: a plain write would then block the
supervisor, and with it the repair of faults. So a daemon thread writes to the descriptor, and
whoever draws asks :attr:`ConsoleWriter.busy` first.
"""

from __future__ import annotations

import io
import os
import re
import select
import threading
from collections import deque
from textwrap import wrap
from typing import TYPE_CHECKING, TextIO

from ddp_runner.observe.format import printable

if TYPE_CHECKING:
    from collections.abc import Collection

BACKLOG_BYTES_MAX = 1024 * 1024
HELD_LINES_MAX = 1000
_FITTED_COLUMNS_MIN = 40
_BEFORE_TEXT = re.compile(
    r" +(?:\S+(?: \S+)* {2,})?"
)  # of a line with a label, as of the start block


class ConsoleWriter:
    """The file that the display writes to. After the reader has gone (``broken``) writes vanish.

    Text that the stream's encoding lacks is written with replacement characters. A stream without
    a descriptor (a notebook's, a StringIO) is written to directly.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._fd = _descriptor(stream)
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.broken = False
        self.bytes_lost = 0
        self._pending = bytearray()
        self._writing = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def columns(self) -> int:
        """The width of the terminal; 80 if there is none, or it is unknown."""
        try:
            return (os.get_terminal_size(self._fd).columns if self._fd is not None else 0) or 80
        except OSError:
            return 80

    @property
    def busy(self) -> bool:
        """True if the terminal has not yet taken all its input."""
        with self._changed:
            return bool(self._pending) or self._writing

    def write(self, text: str) -> int:
        """Queue ``text``, or lose it where the backlog is full."""
        if self.broken:
            return len(text)
        if self._fd is None:
            self._write_through(text)
            return len(text)
        data = text.encode(self.encoding, errors="replace")
        with self._changed:
            if self._closing or len(self._pending) + len(data) > BACKLOG_BYTES_MAX:
                self.bytes_lost += len(data)
                return len(text)
            self._pending += data
            if self._thread is None:
                self._thread = threading.Thread(target=self._pump, name="console", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Return at once: the thread writes as soon as the terminal takes it."""

    def isatty(self) -> bool:
        """Return True if the stream is a terminal."""
        return self._fd is not None and os.isatty(self._fd)

    def fileno(self) -> int:
        """The descriptor of the stream. Raises OSError where it has none."""
        if self._fd is None:
            raise io.UnsupportedOperation("fileno")
        return self._fd

    def drain(self, *, timeout_s: float) -> bool:
        """Wait until all is written, at most ``timeout_s``; False where that was too short."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.broken or not (self._pending or self._writing), timeout=timeout_s
            )

    def close(self, *, timeout_s: float = 1.0) -> None:
        """Write what is left, within ``timeout_s``, and end the thread. The stream stays open."""
        self.drain(timeout_s=timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None and not self.busy:
            self._thread.join(timeout_s)

    def _write_through(self, text: str) -> None:
        try:
            self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            self._stream.flush()
        except (OSError, ValueError):
            self.broken = True  # the reader has gone; ValueError is Python's "closed file"

    def _pump(self) -> None:
        """Thread: move bytes from the backlog to the descriptor."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closing)
                if not self._pending:
                    return
                data, self._pending = bytes(self._pending), bytearray()
                self._writing = True
            whole = self._write_all(data)
            with self._changed:
                self._writing = False
                self.broken = not whole
                self._changed.notify_all()
            if not whole:
                return

    def _write_all(self, data: bytes) -> bool:
        assert self._fd is not None
        view = memoryview(data)
        try:
            while view:
                view = view[_write_some(self._fd, view) :]
        except OSError:
            return False  # the reader has gone
        return True


def _write_some(fd: int, view: memoryview) -> int:
    """Write what ``fd`` takes now; waits for a descriptor that someone made non-blocking."""
    try:
        return os.write(fd, view)
    except BlockingIOError:
        select.select([], [fd], [], 1.0)
        return 0


def _descriptor(stream: TextIO) -> int | None:
    """The descriptor of ``stream``, its own buffer written out first; None where it has none."""
    try:
        stream.flush()
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


class HeldLines:
    """Lines that wait for the terminal; bounded, and the oldest make room with a count. Those of ``hidden`` levels are left out."""

    def __init__(self, hidden: Collection[str] = ()) -> None:
        self._hidden = hidden
        self._lines: deque[tuple[str, str]] = deque(maxlen=HELD_LINES_MAX)
        self._dropped = 0

    def add(self, text: str, level: str) -> None:
        """Hold the lines of ``text``, as a terminal may show them."""
        if level in self._hidden:
            return
        for line in printable(text).split("\n"):
            self._dropped += len(self._lines) == HELD_LINES_MAX
            self._lines.append((line, level))

    def take(self) -> list[tuple[str, str]]:
        """Return all held lines as (text, level), and hold none any more."""
        lines = list(self._lines)
        if self._dropped:
            lines.insert(0, (f"{self._dropped:,} lines not shown: see the log files", "WARNING"))
        self._lines.clear()
        self._dropped = 0
        return lines

    def __len__(self) -> int:
        return len(self._lines)


def marked(text: str, level: str) -> str:
    """``text`` with its level in front where that matters."""
    return f"{level}: {text}" if level in ("WARNING", "ERROR") and text[:2] != "  " else text


def fitted(text: str, level: str, columns: int | None, *, labels: int = 0) -> list[str]:
    """Return the lines of ``text`` for a terminal of ``columns``, broken between words; None, or raw output, leaves it whole.

    The rest of a line stands below its text: below the value where there is a label. ``labels``: columns before the value.
    """
    line = marked(text, level)
    if columns is None or level == "RAW" or len(line) < columns:
        return [line]
    room = max(_FITTED_COLUMNS_MIN, columns - 1)
    found = _BEFORE_TEXT.match(line)
    before = labels or (2 if found is None else found.end())
    indent = " " * min(before, room // 2)
    return wrap(
        line, room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [line]
