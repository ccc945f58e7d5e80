"""The guardian: outlives a supervisor that is killed, and ends what ranks of that run had started.

The kernel ends the run's own processes with their supervisor. What user code starts in a rank (a
data server, a ``subprocess``) knows nothing of that. So this process waits for the end of a pipe whose
other end only the supervisor holds, and then kills every process that carries the run's mark in its
environment, or is in the session of a rank that was alive. When the run ends as it should the
supervisor has ended everything itself, this process too.

Run as a script with no package and no ``site``, so that it is small and starts in milliseconds. It
reads lines: ``mark NAME=TOKEN``, ``folders PREFIX``, ``rank PID``, ``ended PID``. No process is killed by its number
alone: each one is looked at, held by a descriptor and looked at again, so that a number that was given
out again hits nobody.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

TYPE_CHECKING = False  # typing itself takes longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Collection

LOOKS_MAX = 200  # each ends what was found; a process may be starting others
LOOK_EVERY_S = 0.05
CLEAN_LOOKS = 3  # in a row without a find: the kernel may still be ending the ranks themselves
_STOPS = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGTSTP")


def belongs(pid: int, mark: str, sessions: Collection[int]) -> bool:
    """Return True if the process was started with ``mark``, NAME=TOKEN, or is in one of ``sessions``.

    The variable's value may be a list with commas: a run inside another one's rank carries both marks.
    """
    base = f"/proc/{pid}"
    try:
        with open(f"{base}/stat", "rb") as file:  # noqa: PTH123 - pathlib takes as long as all else
            fields = file.read().rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X"):
            return False  # it holds nothing any more
        if int(fields[3]) in sessions:
            return True
        with open(f"{base}/environ", "rb") as file:  # noqa: PTH123
            variables = file.read().split(b"\0")
    except (OSError, IndexError, ValueError):
        return False  # it has ended, or is somebody else's
    name, _, token = mark.encode().partition(b"=")
    values = [
        value for found, _, value in (one.partition(b"=") for one in variables) if found == name
    ]
    return any(token in value.split(b",") for value in values)


def tidies_up(pid: int) -> bool:
    """Return True for Python's resource tracker, which removes semaphores and shared memory after their last user.

    It ends by itself then, in milliseconds; if it is killed, they stay in /dev/shm.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123 - as above
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def let_run(pid: int) -> None:
    """Let a process that is about to be killed end beside other work, if it has only idle processor time, as a drill.

    Nothing happens where the system does not permit it (``CAP_SYS_NICE``, sched(7)).
    """
    with contextlib.suppress(OSError, AttributeError, ValueError):
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):  # noqa: PTH208
            if os.sched_getscheduler(thread) == os.SCHED_IDLE:
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def end(pid: int, mark: str, sessions: Collection[int]) -> bool:
    """SIGKILL the process if it belongs to the run, and does not tidy up; says whether it did."""
    if not belongs(pid, mark, sessions) or tidies_up(pid):
        return False
    try:
        held = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):  # no descriptors of processes: Linux before 5.3
        with contextlib.suppress(OSError):  # it has just ended, or is root's
            os.kill(pid, signal.SIGKILL)
        return True
    try:
        if belongs(pid, mark, sessions):
            let_run(pid)
            signal.pidfd_send_signal(held, signal.SIGKILL)
    except OSError:
        pass  # it has just ended
    finally:
        os.close(held)
    return True


def end_all(mark: str, sessions: Collection[int]) -> None:
    """End what is left of the run, until nothing has been found a few times in a row."""
    own, clean = os.getpid(), 0
    for _ in range(LOOKS_MAX):
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
        found = [pid for pid in pids if pid != own and end(pid, mark, sessions)]
        clean = 0 if found else clean + 1
        if clean == CLEAN_LOOKS:
            return
        time.sleep(LOOK_EVERY_S)


def remove_folders(prefix: str) -> None:
    """Remove the temporary folders that processes of the run have left, as they were killed."""
    given = (os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP"))
    for folder in {*filter(None, given), "/tmp"}:  # noqa: S108 - as tempfile has it
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):  # noqa: PTH208
                if name.startswith(prefix):
                    import shutil  # noqa: PLC0415 - most runs leave none

                    shutil.rmtree(f"{folder}/{name}", ignore_errors=True)


def main() -> None:
    """Read until the supervisor has ended, then end what it has left."""
    for name in _STOPS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as name_file:  # noqa: PTH123
        name_file.write("ddp:guardian")
    mark, folders, sessions = "", "", set()
    for line in sys.stdin:
        what, _, value = line.strip().partition(" ")
        if what == "mark":
            mark = value
        elif what == "folders":
            folders = value
        elif what == "rank":
            sessions.add(int(value))
        elif what == "ended":
            sessions.discard(int(value))
    if mark:
        end_all(mark, sessions)
    if folders:
        remove_folders(folders)


if __name__ == "__main__":
    main()
