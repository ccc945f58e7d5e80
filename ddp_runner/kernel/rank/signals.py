"""Takes the signals that ask for a stop or a save; never decides what they mean."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from os import getpid
from types import FrameType

# What stops the run, and what asks the supervisor for a checkpoint.
RUN_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def take_signals(numbers: Iterable[signal.Signals], act: Callable[[signal.Signals], None]) -> None:
    """Have ``act`` called for these signals to this process, and to no process forked from it.

    That one takes them as any process does: a pool of workers that user code opens is ended by
    SIGTERM, which must neither stop the run nor leave the pool as it is.
    """
    own_pid = getpid()

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        if getpid() == own_pid:
            act(signal.Signals(number))
            return
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
        signal.raise_signal(number)

    for number in numbers:
        signal.signal(number, on_signal)


def leave_stops_to_supervisor() -> None:
    """Have a signal of the run to this process do nothing: who signals all of a run signals that one too."""
    take_signals(RUN_SIGNALS, lambda number: None)  # noqa: ARG005 - nothing is done


@contextmanager
def stops_held() -> Iterator[None]:
    """Hold the run's signals back while a process is forked, until it has called :func:`release_stops`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, RUN_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release_stops() -> None:
    """Take the signals that were held back, now that a handler is there."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RUN_SIGNALS)
