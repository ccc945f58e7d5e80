"""Owns summary.json: how a run ended, whether it is exact and what proves that, as values and on disk. Decides nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ddp_runner import installed
from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.kernel.system.run_files import from_json, read_small, replace_file_synced
from ddp_runner.kernel.wire import events
from ddp_runner.observe.files import encode_record

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ddp_runner.kernel.wire.board import SlotReading
    from ddp_runner.kernel.wire.messages import Finished

DIFFERENCES_KEPT = 20  # the first failed drills
_PEAKS = ("peak_rss_bytes", "peak_device_bytes", "peak_device_permille")


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedRecord:
    """A fault that was asked for with ``--inject``: what was done, where, and ``at_s`` since the start of the run.

    ``number`` is that of the option, from 0; None where a random plan has drawn it. A bad sample is in the data from
    the start, and is not listed.
    """

    kind: str
    rank: int
    number: int | None
    step: int
    phase: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord:
    """One fault and its repair. ``rank`` is -1 where no single rank is to blame.

    ``phase``: the part of the step, empty where nobody knows. ``action``: what was done, in words.
    ``injected``: what of ``--inject`` has brought it about, its culprit's first; empty where nothing has.

    ``detected_s`` and ``recovered_s`` count from the start of the run; ``recovered_s`` is None
    where the run ended first, or nothing had to be repaired. ``seconds`` has what the repair consisted of: ``detect`` (since the
    culprit's last sign of life), ``abort``, ``fork``, ``group``, ``transfer``, ``rebuild``,
    ``total`` (from the detection on). ``victims`` merely lost their peer. ``detail`` is the end of
    the culprit's traceback, or of what it said last; empty where there is none. ``all_ranks_dead``:
    no rank was left with the state, and the newest checkpoint was read; only that costs steps.
    ``times``: so many saves have failed for it, one after the other. ``host``: of the rank, with several machines.
    ``launches_ago``: where the coordinator was lost since, and another one took the ranks over, how often; its times
    count from the start of that launch.
    """

    kind: str
    rank: int
    step: int
    cause: str
    detected_s: float
    recovered_s: float | None
    steps_lost: int
    generation: int
    detail: str = ""
    victims: tuple[int, ...] = ()
    all_ranks_dead: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    phase: str = ""
    action: str = ""
    injected: tuple[InjectedRecord, ...] = ()
    times: int = 1
    host: str = ""
    launches_ago: int = 0


# What people are shown of TimeShares, in the order of a run.
TIME_NAMES = {
    "startup": "start-up",
    "productive": "steps",
    "data_wait": "data wait",
    "checkpoint": "checkpoints",
    "comparison": "comparisons",
    "evaluation": "evaluation",
    "recovery": "recovery",
    "lost": "lost steps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """The uses of a run's seconds. ``productive``: inside committed steps, without data wait.

    ``checkpoint`` and ``comparison``: the time for which training waited for saves, and for comparisons of the
    ranks' states before saves, at intervals and at the end.
    """

    startup: float = 0.0
    productive: float = 0.0
    data_wait: float = 0.0
    checkpoint: float = 0.0
    comparison: float = 0.0
    evaluation: float = 0.0
    recovery: float = 0.0
    lost: float = 0.0


def time_parts(time_s: TimeShares | Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the parts of the time that are above 0, by the names that people see, in the order of a run.

    ``time_s``: also as a file has it, with whatever stands there.
    """
    given = asdict(time_s) if isinstance(time_s, TimeShares) else time_s
    parts = ((shown, given.get(name)) for name, shown in TIME_NAMES.items())
    return [(shown, float(s)) for shown, s in parts if isinstance(s, (int, float)) and s > 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Describes a failed drill of ``rank`` at ``step``, with the first difference in ``first_in``.

    ``cause``: the name that the diagnosis gives it, empty without one; ``state`` if only the update differs. ``places``:
    names of the state outside the model that cause the difference. ``undone``: all ranks have rolled back to a state from
    before the error.
    ``host``: of the rank, with several machines.
    """

    rank: int
    step: int
    first_in: str
    cause: str = ""
    places: tuple[str, ...] = ()
    undone: bool = False
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactProof:
    """The steps of this launch that were computed twice, with the same bits.

    ``repeated``: steps that the ranks themselves have computed twice; ``drilled``: those of which a
    process like a replacement has computed a rank's share, in order. ``repairs_proved``: how many of the repairs
    that have replaced ranks a drill has proved since, such as ``2 of 3``; empty without any. ``differences``: the
    first drills that have failed.
    """

    repeated: int = 0
    drilled: tuple[int, ...] = ()
    repairs_proved: str = ""
    differences: tuple[Difference, ...] = ()

    @classmethod
    def of(
        cls,
        proved: Mapping[str, Collection[int]],
        repairs_proved: str = "",
        differences: Sequence[Difference] = (),
    ) -> ExactProof:
        """Return the proof from the reported steps, by the kind of repetition."""
        return cls(
            repeated=len(proved.get("repeated", ())),
            drilled=tuple(sorted(proved.get("drilled", ()))),
            repairs_proved=repairs_proved,
            differences=tuple(differences),
        )


class Summary(Protocol):
    """The content of summary.json, whoever has decided in the run."""

    def to_record(self) -> dict[str, object]:
        """Return what the file holds."""

    def with_use(self, *, gpus: Mapping[str, object], rank_use: Mapping[str, object]) -> Summary:
        """Return the same with what GPUs and ranks have used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The content of a training's summary.json. None stands for "never known"."""

    run_id: str
    status: RunStatus
    exit_code: int
    steps: int
    epochs: int
    samples: int
    tokens: float | None = None  # the weight of all steps, of a loss that has one
    world_size: int
    final_loss: float | None
    weights_sha256: str | None
    exact: bool | None  # None: no step was made, so nothing is known
    inexact_reasons: tuple[str, ...] = ()
    exact_proof: ExactProof = ExactProof()
    wall_s: float
    time_s: TimeShares
    faults: tuple[FaultRecord, ...] = ()
    # That needed no repair (a skipped step, a save that failed), so they count as no faults: the newest 500.
    tolerated: tuple[FaultRecord, ...] = ()
    injected: tuple[InjectedRecord, ...] = ()  # the newest 1,000
    faults_left_out: int = 0  # repaired by their ranks, and too many to list: in events.jsonl
    checkpoint: str | None
    checkpoint_step: int | None = None
    peak_rss_bytes: int | None = None
    peak_device_bytes: int | None = None
    peak_device_permille: int | None = None  # of its memory, taken by this run or others
    figures: Mapping[str, float] = field(default_factory=dict)
    suspected_leaks: tuple[Mapping[str, object], ...] = ()
    # rank -> mean seconds of a step outside collectives, the wait for data included
    own_step_s: Mapping[str, float] = field(default_factory=dict)
    stragglers: Mapping[str, float] = field(default_factory=dict)  # rank -> factor over the others
    machines_lost: Mapping[str, int] = field(default_factory=dict)  # of several, how often each
    stop_reason: str = ""  # end, target_loss, early_stopping; else what status says
    trackers: Mapping[str, str] = field(default_factory=dict)  # where each has written to
    stage: str = ""  # of the weights; empty without stages
    stages: tuple[StageRecord, ...] = ()  # that this launch has trained, in order
    name: str = ""  # of the run, as its folders have it; empty in files from before there was one
    # Of this launch, from its first step to its end, with all that came between. None: nobody counts them.
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    flops_utilization: float | None = None  # of the devices' peak; None where that is not known
    # Means and peaks by log.gpu_watch_s, of each GPU and each rank.
    gpus: Mapping[str, object] = field(default_factory=dict)
    rank_use: Mapping[str, object] = field(default_factory=dict)
    gpu_epochs: tuple[Mapping[str, Any], ...] = ()  # the same of GPUs by epoch, the newest 200

    @property
    def called(self) -> str:
        """Name and id, as people are shown them."""
        return f"{self.name} ({self.run_id})" if self.name else self.run_id

    @property
    def goodput(self) -> float:
        """Productive time over the time since start-up ended, 0 to 1."""
        return goodput(
            productive_s=self.time_s.productive, wall_s=self.wall_s, startup_s=self.time_s.startup
        )

    def to_record(self) -> dict[str, object]:
        """The content of summary.json."""
        return {**asdict(self), "status": self.status.value, "goodput": round(self.goodput, 6)}

    def with_use(self, *, gpus: Mapping[str, object], rank_use: Mapping[str, object]) -> RunSummary:
        """Return the same with what GPUs and ranks have used."""
        return replace(self, gpus=gpus, rank_use=rank_use)


def goodput(*, productive_s: float, wall_s: float, startup_s: float) -> float:
    """``productive_s / (wall_s - startup_s)``, kept within 0 and 1; 0 where no time was left."""
    available_s = wall_s - startup_s
    return min(1.0, max(0.0, productive_s / available_s)) if available_s > 0 else 0.0


def write_summary(path: Path, summary: Summary) -> None:
    """Replace ``path``; on disk when it returns. Raises OSError, and the old file then stays."""
    replace_file_synced(path, encode_record(summary.to_record()))


def read_summary(path: Path) -> RunSummary:
    """Read ``path`` back. Raises OSError, or ValueError where the file is no summary."""
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 - a display needs neither

    record = from_json(read_small(path))
    if isinstance(record, dict) and isinstance(figures := record.get("figures"), dict):
        # What is not finite is null in the file.
        record["figures"] = {name: one for name, one in figures.items() if one is not None}
    try:
        return TypeAdapter(RunSummary).validate_python(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"its field {where}: {first['msg']}" if where else "it is not a JSON object"
        raise ValueError(what) from error


def other_report(path: Path) -> OtherReport | None:
    """Read a summary.json by the feature that has written it; None where it is a training's.

    Raises OSError, or ValueError where it cannot be understood.
    """
    found = (part.read(path) for part in installed.parts("other_summary"))
    return next((one for one in found if one is not None), None)


@dataclass(frozen=True, slots=True)
class OtherReport:
    """The report on a run that is no training. ``read(path)`` of a feature's ``other_summary.py`` makes it of a summary.json."""

    what: str  # of what it is the run, in words
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """A stage in summary.json. ``last_step`` and ``loss``: with which it has ended; None where it has not."""

    name: str
    first_step: int
    last_step: int | None = None
    loss: float | None = None


@dataclass(slots=True, kw_only=True)
class RunFindings:
    """Filled by the events of a run; the summary has it from here."""

    run_id: str = ""
    name: str = ""
    stages: list[StageRecord] = field(
        default_factory=list
    )  # that this launch has trained, in order
    inexact_reasons: list[str] = field(default_factory=list)
    stragglers: dict[int, float] = field(default_factory=dict)  # rank -> factor over the others
    # With several machines: how often each was lost in this launch.
    machines_lost: dict[str, int] = field(default_factory=dict)
    # Steps of this launch that were computed twice with the same bits: "repeated", "drilled".
    proved: dict[str, set[int]] = field(default_factory=dict)
    repairs_proved: str = ""
    differences: list[Difference] = field(default_factory=list)  # of failed drills, the first ones
    is_stopped: bool = False  # somebody has asked for it

    @property
    def stage(self) -> str:
        """The stage that is trained; empty without stages."""
        return self.stages[-1].name if self.stages else ""

    def own_steps(self, steps: int) -> int:
        """Return the steps of the stage that is trained, out of ``steps`` of the run; all, without stages."""
        return steps - (self.stages[-1].first_step if self.stages else 0)

    def take(self, event: events.Event) -> None:
        """Take the facts about the result from an event."""
        if isinstance(event, events.Drill) and event.differs:
            found = Difference(
                rank=event.rank,
                step=event.step,
                first_in=event.differs,
                cause="state" if event.updated else "",
                host=event.host,
            )
            self.differences += [found] * (len(self.differences) < DIFFERENCES_KEPT)
        match event:
            case events.StageBegins(stage=stage, first_step=first_step):
                self.stages.append(StageRecord(name=stage, first_step=first_step))
            case events.StageEnds(step=step, loss=loss) if self.stages:
                self.stages[-1] = replace(self.stages[-1], last_step=step, loss=loss)
            case events.StopAsked():
                self.is_stopped = True
            case events.Straggler(rank=rank, factor=factor):
                self.stragglers[rank] = factor
            case events.Proved(what=what, step=step):
                # Of ranks that report one step it counts once.
                self.proved.setdefault(what, set()).add(step)
            case events.RepairsProved(proved=proved, repairs=repairs):
                self.repairs_proved = f"{proved} of {repairs}"
            case (
                events.Plan(inexact_reason=reason)
                | events.TuningChanged(inexact_reason=reason)
                | events.RepairedInPlace(inexact_reason=reason)
                | events.Drill(inexact_reason=reason)
                | events.NotProved(inexact_reason=reason)
            ):
                if reason and reason not in self.inexact_reasons:
                    self.inexact_reasons.append(reason)
            case _:
                self._take_difference(event)

    def _take_difference(self, event: events.Event) -> None:
        """Take in the diagnosis of a failed drill, or its roll-back."""
        match event:
            case events.Diagnosed(of_step=of_step, rank=rank, source=cause, places=places):
                self._change(of_step, rank, cause=cause, places=tuple(places))
            case events.Undone(of_step=of_step, rank=rank, withdrawn=reason):
                self._change(of_step, rank, undone=True)
                if reason in self.inexact_reasons:
                    self.inexact_reasons.remove(reason)
            case _:
                pass

    def _change(self, step: int, rank: int, **changes: Any) -> None:
        for place, one in enumerate(self.differences):
            if (one.step, one.rank) == (step, rank):
                self.differences[place] = replace(one, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfRun:
    """The end of a run: its status, ``reading`` of rank 0's slot, and what the ranks reported, if all did."""

    status: RunStatus
    exit_code: int
    reading: SlotReading
    finished: Sequence[Finished]
    now_s: float

    @property
    def report(self) -> Mapping[str, object]:
        """Return what the first rank reported."""
        return self.finished[0].report if self.finished else {}

    @property
    def steps(self) -> int:
        """Return the number of committed steps."""
        return self.finished[0].step if self.finished else self.reading.committed_step

    @property
    def samples(self) -> int:
        """Return the number of samples in them."""
        return self.whole("samples", self.reading.samples)

    def whole(self, name: str, otherwise: int) -> int:
        """Return a whole number of the report, or ``otherwise``."""
        value = self.report.get(name, otherwise)
        return value if isinstance(value, int) else otherwise

    def number(self, name: str, otherwise: object = None) -> float | None:
        """Return a finite number of the report, or ``otherwise`` if that is one."""
        value = self.report.get(name, otherwise)
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None

    def reported(self) -> dict[str, Any]:
        """Return the fields of the summary that the ranks know."""
        report, reading = self.report, self.reading
        figures = report.get("figures")
        return {
            "status": self.status,
            "exit_code": int(self.exit_code),
            "steps": self.steps,
            "samples": self.samples,
            "tokens": self.number("tokens"),
            "stop_reason": str(report.get("stop_reason") or self.status.value),
            "final_loss": self.number("loss", reading.loss if reading.samples else None),
            "weights_sha256": str(report["weights_sha256"]) if "weights_sha256" in report else None,
            **{name: self._peak(name) for name in _PEAKS},
            "figures": {str(name): float(one) for name, one in figures.items()}
            if isinstance(figures, dict)
            else {},
            "suspected_leaks": tuple(
                leak for one in self.finished for leak in _leaks(one.report.get("leaks"))
            ),
        }

    def _peak(self, name: str) -> int | None:
        peaks = [one.report.get("peaks") for one in self.finished]
        values = [peak.get(name) for peak in peaks if isinstance(peak, dict)]
        numbers = [value for value in values if isinstance(value, int)]
        return max(numbers) if numbers and max(numbers) > 0 else None


def _leaks(reported: object) -> list[Mapping[str, object]]:
    return (
        [leak for leak in reported if isinstance(leak, dict)] if isinstance(reported, list) else []
    )
