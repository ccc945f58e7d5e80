"""What the supervisor knows of a run as a whole, and how the run ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddp_runner.kernel.rules.exits import EXIT_CODE_OF_STATUS, RunStatus
from ddp_runner.kernel.wire import events


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of the run. ``error_line`` goes to stderr; ``detail`` may hold a traceback.

    ``is_late_stop``: the ranks had to stop and save, and have not; one that saves alone makes up for it.
    """

    status: RunStatus
    exit_code: int
    reason: str
    error_line: str = ""
    detail: str = ""
    is_late_stop: bool = False

    @classmethod
    def of(
        cls,
        status: RunStatus,
        reason: str,
        *,
        exit_code: int | None = None,
        error_line: str = "",
        detail: str = "",
        is_late_stop: bool = False,
    ) -> Ending:
        """Return an ending with the exit code that belongs to ``status``, or ``exit_code``."""
        return cls(
            status=status,
            exit_code=EXIT_CODE_OF_STATUS[status] if exit_code is None else exit_code,
            reason=reason,
            error_line=error_line,
            detail=detail,
            is_late_stop=is_late_stop,
        )

    @property
    def event(self) -> events.RunEnds:
        """The event for the journal, and for other machines."""
        status, exit_code = self.status.value, int(self.exit_code)
        return events.RunEnds(status=status, exit_code=exit_code, line=self.reason)


@dataclass(slots=True, kw_only=True)
class RunFacts:
    """``committed_step`` is the highest of the ranks now.

    It goes back with them to a checkpoint, so that steps that are lost are counted once. A dead
    rank counts with what it had until its successor has a state.
    """

    run_id: str = ""
    generation: int = 0
    committed_step: int = 0
    steps_per_epoch: int = 0  # 0: no rank has reported it yet; it outlives the rank that did
    ever_formed: bool = False
    saved_any: bool = False  # by this launch
    was_complete: bool = False  # before this launch, which keeps its result
    took_over: bool = False  # the ranks' memory, or a copy, from a lost coordinator
    owes_proof: bool = False  # the launch before it has ended with repairs that are not proved
    formed_at_s: float = 0.0  # when the newest generation was asked to form, or loaded for that
    # Why the result is not bit-identical to that of a run without faults. Others add to this very list.
    inexact_reasons: list[str] = field(default_factory=list)
