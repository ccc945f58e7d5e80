"""Journal and console of what happens: each event's line in the one, and its words, if any, on the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import fault_line
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.messages import Ready
from ddp_runner.supervisor.reporting.outputs import Outputs


class EventLog:
    """A sink of the :class:`Recorder`. Decides nothing."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs

    def take(self, event: events.Event, *, cause: int | None = None) -> int:
        """Write down an event and say what there is to say of it; its id in the journal."""
        event_id = self._outputs.write(event, cause=cause)
        for text, level in _words(event):
            self._outputs.say(text, level=level)
        if isinstance(event, events.TuningChanged) and event.fault_free and event.action:
            # Else the line of the repair has it.
            self._outputs.keep(f"rank {event.rank}: {event.action}")
        return event_id


def _words(event: events.Event) -> Iterator[tuple[str, str]]:  # noqa: C901, PLR0912, PLR0915 - one row an event
    """The lines for people, each with its level."""
    match event:
        case events.RunBegins(lines=lines) | events.AlreadyComplete(text=lines):
            for line in lines:
                yield line, "INFO"
            for line in getattr(event, "warnings", ()):
                yield line, "WARNING"
        case events.StageBegins(lines=lines) if lines:
            yield f"stage {event.stage} ({event.number + 1} of {event.of})", "INFO"
            for line in lines:
                yield line, "INFO"
        case events.StageEnds(stage=stage, step=step):
            yield f"stage {stage} is over at step {step:,}", "INFO"
        case events.StopAsked(reason=reason):
            by_key = reason == StopReason.INTERRUPTED.value
            keys = "Ctrl-C once more" if by_key else "Ctrl-C twice"
            yield f"{reason}: finishing the step and saving; {keys} ends at once", "INFO"
        case events.SaveAsked():
            yield "checkpoint requested: saving after this step", "INFO"
        case events.CheckpointSaved(blocked_s=None, path=path):
            yield f"{path} is on disk; its rank has not reported it", "INFO"
        case events.FolderMadeAgain(text=text) | events.LogOutage(text=text):
            yield text, "WARNING"
        case events.FaultTolerated(line=line) if line:
            yield line, "WARNING"
        case events.LastSaveAsked(rank=rank, step=step):
            yield f"rank {rank} saves step {step} before the run ends", "INFO"
        case events.Plan(line=line) if line:
            yield line, "WARNING"
        case events.Repaired():
            lost, again = event.steps_lost, ", no step lost" if event.is_last else ""
            if lost:
                count = "1 step" if lost == 1 else f"{lost:,} steps"
                again = f", {count} done again from step {event.step:,}"
            words = f"{fault_line(event.culprit)} -> {event.outcome}{again}"
            yield f"{words} ({event.seconds:.2f} s)", "INFO"
        case events.CopyTaken(step=step):
            yield f"no rank was left: continuing from the copy in memory of step {step}", "INFO"
        case events.Straggler(rank=rank, factor=factor):
            words = f"rank {rank} takes {factor:.1f} times as long as the others for its own work"
            yield words, "WARNING"
        case events.SharesProposed():
            yield _shares_line(event), "INFO"
        case events.Drill(differs="", rank=rank, step=step, seconds=seconds):
            yield (
                (
                    f"fire drill at step {step:,}: a replay of rank {rank} gave identical results"
                    f" ({seconds:.1f} s, in the background)"
                ),
                "DETAIL",
            )
        case events.Drill(updated=True, finding=finding):
            if finding:
                yield f"drill: {finding}", "WARNING"
        case events.Drill(finding=finding, inexact_reason=reason):
            yield f"drill: {finding}", "WARNING" if reason else "INFO"
        case events.Diagnosed(line=line, is_warning=is_warning) if line:
            yield line, "WARNING" if is_warning else "INFO"
        case events.DrillSkipped(is_said=True):
            words = f"drill at step {event.step:,} of rank {event.rank} skipped: {event.text}"
            yield words, "INFO"
        case events.NotProved(inexact_reason=line) | events.InDoubt(line=line):
            yield line, "WARNING"
        case events.ZygoteReady(warning=warning) if warning:
            yield warning, "WARNING"
        case events.ZygoteReplaced():
            yield "the process that forks ranks died; its standby takes over", "WARNING"
        case _:
            pass


def with_newest(ready: Sequence[Ready]) -> list[Ready]:
    """The same, the first of them with what was loaded where another rank has a newer state."""
    newest = max(ready, key=lambda one: one.committed_step)  # of equal ones the first
    notes = ready[0].notes
    if newest.committed_step > ready[0].committed_step:
        step = f"step {newest.committed_step:,}"
        notes = (f"training continues at {step}, the newest state of all machines", *notes)
    first = replace(
        ready[0],
        committed_step=newest.committed_step,
        run_id=newest.run_id,
        is_complete=newest.is_complete,
        changed_task=newest.changed_task,
        notes=notes,
    )
    return [first, *ready[1:]]


def lines_of_begin(plan: LaunchPlan, ready: Sequence[Ready]) -> tuple[str, ...]:
    """Return lines about what the ranks have built. A line of all ranks appears once."""
    first = ready[0]
    lines = [*plan.notes, *first.block]
    if first.is_complete:  # but its summary is gone, and is made once more
        where = f"{first.committed_step:,} of {first.total_steps:,} steps"
        lines.append(f"already complete: {where}, nothing to train")
    if len(ready) < plan.world_size:
        there = f"{len(ready)} of {plan.world_size} ranks"
        lines.append(f"the run begins with {there}: the others are taken in when they are there")
    lines += first.notes
    lines += [
        f"rank {other.rank}: {note}"
        for other in ready[1:]
        for note in other.notes
        if note not in first.notes
    ]
    return tuple(lines)


def _shares_line(event: events.SharesProposed) -> str:
    times = ", ".join(f"{seconds * 1e3:.0f}" for seconds in event.own_step_s)
    measured = f"the ranks' own parts of a step take {times} ms"
    if not event.shares:
        return f"data.shares=auto: {measured}, so equal shares stay"
    shares = ",".join(map(str, event.shares))
    return (
        f"data.shares={shares} would even out the ranks: {measured}; a fresh start of this name with"
        " data.shares=auto takes them (--resume none)"
    )
