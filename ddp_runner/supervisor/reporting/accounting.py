"""Keeps account of a run: its incidents, where the time went, and the summary of both."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ddp_runner.core.board import SlotReading
from ddp_runner.core.exits import ExitCode, RunStatus
from ddp_runner.core.faults import Fault
from ddp_runner.core.messages import Finished
from ddp_runner.core.recovery import Incident
from ddp_runner.observe.summary import ExactProof, FaultRecord, RunSummary, TimeShares
from ddp_runner.supervisor.reporting.run_facts import RunFacts

MENDED_KEPT = 500  # of the first faults that ranks mended themselves, and of the last: each told


@dataclass(slots=True, kw_only=True)
class OpenFault:
    """An incident whose repair is under way or done."""

    incident: Incident
    began_s: float
    generation: int
    event_id: int
    outcome: str  # of the plan, for the line that tells of the repair
    all_ranks_dead: bool = False
    recovered_s: float | None = None
    steps_lost: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class Ledger:
    """Written by the supervisor's loop. Times are monotonic seconds."""

    def __init__(self, *, began_s: float) -> None:
        self.began_s = began_s
        self.first_step_s: float | None = None
        self.faults: list[OpenFault] = []
        self.restarts = 0
        self._mended_first: list[FaultRecord] = []
        self._mended_last: deque[FaultRecord] = deque(maxlen=MENDED_KEPT)
        self._mended_left_out = 0
        self.checkpoint = ""
        self.checkpoint_step: int | None = None
        self._launch_step: int | None = None
        self._productive_at_save: dict[int, int] = {}
        self._lost_ns = 0
        self._recovery_s = 0.0
        self._unfinished_s = 0.0  # in steps that a fault cut short, detection included

    @property
    def history(self) -> list[Incident]:
        """The incidents so far, oldest first."""
        return [fault.incident for fault in self.faults]

    @property
    def faults_total(self) -> int:
        """Incidents, and faults that ranks mended themselves, also those that are not listed."""
        listed = len(self._mended_first) + len(self._mended_last)
        return len(self.faults) + listed + self._mended_left_out

    def saved(self, step: int, path: str, productive_ns: int) -> None:
        """A checkpoint was published; what comes after it may be lost."""
        self.checkpoint, self.checkpoint_step = path, step
        # Net of what was lost before, so that each rollback counts its own work once.
        self._productive_at_save[step] = productive_ns - self._lost_ns
        while len(self._productive_at_save) > 64:
            del self._productive_at_save[min(self._productive_at_save)]

    def incident(
        self,
        incident: Incident,
        *,
        began_s: float,
        since_s: float,
        detect_s: float,
        generation: int,
        event_id: int,
        outcome: str,
        all_ranks_dead: bool = False,
    ) -> None:
        """An incident is closed and being repaired.

        ``since_s``: when the last step was committed; ``detect_s``: how long the culprit had shown
        no sign of life before it was noticed.
        """
        if all(fault.recovered_s is not None for fault in self.faults):
            self._unfinished_s += max(0.0, began_s - since_s)
        fault = OpenFault(
            incident=incident,
            began_s=began_s,
            generation=generation,
            event_id=event_id,
            outcome=outcome,
            all_ranks_dead=all_ranks_dead,
        )
        fault.seconds["detect"] = detect_s
        fault.seconds["abort"] = incident.at_s - began_s
        self.faults.append(fault)

    def mended(self, fault: Fault, *, seconds: float, steps_lost: int, generation: int) -> None:
        """A fault was repaired within its generation; it counts in no budget."""
        now_s = time.monotonic()
        record = FaultRecord(
            kind=fault.kind.value,
            rank=fault.rank,
            step=fault.step,
            cause=fault.cause,
            detected_s=round(now_s - seconds - self.began_s, 3),
            recovered_s=round(now_s - self.began_s, 3),
            steps_lost=steps_lost,
            generation=generation,
            detail=fault.detail,
            seconds={"total": round(seconds, 4)},
        )
        if len(self._mended_first) < MENDED_KEPT:
            self._mended_first.append(record)
            return
        self._mended_left_out += len(self._mended_last) == MENDED_KEPT
        self._mended_last.append(record)

    def once_more(self, rank: int) -> None:
        """The process that follows this rank's has nothing left to change: its end is to count."""
        for fault in reversed(self.faults):
            if any(cause.rank == rank for cause in fault.incident.attribution.causes):
                fault.incident = replace(fault.incident, once_more=True)
                return

    def forming(self, now_s: float) -> None:
        """Every rank that is needed is there: what follows is the forming of the generation."""
        for fault in self.faults:
            if fault.recovered_s is None:
                fault.seconds["fork"] = now_s - fault.incident.at_s

    def repaired(
        self, *, now_s: float, committed_step: int, productive_ns: int, parts: Mapping[str, float]
    ) -> list[OpenFault]:
        """The world trains again, at ``committed_step``; returns the faults that were repaired, oldest first.

        ``parts``: the seconds of the slowest rank for ``group``, ``transfer`` and ``rebuild``.
        """
        open_faults = [fault for fault in self.faults if fault.recovered_s is None]
        before = max((f.incident.committed_step for f in open_faults), default=committed_step)
        lost = max(0, before - committed_step)
        if lost:
            net_ns = productive_ns - self._lost_ns
            self._lost_ns += max(0, net_ns - self._kept_ns(committed_step, before, net_ns))
        elif self._launch_step is None:
            self._launch_step = committed_step
        if not open_faults:
            return []
        for fault in open_faults:
            fault.recovered_s = now_s
            fault.seconds.update(parts, total=now_s - fault.began_s)
        open_faults[-1].steps_lost = lost
        self._recovery_s += now_s - min(fault.began_s for fault in open_faults)
        return open_faults

    def _kept_ns(self, step: int, before: int, net_ns: int) -> int:
        """Of the work up to step ``before``, that up to ``step``: shared out evenly since a save."""
        known = {self._launch_step or 0: 0, **self._productive_at_save}
        saved = max((one for one in known if one <= step), default=step)
        saved_ns = known.get(saved, 0)
        return saved_ns + (net_ns - saved_ns) * (step - saved) // (before - saved)

    def summary(
        self,
        *,
        status: RunStatus,
        exit_code: ExitCode,
        world_size: int,
        reading: SlotReading,
        steps_per_epoch: int,
        finished: Sequence[Finished],
        facts: RunFacts,
        own_step_s: Mapping[int, float | None],
        now_s: float,
    ) -> RunSummary:
        """How the run ended. ``reading`` is rank 0's slot, ``finished`` what the ranks reported."""
        report: Mapping[str, object] = finished[0].report if finished else {}
        first_step_s = self.first_step_s if self.first_step_s is not None else now_s
        return RunSummary(
            run_id=facts.run_id,
            status=status,
            exit_code=int(exit_code),
            steps=finished[0].step if finished else reading.committed_step,
            epochs=_integer(report, "epochs", reading.committed_step // max(1, steps_per_epoch)),
            samples=_integer(report, "samples", reading.samples),
            world_size=world_size,
            final_loss=_finite(report.get("loss", reading.loss if reading.samples else None)),
            weights_sha256=str(report["weights_sha256"]) if "weights_sha256" in report else None,
            exact=not facts.inexact_reasons,
            inexact_reasons=tuple(facts.inexact_reasons),
            exact_proof=ExactProof.of(facts.proved),
            wall_s=round(now_s - self.began_s, 3),
            time_s=self._shares(reading, startup_s=first_step_s - self.began_s),
            faults=tuple(
                sorted(
                    [
                        *self._mended_first,
                        *self._mended_last,
                        *(self._record(fault) for fault in self.faults),
                    ],
                    key=lambda record: record.detected_s,
                )
            ),
            faults_left_out=self._mended_left_out,
            checkpoint=str(report.get("checkpoint") or self.checkpoint) or None,
            checkpoint_step=finished[0].step if report.get("checkpoint") else self.checkpoint_step,
            peak_rss_bytes=_peak(finished, "peak_rss_bytes"),
            peak_device_bytes=_peak(finished, "peak_device_bytes"),
            figures=_figures(report),
            suspected_leaks=tuple(
                leak for report in finished for leak in _leaks(report.report.get("leaks"))
            ),
            own_step_s={
                str(rank): round(seconds, 6)
                for rank, seconds in own_step_s.items()
                if seconds is not None
            },
            stragglers={str(rank): factor for rank, factor in facts.stragglers.items()},
        )

    def _shares(self, reading: SlotReading, *, startup_s: float) -> TimeShares:
        return TimeShares(
            startup=round(startup_s, 3),
            productive=round((reading.productive_ns - self._lost_ns) / 1e9, 3),
            data_wait=round(reading.data_wait_ns / 1e9, 3),
            checkpoint=round(reading.checkpoint_ns / 1e9, 3),
            comparison=round(reading.comparison_ns / 1e9, 3),
            evaluation=round(reading.evaluation_ns / 1e9, 3),
            recovery=round(self._recovery_s, 3),
            lost=round(self._lost_ns / 1e9 + self._unfinished_s, 3),
        )

    def _record(self, fault: OpenFault) -> FaultRecord:
        culprit = fault.incident.culprit
        recovered = fault.recovered_s
        return FaultRecord(
            kind=culprit.kind.value,
            rank=culprit.rank,
            step=culprit.step,
            cause=culprit.cause,
            detected_s=round(fault.began_s - self.began_s, 3),
            recovered_s=None if recovered is None else round(recovered - self.began_s, 3),
            steps_lost=fault.steps_lost,
            generation=fault.generation,
            detail=culprit.detail,
            victims=tuple(victim.rank for victim in fault.incident.attribution.victims),
            all_ranks_dead=fault.all_ranks_dead,
            seconds={name: round(value, 4) for name, value in fault.seconds.items()},
        )


def _integer(report: Mapping[str, object], name: str, otherwise: int) -> int:
    value = report.get(name, otherwise)
    return value if isinstance(value, int) else otherwise


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _peak(finished: Sequence[Finished], name: str) -> int | None:
    peaks = [report.report.get("peaks") for report in finished]
    values = [peak.get(name) for peak in peaks if isinstance(peak, dict)]
    numbers = [value for value in values if isinstance(value, int)]
    return max(numbers) if numbers and max(numbers) > 0 else None


def _leaks(reported: object) -> list[Mapping[str, object]]:
    return (
        [leak for leak in reported if isinstance(leak, dict)] if isinstance(reported, list) else []
    )


def _figures(report: Mapping[str, object]) -> dict[str, float]:
    figures = report.get("figures")
    return {str(k): float(v) for k, v in figures.items()} if isinstance(figures, dict) else {}
