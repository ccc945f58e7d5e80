"""Takes hold of a run's directories: makes them, locks them, and points ``logs/latest`` to the logs.

The starter of a run calls it: its supervisor once every rank is ready, before which nothing on disk is
touched; or rank 0 under another launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.run_files import (
    RefusedFileError,
    is_named,
    open_lock,
    open_new,
    open_to_change,
    temporary_path,
)

LOCK_NAME = ".lock"
LOG_LOCK_NAME = ".logs.lock"  # of its own: one directory may be for both
_LOOK_AGAIN_S = 0.1


class Folders(Protocol):
    """The names of a run's folders."""

    @property
    def log_dir(self) -> str:
        """The folder of the logs."""
        ...

    @property
    def checkpoint_dir(self) -> str:
        """The folder of the checkpoints."""
        ...

    @property
    def has_folders_of_its_name(self) -> bool:
        """True if another name would move them."""
        ...

    @property
    def latest(self) -> str:
        """The path that leads to the newest run's logs; empty for a run whose logs are elsewhere."""
        ...


def point(latest: Path, logs: Path) -> None:
    """Make ``latest``, which is next to the folder ``logs``, lead to it, atomically. Raises OSError.

    A link, or on a file system that has none a file with the folder's name.
    """
    temporary = temporary_path(latest)
    try:
        try:
            temporary.symlink_to(logs.name, target_is_directory=True)
        except OSError:
            with os.fdopen(open_new(temporary), "w", encoding="utf-8") as pointer:
                pointer.write(f"{logs.name}\n")
        temporary.replace(latest)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderChange:
    """A change to a folder of a live run. ``is_new``: it was removed, and exists again, empty."""

    option: str
    folder: Path
    text: str
    is_new: bool = False


