"""Collects the supervisor's facts about the whole run, from events and from the supervisor itself."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from ddp_runner.core import events
from ddp_runner.core.drill import DRILLED
from ddp_runner.core.exits import EXIT_CODE_OF_STATUS, RunStatus
from ddp_runner.observe.summary import RunFindings, RunSummary
from ddp_runner.system.run_files import from_json, read_small


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
        """Return an ending with the exit code of ``status``, or with ``exit_code``."""
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
class RunFacts(RunFindings):
    """``committed_step`` is the highest of the ranks now.

    It goes back with them to a checkpoint, so that steps that are lost are counted once. A dead
    rank counts with what it had until its successor has a state.
    """

    generation: int = 0
    committed_step: int = 0
    steps_per_epoch: int = 0  # 0: no rank has reported it yet; it outlives the rank that did
    ever_formed: bool = False
    saved_any: bool = False  # by this launch
    has_replaced: bool = False  # a rank, once training had begun
    formed_at_s: float = 0.0  # when the newest generation was asked to form, or loaded for that
    kept: RunSummary | None = None  # of the run, which was complete before this launch
    spare: dict[str, object] = field(default_factory=dict)  # what the one that waits here holds

    def take(self, event: events.Event) -> None:
        """Take the facts about the whole run from an event."""
        RunFindings.take(self, event)
        match event:
            case events.CheckpointSaved():
                self.saved_any = True
            case events.Plan(replaced=ranks) if ranks and self.ever_formed:
                self.has_replaced = True
            case _:
                pass

    @property
    def lacks_proof(self) -> bool:
        """True if a rank was replaced, and no drill has shown that a replacement computes the same."""
        return self.has_replaced and not self.proved.get(DRILLED)

    def take_up(self, run_id: str, log_dir: str) -> None:
        """Go on with a run; why it is not exact any more stands in its newest status.json."""
        self.run_id = run_id
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            status = from_json(read_small(Path(log_dir, "status.json")))
            if status.get("run_id") == run_id:
                kept = [str(reason) for reason in status["inexact_reasons"]]
                # Ranks may have reported some already; those of before come first.
                self.inexact_reasons[:] = dict.fromkeys([*kept, *self.inexact_reasons])
