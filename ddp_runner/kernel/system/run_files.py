"""Opens the files of a run's folders so that nobody else's are read, emptied or appended to.

Others may be able to write in such a folder: what they put there under a name that the run uses, a
symbolic link, a pipe, a device, is refused, never followed and never waited for. Decides nothing about
content. Every function raises OSError, whose text says what is wrong with the path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

FILE_MODE = 0o644
LOCK_MODE = 0o600
SMALL_BYTES_MAX = 64 * 1024 * 1024  # of a file that is read whole and is no checkpoint
LINE_BYTES_MAX = 16 * 1024 * 1024
_LOCK_BYTES_MAX = 64
_TEMPORARY = re.compile(r"\.(.+)\.tmp-([\w.~]+)-(\d+)-([0-9a-f]{12})-[0-9a-f]{16}")
_HOST_CHARACTERS_MAX = 40
_START_TIME_FIELD = 19  # of /proc/PID/stat, counted from the state behind the name


class RefusedFileError(OSError):
    """Raised if a path holds something that this run may not read or write."""


def open_to_read(path: Path) -> int:
    """A descriptor of a regular file, which is no link."""
    return _open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)


def open_given(path: Path) -> int:
    """Open a path that the user named, as :func:`open_to_read` does, but follow the user's own links."""
    return _open_regular(path, os.O_RDONLY)


def open_to_append(path: Path) -> int:
    """A descriptor of a regular file, made if need be, whose every write goes to its end."""
    return _open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)


def open_to_change(path: Path) -> int:
    """A descriptor of a regular file that exists, to read and to write."""
    return _open_regular(path, os.O_RDWR | os.O_NOFOLLOW)


def open_new(path: Path) -> int:
    """A descriptor of a file that was not there before, to write."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, FILE_MODE)


def open_lock(path: Path) -> int:
    """A descriptor of a lock file, made if need be, that only this user can lock.

    Refuses a file with any other content than a process id, such as another name of a user's file.
    """
    descriptor = _open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode=LOCK_MODE)
    if re.fullmatch(rb"\d{0,20}\n?", os.pread(descriptor, _LOCK_BYTES_MAX, 0)) is None:
        os.close(descriptor)
        raise RefusedFileError(errno.EINVAL, "is no lock file", str(path))
    with contextlib.suppress(OSError):  # of another user, who lets us have it
        os.fchmod(descriptor, LOCK_MODE)
    return descriptor


def is_named(descriptor: int, path: Path) -> bool:
    """Return whether ``path`` still leads to the open file: it was not removed, moved away or replaced."""
    held = os.fstat(descriptor)
    try:
        named = path.lstat()
    except OSError:
        return False
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)


def open_to_append_anywhere(path: Path) -> int:
    """Open a file as :func:`open_to_append` does, and create its folder again if it was removed."""
    try:
        return open_to_append(path)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open_to_append(path)


def _open_regular(path: Path, flags: int, *, mode: int = FILE_MODE) -> int:
    # Without O_NONBLOCK, opening a pipe waits until somebody opens its other end.
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        what = {errno.ELOOP: "is a symbolic link", errno.ENXIO: "is not a regular file"}
        if flags & os.O_NOFOLLOW and error.errno in what:
            raise RefusedFileError(error.errno, what[error.errno], str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RefusedFileError(errno.EINVAL, "is not a regular file", str(path))
    # A process that is started with it expects what it prints to wait for the disk.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & os.O_APPEND)
    return descriptor


def reading(path: Path) -> BinaryIO:
    """A regular file, which is no link, opened to read."""
    return os.fdopen(open_to_read(path), "rb")


def read_small(path: Path, *, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
    """The content of a regular file, which is no link and not larger than that."""
    with reading(path) as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise OSError(errno.EFBIG, f"is larger than {bytes_max:,} bytes", str(path))
    return content


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a regular file, which is no link; of one that is far too long, the pieces."""
    with reading(path) as file:
        while line := file.readline(LINE_BYTES_MAX):
            yield line


