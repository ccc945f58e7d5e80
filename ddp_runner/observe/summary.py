"""Owns summary.json: how a run ended, as values and as a file on disk. Decides nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ddp_runner.core.exits import RunStatus
from ddp_runner.observe.files import encode_record
from ddp_runner.observe.findings import StageRecord
from ddp_runner.system.run_files import from_json, read_small, replace_file_synced

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from ddp_runner.observe.script_summary import ScriptSummary


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactProof:
    """The steps of this launch that were computed twice, with the same bits.

    ``repeated``: steps that the ranks themselves have computed twice; ``drilled``: those of which a
    process like a replacement has computed a rank's share, in order.
    """

    repeated: int = 0
    drilled: tuple[int, ...] = ()

    @classmethod
    def of(cls, proved: Mapping[str, Collection[int]]) -> ExactProof:
        """Return the proof from the reported steps, by the kind of repetition."""
        return cls(
            repeated=len(proved.get("repeated", ())),
            drilled=tuple(sorted(proved.get("drilled", ()))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The content of summary.json. None stands for "never known"."""

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
    exact: bool
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


def goodput(*, productive_s: float, wall_s: float, startup_s: float) -> float:
    """``productive_s / (wall_s - startup_s)``, kept within 0 and 1; 0 where no time was left."""
    available_s = wall_s - startup_s
    return min(1.0, max(0.0, productive_s / available_s)) if available_s > 0 else 0.0


def write_summary(path: Path, summary: RunSummary | ScriptSummary) -> None:
    """Replace ``path``; on disk when it returns. Raises OSError, and the old file then stays."""
    replace_file_synced(path, encode_record(summary.to_record()))


def read_summary(path: Path) -> RunSummary:
    """Read ``path`` back. Raises OSError, or ValueError where the file is no summary."""
    record = from_json(read_small(path))
    try:
        known = {f.name: record[f.name] for f in fields(RunSummary) if f.name in record}
        known["status"] = RunStatus(known["status"])
        known["time_s"] = TimeShares(**known["time_s"])
        known["faults"] = tuple(map(_fault_record, known["faults"]))
        known["tolerated"] = tuple(map(_fault_record, known.get("tolerated", ())))
        known["injected"] = tuple(InjectedRecord(**one) for one in known.get("injected", ()))
        known["inexact_reasons"] = tuple(known["inexact_reasons"])
        proof = known.pop("exact_proof", {})
        known["exact_proof"] = ExactProof(
            repeated=int(proof.get("repeated", 0)), drilled=tuple(proof.get("drilled", ()))
        )
        known["stages"] = tuple(StageRecord(**one) for one in known.get("stages", ()))
        known["gpu_epochs"] = tuple(known.get("gpu_epochs", ()))
        known["suspected_leaks"] = tuple(known.get("suspected_leaks", ()))
        return RunSummary(**known)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a run summary: {error}") from error


def _fault_record(fault: Mapping[str, Any]) -> FaultRecord:
    injected = tuple(InjectedRecord(**one) for one in fault.get("injected", ()))
    victims = tuple(fault.get("victims", ()))
    return FaultRecord(**{**fault, "victims": victims, "injected": injected})
