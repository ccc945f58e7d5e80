"""What a run takes hold of on this machine: its directories, their lock, the store's port, the board.

Nothing on disk is touched before :func:`claim_directories`, which comes when every rank is ready.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
from pathlib import Path

from ddp_runner.core.board import SLOT_BYTES, Board
from ddp_runner.core.faults import BadInputError
from ddp_runner.core.settings import Settings

LOCK_NAME = ".lock"


class DirectoryLock:
    """An exclusive flock(2) on a checkpoint directory. The kernel drops it with the process."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_NAME
        self._descriptor = -1

    def refuse_if_held(self) -> None:
        """Raise BadInputError if another live run holds the directory. Creates nothing."""
        try:
            descriptor = os.open(self._path, os.O_RDWR)
        except OSError:
            return
        try:
            self._lock(descriptor)
        finally:
            os.close(descriptor)

    def acquire(self) -> None:
        """Take the lock. Raises BadInputError if another live run holds it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Let go; the file stays, since removing it would race with the next run."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise BadInputError(
                "--checkpoint-dir",
                self._path.parent,
                f"another run (pid {holder}) is using it; wait for it or take another directory",
            ) from None


def claim_directories(settings: Settings, lock: DirectoryLock) -> None:
    """Make the log and checkpoint directories and lock the latter. Raises BadInputError."""
    for option, name in (
        ("--log-dir", settings.run.log_dir),
        ("--checkpoint-dir", settings.run.checkpoint_dir),
    ):
        try:
            Path(name).mkdir(parents=True, exist_ok=True)
        except OSError as error:  # noqa: PERF203 - two names
            raise BadInputError(option, name, f"cannot be made: {error.strerror}") from error
    try:
        lock.acquire()
    except OSError as error:
        raise BadInputError(
            "--checkpoint-dir", settings.run.checkpoint_dir, f"cannot be locked: {error.strerror}"
        ) from error


def remove_temporary_files(directory: Path) -> list[Path]:
    """Remove what a writer that was killed left half written. The lock must be held: all are dead."""
    removed = []
    for path in directory.glob(".*.tmp-*"):
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append(path)
    return removed


def bind_store_port(port: int) -> socket.socket:
    """A listening loopback socket for the store, held by the supervisor for the whole run.

    Raises BadInputError where the port is taken or none is left.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Without it, the connections of a run that has just ended would block the same --port.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        expected = (
            f"is not free ({error.strerror}); 0 takes any free one"
            if port
            else f"no port is free on loopback ({error.strerror}); end other programs"
        )
        raise BadInputError("ddp.port", port, expected) from error
    return listening


class BoardMemory:
    """The progress board in unnamed shared memory: no file, gone with the last process."""

    def __init__(self, slots: int) -> None:
        self.descriptor = os.memfd_create("progress_board")
        os.ftruncate(self.descriptor, slots * SLOT_BYTES)
        self._memory = mmap.mmap(self.descriptor, 0)
        self._view = memoryview(self._memory)
        self.board = Board(self._view, slots)

    def close(self) -> None:
        """Unmap and close."""
        self.board.close()
        self._view.release()
        with contextlib.suppress(BufferError):  # a slot is still held: the process ends anyway
            self._memory.close()
        os.close(self.descriptor)
