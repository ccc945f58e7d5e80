"""``checkpoint.after_save``: a user's command for each checkpoint, beside training. Its failure is a warning."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.keeper import Keeper
from ddp_runner.kernel.rules.helper_roles import Role
from ddp_runner.kernel.wire import events
from ddp_runner.supervisor.around import OfScreen, ProgramBeside
from ddp_runner.supervisor.reporting.program import Given, NoLogError, Programs, Say

AFTER_SAVE = Role(name="after_save", module="")  # a command of the user's
PLACE = "{path}"  # where the checkpoint's path goes in a command
LOG_NAME = "after_save.log"
_TERM_S = 2.0
_POLL_S = 0.02
_NAME = "checkpoint.after_save"


def program_beside(around: OfScreen) -> AfterSave:
    """Return who runs the command of a run, if it has one."""
    guardian, settings = around.node.guardian, around.plan.settings
    return AfterSave(
        settings.checkpoint.after_save or "",
        log_dir=Path(settings.run.log_dir),
        environment=guardian.marked(os.environ),
        grace_s=settings.checkpoint.after_save_grace_s,
        watched_by=lambda: guardian.pid,
        say=around.say,
    )


class AfterSave(ProgramBeside):
    """Owned by the supervisor's loop. One command at a time; of what came meanwhile only the newest is next.

    The command is run by the shell, in a session of its own and with ``environment``; what it writes is
    appended to a file in the log folder. ``watched_by``: the pid of who ends the command if we die.
    """

    def __init__(
        self,
        command: str,
        *,
        log_dir: Path,
        environment: Mapping[str, str],
        grace_s: float,
        say: Say,
        watched_by: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._command = command
        self._log = log_dir / LOG_NAME
        self._environment = environment
        self._grace_s = grace_s
        self._watched_by = watched_by
        self._say = say
        self._programs = Programs()
        self._keeper = Keeper(AFTER_SAVE, self._programs)
        self._path = ""  # of the checkpoint that the command is busy with
        self._next = ""  # empty: none waits

    @property
    def pid(self) -> int | None:
        """The command's process id, of a session of its own; None while none runs."""
        program = self._keeper.process
        return None if program is None else program.pid

    @property
    def is_owed(self) -> bool:
        """True if a command runs, or is still to be run."""
        return self._keeper.process is not None or bool(self._next)

    def take(self, event: events.Event) -> None:
        """Observe the run: each checkpoint is one that the command is run for."""
        if isinstance(event, events.CheckpointSaved):
            self.saved(event.path)

    def saved(self, path: str) -> None:
        """Note a new checkpoint, for which the command must be run."""
        if not self._command:
            return
        if self._next and self._next != path:
            self._say(
                f"{_NAME}: not run for {Path(self._next).name}: {Path(path).name} is newer, and the"
                f" command for {Path(self._path).name} still runs"
            )
        self._next = path

    def outlasts(self) -> set[int]:
        """Return the pids of a command that is still owed, and of who watches it."""
        pids = (self.pid, self._watched_by()) if self.is_owed else ()
        return {pid for pid in pids if pid is not None}

    def look_first(self) -> None:
        """Start the command for the next checkpoint, where none runs. Never waits."""
        now_s = time.monotonic()
        if not self._next or not self._keeper.is_due(now_s):
            return
        self._path, self._next = self._next, ""
        words = self._command.replace(PLACE, shlex.quote(self._path))
        given = Given(command=words, log=self._log, environment=self._environment)
        try:
            try:
                self._keeper.start(now_s, given)
            except NoLogError:  # the command is not to suffer from it
                self._keeper.start(now_s, replace(given, log=None))
        except OSError as error:
            self._warn(f"cannot be started: {error.strerror or error}")

    def took(self, ended: Ended) -> bool:
        """A child was reaped: whether it was this command, which has then been accounted for."""
        if ended.pid != self.pid:
            return False
        number = ended.signal_number
        code = ended.exit_code if ended.exit_code is not None else -1
        self._over(code if number is None else -number)
        return True

    def finish(self, *, is_cut_short: Callable[[], bool]) -> None:
        """The run has ended: wait for the commands that are owed, and end what takes longer. Reaps them."""
        grace_s = self._grace_s
        deadline_s = time.monotonic() + grace_s
        while True:
            self._poll()
            self.look_first()
            if not self.is_owed:
                return
            if time.monotonic() >= deadline_s or is_cut_short():
                break
            time.sleep(_POLL_S)
        if self._keeper.process is not None:
            self._warn(f"killed: the run has ended (checkpoint.after_save_grace_s={grace_s:g})")
            self._end()
        if self._next:
            self._say(f"{_NAME}: not run for {Path(self._next).name}", level="WARNING")

    def _end(self) -> None:
        """End all of its session: first it is asked to."""
        program = self._keeper.process
        assert program is not None
        for number, patience_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _TERM_S)):
            # Not reaped: the session's number is nobody else's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, number)
            deadline_s = time.monotonic() + patience_s
            while time.monotonic() < deadline_s and not _has_ended(program.pid):
                time.sleep(_POLL_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(program.pid, signal.SIGKILL)
        if not program.wait(_TERM_S):  # it waits for a disk, which no signal ends
            self._warn(f"process {program.pid} would not end")
        self._programs.forget(self._keeper.role)

    def _poll(self) -> None:
        program = self._keeper.process
        if program is not None and (code := program.poll()) is not None:
            self._over(code)

    def _over(self, code: int) -> None:
        """Note the end of the command, with its exit code, or minus its signal."""
        program = self._keeper.process
        assert program is not None
        last = program.last_line()
        self._programs.forget(self._keeper.role)
        if code == 0:
            return
        said = f": {last[:300]}" if last else ""
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._warn(f"{how}{said}")

    def _warn(self, what: str) -> None:
        self._say(f"{_NAME} for {Path(self._path).name}: {what}", level="WARNING")


def _has_ended(pid: int) -> bool:
    """Return True if a child has ended; it still has to be reaped."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return found is not None
