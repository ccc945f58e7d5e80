"""Builds a rank's messages before it trains, and about the end of its training. Never decides when."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from ddp_runner.checkpoint.codec import weights_sha256
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.core.batch_sizes import cut, shares_of
from ddp_runner.core.run_stages import steps_before
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.group.communicators import ends_in_silence
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.secrets import without_secrets
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.wire.messages import Finished, Ready
from ddp_runner.observe.start_block import StartFacts, start_block
from ddp_runner.training.components.lr_schedule import schedule_words
from ddp_runner.training.figures.use_figures import speed_report
from ddp_runner.training.loading.ready_objects import ReadyState
from ddp_runner.training.rank_context import Feed, RankParts, TaskParts
from ddp_runner.training.saves.last_save import checkpoint_room
from ddp_runner.training.starting.resume import is_complete
from ddp_runner.training.state import TrainState
from ddp_runner.training.workload import TaskWorkload, Workload

NOTES_MAX, NOTE_CHARACTERS_MAX = 30, 500  # a user's task makes some of them


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """The result of a rank's training. ``loss`` is of the last committed step over all ranks.

    ``model`` is the trained one, ready for use (``eval()``, with the average where ``ema_decay`` keeps
    one); None under a supervisor, whose ranks end with their processes.
    """

    reason: StopReason
    steps: int
    epochs: int
    samples: int
    tokens: float | None
    loss: float
    figures: Mapping[str, float]
    weights_sha256: str
    checkpoint: str
    peaks: Mapping[str, int]
    leaks: tuple[Mapping[str, object], ...]
    sample: str
    stop_reason: str = ""
    speed: Mapping[str, float] = field(default_factory=dict)  # of use_figures.speed_report
    model: nn.Module | None = field(default=None, repr=False, compare=False)


class BuiltParts(Protocol):
    """The settings of a rank, and what it has built of them."""

    @property
    def settings(self) -> Settings:
        """The settings of the run."""
        ...

    @property
    def workload(self) -> Workload:
        """A :class:`TaskWorkload`, but for a loop of one's own."""
        ...

    @property
    def state(self) -> TrainState:
        """The state as it was built or loaded."""
        ...


class Built(BuiltParts, Protocol):
    """The parts that a rank has built, as far as people are shown them before training."""

    @property
    def loader(self) -> Feed:
        """It may have ``workers`` and ``notes``."""
        ...

    @property
    def store(self) -> CheckpointStore:
        """The store of the checkpoints."""
        ...

    @property
    def runtime(self) -> Runtime:
        """The runtime of this rank."""
        ...


def start_notes(parts: Built) -> tuple[str, ...]:
    """Return the notes of data, precision and loader before training, a line each; secrets are ``***``."""
    hidden = parts.runtime.logger.hidden
    found = (
        *parts.workload.notes,
        *parts.state.precision.notes,
        *getattr(parts.loader, "notes", ()),
    )
    lines = (" ".join(without_secrets(str(note), hidden).split()) for note in found[:NOTES_MAX])
    return tuple(line[:NOTE_CHARACTERS_MAX] for line in lines if line)


def block_of(parts: Built) -> tuple[str, ...]:
    """Return a description of the run, in lines for people."""
    settings, workload, state = parts.settings, parts.workload, parts.state
    ranks, on_cpu = parts.runtime.rank_info.world_size, workload.device.type == "cpu"
    is_task = isinstance(workload, TaskWorkload)
    # Own batches are counted in steps, of one sample as it were.
    loads = is_task or workload.global_batch > ranks
    room = checkpoint_room(state, parts.store, parts.runtime.disk)
    room_bytes = None
    if room is not None and room.free_bytes < sys.maxsize:
        room_bytes = room.free_bytes + room.kept_bytes
    name = "the CPU" if on_cpu else torch.cuda.get_device_name(workload.device)
    facts = StartFacts(
        ranks=ranks,
        machines=ranks // max(1, parts.runtime.rank_info.local_world_size),
        device=name,
        backend=workload.backend,
        threads=torch.get_num_threads() if on_cpu else 0,
        precision=state.precision.name,
        parameters=workload.parameters,
        trained=sum(one.numel() for one in state.model.parameters() if one.requires_grad),
        total_steps=workload.length.total_steps,
        steps_per_epoch=workload.length.steps_per_epoch,
        committed_step=state.committed_step,
        shares=cut(workload.global_batch, shares) if (shares := shares_of(settings.data)) else (),
        samples=workload.order.dataset_size if loads else None,
        global_batch=workload.global_batch if loads else None,
        micro_batch_size=state.tuning.micro_batch_size if loads else None,
        loader_workers=getattr(parts.loader, "workers", None),
        checkpoint_bytes=None if room is None else room.needed_bytes,
        room_bytes=room_bytes,
        is_task=is_task,
        schedule=_schedule_words(settings, workload),
        optimizer=state.rates.words() if isinstance(state, ReadyState) else "",
        first_step=workload.length.first_step,
        left_out=_left_out(state),
        begun_with=state.begun_with,
        mode=parts.runtime.rank_info.mode,
        code=parts.runtime.rank_info.code,
        devices=len(workload.devices),
    )
    return start_block(settings, facts)


