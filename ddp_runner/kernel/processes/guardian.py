"""The supervisor's side of the guardian, and the end of what a rank that died had started."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import psutil

from ddp_runner.kernel.processes import guardian_process
from ddp_runner.kernel.system.parent_death import (
    MARK_VARIABLE,
    marked,
    rank_mark,
    temporary_prefix,
)

_MARK_BYTES = 16
_LOOKS_MAX = (
    5  # what was found may have started others meanwhile; the end of the run finds the rest
)


class Guardian:
    """Owns the mark that every process of this run's ranks inherits, and a process that outlives us.

    What user code starts in a rank ends when that rank is replaced and when the run ends. It carries
    the mark in its environment, unless it was started with one of its own, and is in its rank's
    session, unless it made one of its own; what did both on purpose is taken for a service that shall
    go on, unless it still descends from this process when the run ends.
    """

    def __init__(self, mark: str = "") -> None:
        """``mark``: which processes of the run have already, if any."""
        self._token = mark or secrets.token_hex(_MARK_BYTES)
        self._process: subprocess.Popen[bytes] | None = None
        self._writer = -1

    def marked(self, environment: Mapping[str, str]) -> dict[str, str]:
        """``environment`` for the processes of this run; a run inside another one's rank has two marks."""
        return marked(environment, self._token)

    def start(self) -> None:
        """Start the process that ends what is left, should this one be killed. May raise OSError."""
        reader, self._writer = os.pipe()
        # INVARIANT one-holder: the pipe ends when this process does, however it ends.
        # Broken if: any other process inherits its writing end.
        # Guarded by: test_what_ranks_have_started_ends_with_a_killed_supervisor.
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and file
                [sys.executable, "-I", "-S", guardian_process.__file__],
                stdin=reader,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={k: v for k, v in os.environ.items() if k != MARK_VARIABLE},
                start_new_session=True,
            )
        finally:
            os.close(reader)
        os.set_blocking(self._writer, False)
        self._say(f"mark {MARK_VARIABLE}={self._token}")
        self._say(f"folders {temporary_prefix(self._token)}")

    @property
    def pid(self) -> int | None:
        """The process id; None if there is no process."""
        return None if self._process is None else self._process.pid

    def watch(self, rank_pid: int) -> None:
        """A rank has begun: its session is this run's."""
        self._say(f"rank {rank_pid}")

    def rank_ended(self, rank_pid: int, *, known: Collection[int]) -> list[int]:
        """End what the rank of this pid, which was reaped, had started; returns their pids.

        ``known`` are the run's own processes among this one's children.
        """
        self._say(f"ended {rank_pid}")
        ended: list[int] = []
        mark = f"{MARK_VARIABLE}={rank_mark(self._token, rank_pid)}"
        for _ in range(_LOOKS_MAX):
            below = list(_below(os.getpid(), leave_out={*known, self.pid}))
            found = [pid for pid in below if guardian_process.end(pid, mark, {rank_pid})]
            if not found:
                break
            ended += (pid for pid in found if pid not in ended)
        return ended

    def close(self) -> None:
        """Let go of the process, which has been ended or ends by itself, and remove what killed ranks have left."""
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1
        if self._process is not None:
            self._process.returncode = 0  # reaped with all others, perhaps
            self._process = None
        guardian_process.remove_folders(temporary_prefix(self._token))

    def _say(self, line: str) -> None:
        if self._writer >= 0:
            with contextlib.suppress(OSError):  # somebody has killed it: what is lost is that only
                os.write(self._writer, f"{line}\n".encode())


def _below(pid: int, *, leave_out: Collection[int | None]) -> Iterator[int]:
    """Yield all descendants of ``pid``, without ``leave_out`` and its descendants."""
    for child in _children(pid):
        if child not in leave_out:
            yield child
            yield from _below(child, leave_out=leave_out)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text(encoding="ascii").split())
    except FileNotFoundError:  # it has ended, or a kernel that does not list children
        with contextlib.suppress(psutil.Error):
            found = [child.pid for child in psutil.Process(pid).children()]
    except OSError:
        pass
    return found
