"""What a rank has to say before it trains, and how its training ended. Never decides when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from ddp_runner.checkpoint.codec import weights_sha256
from ddp_runner.collective.communicators import ends_in_silence
from ddp_runner.core.exits import StopReason
from ddp_runner.core.messages import Finished, Ready
from ddp_runner.core.secrets import without_secrets
from ddp_runner.training.rank_context import RankParts
from ddp_runner.training.resume import is_complete

NOTES_MAX, NOTE_CHARACTERS_MAX = 30, 500  # a user's task makes some of them


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """How a rank's training ended. ``loss`` is of the last committed step over all ranks.

    ``model`` is the trained one, ready for use (``eval()``, with the average where ``ema_decay`` keeps
    one); None under a supervisor, whose ranks end with their processes.
    """

    reason: StopReason
    steps: int
    epochs: int
    samples: int
    loss: float
    figures: Mapping[str, float]
    weights_sha256: str
    checkpoint: str
    peaks: Mapping[str, int]
    leaks: tuple[Mapping[str, object], ...]
    sample: str
    model: nn.Module | None = field(default=None, repr=False, compare=False)


def start_notes(parts: RankParts) -> tuple[str, ...]:
    """What data, precision and loader have to say before training, a line each; secrets are ``***``."""
    hidden = parts.runtime.logger.hidden
    found = (
        *parts.workload.notes,
        *parts.state.precision.notes,
        *getattr(parts.loader, "notes", ()),
    )
    lines = (" ".join(without_secrets(str(note), hidden).split()) for note in found[:NOTES_MAX])
    return tuple(line[:NOTE_CHARACTERS_MAX] for line in lines if line)


def ready_message(parts: RankParts, run_id: str) -> Ready:
    """What this rank has, as the supervisor gets it. ``run_id``: of what is resumed, if anything is."""
    workload, state = parts.workload, parts.state
    return Ready(
        rank=parts.runtime.rank_info.rank,
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
    )


def report_of(parts: RankParts, reason: StopReason) -> TrainReport:
    """What there is to say now; every rank computes the digest of its own weights."""
    state, length = parts.state, parts.workload.length
    return TrainReport(
        reason=reason,
        steps=state.committed_step,
        epochs=state.committed_step // length.steps_per_epoch,
        samples=state.samples,
        loss=parts.progress.loss,
        figures=dict(parts.progress.figures),
        weights_sha256=weights_sha256(state.weights()),
        checkpoint=parts.progress.checkpoint,
        peaks=parts.memory.peaks(),
        leaks=parts.memory.suspected_leaks,
        sample="",
    )


def finished_message(report: TrainReport, rank: int) -> Finished:
    """The report as the supervisor gets it."""
    return Finished(
        rank=rank,
        reason=report.reason,
        step=report.steps,
        report={
            "epochs": report.epochs,
            "samples": report.samples,
            "loss": report.loss,
            "figures": dict(report.figures),
            "weights_sha256": report.weights_sha256,
            "checkpoint": report.checkpoint,
            "peaks": dict(report.peaks),
            "leaks": [dict(leak) for leak in report.leaks],
            "sample": report.sample,
        },
    )