class DirectoryLock:
    """An exclusive flock(2) on a directory. The kernel drops it with the process."""

    def __init__(
        self,
        directory: Path,
        *,
        option: str = "--checkpoint-dir",
        name: str = LOCK_NAME,
        way_on: str = "take another directory",
    ) -> None:
        self._path = directory / name
        self._option = option
        self._way_on = way_on
        self._descriptor = -1
        self._folder: os.stat_result | None = None  # that was locked
        self._trouble = ""

    def refuse_if_held(self) -> None:
        """Raise BadInputError if another live run holds the directory. Creates nothing."""
        try:
            descriptor = open_to_change(self._path)
        except OSError:
            return
        try:
            self._lock(descriptor)
        finally:
            os.close(descriptor)

    def refuse_if_foreign(self) -> None:
        """Raise BadInputError if the lock is a file of another user's run, which this user may not open."""
        is_ours = os.access(self._path, os.R_OK | os.W_OK, effective_ids=True)
        if self._path.is_file() and not is_ours:
            what = f"cannot be locked: {self._path.name} in it is of another user's run"
            raise BadInputError(self._option, self._path.parent, what)

    def acquire(self, *, patience_s: float = 0.0) -> None:
        """Take the lock. Raises BadInputError if another live run still holds it after that time.

        OSError: it cannot be taken or, on a full disk, is held without a name. One that is held already stays.
        """
        if self._descriptor >= 0 and not self.is_of_another_folder:
            return
        try:
            descriptor = open_lock(self._path)
        except RefusedFileError as error:
            what = f"cannot be locked: {self._path.name} in it {error.strerror}"
            raise BadInputError(self._option, self._path.parent, what) from error
        give_up_s = time.monotonic() + patience_s
        try:
            while True:
                try:
                    self._lock(descriptor)
                    break
                except BadInputError:
                    if time.monotonic() >= give_up_s:
                        raise
                    time.sleep(_LOOK_AGAIN_S)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self._folder = self._path.parent.stat()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    @property
    def is_of_another_folder(self) -> bool:
        """True if the lock that is held is no longer the one that other processes would find."""
        return self._descriptor >= 0 and not is_named(self._descriptor, self._path)

    def renew(self) -> FolderChange | None:
        """Make the folder again if it is gone, and lock the one that is there. What there is to say.

        Where that fails the old lock is kept, and the next call tries again; it is said once.
        """
        # INVARIANT lock-of-now: the lock is of the folder that is there now.
        # Broken if: a folder that was removed or moved away is written to again without its lock.
        # Guarded by: test_folders_that_are_removed_are_made_again_and_locked.
        folder, old = self._path.parent, self._descriptor
        is_new = not self._is_the_folder(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.acquire()
        except (OSError, BadInputError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            return self._said_once(f"{folder} was removed, and cannot be locked again ({reason})")
        os.close(old)
        self._trouble = ""
        text = f"{folder} was removed or moved away: it is made again"
        if not is_new:
            text = f"the lock of {folder} was removed: it is locked again"
        return FolderChange(option=self._option, folder=folder, text=text, is_new=is_new)

    def _is_the_folder(self, folder: Path) -> bool:
        try:
            return self._folder is not None and os.path.samestat(folder.stat(), self._folder)
        except OSError:
            return False

    def _said_once(self, text: str) -> FolderChange | None:
        if text == self._trouble:
            return None
        self._trouble = text
        return FolderChange(option=self._option, folder=self._path.parent, text=text)

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
                self._option,
                self._path.parent,
                f"another run (pid {holder}) is using it; wait for it, or {self._way_on}",
            ) from None


class RunDirectories:
    """The log and checkpoint directories of one run; one live run has each of them."""

    def __init__(self, run: Folders, *, path_of: Callable[[str], Path] = Path) -> None:
        """``path_of``: the folder of a name, in a process that runs code of the user's."""
        self._run, self._path_of = run, path_of
        way_on = "take another --name" if run.has_folders_of_its_name else "take another directory"
        # A script has no checkpoints of ours: what it locks is its log folder.
        is_one = run.checkpoint_dir == run.log_dir
        self._option = "--log-dir" if is_one else "--checkpoint-dir"
        self._checkpoints = DirectoryLock(
            path_of(run.checkpoint_dir), option=self._option, way_on=way_on
        )
        self._logs = DirectoryLock(
            path_of(run.log_dir), option="--log-dir", name=LOG_LOCK_NAME, way_on=way_on
        )

    def refuse_if_held(self) -> None:
        """Raise BadInputError if another live run holds one of them, or another user's has made it. Creates nothing."""
        for lock in (self._checkpoints, self._logs):
            lock.refuse_if_foreign()
            lock.refuse_if_held()

    def are_checkpoints_held(self) -> bool:
        """Return whether another live run, also one on another machine, is seen to hold the checkpoints."""
        try:
            self._checkpoints.refuse_if_held()
        except BadInputError:
            return True
        return False

    def hold_checkpoints(self) -> bool:
        """Lock the folder of the checkpoints, which is there. Returns False where that cannot be."""
        try:
            self._checkpoints.acquire()
        except (OSError, BadInputError):
            return False
        return True

    def claim(self, *, patience_s: float = 0.0) -> None:
        """Make and lock them. Raises BadInputError.

        ``patience_s``: how long who holds a lock may still have to end.
        """
        for option, name in (
            ("--log-dir", self._run.log_dir),
            ("--checkpoint-dir", self._run.checkpoint_dir),
        ):
            try:
                self._path_of(name).mkdir(parents=True, exist_ok=True)
            except OSError as error:  # noqa: PERF203 - two names
                raise BadInputError(option, name, f"cannot be made: {error.strerror}") from error
        try:
            self._checkpoints.acquire(patience_s=patience_s)
        except OSError as error:
            raise BadInputError(
                self._option, self._run.checkpoint_dir, f"cannot be locked: {error.strerror}"
            ) from error
        try:
            self._logs.acquire(patience_s=patience_s)
        except BadInputError:
            self._checkpoints.release()
            raise
        except OSError:
            pass  # worth no run: such a disk takes no lines either
        self._point()

    def look(self) -> list[FolderChange]:
        """Make and lock again what was removed since; return the changes. Raises nothing."""
        locks = (self._checkpoints, self._logs)
        lost = [lock for lock in locks if lock.is_of_another_folder]
        changes = [change for lock in lost if (change := lock.renew()) is not None]
        if self._logs in lost:
            self._point()
        return changes

    def _point(self) -> None:
        if latest := self._run.latest:
            with contextlib.suppress(OSError):  # a convenience: no run ends for want of it
                point(self._path_of(latest), self._path_of(self._run.log_dir))

    def release(self) -> None:
        """Let go of both."""
        self._checkpoints.release()
        self._logs.release()
