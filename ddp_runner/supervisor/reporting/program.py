"""Programs beside a run: each has an interpreter, or a shell, and a session of its own. Decides nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddp_runner import start
from ddp_runner.kernel.processes.children import (
    kill,
    make_output_file,
    read_end,
    read_output,
)
from ddp_runner.kernel.rules.helper_roles import Role
from ddp_runner.kernel.system.run_files import open_to_append_anywhere

_READ_BYTES = 1 << 20
Say = Callable[..., None]  # a line for people, and ``level``


class NoLogError(OSError):
    """The log of a program cannot be written to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The input of a program: ``words`` after its module's name, or a ``command`` for the shell.

    ``log``: a file that its output is appended to; without one it goes to memory. ``answers``: its standard output
    is read here instead. ``environment``: None: this process's.
    """

    words: tuple[str, ...] = ()
    command: str = ""
    log: Path | None = None
    answers: bool = False
    environment: Mapping[str, str] | None = None


class Program:
    """One process, from its start until its owner closes it. It is reaped with all others."""

    is_ready = True

    def __init__(self, role: Role, given: Given, *inherited: int) -> None:
        """May raise OSError, of which NoLogError."""
        self._log = given.log
        output = _open(role, given.log)
        self._log_begin = os.fstat(output).st_size
        try:
            # Its own session: a terminal's Ctrl-C is for the supervisor.
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, or the user's own command
                given.command or [sys.executable, start.__file__, role.module, *given.words],
                shell=bool(given.command),
                pass_fds=inherited,
                stdin=subprocess.DEVNULL if given.command else subprocess.PIPE,
                stdout=subprocess.PIPE if given.answers else output,
                stderr=output,
                start_new_session=True,
                bufsize=0,
                env=None if given.environment is None else dict(given.environment),
            )
        except OSError:
            os.close(output)
            raise
        # A file in memory is read when it has ended; a log by its path.
        self._output = output if given.log is None else -1
        if given.log is not None:
            os.close(output)
        if self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)
        self.since_s = time.monotonic()

    @property
    def pid(self) -> int:
        """The process id, which is also its session's."""
        return self._process.pid

    def send(self, text: bytes) -> None:
        """Write to its standard input; a program that has just ended is found when it is reaped."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(text)

    def hang_up(self) -> None:
        """Close its input."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def read(self) -> bytes:
        """Return its answers since the last call."""
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            return os.read(self._process.stdout.fileno(), _READ_BYTES)
        return b""

    def last_line(self) -> str:
        """The last that it wrote; empty where that is nothing. Asked before it is closed."""
        if self._log is None:
            text = read_output(self._output)
        else:
            text = read_end(self._log, begin=self._log_begin)
        return text.strip().rpartition("\n")[2].strip()

    def poll(self) -> int | None:
        """Reap it, if it has ended: its exit code, or below 0 its signal. For who reaps no others."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> bool:
        """Reap it as soon as it ends; whether it has."""
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Let go of it."""
        if self._process.returncode is None:
            self._process.returncode = 0  # reaped with all others
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        if self._output >= 0:
            os.close(self._output)


class Programs:
    """Runs the programs of one owner, at most one of each role: a :class:`~ddp_runner.kernel.processes.keeper.Host`."""

    can_fork = True

    def __init__(self) -> None:
        self._running: dict[str, Program] = {}

    @property
    def pids(self) -> list[int]:
        """The pids of the programs that live, as far as is known."""
        return [program.pid for program in self._running.values()]

    def helper(self, role: Role) -> Program | None:
        """The process of a role; None where there is none."""
        return self._running.get(role.name)

    def start_helper(self, role: Role, spec: Given, *inherited: int) -> Program:
        """Start one for a role that has none. May raise OSError."""
        program = self._running[role.name] = Program(role, spec, *inherited)
        return program

    def kill(self, helper: Program | None) -> None:
        """SIGKILL it; its end follows."""
        if helper is not None:
            kill(helper.pid)

    def helper_stopped_s(self, helper: Program | None, now_s: float) -> float:
        """Return 0: a stopped program is left alone."""
        del helper, now_s
        return 0.0

    def forget(self, role: Role) -> None:
        """Forget a program that has ended, or that is no longer waited for."""
        program = self._running.pop(role.name, None)
        if program is not None:
            program.close()


def _open(role: Role, log: Path | None) -> int:
    if log is None:
        return make_output_file(role.name)
    try:
        return open_to_append_anywhere(log)
    except OSError as error:
        raise NoLogError(*error.args) from error
