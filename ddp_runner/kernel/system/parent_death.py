"""Ties a process's life to its parent's, by the kernel; never decides who dies.

Every process of a run calls :func:`die_with_parent` first thing, so that SIGKILL on the supervisor
or on a rank leaves nothing behind, even when a thread of the child holds the GIL.
Source: prctl(2), ``PR_SET_PDEATHSIG`` and ``PR_SET_CHILD_SUBREAPER``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# What every process of a run inherits, so that what user code has started can be recognized.
MARK_VARIABLE = "DDP_RUNNER_MARK"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NAME = 15


def _prctl(option: int, argument: int | bytes) -> bool:
    """Call prctl(2); False where the system has no such call or refuses it."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    value = argument if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    return bool(libc.prctl(option, value, 0, 0, 0) == 0)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent, ``parent_pid``, ends.

    Exits at once with status 1 if the parent has ended already: a signal set after the parent's
    death would never come.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> bool:
    """Become the parent of every descendant whose own parent ends (a "child subreaper").

    Returns False on systems without it; orphans then go to init and end by end-of-file.
    """
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """Name this process for ``ps`` and ``top`` (15 bytes at most are kept)."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def marked(environment: Mapping[str, str], run_mark: str) -> dict[str, str]:
    """``environment`` for the processes of a run; a run inside another one's rank has two marks."""
    marks = [mark for mark in environment.get(MARK_VARIABLE, "").split(",") if mark]
    return {**environment, MARK_VARIABLE: ",".join([*marks, run_mark])}


def rank_mark(run_mark: str, pid: int) -> str:
    """Return the mark that processes started by the rank with this pid carry besides the run's mark."""
    return f"{run_mark}.{pid}"


def semaphores_of(pid: int) -> str:
    """Return the prefix of the names of semaphores that a rank makes for its workers."""
    return f"ddp{pid}-"


def mark_own_children() -> None:
    """Mark what user code starts in this rank from here on with the rank's mark, in a separate session.

    The names that multiprocessing gives to semaphores carry the mark too. It removes each at once, but a rank
    that is killed in between leaves one behind, and only the mark shows whose it was.
    """
    from multiprocessing import current_process  # noqa: PLC0415 - a launch need not wait for it

    prefix = "/" + semaphores_of(os.getpid()).rstrip("-")
    with contextlib.suppress(AttributeError, TypeError):  # another Python may have no such thing
        current_process()._config["semprefix"] = prefix  # type: ignore[attr-defined]  # noqa: SLF001
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    marks = os.environ.get(MARK_VARIABLE, "")
    if marks and not marks.endswith(f".{os.getpid()}"):  # a spare that has built has done so
        run_mark = marks.rpartition(",")[2]
        os.environ[MARK_VARIABLE] = f"{marks},{rank_mark(run_mark, os.getpid())}"
        _mark_temporary_folder(temporary_prefix(run_mark))


def temporary_prefix(run_mark: str) -> str:
    """Return the beginning of the names of temporary folders that multiprocessing makes in ranks and their forks."""
    return f"pymp-{run_mark[:12]}-"


SOCKET_PATH_MAX = 107  # bytes of a socket's address on Linux, unix(7)
_IN_FOLDER = "/listener-abcdefgh"  # multiprocessing's name of a socket


def _mark_temporary_folder(prefix: str) -> None:
    """Give the folder of multiprocessing's sockets a name by which the run finds it, should this process be killed.

    Where that would make a socket's path too long, the name stays multiprocessing's own.
    """
    import shutil  # noqa: PLC0415 - as above
    import tempfile  # noqa: PLC0415
    from multiprocessing import current_process, util  # noqa: PLC0415

    def get_temp_dir() -> str:
        config: dict[str, str] = current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001
        if config.get("tempdir") is None:
            longest = f"{tempfile.gettempdir()}/{prefix}abcdefgh{_IN_FOLDER}"
            fits = len(os.fsencode(longest)) <= SOCKET_PATH_MAX
            config["tempdir"] = folder = tempfile.mkdtemp(prefix=prefix if fits else "pymp-")
            util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
        return config["tempdir"]

    util.get_temp_dir = get_temp_dir
