"""Plain lines about a run, and the block of text that ends it. Pure; draws nothing."""

from __future__ import annotations

import shlex
from textwrap import wrap
from typing import TYPE_CHECKING

from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.kernel.rules.faults import FaultKind
from ddp_runner.observe import format as fmt
from ddp_runner.observe.accounting import TOLERATED_KEPT
from ddp_runner.observe.summary import time_parts
from ddp_runner.start import COMMAND

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddp_runner.observe.summary import FaultRecord, RunSummary
    from ddp_runner.observe.view import RunView

DRILLS_SHOWN_MAX = 5
FAULTS_SHOWN_MAX = 8
CAUSE_CHARACTERS_MAX = 120  # the whole text stands in events.jsonl
BLOCK_COLUMNS_MIN, BLOCK_COLUMNS_MAX = 24, 79  # a path may be longer: it is never broken
_LABEL_COLUMNS = 12
_STOPPED = (RunStatus.PREEMPTED, RunStatus.INTERRUPTED)


def progress_line(view: RunView) -> str:
    """``step 120/1,500  epoch 1  loss 2.3456  …  eta 2m 03s``; unknown figures are left out."""
    step, epoch, loss = _reported(view)
    total = f"/{fmt.count(view.max_steps)}" if view.max_steps > 0 else ""
    parts = [f"step {fmt.count(step)}{total}"]
    if view.stage:
        parts.append(f"stage {view.stage}")
    if view.epochs is not None:
        parts.append(f"epoch {epoch_text(view, epoch)}")
    if loss is not None:
        parts.append(f"loss {fmt.figure(loss)}")
    if view.learning_rate is not None:
        parts.append(f"lr {view.learning_rate:.1e}")
    if view.grad_norm is not None:
        parts.append(f"grad {view.grad_norm:.2f}")
    if view.samples_per_s is not None:
        parts.append(f"{fmt.rate(view.samples_per_s)} samples/s")
    waits = [rank.data_wait_share for rank in view.ranks if rank.data_wait_share is not None]
    if waits:
        parts.append(f"data {fmt.percent(max(waits))}")
    peak_bytes = max((rank.rss_bytes for rank in view.ranks), default=0)
    if peak_bytes:
        parts.append(f"mem {fmt.byte_size(peak_bytes)}")
    if view.eta_s is not None:
        parts.append(f"eta {fmt.duration(view.eta_s)}")
    return "  ".join(parts)


def _reported(view: RunView) -> tuple[int, int, float | None]:
    """Return a step with its own epoch and loss: ranks may be steps ahead of what they have reported."""
    if view.logged_step is None:
        return view.step, view.epoch, view.loss
    epoch = view.epoch if view.logged_epoch is None else view.logged_epoch
    return view.logged_step, epoch, view.logged_loss


def epoch_text(view: RunView, epoch: int) -> str:
    """Return ``2/10`` for epoch 1, or ``2`` where the run goes by steps."""
    if not view.epochs:
        return str(epoch + 1)
    return f"{min(epoch + 1, view.epochs)}/{view.epochs}"


def summary_block(summary: RunSummary, *, log_dir: str, width: int) -> list[str]:
    """The last lines of a run, for people, on a terminal of ``width`` columns; broken between words."""
    rows = [
        *summary_rows(summary, faults_max=FAULTS_SHOWN_MAX),
        ("logs", log_dir),
        ("report", f"{COMMAND} report -l {shlex.quote(log_dir)}"),
    ]
    return rows_block(rows, width=width)


