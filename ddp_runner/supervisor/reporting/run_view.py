"""Puts together what status.json and the display show. Reads the board; changes nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict

from ddp_runner.core.batch_sizes import global_batch
from ddp_runner.core.board import Cell, SlotReading
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.lifecycle import IN_WORLD, RankState, RunState
from ddp_runner.core.phases import Stage
from ddp_runner.core.run_stages import steps_before
from ddp_runner.observe.summary import TimeShares, goodput
from ddp_runner.observe.view import FaultView, NodeView, RankView, RunView
from ddp_runner.supervisor.rank_handle import RankHandle
from ddp_runner.supervisor.reporting.recorder import Evaluated
from ddp_runner.supervisor.reporting.run_watch import RunWatch
from ddp_runner.supervisor.run_facts import RunFacts


def run_view(
    plan: LaunchPlan,
    handles: list[RankHandle],
    *,
    facts: RunFacts,
    state: RunState,
    doing: tuple[str, float],
    began_s: float,
    faults_total: int,
    restarts: int,
    now_ns: int,
    trackers: Mapping[str, str],
    nodes: tuple[NodeView, ...] = (),
    watch: RunWatch | None = None,
    faults: tuple[FaultView, ...] = (),
    losses: tuple[tuple[int, float], ...] = (),
    time_s: TimeShares | None = None,
    evaluated: Evaluated | None = None,
) -> RunView:
    """One look at everything."""
    readings = [handle.slot.read() for handle in handles]
    first = next(handle for handle in handles if handle.membership in IN_WORLD)
    step = max(reading.committed_step for reading in readings)
    total = max(reading.total_steps for reading in readings)
    step_s = max((reading.step_ns for reading in readings), default=0) / 1e9
    rates = [handle.metrics.get("samples_per_s") for handle in handles]
    known = [rate for rate in rates if rate is not None]
    rate = known[0] if known else None
    remaining = max(0, total - step)
    batch = global_batch(plan.settings.data, world_size=plan.computing_devices)
    by_steps_s = remaining * step_s if step_s and total else None
    eta_s = remaining * batch / rate if rate else by_steps_s
    per_epoch = facts.steps_per_epoch
    logged = first.metrics.get("step")
    elapsed_s = now_ns / 1e9 - began_s
    if evaluated is not None and evaluated.step > step:
        evaluated = None  # the ranks went back behind it, and evaluate again
    return RunView(
        run_id=facts.run_id,
        pid=os.getpid(),
        state=state.value,
        generation=facts.generation,
        world_size=sum(handle.membership in IN_WORLD for handle in handles),
        step=step,
        max_steps=total,
        epoch=readings[first.rank].epoch,
        epochs=_epochs(plan, total - steps_before(plan.settings.stage), per_epoch),
        loss=_known_loss(readings[first.rank]),
        samples_per_s=rate,
        eta_s=eta_s,
        elapsed_s=elapsed_s,
        faults_total=faults_total,
        restarts=restarts,
        doing=doing[0],
        doing_s=round(doing[1], 3),
        ranks=tuple(
            _rank_view(handle, reading, now_ns, watch, plan)
            for handle, reading in zip(handles, readings, strict=True)
        ),
        title=plan.title,
        name=plan.settings.run.name,
        log_dir=plan.settings.run.log_dir,
        logged_step=None if logged is None else int(logged),
        learning_rate=first.metrics.get("learning_rate"),
        grad_norm=first.metrics.get("grad_norm"),
        evaluated_step=None if evaluated is None else evaluated.step,
        evaluated={} if evaluated is None else evaluated.figures,
        inexact_reasons=tuple(facts.inexact_reasons),
        trackers=trackers,
        nodes=nodes,
        gpus=() if watch is None else watch.gpus(handles),
        tokens_per_s=first.metrics.get("tokens_per_s"),
        flops_utilization=first.metrics.get("flops_utilization"),
        faults=faults,
        stragglers=facts.stragglers,
        losses=losses,
        time_s={} if time_s is None else asdict(time_s),
        goodput=_goodput(time_s, elapsed_s),
        stage=facts.stage,
        stages=len(plan.stages),
        spare=dict(facts.spare),
    )


def _goodput(time_s: TimeShares | None, elapsed_s: float) -> float | None:
    if time_s is None or not time_s.productive:
        return None
    share = goodput(productive_s=time_s.productive, wall_s=elapsed_s, startup_s=time_s.startup)
    return round(share, 4)


def _epochs(plan: LaunchPlan, total: int, per_epoch: int) -> int | None:
    """None where nobody knows of any, as of a script."""
    if plan.script is not None:
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


def _known_loss(reading: SlotReading) -> float | None:
    if reading.last_commit_ns == 0 or not math.isfinite(reading.loss):
        return None
    return reading.loss
