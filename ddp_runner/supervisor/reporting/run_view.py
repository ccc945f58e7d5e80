"""Puts together what status.json and the display show. Reads the board; changes nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from ddp_runner.core.batch_sizes import global_batch
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.run_stages import steps_before
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.rules.lifecycle import IN_WORLD, RankState, RunState
from ddp_runner.kernel.rules.phases import Stage
from ddp_runner.kernel.wire.board import Cell, SlotReading
from ddp_runner.observe.summary import TimeShares, goodput
from ddp_runner.observe.view import NodeView, RankView, RunView
from ddp_runner.supervisor.reporting.recorder import Recorder
from ddp_runner.supervisor.reporting.run_watch import RunWatch

FAULTS_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What is shown next to the ranks: links of trackers, other machines, the use of GPUs and CPUs, the spare that waits."""

    trackers: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[NodeView, ...] = ()
    watch: RunWatch | None = None
    spare: Mapping[str, object] = field(default_factory=dict)


def run_view(
    plan: LaunchPlan,
    handles: list[RankHandle],
    recorder: Recorder,
    *,
    state: RunState,
    doing: tuple[str, float],
    now_ns: int,
    around: Around,
) -> RunView:
    """Look once at everything. ``doing``: what the start is at, and for how long."""
    view = _where_it_stands(plan, handles, recorder, state=state, now_ns=now_ns, around=around)
    findings, evaluated = recorder.findings, recorder.evaluated
    if evaluated is not None and evaluated.step > view.step:
        evaluated = None  # the ranks went back behind it, and evaluate again
    first = next(handle for handle in handles if handle.membership in IN_WORLD)
    now_s = now_ns / 1e9
    reports = (one.metrics for one in handles if one.membership in IN_WORLD)
    report = next((one for one in reports if "step" in one), first.metrics)
    logged = report.get("step")
    time_s = recorder.accounting.shares(first.slot.read(), now_s=now_s)
    return replace(
        view,
        doing=doing[0],
        doing_s=round(doing[1], 3),
        logged_step=None if logged is None else int(logged),
        logged_epoch=None if "epoch" not in report else int(report["epoch"]),
        logged_loss=_finite(report.get("loss")),
        learning_rate=report.get("learning_rate"),
        grad_norm=report.get("grad_norm"),
        tokens_per_s=report.get("tokens_per_s"),
        flops_utilization=first.metrics.get("flops_utilization"),
        evaluated_step=None if evaluated is None else evaluated.step,
        evaluated={} if evaluated is None else evaluated.figures,
        inexact_reasons=tuple(findings.inexact_reasons),
        is_stopped=findings.is_stopped,
        stragglers=findings.stragglers,
        stage=findings.stage,
        faults=recorder.accounting.newest_faults(FAULTS_SHOWN, now_s=now_s),
        losses=recorder.losses.points(),
        time_s=asdict(time_s),
        goodput=_goodput(time_s, view.elapsed_s),
    )


def _where_it_stands(
    plan: LaunchPlan,
    handles: list[RankHandle],
    recorder: Recorder,
    *,
    state: RunState,
    now_ns: int,
    around: Around,
) -> RunView:
    """Return the steps, the pace and the ranks, by the board and the newest reports."""
    readings = [handle.slot.read() for handle in handles]
    first = next(handle for handle in handles if handle.membership in IN_WORLD)
    step = max(reading.committed_step for reading in readings)
    total = max(reading.total_steps for reading in readings)
    rates = [handle.metrics.get("samples_per_s") for handle in handles]
    rate = next((one for one in rates if one is not None), None)
    facts, accounting = recorder.facts, recorder.accounting
    return RunView(
        run_id=facts.run_id,
        pid=os.getpid(),
        state=state.value,
        generation=facts.generation,
        world_size=sum(handle.membership in IN_WORLD for handle in handles),
        step=step,
        max_steps=total,
        epoch=readings[first.rank].epoch,
        epochs=_epochs(plan, total - steps_before(plan.settings.stage), facts.steps_per_epoch),
        loss=_known_loss(readings[first.rank]),
        samples_per_s=rate,
        eta_s=_eta_s(plan, readings, rate, remaining=max(0, total - step) if total else None),
        elapsed_s=now_ns / 1e9 - accounting.began_s,
        faults_total=accounting.faults_total,
        restarts=accounting.restarts,
        ranks=tuple(
            _rank_view(handle, reading, now_ns, around.watch, plan)
            for handle, reading in zip(handles, readings, strict=True)
        ),
        title=plan.title,
        name=plan.settings.run.name,
        log_dir=plan.settings.run.log_dir,
        trackers=around.trackers,
        nodes=around.nodes,
        gpus=() if around.watch is None else around.watch.gpus(handles),
        spare=dict(around.spare),
        stages=len(plan.stages),
    )


def _eta_s(
    plan: LaunchPlan, readings: list[SlotReading], rate: float | None, *, remaining: int | None
) -> float | None:
    """Return the seconds that are left, by the samples a second if they are known, else by the slowest step."""
    if rate:
        batch = global_batch(plan.settings.data, world_size=plan.computing_devices)
        return (remaining or 0) * batch / rate
    step_s = max((reading.step_ns for reading in readings), default=0) / 1e9
    return remaining * step_s if step_s and remaining is not None else None


def _goodput(time_s: TimeShares, elapsed_s: float) -> float | None:
    if not time_s.productive:
        return None
    share = goodput(productive_s=time_s.productive, wall_s=elapsed_s, startup_s=time_s.startup)
    return round(share, 4)


def _epochs(plan: LaunchPlan, total: int, per_epoch: int) -> int | None:
    """None where nobody knows of any, as of an opaque program."""
    if plan.opaque is not None:
        return None
    return -(-total // per_epoch) if per_epoch else plan.settings.run.epochs


# What is shown of states that are nobody's business outside.
_SHOWN_AS = {RankState.KILLING: RankState.ABORTING, RankState.ENDED: RankState.FINISHED}


def _state(handle: RankHandle) -> str:
    """Return the state that is shown of the rank; a rank that never began is waiting, not dead."""
    if handle.state is RankState.DEAD and not handle.spawned_at_s:
        return "waiting"
    return str(_SHOWN_AS.get(handle.state, handle.state).value)


def _rank_view(
    handle: RankHandle, reading: SlotReading, now_ns: int, watch: RunWatch | None, plan: LaunchPlan
) -> RankView:
    share = handle.metrics.get("samples_per_s")
    loader_bytes = handle.metrics.get("loader_bytes")
    return RankView(
        rank=handle.rank,
        pid=handle.pid or 0,
        state=_state(handle),
        step=reading.committed_step,
        phase=reading.phase.label,
        building=Stage(handle.slot.get(Cell.STAGE)).label,
        phase_age_s=round(max(0, now_ns - reading.phase_since_ns) / 1e9, 3)
        if reading.phase_since_ns
        else 0.0,
        rss_bytes=handle.rss_bytes,
        device=plan.devices[handle.rank].device,
        loader_pids=handle.loader_pids,
        loss=_known_loss(reading),
        samples_per_s=share,
        data_wait_share=handle.metrics.get("data_wait_share"),
        loader_bytes=None if loader_bytes is None else int(loader_bytes),
        node=handle.rank // plan.ranks_per_node,
        cpu_share=None if watch is None else watch.cpu_share(handle.rank),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _known_loss(reading: SlotReading) -> float | None:
    return None if reading.last_commit_ns == 0 else _finite(reading.loss)
