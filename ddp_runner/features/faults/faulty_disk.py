"""The disk of a rank whose run injects faults: fills up, slows down, damages what it keeps."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

from ddp_runner.checkpoint.manifest import checkpoint_name, manifest_name, step_of
from ddp_runner.rank.fenced_disk import FencedDisk, never
from ddp_runner.system.run_files import open_to_change

TROUBLE_BYTES = 32  # of memory that two processes may share
# The last is one more than the step, so that fresh memory has none.
_FULL_UNTIL_NS, _DELAY_NS, _FAILS_SYNC, _NEWEST = range(4)


class FaultyDisk(FencedDisk):
    """The system's own disk until a fault is injected. The training thread injects, any thread uses it.

    ``trouble``: the injected faults, if another process writes; ``folder``: the checkpoints' folder.
    """

    def __init__(
        self,
        is_fenced: Callable[[], bool] = never,
        *,
        trouble: memoryview | None = None,
        folder: Path | None = None,
    ) -> None:
        super().__init__(is_fenced)
        bytes_of = memoryview(bytearray(TROUBLE_BYTES)) if trouble is None else trouble
        self._cells = bytes_of[:TROUBLE_BYTES].cast("q")
        self._folder = folder

    @property
    def has_checkpoint(self) -> bool:
        """True if a published checkpoint can be damaged, and no newer one is being written."""
        newest = self._newest
        return newest is not None and _manifest_of(newest).exists()

    def fill(self, *, seconds: float) -> None:
        """Refuse every write for so long."""
        self._cells[_FULL_UNTIL_NS] = time.monotonic_ns() + int(seconds * 1e9)

    def slow_down(self, *, seconds: float) -> None:
        """Take so much longer for the next write."""
        self._cells[_DELAY_NS] += int(seconds * 1e9)

    def fail_next_sync(self) -> None:
        """Have the next sync of a file fail as on a broken device; the bytes may or may not be there."""
        self._cells[_FAILS_SYNC] = 1

    def damage_newest(self) -> None:
        """Turn over a byte in the middle of the newest checkpoint; nothing where there is none."""
        newest = self._newest
        if newest is None:
            return
        with os.fdopen(open_to_change(newest), "rb+") as file:
            middle = file.seek(0, os.SEEK_END) // 2
            byte = os.pread(file.fileno(), 1, middle)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 0xFF]), middle)

    @property
    def _newest(self) -> Path | None:
        number, folder = self._cells[_NEWEST], self._folder
        return folder / checkpoint_name(number - 1) if number and folder is not None else None

    def open_temporary(self, path: Path) -> int:
        """Open the file as the system does, and note that the newest checkpoint is not complete yet."""
        if ".pt." in path.name:
            self._cells[_NEWEST] = 0
        return super().open_temporary(path)

    def write(self, handle: int, data: memoryview) -> None:
        """Append all of ``data``, unless the system refuses it: by a limit on the size of files."""
        delay_ns, self._cells[_DELAY_NS] = self._cells[_DELAY_NS], 0
        if delay_ns:
            time.sleep(delay_ns / 1e9)
        if time.monotonic_ns() >= self._cells[_FULL_UNTIL_NS]:
            super().write(handle, data)
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            super().write(handle, data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def sync_file(self, handle: int) -> None:
        """fsync(2), unless it is to fail."""
        fails, self._cells[_FAILS_SYNC] = self._cells[_FAILS_SYNC], 0
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync_file(handle)

    def replace(self, source: Path, target: Path) -> None:
        """rename(2); remembers the checkpoint that is published by it."""
        super().replace(source, target)
        step = step_of(target.name) if target.suffix == ".pt" else None
        if step is not None:
            self._folder, self._cells[_NEWEST] = target.parent, step + 1


def shared_trouble(path: str) -> memoryview | None:
    """Map the disk faults that a rank shares with its writer process; None if nothing is shared."""
    if not path:
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # the supervisor has just ended, and so does this process
        return None
    memory = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    return memoryview(memory)


def _manifest_of(path: Path) -> Path:
    return path.with_name(manifest_name(int(path.stem.removeprefix("step_"))))
