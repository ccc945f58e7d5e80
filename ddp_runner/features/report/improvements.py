"""A run that has ended, as it was read from its files, and what to change first so that one like it takes less time.

Pure: reads no file.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from ddp_runner.observe.format import count, duration, percent
from ddp_runner.observe.history.metrics_history import Curves
from ddp_runner.observe.history.run_history import RunHistory
from ddp_runner.observe.summary import FaultRecord, RunSummary

# From this share of the time since the start-up on, something is worth a line.
WAIT_SHARE_MIN = 0.05
SAVE_SHARE_MIN = 0.03
COMPARISON_SHARE_MIN = 0.03
EVALUATION_SHARE_MIN = 0.15
STRAGGLER_SHARE_MIN = 0.05
RESTART_SHARE_MIN = 0.02
_SAME_CAUSE_MIN = 3  # faults of one kind and rank: no accident any more
_HANGS = ("rank_hung", "collective_stuck")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """``settings`` by ``section.name``; ``resumed_step``: where its newest launch, which the summary is of, began."""

    name: str
    summary: RunSummary
    settings: Mapping[str, object]
    curves: Curves
    resumed_step: int = 0

    @classmethod
    def of(cls, history: RunHistory, summary: RunSummary) -> EndedRun:
        """Return the facts of a folder that has been read."""
        return cls(
            name=summary.name or history.name,
            summary=summary,
            settings={row.key: row.value for row in history.settings()},
            curves=history.metrics.curves,
            resumed_step=history.faults.resumed_step,
        )

    @property
    def trained_s(self) -> float:
        """The time since the start-up."""
        return max(0.0, self.summary.wall_s - self.summary.time_s.startup)

    @property
    def steps(self) -> int:
        """The number of steps of this launch."""
        return max(0, self.summary.steps - self.resumed_step)

    @property
    def steps_per_s(self) -> float | None:
        """The steps per second over all time since the start-up, repairs and saves included."""
        return self.steps / self.trained_s if self.trained_s > 0 else None

    @property
    def faults_total(self) -> int:
        """The number of faults, with those that the summary does not list."""
        return len(self.summary.faults) + self.summary.faults_left_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """``what`` costs about ``seconds``; ``change`` names the setting."""

    what: str
    change: str
    seconds: float


def improvements(run: EndedRun) -> list[Improvement]:
    """The rules that apply, what costs most first."""
    if run.trained_s <= 0:
        return []
    found = [one for one in (*_waits(run), straggler(run), restarts(run)) if one is not None]
    return sorted(found, key=lambda one: -one.seconds)


def _waits(run: EndedRun) -> Iterator[Improvement]:
    """Yield a change for each part of the time in which steps waited, and that is large enough."""
    for part, least, spent_on, change in (
        ("data_wait", WAIT_SHARE_MIN, "waiting for data", _less_data_wait),
        ("checkpoint", SAVE_SHARE_MIN, "waiting for saves", _fewer_saves),
        ("comparison", COMPARISON_SHARE_MIN, "comparing the ranks' weights", _fewer_comparisons),
        ("evaluation", EVALUATION_SHARE_MIN, "evaluating", _fewer_evaluations),
    ):
        seconds = getattr(run.summary.time_s, part)
        if seconds >= least * run.trained_s:
            what = _spent(spent_on, seconds, run)
            yield Improvement(what=what, change=change(run), seconds=seconds)


def _less_data_wait(run: EndedRun) -> str:
    """More processes that load, or none that has to."""
    total = run.settings.get("data.workers_total")
    key = "data.num_workers" if total is None else "data.workers_total"
    workers = run.settings.get(key)
    if workers == 0:
        change = f"{key}=2 (it is 0: each rank loads its own data)"
    elif isinstance(workers, int):
        change = (
            f"{key}={2 * workers} (it is {workers}) where there are cores for them, "
            "or data.prefetch_factor where single samples are slow"
        )
    else:
        change = "data.num_workers, more than it is where there are cores for them"
    if run.settings.get("data.preload") is False:
        change += "; data.preload=true where all samples fit into memory"
    return change


def _steps(run: EndedRun, key: str) -> int:
    """Return the steps between two of what ``key`` sets; 0 if it goes by something else."""
    every = run.settings.get(key)
    return every if isinstance(every, int) and every > 0 else 0


def _fewer_saves(run: EndedRun) -> str:
    if every := _steps(run, "checkpoint.save_every_steps"):
        return (
            f"checkpoint.save_every_steps=auto, or {2 * every} (it is {count(every)}): "
            "auto weighs what a save costs against what a fault would"
        )
    return (
        "checkpoint.only_trained=true where weights are frozen, "
        "or a faster disk for run.checkpoint_dir"
    )


def _fewer_comparisons(run: EndedRun) -> str:
    change = "recovery.replica_check_steps, more than it is"
    if every := _steps(run, "recovery.replica_check_steps"):
        change = f"recovery.replica_check_steps={2 * every} (it is {count(every)})"
    return f"{change}; each save compares, too: fewer of those by checkpoint.save_every_steps"


def _fewer_evaluations(run: EndedRun) -> str:
    """Less often, or over less data."""
    change = "log.evaluate_interval=2 or more"
    if every := _steps(run, "log.evaluate_every_steps"):
        change = f"log.evaluate_every_steps={2 * every} (it is {count(every)})"
    return f"{change}, or log.evaluate_batches for a part of the validation data"


def straggler(run: EndedRun) -> Improvement | None:
    """A rank whose own part of each step takes longer: the others wait for it in every collective."""
    own = {rank: seconds for rank, seconds in run.summary.own_step_s.items() if seconds > 0}
    if len(own) < 2 or run.steps <= 0:
        return None
    slowest = max(own, key=own.__getitem__)
    others_s = median(seconds for rank, seconds in own.items() if rank != slowest)
    seconds = min((own[slowest] - others_s) * run.steps, run.summary.time_s.productive)
    if seconds < STRAGGLER_SHARE_MIN * run.trained_s:
        return None
    what = (
        f"rank {slowest} takes {own[slowest] * 1e3:.1f} ms a step, the others {others_s * 1e3:.1f}: "
        f"they wait for it, about {percent(seconds / run.trained_s)} of the time"
    )
    change = "data.shares with a smaller number for it, or data.shares=auto, if its device is slower for good"
    if run.settings.get("data.shares") in ((), [], None):
        change += "; else see what else runs there: other programs, its clocks, its disk"
    return Improvement(what=what, change=change, seconds=seconds)


def restarts(run: EndedRun) -> Improvement | None:
    """Faults: the one that comes again and again, steps that were done twice, repairs that took long."""
    seconds = run.summary.time_s.recovery + run.summary.time_s.lost
    faults = run.summary.faults
    repeated = _repeated(faults)
    if not faults or (seconds < RESTART_SHARE_MIN * run.trained_s and repeated is None):
        return None
    total = run.faults_total
    faults_of = f"{count(total)} fault{'s' if total > 1 else ''}"
    what = _spent(f"{faults_of}, repairs and steps done again", seconds, run)
    return Improvement(what=what, change=_against(run, repeated), seconds=seconds)


def _repeated(faults: tuple[FaultRecord, ...]) -> FaultRecord | None:
    """The newest of those that came again and again in the same way; what was injected does not count."""
    own = [fault for fault in faults if not fault.injected]
    found = Counter((fault.kind, fault.rank) for fault in own).most_common(1)
    if not found or found[0][1] < _SAME_CAUSE_MIN:
        return None
    return next(fault for fault in reversed(own) if (fault.kind, fault.rank) == found[0][0])


def _against(run: EndedRun, repeated: FaultRecord | None) -> str:
    faults = run.summary.faults
    if repeated is not None:
        who = f"rank {repeated.rank}" if repeated.rank >= 0 else "all ranks"
        first = f"the cause, which comes again and again: {who}, {repeated.kind}: {repeated.cause}"
        if repeated.rank >= 0 and run.settings.get("recovery.min_ranks") == 0:
            first += "; recovery.min_ranks to continue without such a rank"
        return first
    if any(fault.steps_lost for fault in faults):
        lost = sum(fault.steps_lost for fault in faults)
        return (
            f"checkpoint.save_every_steps, less than it is, as no rank was left with the state: "
            f"{count(lost)} step{'s' if lost > 1 else ''} done again"
        )
    parts: dict[str, float] = defaultdict(float)
    for fault in faults:
        for part, seconds in fault.seconds.items():
            # Until others are noticed it is mostly the step that they were in.
            if part != "total" and (part != "detect" or fault.kind in _HANGS):
                parts[part] += seconds
    longest = max(parts, key=parts.__getitem__, default="")
    if longest == "fork" and run.settings.get("recovery.warm_spare") is False:
        return "recovery.warm_spare=true: most of it was waiting for new processes"
    if longest == "detect":
        return "recovery.hang_min_s and recovery.hang_factor, less than they are: most of it was noticing that a rank hangs"  # fmt: skip
    most = f"; {longest} takes most of a repair" if longest else ""
    return f"no setting helps; the list of faults shows the causes{most}"


def _spent(what: str, seconds: float, run: EndedRun) -> str:
    return f"{what}: {duration(seconds)}, {percent(seconds / run.trained_s)} of the time"
