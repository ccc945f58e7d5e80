"""A disk that loses power at a chosen operation, over a real directory.

It keeps, beside the real files, what would survive: content up to the last file sync, names up to
the last directory sync. After the crash every operation raises, as nothing runs on a machine that
is off; :meth:`CrashingDisk.restart` then leaves in the directory what a restart would find.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class SimulatedCrash(BaseException):
    """The power is off. No handler for ordinary errors may catch this."""


class Survival(Enum):
    """What of the operations that were not synced yet reaches the platter."""

    EVERYTHING = "everything"  # only the process died
    NOTHING = "nothing"
    NAMES = "names, with half of the content"
    LAST_NAME = "only the last change of a name"


@dataclass
class Inode:
    """Content of a file: all of it, and the part that was synced."""

    data: bytes = b""
    synced: bytes = b""

    def after(self, survival: Survival) -> bytes:
        if survival is Survival.EVERYTHING:
            return self.data
        if survival is Survival.NOTHING:
            return self.synced
        return (
            self.synced + self.data[len(self.synced) :][: (len(self.data) - len(self.synced)) // 2]
        )


@dataclass(frozen=True)
class Change:
    """A change of names that no directory sync has made durable yet."""

    directory: Path
    removed: Path | None
    added: tuple[Path, Inode] | None


@dataclass
class CrashingDisk:
    """Passes the contract of ``Disk``; crashes in place of operation number ``crash_at`` (from 1)."""

    root: Path
    crash_at: int | None = None
    operations: int = 0
    _live: dict[Path, Inode] = field(default_factory=dict)
    _durable: dict[Path, Inode] = field(default_factory=dict)
    _changes: list[Change] = field(default_factory=list)
    _open: dict[int, Inode] = field(default_factory=dict)
    _paths: dict[int, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in self.root.rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                self._live[path] = Inode(content, content)
        self._durable = dict(self._live)

    def _count(self) -> None:
        self.operations += 1
        if self.crash_at is not None and self.operations >= self.crash_at:
            raise SimulatedCrash

    def open_temporary(self, path: Path) -> int:
        self._count()
        with path.open("xb"):
            inode = Inode()
        self._live[path] = inode
        self._changes.append(Change(path.parent, None, (path, inode)))
        handle = max(self._open, default=0) + 1
        self._open[handle] = inode
        self._paths[handle] = path
        return handle

    def set_room_aside(self, handle: int, size_bytes: int) -> None:
        """Nothing follows from it."""

    def write(self, handle: int, data: memoryview) -> None:
        content = bytes(data)
        try:
            self._count()
        except SimulatedCrash:
            if self.operations == self.crash_at:
                self._open[handle].data += content[: len(content) // 2]
            raise
        self._open[handle].data += content
        with self._paths[handle].open("ab") as file:
            file.write(content)

    def sync_file(self, handle: int) -> None:
        self._count()
        self._open[handle].synced = self._open[handle].data

    def close(self, handle: int) -> None:
        del self._open[handle], self._paths[handle]

    def replace(self, source: Path, target: Path) -> None:
        self._count()
        source.replace(target)
        inode = self._live.pop(source)
        self._live[target] = inode
        self._changes.append(Change(source.parent, source, (target, inode)))

    def sync_directory(self, directory: Path) -> None:
        self._count()
        for change in self._changes:
            if change.directory == directory:
                _apply(change, self._durable)
        self._changes = [change for change in self._changes if change.directory != directory]

    def remove(self, path: Path) -> None:
        self._count()
        path.unlink()
        del self._live[path]
        self._changes.append(Change(path.parent, path, None))

    def make_directory(self, directory: Path) -> None:
        self._count()
        directory.mkdir(parents=True, exist_ok=True)

    def size_bytes(self, path: Path) -> int:
        return path.stat().st_size

    def free_bytes(self, directory: Path) -> int:
        return shutil.disk_usage(directory).free

    def restart(self, survival: Survival) -> None:
        """Turn the real directory into what a restart finds."""
        names = dict(self._durable)
        pending = self._changes[-1:] if survival is Survival.LAST_NAME else self._changes
        for change in pending if survival is not Survival.NOTHING else ():
            _apply(change, names)
        for path in list(self.root.rglob("*")):
            if path.is_file():
                path.unlink()
        for path, inode in names.items():
            path.write_bytes(inode.after(survival))


def _apply(change: Change, names: dict[Path, Inode]) -> None:
    if change.removed is not None:
        names.pop(change.removed, None)
    if change.added is not None:
        names[change.added[0]] = change.added[1]