def from_json(text: str | bytes) -> Any:
    """Parse JSON from a file. Raises ValueError, also for excessive nesting."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def not_written(path: Path, error: OSError) -> str:
    """Return the line about a file of the log folder that cannot be written; the run does not need it."""
    return f"{path} cannot be written ({error.strerror or error}); training continues without it"


def is_regular(path: Path) -> bool:
    """Return whether the path is a regular file, not a link."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """The process that writes a temporary file. ``life`` distinguishes it from a later process with its pid."""

    host: str
    pid: int
    life: str

    @property
    def is_foreign(self) -> bool:
        """True if the writer is on another machine; only that machine knows whether it lives."""
        return self.host != _host()

    @property
    def is_alive(self) -> bool:
        """True if the writing process still runs. For a writer on this machine only."""
        # INVARIANT own-host-judges: what another machine's process is writing is never removed.
        # Broken if: a writer's pid is looked up without a look at its host.
        # Guarded by: test_leftovers_of_the_dead_are_removed_and_of_others_kept.
        assert not self.is_foreign, "only its own host knows"
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass  # of another user; the next look may be refused, too
        return _life_of(self.pid) in (self.life, None)


def temporary_path(path: Path) -> Path:
    """Return the unguessable temporary path at which this process writes the later ``path``."""
    pid = os.getpid()
    writer = f"{_host()}-{pid}-{_life_of(pid) or '0' * 12}"
    return path.with_name(f".{path.name}.tmp-{writer}-{secrets.token_hex(8)}")


def writer_of(name: str) -> Writer | None:
    """Return the writer of a temporary file of ours, from its name; None for any other name."""
    match = _TEMPORARY.fullmatch(name)
    return None if match is None else Writer(host=match[2], pid=int(match[3]), life=match[4])


def replace_file(path: Path, data: bytes) -> None:
    """Replace ``path`` whole: readers see the old or the new content. Survives no power cut."""
    _replace(path, data, is_synced=False)


def replace_file_synced(path: Path, data: bytes) -> None:
    """Replace a file as :func:`replace_file` does, and sync it to disk before returning."""
    # INVARIANT publish-last: the file is on disk before its name is, and its name before we return.
    # Broken if: the replace moves above the first fsync, or the directory is not synced.
    # Guarded by: test_a_summary_is_synced_before_its_name_and_its_folder_after.
    _replace(path, data, is_synced=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _replace(path: Path, data: bytes, *, is_synced: bool) -> None:
    temporary = temporary_path(path)
    descriptor = open_new(temporary)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def left_over(directory: Path) -> tuple[list[Path], list[Path]]:
    """The temporary files of writers of this machine that have ended, and those of other machines."""
    dead, foreign = [], []
    with contextlib.suppress(FileNotFoundError):
        for path in sorted(directory.iterdir()):
            writer = writer_of(path.name)
            if writer is None:
                continue
            if writer.is_foreign:
                foreign.append(path)
            elif not writer.is_alive or writer.pid == os.getpid():
                dead.append(path)
    return dead, foreign


@functools.cache
def _host() -> str:
    """The name of this machine, and a digest of what distinguishes it from others of that name."""
    name = os.uname().nodename
    digest = hashlib.sha256(name.encode())
    with contextlib.suppress(OSError):
        digest.update(Path("/etc/machine-id").read_bytes())
    shown = re.sub(r"[^\w.]", "_", name, flags=re.ASCII)[:_HOST_CHARACTERS_MAX]
    return f"{shown}~{digest.hexdigest()[:8]}"


def _life_of(pid: int) -> str | None:
    """A digest of when that process began; None where the system does not show it.

    A process that has ended and was not waited for yet is alive no more: that is another digest.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
        fields = text[text.rindex(b")") + 1 :].split()
        if fields[0] in (b"Z", b"X"):
            return ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except (OSError, ValueError):
        return None
    return hashlib.sha256(boot + fields[_START_TIME_FIELD]).hexdigest()[:12]
