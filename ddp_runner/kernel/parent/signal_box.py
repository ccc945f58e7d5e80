"""The signals that a supervisor hears, as events of its loop."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from types import FrameType

from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.stopping import StopSignal

STOP_SIGNALS = {
    signal.SIGINT: StopReason.INTERRUPTED,
    signal.SIGTERM: StopReason.PREEMPTED,
    signal.SIGUSR1: StopReason.PREEMPTED,
    signal.SIGHUP: StopReason.PREEMPTED,
}
# Those by which somebody may ask again, in a hurry.
INSISTENT = {signal.SIGINT: StopSignal.INTERRUPT, signal.SIGTERM: StopSignal.TERMINATE}
SAVE_SIGNAL = signal.SIGUSR2


class SignalBox:
    """Signals as a readable socket, so that the loop wakes for them and nothing is interrupted."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: dict[int, object] = {}

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._reader.fileno()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Catch our signals for the length of the block. An ignored SIGHUP (nohup) stays ignored.

        Afterwards those that stop a run do nothing: it has ended, and one that is repeated would end
        this process before it has given its exit code.
        """
        wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        number: int
        for number in (*STOP_SIGNALS, SAVE_SIGNAL, signal.SIGQUIT, signal.SIGCHLD):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, _only_wake)
        try:
            yield
        finally:
            for number, handler in self._before.items():
                has_ended = number in STOP_SIGNALS
                signal.signal(number, signal.SIG_IGN if has_ended else handler)  # type: ignore[arg-type] # what signal() returned
            signal.set_wakeup_fd(wakeup_before)
            self._reader.close()
            self._writer.close()

    def take(self) -> list[int]:
        """The signals since the last call, oldest first."""
        numbers: list[int] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                numbers += self._reader.recv(4096)
        return numbers


def _only_wake(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor has woken the loop."""
    del number, frame
