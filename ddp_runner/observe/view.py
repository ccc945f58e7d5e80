"""One look at a run and its ranks, as frozen values. Reads nothing; the supervisor fills it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from ddp_runner.core.gpu_reading import GpuReading

LAST = "LAST"  # the level of lines about how a run has ended: shown by a quiet console, too


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank. ``step`` is the newest committed one; ``None`` stands for "not known yet".

    ``building`` is what it builds while its phase is ``startup``.
    ``data_wait_share`` is the share of step time spent waiting for data, 0 to 1. ``loader_bytes``: what its
    loader workers hold of their own; ``cpu_share``: cores that it and they use. ``node``: its machine's number.
    """

    rank: int
    pid: int
    state: str
    step: int
    phase: str
    phase_age_s: float
    rss_bytes: int
    device: str
    building: str = ""
    loader_pids: tuple[int, ...] = ()
    loss: float | None = None
    samples_per_s: float | None = None
    data_wait_share: float | None = None
    loader_bytes: int | None = None
    cpu_share: float | None = None
    node: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """A GPU that ``ranks`` compute on, of machine ``node``.

    ``age_s``: of what its driver has said; None where only the ranks themselves know anything of it.
    """

    node: int
    ranks: tuple[int, ...]
    age_s: float | None
    reading: GpuReading


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultView:
    """A fault that was repaired, or that is: ``age_s`` since it was noticed, ``repaired_s`` until all trained again.

    ``repaired_s`` None: it is being repaired, or never was.
    """

    text: str
    step: int
    age_s: float
    repaired_s: float | None
    is_being_repaired: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """Another machine than the coordinator's. ``number`` below 0: it waits for a place.

    ``round_trip_s``: of its newest look and the answer; None: it is not there. ``losses``: how often it was
    lost in this launch; for ``left_out_s`` the run does without it.
    """

    number: int
    host: str
    is_there: bool
    round_trip_s: float | None
    losses: int = 0
    left_out_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The run. ``state`` is one of starting, running, recovering, stopping, done, failed.

    ``trackers``: where to find what each has written. ``logged_step`` is the newest step that the ranks reported metrics for, with its
    ``logged_epoch``, ``logged_loss``, ``learning_rate`` and ``grad_norm``; ``step``, ``epoch`` and ``loss`` may be newer; ``evaluated`` are the figures of the newest evaluation by name, after ``evaluated_step``
    (empty and None before the first one of a launch or stage); ``epoch`` counts from 0 and is shown from 1;
    ``epochs`` is None where nobody knows of any. ``doing`` is
    what the start is at, for ``doing_s`` by now; empty once the first step is done. ``faults``: the newest, oldest
    first. ``stragglers``: how many times as long as the others a rank takes. ``losses``: steps of the whole run with
    their loss, for a curve. ``time_s`` and ``goodput``: as in the summary, up to now; None before the first step.
    """

    run_id: str
    pid: int
    state: str
    generation: int
    world_size: int
    step: int
    max_steps: int
    epoch: int
    epochs: int | None
    loss: float | None
    samples_per_s: float | None
    eta_s: float | None
    elapsed_s: float
    faults_total: int
    restarts: int
    ranks: tuple[RankView, ...]
    title: str
    log_dir: str
    logged_step: int | None = None
    logged_epoch: int | None = None
    logged_loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    evaluated_step: int | None = None
    evaluated: Mapping[str, float] = field(default_factory=dict)
    inexact_reasons: tuple[str, ...] = ()
    doing: str = ""
    doing_s: float = 0.0
    name: str = ""
    trackers: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[NodeView, ...] = ()
    gpus: tuple[GpuView, ...] = ()
    tokens_per_s: float | None = None
    flops_utilization: float | None = None
    faults: tuple[FaultView, ...] = ()
    stragglers: Mapping[int, float] = field(default_factory=dict)
    losses: tuple[tuple[int, float], ...] = ()
    time_s: Mapping[str, float] = field(default_factory=dict)
    goodput: float | None = None
    stage: str = ""  # the one that is trained, of so many; empty and 0 without stages
    stages: int = 0
    spare: Mapping[str, object] = field(default_factory=dict)  # that waits: its kind, what it holds
    is_stopped: bool = False  # somebody has asked it to stop

    @property
    def shown_state(self) -> str:
        """The state in words: a run that was stopped before its end is not done."""
        was_cut = self.is_stopped and self.step < self.max_steps
        return "stopped" if was_cut and self.state == "done" else self.state


def status_record(view: RunView) -> dict[str, object]:
    """Return the content of status.json for ``view``, with a few figures more."""
    gpus = [
        {"node": gpu.node, "ranks": gpu.ranks, "age_s": gpu.age_s, **gpu.reading.to_record()}
        for gpu in view.gpus
    ]
    record = asdict(replace(view, gpus=(), losses=()))
    # Those of metrics.jsonl, and what the state says.
    for name in ("losses", "logged_loss", "logged_epoch", "is_stopped"):
        del record[name]
    return {**record, "gpus": gpus}
