"""The few disk operations that durability rests on, as a port. Never decides their order.

The order is the business of ``publish`` and ``store``; tests put a disk here that loses power at
any operation.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from typing import TYPE_CHECKING, Protocol

from ddp_runner.kernel.system.run_files import open_new

if TYPE_CHECKING:
    from pathlib import Path

# What a file system answers that cannot sync a directory (some network and FUSE ones): there its
# own rename is as durable as it gets, and refusing to save would not make it more so.
_CANNOT_SYNC_DIRECTORY = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of linux/falloc.h
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h
_PIECE_BYTES = 16 * 1024 * 1024  # of one call
_BEGUN_BYTES_MIN = 1024 * 1024  # the disk begins with smaller ones when it likes
_LIBC = ctypes.CDLL(None)


class Disk(Protocol):
    """Every method raises OSError when the system refuses. Handles are opaque integers."""

    def open_temporary(self, path: Path) -> int:
        """Create ``path``, which must not be there, for writing."""
        ...

    def set_room_aside(self, handle: int, size_bytes: int) -> None:
        """Say how many bytes will be written at least, which makes their writing faster; never fails."""
        ...

    def write(self, handle: int, data: memoryview) -> None:
        """Append all of ``data``, a flat view of bytes."""
        ...

    def sync_file(self, handle: int) -> None:
        """Return once everything written to ``handle`` survives a loss of power."""
        ...

    def close(self, handle: int) -> None:
        """Give ``handle`` up; syncs nothing."""
        ...

    def replace(self, source: Path, target: Path) -> None:
        """Rename ``source`` to ``target`` at once, over an older ``target``."""
        ...

    def sync_directory(self, directory: Path) -> None:
        """Return once every rename and removal in ``directory`` survives a loss of power."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file."""
        ...

    def make_directory(self, directory: Path) -> None:
        """Create ``directory`` and its parents; nothing if it is there."""
        ...

    def size_bytes(self, path: Path) -> int:
        """The size of a file."""
        ...

    def free_bytes(self, directory: Path) -> int:
        """Bytes that this user may still write under ``directory``."""
        ...


class RealDisk:
    """The operating system's own."""

    def open_temporary(self, path: Path) -> int:
        """Create ``path``, which must not be there, for writing; programs that we start have it not."""
        return open_new(path)

    def set_room_aside(self, handle: int, size_bytes: int) -> None:
        """fallocate(2), where there is one: what it refuses, :meth:`write` shows.

        posix_fallocate(3) writes the whole file where the file system cannot set room aside.
        """
        if call := getattr(_LIBC, "fallocate", None):
            call(handle, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size_bytes))

    def write(self, handle: int, data: memoryview) -> None:
        """Append all of ``data``; the disk begins with it while more comes, so that a sync has less to wait for."""
        begin = getattr(_LIBC, "sync_file_range", None) if data.nbytes >= _BEGUN_BYTES_MIN else None
        written = 0
        while written < data.nbytes:
            written += os.write(handle, data[written : written + _PIECE_BYTES])
            if begin is not None:
                begin(handle, ctypes.c_int64(0), ctypes.c_int64(0), _BEGIN_WRITING)

    def sync_file(self, handle: int) -> None:
        """fsync(2). After an error the file's content is unknown: give it up, never sync again."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Release the descriptor."""
        os.close(handle)

    def replace(self, source: Path, target: Path) -> None:
        """rename(2)."""
        source.replace(target)

    def sync_directory(self, directory: Path) -> None:
        """Sync the directory itself, where the file system has it."""
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC_DIRECTORY:
                raise
        finally:
            os.close(handle)

    def remove(self, path: Path) -> None:
        """unlink(2)."""
        path.unlink()

    def make_directory(self, directory: Path) -> None:
        """mkdir(2), parents included."""
        directory.mkdir(parents=True, exist_ok=True)

    def size_bytes(self, path: Path) -> int:
        """lstat(2)."""
        return path.lstat().st_size

    def free_bytes(self, directory: Path) -> int:
        """statvfs(3): what is free for an ordinary user. Without limit where the system cannot say."""
        usage = shutil.disk_usage(directory)
        return usage.free if usage.total else sys.maxsize
