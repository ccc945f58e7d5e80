"""The disk of a rank whose run injects faults: fills up, slows down, damages what it keeps."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

from ddp_runner.checkpoint.manifest import manifest_name, step_of
from ddp_runner.rank.fenced_disk import FencedDisk, never
from ddp_runner.system.run_files import open_to_change


class FaultyDisk(FencedDisk):
    """The system's own disk until it is asked for trouble. Asked by the training thread, used by any."""

    def __init__(self, is_fenced: Callable[[], bool] = never) -> None:
        super().__init__(is_fenced)
        self._full_until_s = 0.0
        self._delay_s = 0.0
        self._fails_sync = False
        self._newest: Path | None = None

    @property
    def has_checkpoint(self) -> bool:
        """Whether this process has published one that can be damaged, and writes no newer one."""
        newest = self._newest
        return newest is not None and _manifest_of(newest).exists()

    def fill(self, *, seconds: float) -> None:
        """Refuse every write for so long."""
        self._full_until_s = time.monotonic() + seconds

    def slow_down(self, *, seconds: float) -> None:
        """Take so much longer for the next write."""
        self._delay_s += seconds

    def fail_next_sync(self) -> None:
        """Have the next sync of a file fail as on a broken device; the bytes may or may not be there."""
        self._fails_sync = True

    def damage_newest(self) -> None:
        """Turn over a byte in the middle of the newest checkpoint; nothing where there is none."""
        if self._newest is None:
            return
        with os.fdopen(open_to_change(self._newest), "rb+") as file:
            middle = file.seek(0, os.SEEK_END) // 2
            byte = os.pread(file.fileno(), 1, middle)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 0xFF]), middle)

    def open_temporary(self, path: Path) -> int:
        """As the system does it; what comes to be is no checkpoint yet."""
        if ".pt." in path.name:
            self._newest = None
        return super().open_temporary(path)

    def write(self, handle: int, data: memoryview) -> None:
        """Append all of ``data``, unless the system refuses it: by a limit on the size of files."""
        delay_s, self._delay_s = self._delay_s, 0.0
        if delay_s:
            time.sleep(delay_s)
        if time.monotonic() >= self._full_until_s:
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
        fails, self._fails_sync = self._fails_sync, False
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync_file(handle)

    def replace(self, source: Path, target: Path) -> None:
        """rename(2); remembers the checkpoint that is published by it."""
        super().replace(source, target)
        if target.suffix == ".pt" and step_of(target.name) is not None:
            self._newest = target


def _manifest_of(path: Path) -> Path:
    return path.with_name(manifest_name(int(path.stem.removeprefix("step_"))))
