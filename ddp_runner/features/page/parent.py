"""Starts the live page beside a run. Owned by a supervisor's loop; waits for nothing."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from ddp_runner import start
from ddp_runner.core.settings import LogSettings
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.keeper import Keeper
from ddp_runner.kernel.rules.helper_roles import Role
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.supervisor.around import OfScreen, ProgramBeside
from ddp_runner.supervisor.reporting.program import Given, Programs, Say

PAGE = Role(name="page", module=f"{__package__}.child", tries=1)
_HOST = "127.0.0.1"
PORTS_TRIED = 20
_WAITING_MAX = 128
TOKEN_BYTES = 24


def program_beside(around: OfScreen) -> PageKeeper:
    """Return who starts the page of a run, if it has one."""
    settings = around.plan.settings
    log_dir = Path(settings.run.log_dir)
    return PageKeeper(
        settings.log, log_dir, clock=around.clock, say=around.say, announce=around.announce
    )


class PageKeeper(ProgramBeside):
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
        self._say(
            f"the page has ended: {ended.how}; the run continues, and `{again}` shows it again"
        )
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
