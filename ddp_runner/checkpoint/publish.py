"""One file, written under a temporary name and published when it is on disk. Never reads one.

``DurableWriter`` is what torch.save writes into: it hashes what it writes, at the same time.
"""

from __future__ import annotations

import errno
import hashlib
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_runner.system.run_files import temporary_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddp_runner.checkpoint.disk import Disk

# Smaller pieces are gathered: torch writes four for each tensor, most of a few bytes, and below
# this a hand-over to the hashing thread costs more than the hash.
_PIECE_BYTES_MIN = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was published: size and SHA-256 of the bytes that were handed to the disk."""

    path: Path
    size_bytes: int
    sha256: str


class _Hasher:
    """SHA-256 of a stream; large pieces are hashed by a thread of its own while they are written.

    No executor of the standard library: those take no work once the interpreter is ending, when a
    plain script's last save may still be under way.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._pieces: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, view: memoryview) -> None:
        """Take the next piece, which must stay as it is until :meth:`wait` returns."""
        if view.nbytes < _PIECE_BYTES_MIN:
            self._hash.update(view)
            self._done.put(None)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint-hash")
            self._thread.start()
        self._pieces.put(view)

    def wait(self) -> None:
        """Return once the piece is hashed."""
        self._done.get()

    def _run(self) -> None:
        while (view := self._pieces.get()) is not None:
            self._hash.update(view)
            self._done.put(None)

    def close(self) -> str:
        """End the thread; the digest as hexadecimal digits."""
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
        return self._hash.hexdigest()


class DurableWriter:
    """A file object for torch.save: appends to a handle and hashes the same bytes beside it.

    The bytes that torch hands over are valid only during the call, so each call waits for both.
    After the first failure it takes and drops everything and keeps the error in ``failure``: torch
    cannot end its archive after a failed write and would hide the cause behind its own error.
    """

    def __init__(self, disk: Disk, handle: int, hasher: _Hasher) -> None:
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
        """For torch, which calls it at the end: :meth:`finish` is what empties the writer."""

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


def publish(disk: Disk, path: Path, produce: Callable[[DurableWriter], None]) -> Written:
    """Have ``produce`` write a file and make it appear as ``path``, whole, or not at all.

    The caller syncs the directory, once for all that it publishes there. On any error the temporary
    file is removed and what stood at ``path`` is untouched; if the removal fails too, the error
    that is raised is of that removal, caused by the first one.
    """
    temporary = temporary_path(path)
    try:
        written = _write_synced(disk, temporary, produce)
        # INVARIANT sync-before-rename: a name that readers look for never stands for bytes that a
        # loss of power can take away.
        # Broken if: replace() moves above the sync in _write_synced().
        # Guarded by: test_a_crash_at_any_disk_operation_keeps_the_newest_announced_checkpoint.
        disk.replace(temporary, path)
    except BaseException:
        _remove_if_there(disk, temporary)
        raise
    return Written(path=path, size_bytes=written[0], sha256=written[1])


def publish_text(disk: Disk, path: Path, text: str) -> Written:
    """:func:`publish` a small text."""
    return publish(disk, path, lambda out: _write_text(out, text))


def _write_text(out: DurableWriter, text: str) -> None:
    out.write(text.encode())


def _write_synced(
    disk: Disk, path: Path, produce: Callable[[DurableWriter], None]
) -> tuple[int, str]:
    """Write and sync ``path``; size and digest. Raises OSError if the disk holds another size."""
    handle = disk.open_temporary(path)
    try:
        hasher = _Hasher()
        try:
            writer = DurableWriter(disk, handle, hasher)
            produce(writer)
            writer.finish()
        finally:
            sha256 = hasher.close()
        disk.sync_file(handle)
    finally:
        disk.close(handle)
    size_bytes = disk.size_bytes(path)
    if size_bytes != writer.size_bytes:
        wrong = f"holds {size_bytes} bytes after a write of {writer.size_bytes}"
        raise OSError(errno.EIO, wrong, str(path))
    return size_bytes, sha256


def _remove_if_there(disk: Disk, path: Path) -> None:
    try:
        disk.remove(path)
    except FileNotFoundError:
        return  # it was never created, or was renamed already
