"""Starts the live page beside a run, in a process of its own that may die. Waits for nothing, restarts nothing."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from ddp_runner import start
from ddp_runner.core.settings import LogSettings
from ddp_runner.system.run_files import open_to_append_anywhere

_MODULE = "ddp_runner.cli.live_page.beside"
_HOST = "127.0.0.1"
PORTS_TRIED = 20
_WAITING_MAX = 128
TOKEN_BYTES = 24
Say = Callable[..., None]


class PageKeeper:
    """Owned by the supervisor's loop. ``announce`` shows a line on the console and writes it nowhere."""

    def __init__(
        self, settings: LogSettings, log_dir: Path, *, say: Say, announce: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._log_dir = log_dir
        self._say = say
        self._announce = announce
        # Who asked for it without the extra has read how to install it.
        self._is_due = settings.page and find_spec("nicegui") is not None
        self._process: subprocess.Popen[bytes] | None = None

    def look(self) -> None:
        """Start it once, when the run may write into its folder."""
        if not self._is_due:
            return
        self._is_due = False
        listener = free_port(self._settings.page_port)
        if listener is None:
            last = self._settings.page_port + PORTS_TRIED - 1
            self._say(f"no page: ports {self._settings.page_port} to {last} are taken")
            return
        with listener:
            try:
                self._start(listener)
            except OSError as error:
                self._say(f"no page: {error.strerror or error}", level="WARNING")

    def ended(self, pid: int, *, how: str) -> bool:
        """Whether the child that was reaped was the page's."""
        if self._process is None or self._process.pid != pid:
            return False
        self._process.returncode = 0  # reaped with all others
        self._process = None
        again = f"{start.COMMAND} page -l {self._log_dir}"
        self._say(f"the page has ended: {how}; the run goes on, and `{again}` shows it again")
        return True

    def _start(self, listener: socket.socket) -> None:
        # INVARIANT token-on-no-disk: the page's token is on the console and in two processes, in no file.
        # Broken if: it is a word of a command line, or goes through a line that is logged.
        # Guarded by: test_the_page_is_started_once_with_a_token_of_its_own.
        token = secrets.token_urlsafe(TOKEN_BYTES)
        output = open_to_append_anywhere(self._log_dir / "page.log")
        try:
            # Its own session: a terminal's Ctrl-C is for the supervisor.
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [
                    *(sys.executable, start.__file__, _MODULE, str(self._log_dir)),
                    *(str(listener.fileno()), str(os.getpid())),
                    str(int(self._settings.page_can_inject)),
                ],
                pass_fds=(listener.fileno(),),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                bufsize=0,
            )
        finally:
            os.close(output)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended at once, which is said when it is reaped
            self._process.stdin.write(token.encode() + b"\n")
            self._process.stdin.close()
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
