"""The programs beside a run: trackers, the page, and the reader of GPUs. What is each one's own; waits for none.

They share a keeper. Each is owned by a supervisor's loop, which says when to look and whose process has ended.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ddp_runner import start
from ddp_runner.core.gpu_reading import GpuReading
from ddp_runner.core.helper_roles import GPU_READER, PAGE, TRACKER, Role
from ddp_runner.core.settings import LogSettings
from ddp_runner.features.gpu_watch.program import NO_DRIVER
from ddp_runner.features.trackers.follow import position_path, read_position
from ddp_runner.supervisor.processes.children import Ended
from ddp_runner.supervisor.processes.keeper import Keeper
from ddp_runner.supervisor.processes.program import Given, NoLogError, Program, Programs, Say
from ddp_runner.system.clock import Clock
from ddp_runner.system.proc_state import stat_fields
from ddp_runner.system.run_files import from_json

_HOST = "127.0.0.1"
PORTS_TRIED = 20
_WAITING_MAX = 128
TOKEN_BYTES = 24
SILENT_INTERVALS = 4  # without a reading
_LINE_BYTES_MAX = 1 << 20
_POLL_S = 0.02


class TrackerKeeper:
    """Looks after the trackers once the run may write, and ends them with it. What they miss comes later."""

    def __init__(
        self,
        names: Sequence[str],
        log_dir: Path,
        *,
        clock: Clock,
        say: Say,
        role: Role = TRACKER,
    ) -> None:
        self._log_dir = log_dir
        self._clock = clock
        self._say = say
        self._has_begun = False
        self._programs = Programs()
        self._keepers = [Keeper(replace(role, name=name), self._programs) for name in names]
        # Of each, its position: changed when, and the link.
        self._looked = dict.fromkeys(names, (0, ""))

    @property
    def pids(self) -> list[int]:
        """The processes that live, for all that is known."""
        return self._programs.pids

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

    def end(self, exit_code: int) -> None:
        """Have each write what is left; none is waited for longer than its role allows."""
        for keeper in self._keepers:
            self._find_dead(keeper)
        for program in map(self._programs.helper, self._roles):
            if program is not None:
                program.send(f"end {exit_code}\n".encode())
        began_s = time.monotonic()
        for role in self._roles:
            program = self._programs.helper(role)
            if program is None:
                continue
            while (is_alive := _lives(program.pid)) and time.monotonic() < began_s + role.end_s:
                time.sleep(_POLL_S)
            if is_alive:
                self._say(
                    f"{role.name} was not done within {role.end_s:g} s: a resume goes on there"
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
            f"the run goes on without it, see {self._log_path(name)}; a resume takes it up again"
            if keeper.is_given_up
            else "it is started again and goes on where it was"
        )
        self._say(f"the tracker {name} has ended: {how}; {goes_on}", level="WARNING")

    def _log_path(self, name: str) -> Path:
        return self._log_dir / f"tracker_{name}.log"


class PageKeeper:
    """Starts the live page, which may die, once. ``announce`` shows a line on the console and writes it nowhere."""

    def __init__(
        self,
        settings: LogSettings,
        log_dir: Path,
        *,
        clock: Clock,
        say: Say,
        announce: Callable[[str], None],
        role: Role = PAGE,
    ) -> None:
        self._settings = settings
        self._log_dir = log_dir
        self._clock = clock
        self._say = say
        self._announce = announce
        # Who asked for it without the extra has read how to install it.
        self._is_wanted = settings.page and find_spec("nicegui") is not None
        self._programs = Programs()
        self._keeper = Keeper(role, self._programs)

    def look(self) -> None:
        """Start it once, when the run may write into its folder."""
        now_s = self._clock.monotonic()
        if not self._is_wanted or not self._keeper.is_due(now_s):
            return
        listener = free_port(self._settings.page_port)
        if listener is None:
            self._keeper.give_up()
            last = self._settings.page_port + PORTS_TRIED - 1
            self._say(f"no page: ports {self._settings.page_port} to {last} are taken")
            return
        with listener:
            try:
                self._start(listener, now_s)
            except OSError as error:
                self._keeper.give_up()
                self._say(f"no page: {error.strerror or error}", level="WARNING")

    def took(self, ended: Ended) -> bool:
        """Return True if a reaped child was the page's."""
        program = self._keeper.process
        if program is None or program.pid != ended.pid:
            return False
        self._programs.forget(self._keeper.role)
        self._keeper.ended(self._clock.monotonic())
        again = f"{start.COMMAND} page -l {self._log_dir}"
        self._say(f"the page has ended: {ended.how}; the run goes on, and `{again}` shows it again")
        return True

    def _start(self, listener: socket.socket, now_s: float) -> None:
        # INVARIANT token-on-no-disk: the page's token is on the console and in two processes, in no file.
        # Broken if: it is a word of a command line, or goes through a line that is logged.
        # Guarded by: test_the_page_is_started_once_with_a_token_of_its_own.
        token = secrets.token_urlsafe(TOKEN_BYTES)
        number, can_inject = listener.fileno(), int(self._settings.page_can_inject)
        words = (str(self._log_dir), str(number), str(os.getpid()), str(can_inject))
        given = Given(words=words, log=self._log_dir / "page.log")
        program = self._keeper.start(now_s, given, number)
        program.send(token.encode() + b"\n")
        program.hang_up()
        port = listener.getsockname()[1]
        self._announce(f"page: http://{_HOST}:{port}/run/~?token={token}")


