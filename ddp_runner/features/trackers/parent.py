"""Looks after the trackers of a run, each a program of its own. Owned by a supervisor's loop; waits for none but at the end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.keeper import Keeper
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.kernel.rules.helper_roles import DOUBLED_S, Role
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.system.proc_state import stat_fields
from ddp_runner.observe.tracker_position import position_path, read_position
from ddp_runner.supervisor.around import OfScreen, ProgramBeside
from ddp_runner.supervisor.reporting.program import Given, NoLogError, Program, Programs, Say

TRACKER = Role(
    name="tracker",  # of each, its own
    module=f"{__package__}.tracker_process",
    pauses_s=DOUBLED_S,
    lived_s=60.0,
    tries=10,
    end_s=5.0,  # to write what is left, where a resume continues there
)
_COMPLETE_END_S = 60.0  # its program may still be importing, or its server be slow
_POLL_S = 0.02


def program_beside(around: OfScreen) -> TrackerKeeper:
    """Return who looks after the trackers of a run."""
    settings = around.plan.settings
    log_dir = Path(settings.run.log_dir)
    return TrackerKeeper(settings.log.trackers, log_dir, clock=around.clock, say=around.say)


class TrackerKeeper(ProgramBeside):
    """Looks after the trackers once the run may write, and ends them with it. What they miss comes later."""

    def __init__(
        self,
        names: Sequence[str],
        log_dir: Path,
        *,
        clock: Clock,
        say: Say,
        role: Role = TRACKER,
        complete_end_s: float = _COMPLETE_END_S,
    ) -> None:
        self._log_dir = log_dir
        self._clock = clock
        self._say = say
        self._complete_end_s = complete_end_s
        self._has_begun = False
        self._programs = Programs()
        self._keepers = [Keeper(replace(role, name=name), self._programs) for name in names]
        # Of each, its position: changed when, and the link.
        self._looked = dict.fromkeys(names, (0, ""))

    def outlasts(self) -> set[int]:
        """Return the processes that live, for all that is known: they have the last record to write."""
        return set(self._programs.pids)

    def look(self) -> None:
        """Start what is due."""
        now_s, self._has_begun = self._clock.monotonic(), True
        for keeper in self._keepers:
            if keeper.is_due(now_s):
                self._start(keeper, now_s)

    def took(self, ended: Ended) -> bool:
        """Return True if a reaped child was a tracker; another one is due after a while."""
        for keeper in self._keepers:
            program = keeper.process
            if program is not None and program.pid == ended.pid:
                said = program.last_line() if ended.exit_code is not None else ""
                self._programs.forget(keeper.role)
                self._failed(keeper, f"{ended.how} ({said})" if said else ended.how)
                return True
        return False

    def links(self) -> dict[str, str]:
        """Return the address of each tracker's record, for those that have one."""
        for name, looked in self._looked.items():
            path = position_path(self._log_dir, name)
            with contextlib.suppress(OSError):
                changed_ns = path.stat().st_mtime_ns
                if changed_ns != looked[0]:
                    link = str(read_position(path).get("link", ""))
                    if link and link != looked[1]:
                        self._say(f"{name}: {link}")
                    self._looked[name] = (changed_ns, link)
        return {name: link for name, (_, link) in self._looked.items() if link}

    def end(self, exit_code: int, *, is_cut_short: Callable[[], bool]) -> None:
        """Have each write what is left. A complete run waits longer: no resume will write it."""
        for keeper in self._keepers:
            self._find_dead(keeper)
        for program in map(self._programs.helper, self._roles):
            if program is not None:
                program.send(f"end {exit_code}\n".encode())
        is_complete = exit_code == ExitCode.DONE
        later = "the rest is only in metrics.jsonl" if is_complete else "a resume continues there"
        began_s, is_cut = time.monotonic(), False
        for role in self._roles:
            program = self._programs.helper(role)
            if program is None:
                continue
            if is_complete and not is_cut and not _ends(program.pid, by_s=began_s + role.end_s):
                until_s = began_s + self._complete_end_s
                self._say(
                    f"waiting for {role.name}, {self._complete_end_s:g} s at most; Ctrl-C skips it"
                )
                is_cut = not _ends(program.pid, by_s=until_s, is_cut_short=is_cut_short)
            if not _ends(program.pid, by_s=began_s + role.end_s):
                waited_s = time.monotonic() - began_s
                self._say(f"{role.name} was not done within {waited_s:.1f} s: {later}")
            elif how := _how_failed(program.pid):
                self._say(
                    f"the tracker {role.name} has ended: {how}, see {self._log_path(role.name)};"
                    f" {later}",
                    level="WARNING",
                )
            self._programs.forget(role)

    @property
    def _roles(self) -> list[Role]:
        return [keeper.role for keeper in self._keepers]

    def _find_dead(self, keeper: Keeper[Program, Given]) -> None:
        """Start a tracker once more at the end if it has died, or waits to be started again."""
        program = keeper.process
        if program is not None and not _lives(program.pid):
            self._programs.forget(keeper.role)
        if keeper.process is None and self._has_begun and not keeper.is_given_up:
            self._start(keeper, self._clock.monotonic())

    def _start(self, keeper: Keeper[Program, Given], now_s: float) -> None:
        name = keeper.role.name
        words = (name, str(self._log_dir), str(os.getpid()))
        try:
            keeper.start(now_s, Given(words=words, log=self._log_path(name)))
        except NoLogError as error:
            self._failed(keeper, f"has no log: {error.strerror or error}")
        except OSError as error:
            self._failed(keeper, f"cannot be started: {error.strerror or error}")

    def _failed(self, keeper: Keeper[Program, Given], how: str) -> None:
        keeper.ended(self._clock.monotonic())
        name = keeper.role.name
        goes_on = (
            f"the run continues without it, see {self._log_path(name)}; a resume starts it again"
            if keeper.is_given_up
            else "it is restarted and continues where it was"
        )
        self._say(f"the tracker {name} has ended: {how}; {goes_on}", level="WARNING")

    def _log_path(self, name: str) -> Path:
        return self._log_dir / f"tracker_{name}.log"


def _lives(pid: int) -> bool:
    """Return True if the process is there and has not ended; nobody reaps it meanwhile."""
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def _ends(pid: int, *, by_s: float, is_cut_short: Callable[[], bool] = lambda: False) -> bool:
    """Wait until a process has ended; False if it has not by then, or the wait is cut short."""
    while _lives(pid):
        if time.monotonic() >= by_s or is_cut_short():
            return False
        time.sleep(_POLL_S)
    return True


def _how_failed(pid: int) -> str:
    """Return how a child ended that nobody has reaped; empty if it was successful."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ""
    if ended is None or ended.si_status == 0:
        return ""
    what = "exit code" if ended.si_code == os.CLD_EXITED else "signal"
    return f"{what} {ended.si_status}"
