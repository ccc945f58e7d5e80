"""Follows one growing text file, line by line, whatever happens to it. Never blocks or raises."""

from __future__ import annotations

import os
from pathlib import Path

from ddp_runner.kernel.system.run_files import open_to_read
from ddp_runner.observe.format import byte_size

CHUNK_BYTES = 64 * 1024  # read per call
LINE_BYTES_MAX = 16 * 1024  # the rest of a longer line is left out
BACKLOG_BYTES_MAX = 4 * 1024 * 1024  # beyond it the middle is skipped, and said so


class FollowedFile:
    """A cursor on a file that may not exist yet, grow, be cut short or be replaced.

    With ``from_end`` it starts behind what stands in the file now, and leaves out the next
    ``skipped_bytes``, which have been shown already.
    """

    def __init__(self, path: Path, *, from_end: bool, skipped_bytes: int = 0) -> None:
        self.path = path
        self._to_skip = skipped_bytes
        self.has_more = False  # the last read_lines() stopped at its bound, not at the end
        self._fd: int | None = None
        self._offset = 0
        self._partial = b""
        self._overlong = False
        if from_end and self._open():
            self._offset = self._size()

    def read_lines(self) -> list[str]:
        """The lines completed since the last call, from at most CHUNK_BYTES of the file."""
        notes = self._skip_backlog()
        data = self._read()
        if not data and self._changed_underneath():
            notes += self.take_partial()
            self._offset, self._overlong = 0, False
            data = self._read()
        self.has_more = len(data) == CHUNK_BYTES
        return notes + self._cut(data)

    def take_partial(self) -> list[str]:
        """The unfinished last line, given up waiting for its end; empty where there is none."""
        rest, self._partial = self._partial, b""
        return [_text(rest)] if rest else []

    @property
    def taken_bytes(self) -> int:
        """The bytes of the file that were read, in whole lines."""
        return self._offset - len(self._partial)

    def close(self) -> None:
        """Close the file; the next read opens it again, at the same place."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> bool:
        try:
            self._fd = open_to_read(self.path)
        except OSError:
            return False  # not there yet, or no file: the next poll looks again
        return True

    def _size(self) -> int:
        return os.fstat(self._fd).st_size if self._fd is not None else 0

    def _read(self) -> bytes:
        if self._fd is None and not self._open():
            return b""
        assert self._fd is not None
        try:
            data = os.pread(self._fd, CHUNK_BYTES, self._offset)
        except OSError:
            return b""  # a passing I/O error of a log: the next poll reads the same place again
        self._offset += len(data)
        skipped = min(self._to_skip, len(data))
        self._to_skip -= skipped
        return data[skipped:]

    def _changed_underneath(self) -> bool:
        """Return True if the file was cut short or replaced (the new one is opened by the next read)."""
        if self._fd is None:
            return False
        try:
            named = self.path.stat()
        except OSError:
            return False  # moved away, its successor is not there yet
        held = os.fstat(self._fd)
        replaced = (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino)
        if not replaced and held.st_size >= self._offset:
            return False
        if replaced:
            self.close()
        return True

    def _skip_backlog(self) -> list[str]:
        if self._fd is None and not self._open():
            return []
        behind = self._size() - self._offset
        if behind <= BACKLOG_BYTES_MAX:
            return []
        skipped = behind - CHUNK_BYTES
        self._offset += skipped
        self._partial, self._overlong = b"", True  # we land inside a line
        return [f"{byte_size(skipped)} of output are not shown; they stand in {self.path}"]

    def _cut(self, data: bytes) -> list[str]:
        *whole, rest = (self._partial + data).split(b"\n")
        if self._overlong and whole:
            del whole[0]
            self._overlong = False
        lines = [_text(line) for line in whole]
        if len(rest) > LINE_BYTES_MAX:
            rest = rest[rest.rfind(b"\r") + 1 :]  # a progress bar: only its last state counts
        if self._overlong:
            rest = b""
        elif len(rest) > LINE_BYTES_MAX:
            lines.append(_text(rest))
            rest, self._overlong = b"", True
        self._partial = rest
        return lines


class FollowedMemory(FollowedFile):
    """The same on a file in memory, by its descriptor, which stays the caller's."""

    def __init__(self, descriptor: int, *, kept_in: str = "") -> None:
        """``kept_in``: the file in which people find what stands here."""
        super().__init__(Path(kept_in or f"/proc/self/fd/{descriptor}"), from_end=False)
        self._fd = os.dup(descriptor)

    def _open(self) -> bool:
        return False  # it is let go of, and has no name by which it could be found again

    def _changed_underneath(self) -> bool:
        return False


def _text(line: bytes) -> str:
    cut = line[:LINE_BYTES_MAX]
    text = cut.decode(errors="replace")
    return text + " …" if len(line) > len(cut) else text