def free_port(first: int) -> socket.socket | None:
    """A socket that listens on ``first`` or one of the next: who comes before the page is ready waits for it."""
    for port in range(first, min(first + PORTS_TRIED, 65_536)):
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((_HOST, port))
            listener.listen(_WAITING_MAX)
        except OSError:
            listener.close()
        else:
            return listener
    return None


class GpuReader:
    """Has the newest that the GPU driver said; the process that asks it is ended where it does not answer."""

    def __init__(
        self, interval_s: float, *, clock: Clock, say: Say, role: Role = GPU_READER
    ) -> None:
        self._interval_s = interval_s
        silent_s = max(role.silent_s, SILENT_INTERVALS * interval_s)
        self._clock = clock
        self._say = say
        self._programs = Programs()
        self._keeper = Keeper(replace(role, silent_s=silent_s), self._programs)
        self._line = b""  # the begin of one that is not whole yet
        self._has_warned = False
        self.gpus: tuple[GpuReading, ...] = ()  # the newest reading
        self.read_at_s: float | None = None  # when that came
        self.count = 0  # of readings

    @property
    def pid(self) -> int | None:
        """The pid of its process; None if there is none."""
        program = self._keeper.process
        return None if program is None else program.pid

    @property
    def is_given_up(self) -> bool:
        """True if the driver is not asked any more."""
        return self._keeper.is_given_up

    def age_s(self, now_s: float) -> float | None:
        """Return the age of the newest reading; None before the first."""
        return None if self.read_at_s is None else max(0.0, now_s - self.read_at_s)

    def look(self) -> None:
        """Take in what has been read, and see to the process. Never waits."""
        now_s = self._clock.monotonic()
        program = self._keeper.process
        if program is None:
            if self._keeper.is_due(now_s):
                self._start(now_s)
            return
        self._receive(program, now_s)
        # INVARIANT reader-is-apart: no call into a GPU driver is made by a process that supervises.
        # Broken if: NVML is asked by the supervisor itself, or its reader is waited for.
        # Guarded by: test_a_driver_that_hangs_is_given_up_and_nobody_waits_for_it.
        if self._keeper.look(now_s) is not None and not self._has_warned:
            self._has_warned = True
            self._say(
                f"the GPU driver has not answered for {self._keeper.role.silent_s:g} s: what it said last is"
                " shown with its age, and training goes on; another process asks it again",
                level="WARNING",
            )

    def took(self, ended: Ended) -> bool:
        """Return True if a reaped child was the reader; another one is due after a while."""
        program = self._keeper.process
        if program is None or program.pid != ended.pid:
            return False
        self._receive(program, self._clock.monotonic())
        said = program.last_line()
        self._programs.forget(self._keeper.role)
        self._keeper.ended(self._clock.monotonic())
        if ended.exit_code == NO_DRIVER:
            self._keeper.give_up()
            self._say(f"no readings of GPUs: {said}")
        elif self._keeper.is_given_up:
            last = f" ({said})" if said else ""
            self._say(f"no more readings of GPUs: their reader has ended: {ended.how}{last}")
        return True

    def end(self) -> None:
        """The run has ended: kill it, and wait for nothing."""
        self._keeper.give_up()
        self._keeper.kill()

    def close(self) -> None:
        """Let go of what leads to it."""
        self._programs.forget(self._keeper.role)

    def _start(self, now_s: float) -> None:
        environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        words = (str(self._interval_s), str(os.getpid()))
        self._line = b""
        try:
            self._keeper.start(now_s, Given(words=words, answers=True, environment=environment))
        except OSError as error:
            self._keeper.give_up()
            self._say(f"no readings of GPUs: {error.strerror or error}")

    def _receive(self, program: Program, now_s: float) -> None:
        lines = (self._line + program.read()).split(b"\n")
        self._line = lines.pop()[:_LINE_BYTES_MAX]
        for line in lines[-1:]:
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                self.gpus = tuple(GpuReading.from_record(one) for one in from_json(line))
                self.read_at_s = now_s
                self.count += 1
                self._keeper.heard(now_s)


def _lives(pid: int) -> bool:
    """Return True if the process is there and has not ended; nobody reaps it meanwhile."""
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in ("Z", "X")
