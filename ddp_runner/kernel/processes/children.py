"""The supervisor's child processes: starts the zygote, has it fork, reaps and kills. Decides nothing."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddp_runner.kernel.processes.guardian_process import let_run, tidies_up
from ddp_runner.kernel.processes.zygote_start import StartedZygote
from ddp_runner.kernel.system.control_channel import Channel, ChannelClosedError
from ddp_runner.kernel.system.parent_death import semaphores_of
from ddp_runner.kernel.system.proc_state import stat_fields
from ddp_runner.kernel.system.run_files import reading
from ddp_runner.kernel.wire.fork_specs import ForkKind, ImportsSpec
from ddp_runner.kernel.wire.messages import Fork

OUTPUT_SHOWN_BYTES = 8_000
WORDS_BYTES = 64_000  # that a process may take to say why it dies: the stacks of all its threads
TIDY_UP_S = 1.0  # for what ends by itself when all others have
# For processes that were started meanwhile; each look goes through all of the machine.
_LOOK_AGAIN_S = 0.05
_EXITING = 0x4  # PF_EXITING of Linux, in a process's flags
_LIBC = ctypes.CDLL(None, use_errno=True)
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - not a place for our own files


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A reaped child: ``exit_code`` or ``signal_number``, the other is None."""

    pid: int
    exit_code: int | None
    signal_number: int | None
    at_ns: int

    @property
    def how(self) -> str:
        """The exit status in words."""
        return (
            f"signal {self.signal_number}" if self.signal_number else f"exit code {self.exit_code}"
        )


def make_output_file(name: str) -> int:
    """An unnamed file in memory for a process's output; it vanishes with its last descriptor."""
    return os.memfd_create(name)


def read_output(descriptor: int, limit_bytes: int = OUTPUT_SHOWN_BYTES) -> str:
    """The end of what was written to an output file."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - limit_bytes)
    return os.pread(descriptor, limit_bytes, start).decode(errors="replace").strip()


def file_size(path: Path) -> int:
    """Return the size of the file in bytes; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_end(path: Path, *, begin: int) -> str:
    """The end of what stands in a log from ``begin`` on; empty where it cannot be read."""
    try:
        with reading(path) as file:
            file.seek(max(begin, file_size(path) - WORDS_BYTES))
            return file.read(WORDS_BYTES).decode(errors="replace")
    except OSError:
        return ""


class Zygote:
    """The process that forks the others. A new object for each one started."""

    def __init__(self, started: StartedZygote) -> None:
        # Requests go out by it, answers come in the order of the requests. Open until close().
        self.channel = Channel(started.connection)
        # A file in memory that it, and what it imports, writes to. Open until close().
        self.output = started.output
        # Whether it has imported torch and the task, so that it forks at once. Never taken back.
        self.ready = False
        self._process = started.process

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send_import(self, wanted: str) -> None:
        """Have one that was started ahead import the rest too; its end, if it has ended, follows."""
        with contextlib.suppress(ChannelClosedError):
            self.channel.send(Fork(token=0, kind=ForkKind.IMPORTS, spec=ImportsSpec(wanted=wanted)))

    def fork(self, request: Fork, descriptors: Sequence[int]) -> None:
        """Ask for a fork; ``Forked`` with the same token answers. Raises ChannelClosedError."""
        self.channel.send(request, descriptors=descriptors)

    def mark_reaped(self, exit_code: int) -> None:
        """Record it in the Popen object, which must not wait for a pid that we reaped."""
        self._process.returncode = exit_code

    def close(self) -> None:
        """Close channel and output."""
        self.channel.close()
        os.close(self.output)


def reap_children() -> Iterator[Ended]:
    """Yield every child that has ended since the last call, adopted orphans included."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _remove_segments(pid)
        code = os.waitstatus_to_exitcode(status)
        yield Ended(
            pid=pid,
            exit_code=code if code >= 0 else None,
            signal_number=-code if code < 0 else None,
            at_ns=time.monotonic_ns(),
        )


def is_killed(pid: int | None) -> bool:
    """Return True if an unreaped child has got SIGKILL; also while the kernel still frees its memory."""
    fields = stat_fields(pid)
    if not fields:
        return False
    is_ending = fields[0] == "Z" or int(fields[6]) & _EXITING
    return bool(is_ending) and int(fields[-1]) & 0x7F == signal.SIGKILL


def _remove_segments(pid: int) -> None:
    """Remove the shared memory that a process was making when it died.

    torch names a segment by its process and unlinks it at once; a loader worker that is killed in
    between, as it is when its rank dies, leaves the name for good. So does a rank a semaphore.
    """
    for pattern in (f"torch_{pid}_*", f"sem.{semaphores_of(pid)}*"):
        for segment in _SHARED_MEMORY.glob(pattern):
            with contextlib.suppress(OSError):  # of a same-numbered process of somebody else
                segment.unlink()


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a child that has not been reaped: its pid cannot be anybody else's.

    Raises ValueError for a number that would mean a group of processes.
    """
    if pid <= 0:
        raise ValueError(f"pid={pid} is no process")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def signal_main_thread(pid: int, number: int) -> None:
    """Signal a child's main thread, which acts on it before its next instruction (tgkill(2)).

    A signal to the whole process is taken by any of its threads. When a stopped process is woken its
    main thread may be past the place where it stood before another thread has taken the signal.
    Raises ValueError for a number that would mean a group of processes.
    """
    tgkill = getattr(_LIBC, "tgkill", None)  # glibc 2.30
    if pid <= 0 or tgkill is None:
        kill(pid, number)
    elif tgkill(pid, pid, number) and ctypes.get_errno() != errno.ESRCH:
        raise OSError(ctypes.get_errno(), f"no signal {number} to the main thread of {pid}")


def end_descendants(*, timeout_s: float, but: Collection[int] = ()) -> list[int]:
    """SIGKILL whatever still descends from this process and reap it; returns pids that stayed.

    ``but``: children that go on, with what descends from them, and are reaped by whoever started them.
    """
    began_s = now_s = time.monotonic()
    deadline_s, next_look_s = began_s + timeout_s, began_s
    left: list[int] = []
    while True:
        _reap_all_but(but)
        if not _has_children():
            return []
        if now_s >= min(next_look_s, deadline_s) or not any(map(stat_fields, left)):
            stays = {*but, *(below for pid in but for below in _below(pid))}
            left = [pid for pid in _below(os.getpid()) if pid not in stays]
            next_look_s = now_s + _LOOK_AGAIN_S
            if not left or now_s >= deadline_s:
                return left
            for pid in left:
                if now_s > began_s + TIDY_UP_S or not tidies_up(pid):
                    let_run(pid)
                    kill(pid)
        time.sleep(0.005)
        now_s = time.monotonic()


def _has_children() -> bool:
    """Return whether this process has children, without a search through all processes of the machine."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _below(pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def _reap_all_but(but: Collection[int]) -> None:
    if not but:
        for _ in reap_children():
            pass
        return
    for child in psutil.Process().children():
        if child.pid in but:
            continue
        with contextlib.suppress(ChildProcessError):
            pid, _ = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                _remove_segments(pid)