def summary_rows(summary: RunSummary, *, faults_max: int) -> list[tuple[str, str]]:
    """Return labels and values on how a run ended; an empty label continues the one before it."""
    return [
        ("status", headline(summary)),
        ("run", summary.called),
        ("steps", _steps(summary)),
        *_loss_row(summary),
        *((name.replace("_", " "), fmt.figure(value)) for name, value in summary.figures.items()),
        ("time", f"{fmt.duration(summary.wall_s)}, goodput {fmt.percent(summary.goodput)}"),
        *_time_row(summary),
        *_memory_row(summary),
        ("faults", _faults_total(summary)),
        *(("", line) for line in _fault_lines(summary, faults_max)),
        *_skipped_row(summary),
        *_machines_row(summary),
        ("exact", exact_text(summary)),
        ("weights", "-" if summary.weights_sha256 is None else summary.weights_sha256[:12]),
        ("checkpoint", summary.checkpoint or "none"),
    ]


def rows_block(rows: Sequence[tuple[str, str]], *, width: int) -> list[str]:
    """Return ``rows`` as lines for a terminal of ``width`` columns, broken between words."""
    columns = max(BLOCK_COLUMNS_MIN, min(width - 1, BLOCK_COLUMNS_MAX))
    # A label that would take more than half of the line gets one of its own.
    beside = (len(label) + 2 for label, _ in rows if len(label) + 2 <= columns // 2)
    labels = max(_LABEL_COLUMNS, *beside)
    block = []
    room = columns - labels - 1
    for label, text in rows:
        wrapped = wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
        is_long = len(label) + 2 > labels
        block += [f" {label}"] if is_long else []
        block += [f" {'' if is_long else label:<{labels}}{wrapped[0]}"]
        block += [" " * (labels + 1) + line for line in wrapped[1:]]
    return block


def headline(summary: RunSummary) -> str:
    """Return how the run ended; for one that was stopped also whether it saved."""
    how = summary.status.words
    if summary.status not in _STOPPED:
        return how
    if summary.checkpoint is None:
        return f"{how} and ended at once: there is no checkpoint"
    step = summary.steps if summary.checkpoint_step is None else summary.checkpoint_step
    if step >= summary.steps:
        return f"{how} and saved: run the same command again to resume"
    return f"{how} and ended at once; newest checkpoint: step {fmt.count(step)}"


def _steps(summary: RunSummary) -> str:
    done = ((summary.steps, "step"), (summary.samples, "sample"), (summary.world_size, "rank"))
    return ", ".join(fmt.counted(*one) for one in done)


def _loss_row(summary: RunSummary) -> Iterable[tuple[str, str]]:
    # A loop need not say its loss, and a run that ended before its first step has none.
    if summary.final_loss is not None:
        yield "loss", fmt.figure(summary.final_loss)


def _time_row(summary: RunSummary) -> Iterable[tuple[str, str]]:
    parts = [(name, seconds) for name, seconds in time_parts(summary.time_s) if seconds >= 0.05]
    if parts:
        yield "", ", ".join(f"{name} {fmt.duration(seconds)}" for name, seconds in parts)


def _memory_row(summary: RunSummary) -> Iterable[tuple[str, str]]:
    parts = []
    if summary.peak_rss_bytes:
        parts.append(f"at most {fmt.byte_size(summary.peak_rss_bytes)} a rank")
    if summary.peak_device_bytes:
        parts.append(f"{fmt.byte_size(summary.peak_device_bytes)} on the device")
    if summary.suspected_leaks:
        parts.append("it grew steadily: suspected leak")
    if parts:
        yield "memory", ", ".join(parts)


def _faults_total(summary: RunSummary) -> str:
    faults, left_out = summary.faults, summary.faults_left_out
    if not faults:
        return "none"
    repairs = [one for one in faults if one.recovered_s is not None]
    lost = sum(fault.steps_lost for fault in faults)
    steps = f"{fmt.counted(lost, 'step')} done again"
    if not repairs:
        return f"{len(faults)}, none repaired"
    repaired = f"{len(repairs) + left_out} repaired in {fmt.duration(_repaired_s(repairs))}"
    return f"{len(faults) + left_out}, {repaired}, {steps}"


def _skipped_row(summary: RunSummary) -> Iterable[tuple[str, str]]:
    kinds = (FaultKind.NON_FINITE.value, FaultKind.LOSS_EXPLODED.value)
    skipped = [
        one
        for one in summary.tolerated
        if one.kind in kinds and one.action.startswith("step skipped")
    ]
    if skipped:
        least = "at least " if len(summary.tolerated) >= TOLERATED_KEPT else ""
        cause = "a loss or gradient was not finite or exploded"
        yield "skipped", f"{least}{fmt.counted(len(skipped), 'step')}: {cause}"


def _repaired_s(repairs: Iterable[FaultRecord]) -> float:
    """Return the total time of the repairs; time in which several overlap counts once."""
    total_s, launch, until_s = 0.0, -1, 0.0
    for one in sorted(repairs, key=lambda one: (one.launches_ago, one.detected_s)):
        if one.launches_ago != launch:
            launch, until_s = one.launches_ago, one.detected_s
        end_s = max(until_s, one.recovered_s or 0.0)
        total_s += end_s - max(until_s, one.detected_s)
        until_s = end_s
    return total_s


def _machines_row(summary: RunSummary) -> Iterable[tuple[str, str]]:
    lost = [
        f"{machine} was lost {'once' if times == 1 else f'{times} times'}"
        for machine, times in summary.machines_lost.items()
    ]
    if lost:
        yield "machines", ", ".join(lost)


def _fault_lines(summary: RunSummary, most: int) -> Iterable[str]:
    for fault in summary.faults[:most]:
        yield fault_sentence(fault)
    more = len(summary.faults) - most + summary.faults_left_out
    if more > 0:
        yield f"and {more} more, in events.jsonl"


def fault_sentence(fault: FaultRecord) -> str:
    """``step 60: rank 1 killed (SIGKILL), repaired in 0.1s``; whether all ranks died, and steps done again, if so."""
    who = f"rank {fault.rank}" if fault.rank >= 0 else "all ranks"
    cause = fault.cause.split("\n")[0]
    if len(cause) > CAUSE_CHARACTERS_MAX:
        cause = cause[: CAUSE_CHARACTERS_MAX - 1] + "…"
    what = cause if cause.startswith((f"{who} ", f"{who}'")) else f"{who}: {cause}"
    if fault.host and fault.host not in what:
        what = what.replace(who, f"{who} on {fault.host}", 1)
    repair = "not repaired"
    if fault.recovered_s is not None:
        repair = f"repaired in {fmt.duration(fault.recovered_s - fault.detected_s)}"
    again = ", all ranks were dead" if fault.all_ranks_dead else ""
    if fault.steps_lost:
        again += f", {fmt.counted(fault.steps_lost, 'step')} again"
    before = ", before the coordinator was lost" if fault.launches_ago else ""
    return f"step {fmt.count(fault.step)}: {what}, {repair}{again}{before}"


def exact_text(summary: RunSummary) -> str:
    """Return whether the weights are those of a run without faults, and the proof or the reasons."""
    if summary.exact is False:
        return f"no: {'; '.join(summary.inexact_reasons) or 'reason unknown'}"
    if not summary.steps:
        return "- (no step was made)"
    proof, said = summary.exact_proof, []
    if proof.repeated:
        said.append(
            "first step repeated" if proof.repeated == 1 else f"{proof.repeated} steps repeated"
        )
    if proof.drilled:
        said.append(_drills(proof.drilled))
    if proof.repairs_proved:
        said.append(f"{proof.repairs_proved} repairs proved")
    return f"yes ({'; '.join(said)})" if said else "yes"


def _drills(steps: Sequence[int]) -> str:
    if len(steps) > DRILLS_SHOWN_MAX:
        return f"{len(steps)} drills passed"
    *before, last = (fmt.count(step) for step in steps)
    if not before:
        return f"drill passed at step {last}"
    return f"drills passed at steps {', '.join(before)} and {last}"
