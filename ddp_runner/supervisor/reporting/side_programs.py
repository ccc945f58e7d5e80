"""Keeps the programs beside a run that follow its files: trackers, and the page. Waits for none."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from ddp_runner import start
from ddp_runner.core.settings import LogSettings
from ddp_runner.core.tracking import END_WAIT_S, LIVED_S, STARTS_MAX, backoff_s
from ddp_runner.observe.files import read_tail
from ddp_runner.observe.trackers.position import position_path, read_position
from ddp_runner.system.clock import Clock
from ddp_runner.system.proc_state import stat_fields
from ddp_runner.system.run_files import open_to_append_anywhere

_TRACKER_MODULE = "ddp_runner.observe.trackers.tracker_process"
_PAGE_MODULE = "ddp_runner.cli.live_page.beside"
_HOST = "127.0.0.1"
PORTS_TRIED = 20
_WAITING_MAX = 128
TOKEN_BYTES = 24
Say = Callable[..., None]


@dataclass(slots=True, kw_only=True)
class _Kept:
    """One tracker. ``failures``: so many processes in a row have ended at once; ``start_at_s``: the next is due."""

    name: str
    process: subprocess.Popen[bytes] | None = None
    started_at_s: float = 0.0
    start_at_s: float = 0.0
    failures: int = 0
    is_given_up: bool = False
    looked: tuple[int, str] = field(default=(0, ""))  # at its position: changed when, and the link


class TrackerKeeper:
    """Owned by the supervisor's loop, which calls :meth:`look` once the run may write."""

    def __init__(self, names: Sequence[str], log_dir: Path, *, clock: Clock, say: Say) -> None:
        self._log_dir = log_dir
        self._clock = clock
        self._say = say
        self._has_begun = False
        self._trackers = [_Kept(name=name) for name in names]

    @property
    def pids(self) -> list[int]:
        """The processes that live, for all that is known."""
        return [one.process.pid for one in self._trackers if one.process is not None]

    def look(self) -> None:
        """Start what is due."""
        now_s, self._has_begun = self._clock.monotonic(), True
        for one in self._trackers:
            if one.process is None and not one.is_given_up and now_s >= one.start_at_s:
                self._start(one, now_s)

    def ended(self, pid: int, *, how: str) -> bool:
        """Whether the child that was reaped was a tracker's; then another one is due after a while."""
        for one in self._trackers:
            if one.process is not None and one.process.pid == pid:
                self._close(one)
                self._failed(one, how)
                return True
        return False

    def links(self) -> dict[str, str]:
        """Where a person finds what each has written, of those that say so."""
        for one in self._trackers:
            path = position_path(self._log_dir, one.name)
            with contextlib.suppress(OSError):
                changed_ns = path.stat().st_mtime_ns
                if changed_ns != one.looked[0]:
                    link = str(read_position(path).get("link", ""))
                    if link and link != one.looked[1]:
                        self._say(f"{one.name}: {link}")
                    one.looked = (changed_ns, link)
        return {one.name: one.looked[1] for one in self._trackers if one.looked[1]}

    def end(self, exit_code: int) -> None:
        """Have each write what is left; none is waited for longer than :data:`END_WAIT_S`."""
        self._find_dead()
        living = [one for one in self._trackers if one.process is not None]
        for one in living:
            assert one.process is not None
            assert one.process.stdin is not None
            with contextlib.suppress(OSError):  # it has just ended
                os.write(one.process.stdin.fileno(), f"end {exit_code}\n".encode())
        deadline_s = time.monotonic() + END_WAIT_S
        for one in living:
            assert one.process is not None
            while (is_alive := _lives(one.process.pid)) and time.monotonic() < deadline_s:
                time.sleep(0.02)
            if is_alive:
                self._say(
                    f"{one.name} was not done within {END_WAIT_S:g} s: a resume goes on there"
                )
            self._close(one)

    def _find_dead(self) -> None:
        """At the end: one that has died meanwhile, or waits to be started again, has a last chance."""
        for one in self._trackers:
            if one.process is not None and not _lives(one.process.pid):
                self._close(one)
            if one.process is None and self._has_begun and not one.is_given_up:
                self._start(one, self._clock.monotonic())

    def _start(self, one: _Kept, now_s: float) -> None:
        one.started_at_s = now_s  # also of one that cannot be started, and so does not live long
        log = self._log_path(one)
        try:
            output = open_to_append_anywhere(log)
        except OSError as error:
            self._failed(one, f"has no log: {error.strerror or error}")
            return
        try:
            # Its own session: a terminal's Ctrl-C is for the supervisor.
            one.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [
                    *(sys.executable, start.__file__, _TRACKER_MODULE),
                    *(one.name, str(self._log_dir), str(os.getpid())),
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._failed(one, f"cannot be started: {error.strerror or error}")
        finally:
            os.close(output)

    def _failed(self, one: _Kept, how: str) -> None:
        now_s = self._clock.monotonic()
        one.failures = 1 if now_s - one.started_at_s >= LIVED_S else one.failures + 1
        one.is_given_up = one.failures >= STARTS_MAX
        one.start_at_s = now_s + backoff_s(one.failures)
        goes_on = (
            f"the run goes on without it, see {self._log_path(one)}; a resume takes it up again"
            if one.is_given_up
            else "it is started again and goes on where it was"
        )
        last = read_tail(self._log_path(one)).decode(errors="replace").strip().rpartition("\n")[2]
        said = f" ({last})" if last and how.startswith("exit") else ""
        self._say(f"the tracker {one.name} has ended: {how}{said}; {goes_on}", level="WARNING")

    def _log_path(self, one: _Kept) -> Path:
        return self._log_dir / f"tracker_{one.name}.log"

    def _close(self, one: _Kept) -> None:
        assert one.process is not None
        one.process.returncode = 0  # reaped with all others
        if one.process.stdin is not None:
            one.process.stdin.close()
        one.process = None


def _lives(pid: int) -> bool:
    """Whether the process is there and has not ended; nobody reaps it meanwhile."""
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


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
                    *(sys.executable, start.__file__, _PAGE_MODULE, str(self._log_dir)),
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
