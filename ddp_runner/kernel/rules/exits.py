"""The exit codes and end states that scripts rely on."""

from __future__ import annotations

from enum import Enum, IntEnum


class ExitCode(IntEnum):
    """The exit codes that the command returns to the shell."""

    DONE = 0
    FAILED = 1
    BAD_USAGE = 2
    GAVE_UP = 3
    PREEMPTED = 75  # EX_TEMPFAIL: saved; run the same command again
    INTERRUPTED = 130  # 128 + SIGINT: saved


class RunStatus(Enum):
    """``status`` in summary.json."""

    COMPLETED = "completed"
    FAILED = "failed"
    GAVE_UP = "gave_up"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"

    @property
    def words(self) -> str:
        """The status as people read it: ``gave up``."""
        return self.value.replace("_", " ")


class StopReason(Enum):
    """Why the ranks are asked to stop at a step boundary."""

    COMPLETED = "completed"
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"


EXIT_CODE_OF_STATUS = {
    RunStatus.COMPLETED: ExitCode.DONE,
    RunStatus.FAILED: ExitCode.FAILED,
    RunStatus.GAVE_UP: ExitCode.GAVE_UP,
    RunStatus.PREEMPTED: ExitCode.PREEMPTED,
    RunStatus.INTERRUPTED: ExitCode.INTERRUPTED,
}
OF_SIGNAL = 128  # added to the number of a signal, in what a shell sees
STATUS_OF_REASON = {
    StopReason.COMPLETED: RunStatus.COMPLETED,
    StopReason.PREEMPTED: RunStatus.PREEMPTED,
    StopReason.INTERRUPTED: RunStatus.INTERRUPTED,
}


def exit_code_of(*, exit_code: int | None, signal_number: int | None) -> int:
    """Return the exit code that a shell would see for a failed rank: its own, or 128 plus the signal's number."""
    if signal_number is not None:
        return OF_SIGNAL + signal_number
    return exit_code or 1  # who leaves with 0 before the others has failed
