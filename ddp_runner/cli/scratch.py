"""Runs the work of commands that train for show: a temporary folder, its removal, and signals that end all."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REMOVED_WITHIN_S = 5.0

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


def in_temporary_folder(
    command: str,
    work: Callable[[Path], ExitCode],
    *,
    keep: bool,
    keeps_failed: bool = True,
    say: Callable[[str], None] | None = None,
) -> ExitCode:
    """Return the result of ``work`` in a temporary folder, which is kept on request, or if it ``keeps_failed``.

    Ctrl-C, SIGTERM and SIGHUP end it: the result is 130, and the folder is removed unless it is to be kept.
    """
    say = say or say_now
    with _signals_reach_work_alone() as came:
        folder = _made(f"ddp_runner_{command}_")
        kept = keep
        try:
            exit_code = _perform(work, folder, came)
            kept = keep or (keeps_failed and exit_code is ExitCode.FAILED)
        except KeyboardInterrupt:
            exit_code = ExitCode.INTERRUPTED
        finally:
            if not kept:
                _remove(folder)
        if exit_code is ExitCode.INTERRUPTED:
            say(f"\n{command}: interrupted; everything it started has ended")
        if kept:
            say(f"logs and checkpoints of the runs: {folder}")
    return exit_code


def _made(prefix: str) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        expected = f"no temporary folder can be made: {error.strerror}"
        raise BadInputError("TMPDIR", "", expected) from error


def _perform(work: Callable[[Path], ExitCode], folder: Path, came: list[int]) -> ExitCode:
    """Do the work: signals interrupt what runs below here, and nothing else of this module."""
    if came:
        raise KeyboardInterrupt
    return work(folder)


def _remove(folder: Path) -> None:
    """Remove it whole, with what a process still writes there as it ends."""
    deadline_s = time.monotonic() + _REMOVED_WITHIN_S
    while folder.exists() and time.monotonic() < deadline_s:
        shutil.rmtree(folder, ignore_errors=True)


def say_now(text: str) -> None:
    """Print a line before anything that comes from a child, which is often on the same descriptor."""
    print(text)
    sys.stdout.flush()


@contextmanager
def _signals_reach_work_alone() -> Iterator[list[int]]:
    """Give the list of the signals that came; each raises KeyboardInterrupt where it meets `_perform` at work.

    Elsewhere, as while the folder is made or removed, it is only noted: any number of Ctrl-C leaves no rest.
    A signal that was ignored stays ignored.
    """
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in _ENDING}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def answer_by(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        for number in heeded:
            signal.signal(number, handler)

    def interrupt(number: int, frame: FrameType | None) -> None:
        answer_by(signal.SIG_IGN)  # else the handlers of many signals nest until the stack is full
        came.append(number)
        while frame is not None:
            if frame.f_code is _perform.__code__:
                answer_by(interrupt)
                raise KeyboardInterrupt
            frame = frame.f_back

    answer_by(interrupt)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
