"""Keeps the trackers' processes: starts them, again where they end, and ends them with the run. Waits for none."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_runner import start
from ddp_runner.core.tracking import END_WAIT_S, LIVED_S, STARTS_MAX, backoff_s
from ddp_runner.observe.files import read_tail
from ddp_runner.observe.trackers.position import position_path, read_position
from ddp_runner.system.clock import Clock
from ddp_runner.system.proc_state import stat_fields
from ddp_runner.system.run_files import open_to_append_anywhere

_MODULE = "ddp_runner.observe.trackers.tracker_process"
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
                    *(sys.executable, start.__file__, _MODULE),
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