def _schedule_words(settings: Settings, workload: Workload) -> str:
    words = schedule_words(settings.optim, total_steps=workload.length.own_steps)
    return f"{words}, steps of the stage" if steps_before(settings.stage) else words


def _left_out(state: TrainState) -> int:
    """Return the number of elements that checkpoints leave out, as far as it is known before."""
    hashes = state.start.get("hashes", {}) if state.only_trained else {}
    return sum(one.numel() for name, one in state.named_parameters() if name in hashes)


def ready_message(parts: RankParts, run_id: str, *, is_first: bool) -> Ready:
    """Return this rank's message for the supervisor. ``run_id``: of the resumed run, if any.

    ``is_first``: this process has trained in no generation yet.
    """
    workload, state = parts.workload, parts.state
    info = parts.runtime.rank_info
    shows = is_first and info.loads and info.rank == 0
    return Ready(
        rank=info.rank,
        committed_step=state.committed_step,
        run_id=run_id,
        total_steps=workload.length.total_steps,
        steps_per_epoch=workload.length.steps_per_epoch,
        train_samples=workload.order.dataset_size,
        parameters=workload.parameters,
        device=str(workload.device),
        precision=state.precision.name,
        notes=start_notes(parts),
        is_complete=is_complete(workload, state),
        changed_task=parts.progress.changed_task,
        ends_in_silence=ends_in_silence(workload.backend),
        device_free_bytes=workload.device_free_bytes,
        block=block_of(parts) if shows else (),
        is_from_memory=is_first and parts.progress.is_from_memory,
        is_given_all=not isinstance(workload, TaskWorkload)
        or bool(getattr(workload.task, "takes_settings", False)),
    )


def report_of(parts: RankParts, reason: StopReason) -> TrainReport:
    """Return the report at this time; every rank computes the digest of its own weights."""
    state, length = parts.state, parts.workload.length
    return TrainReport(
        reason=reason,
        steps=state.committed_step,
        epochs=state.own_step // length.steps_per_epoch,
        samples=state.samples,
        tokens=state.tokens,
        loss=math.nan if state.monitor.last is None else state.monitor.last,
        figures=dict(state.figures),
        weights_sha256=weights_sha256(state.weights()),
        checkpoint=parts.progress.checkpoint,
        peaks=parts.memory.peaks(),
        leaks=parts.memory.suspected_leaks,
        sample="",
        stop_reason=_stop_reason(parts, reason),
        speed=speed_report(parts) if isinstance(parts, TaskParts) else {},
    )


def _stop_reason(parts: RankParts, reason: StopReason) -> str:
    """Why training ended, in a word of summary.json."""
    state = parts.state
    if reason is not StopReason.COMPLETED:
        return str(reason.value)
    if state.committed_step >= parts.workload.length.total_steps:
        return "end"
    return "target_loss" if state.monitor.target_reached else "early_stopping"


def finished_message(report: TrainReport, rank: int) -> Finished:
    """The report as the supervisor gets it."""
    return Finished(
        rank=rank,
        reason=report.reason,
        step=report.steps,
        report={
            "epochs": report.epochs,
            "samples": report.samples,
            "tokens": report.tokens,
            "loss": report.loss,
            "figures": dict(report.figures),
            "weights_sha256": report.weights_sha256,
            "checkpoint": report.checkpoint,
            "peaks": dict(report.peaks),
            "leaks": [dict(leak) for leak in report.leaks],
            "sample": report.sample,
            "stop_reason": report.stop_reason,
            **report.speed,
        },
    )
