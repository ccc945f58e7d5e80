"""When a run is asked to stop, and which signals of many mean "end at once" and not "finish the step and save". No clock, no process.

Kernel, shell and scheduler send stop signals several times over: a closed terminal sends SIGHUP
twice, a container runtime signals every process, a parent passes a Ctrl-C on that the terminal has
sent to its child as well. Only a person who asks again, or a scheduler that does after a while, is in
such a hurry that the save may be lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# Interrupts that follow each other faster are of one press of the keys: passed on by a parent, or
# the key is held down. No person presses them so fast.
PRESS_GAP_S = 0.12
PASSED_ON_MAX = 3  # of one press, by the terminal and by parents; more is a key that is held down
TERMINATE_AGAIN_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """A time limit: the launch is asked to stop after ``seconds``; ``why`` is the reason for people."""

    seconds: float
    why: str


class StopSignal(Enum):
    """The kinds of signals that stop a run; they differ in whether a second one ends the run at once."""

    INTERRUPT = "Ctrl-C"
    TERMINATE = "SIGTERM"
    OTHER = "another one"  # SIGHUP, SIGUSR1: however often they come


class StopSignals:
    """Counts the stop signals of one process. Times are monotonic seconds and never go back."""

    def __init__(self) -> None:
        self._presses = 0  # of Ctrl-C that are over
        self._in_press = 0  # interrupts of the newest one
        self._newest_s = 0.0  # of these
        self._terminated_s: float | None = None  # the first SIGTERM
        self._has_terminated_again = False

    def heard(self, signal: StopSignal, now_s: float) -> None:
        """A signal has come."""
        if signal is StopSignal.TERMINATE:
            if self._terminated_s is None:
                self._terminated_s = now_s
            self._has_terminated_again |= now_s > self._terminated_s + TERMINATE_AGAIN_S
        if signal is not StopSignal.INTERRUPT:
            return
        self._end_press(now_s)
        self._in_press += 1
        self._newest_s = now_s

    def ends_at_once(self, now_s: float) -> bool:
        """Return whether the user asked again: a second press of Ctrl-C, or a late second SIGTERM."""
        self._end_press(now_s)
        return self._has_terminated_again or self._presses > 1

    def _end_press(self, now_s: float) -> None:
        if not self._in_press or now_s <= self._newest_s + PRESS_GAP_S:
            return
        # The first one counts whatever it was: the run stops for it. A key that is held down goes on
        # with many, after a pause as long as between two presses.
        self._presses += self._presses == 0 or self._in_press <= PASSED_ON_MAX
        self._in_press = 0
