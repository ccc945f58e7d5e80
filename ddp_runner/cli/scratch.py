"""What the commands share that train for show: a temporary folder, its end, and signals that end all."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.core.exits import ExitCode

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
    say: Callable[[str], None] | None = None,
) -> ExitCode:
    """What ``work`` returns for a folder of its own, which is kept if so asked or where it has failed.

    Ctrl-C, SIGTERM and SIGHUP end it: 130, and the folder goes unless it is to be kept.
    """
    say = say or say_now
    folder = Path(tempfile.mkdtemp(prefix=f"ddp_runner_{command}_"))
    kept = keep
    try:
        with _ended_by_signals():
            exit_code = work(folder)
        kept = keep or exit_code is ExitCode.FAILED
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


def _remove(folder: Path) -> None:
    """Remove it whole: neither another Ctrl-C nor a process that still writes there as it ends leaves a rest."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        deadline_s = time.monotonic() + _REMOVED_WITHIN_S
        while folder.exists() and time.monotonic() < deadline_s:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def say_now(text: str) -> None:
    """Print a line before anything that comes from a child, which is often on the same descriptor."""
    print(text)
    sys.stdout.flush()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the block as Ctrl-C does; an ignored SIGHUP stays ignored."""
    numbers = [signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt
