"""One file, written under a temporary name and published when it is on disk. Never reads one.

``DurableWriter`` is what torch.save writes into: it hashes what it writes, at the same time.
"""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_runner.checkpoint.file_hash import PIECE_BYTES_MIN, FileHash, algorithm_for
from ddp_runner.kernel.system.run_files import temporary_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddp_runner.kernel.system.disk import Disk

# Smaller pieces are gathered: torch writes four for each tensor, most of a few bytes.
_PIECE_BYTES_MIN = PIECE_BYTES_MIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The record of a published file: size and digest (see ``file_hash``) of the bytes handed to the disk."""

    size_bytes: int
    sha256: str
    algorithm: str


class DurableWriter:
    """A file object for torch.save: appends to a handle and hashes the same bytes beside it.

    The bytes that torch hands over are valid only during the call, so each call waits for both.
    After the first failure it takes and drops everything and keeps the error in ``failure``: torch
    cannot end its archive after a failed write and would hide the cause behind its own error.
    """

    def __init__(self, disk: Disk, handle: int, hasher: FileHash) -> None:
        self._disk = disk
        self._handle = handle
        self._hasher = hasher
        self._gathered = bytearray()
        self.size_bytes = 0
        self.failure: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append ``data``; returns its length, also after a failure (see the class)."""
        view = memoryview(data)
        if self.failure is None and view.nbytes:
            try:
                self._take(view.cast("B"))
            except BaseException as error:  # noqa: BLE001  # raised by finish() when torch is out
                self.failure = error
        return view.nbytes

    def flush(self) -> None:
        """Do nothing: torch calls it at the end, and :meth:`finish` empties the writer."""

    def finish(self) -> None:
        """Append what is still gathered; raises the first failure of any write."""
        if self.failure is not None:
            raise self.failure
        self._append_gathered()

    def _take(self, view: memoryview) -> None:
        if view.nbytes < _PIECE_BYTES_MIN:
            self._gathered += view
            if len(self._gathered) >= _PIECE_BYTES_MIN:
                self._append_gathered()
        else:
            self._append_gathered()
            self._append(view)

    def _append_gathered(self) -> None:
        if self._gathered:
            self._append(memoryview(self._gathered))
            self._gathered = bytearray()

    def _append(self, view: memoryview) -> None:
        self._hasher.begin(view)
        try:
            self._disk.write(self._handle, view)
        finally:
            self._hasher.wait()
        self.size_bytes += view.nbytes


def publish(
    disk: Disk,
    path: Path,
    produce: Callable[[DurableWriter], None],
    *,
    least_bytes: int = 0,
    confirm: Callable[[], None] | None = None,
) -> Written:
    """Have ``produce`` write a file and make it appear as ``path``, whole, or not at all.

    ``least_bytes``: that it has for certain. ``confirm`` is called when all is written, before the file
    appears; what it raises is raised.

    The caller syncs the directory, once for all that it publishes there. On any error the temporary
    file is removed and what stood at ``path`` is untouched; if the removal fails too, the error
    that is raised is of that removal, caused by the first one.
    """
    temporary = temporary_path(path)
    try:
        written = _write_synced(disk, temporary, produce, least_bytes, confirm)
        # INVARIANT sync-before-rename: a name that readers look for never stands for bytes that a
        # loss of power can take away.
        # Broken if: replace() moves above the sync in _write_synced().
        # Guarded by: test_a_crash_at_any_disk_operation_keeps_the_newest_announced_checkpoint.
        disk.replace(temporary, path)
    except BaseException:
        _remove_if_there(disk, temporary)
        raise
    return written


def publish_text(disk: Disk, path: Path, text: str) -> Written:
    """:func:`publish` a small text."""
    return publish(disk, path, lambda out: _write_text(out, text))


def _write_text(out: DurableWriter, text: str) -> None:
    out.write(text.encode())


def _write_synced(
    disk: Disk,
    path: Path,
    produce: Callable[[DurableWriter], None],
    least_bytes: int,
    confirm: Callable[[], None] | None,
) -> Written:
    """Write and sync ``path``. Raises OSError if the disk holds another size."""
    handle = disk.open_temporary(path)
    hasher = FileHash(algorithm_for(least_bytes))
    try:
        if least_bytes:
            disk.set_room_aside(handle, least_bytes)
        try:
            writer = DurableWriter(disk, handle, hasher)
            produce(writer)
            writer.finish()
        finally:
            sha256 = hasher.close()
        if confirm is None:
            disk.sync_file(handle)
        else:
            _sync_beside(disk, handle, confirm)
    finally:
        disk.close(handle)
    size_bytes = disk.size_bytes(path)
    if size_bytes != writer.size_bytes:
        wrong = f"holds {size_bytes} bytes after a write of {writer.size_bytes}"
        raise OSError(errno.EIO, wrong, str(path))
    return Written(size_bytes=size_bytes, sha256=sha256, algorithm=hasher.algorithm)


def _sync_beside(disk: Disk, handle: int, confirm: Callable[[], None]) -> None:
    """Sync, and ``confirm`` meanwhile."""
    failures: list[BaseException] = []

    def check() -> None:
        try:
            confirm()
        except BaseException as error:  # noqa: BLE001 - top of a thread: raised below
            failures.append(error)

    thread = threading.Thread(target=check, name="checkpoint-confirm")
    thread.start()
    try:
        disk.sync_file(handle)
    finally:
        thread.join()
    if failures:
        raise failures[0]


def _remove_if_there(disk: Disk, path: Path) -> None:
    try:
        disk.remove(path)
    except FileNotFoundError:
        return  # it was never created, or was renamed already
