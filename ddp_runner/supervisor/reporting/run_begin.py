"""The beginning of a run, once its ranks have built what they train: its folders, its files and its first lines."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ddp_runner import config
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.kernel.system.run_files import from_json, read_small
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.messages import Ready
from ddp_runner.observe.summary import RunSummary, read_summary
from ddp_runner.supervisor.reporting.event_log import lines_of_begin, with_newest
from ddp_runner.supervisor.reporting.recorder import Recorder, faults_before, has_open_repairs
from ddp_runner.system.run_directories import RunDirectories

# Where the files are, what is resumed, and what is shown.
_SAYS_NOTHING = (
    "run.name",
    "run.log_dir",
    "run.checkpoint_dir",
    "run.resume",
    "log.console",
    "log.display",
    "log.trackers",
    "log.page",
    "log.page_port",
    "log.page_can_inject",
)


class RunBegin:
    """Called by :class:`Supervisor` before the first generation. ``shown_bytes``: as of :class:`Start`."""

    def __init__(
        self,
        recorder: Recorder,
        directories: RunDirectories,
        *,
        plan: Callable[[], LaunchPlan],
        shown_bytes: Callable[[], int],
    ) -> None:
        """``plan`` gives the one in force: the stage that is trained may change before anything has formed."""
        self._recorder = recorder
        self._directories = directories
        self._plan = plan
        self._shown_bytes = shown_bytes

    def claim(self, ready: Sequence[Ready]) -> None:
        """Take the folders of the run that ``ready`` has resumed. Raises BadInputError where they are another's."""
        first = with_newest(ready)[0]
        recorder, run_id = self._recorder, first.run_id or uuid.uuid4().hex[:12]
        recorder.facts.run_id = recorder.findings.run_id = run_id
        self._take_up(run_id)
        self._directories.claim()

    def _take_up(self, run_id: str) -> None:
        """Go on with a run; why it is not exact any more stands in its newest status.json.

        Whether its repairs are proved stands in its journal.
        """
        log_dir = Path(self._plan().settings.run.log_dir)
        path = log_dir / "status.json"
        reasons = self._recorder.facts.inexact_reasons
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            status = from_json(read_small(path))
            if status.get("run_id") == run_id:
                kept = [str(reason) for reason in status["inexact_reasons"]]
                # Ranks may have reported some already; those of before come first.
                reasons[:] = dict.fromkeys([*kept, *reasons])
        self._recorder.facts.owes_proof |= has_open_repairs(log_dir / "events.jsonl", run_id=run_id)

    def record(self, ready: Sequence[Ready]) -> bool:
        """Open the files and record the beginning. Returns whether the run was complete before."""
        ready, plan, recorder = with_newest(ready), self._plan(), self._recorder
        first = ready[0]
        if plan.is_last_stage:
            recorder.kept = kept_summary(Path(plan.settings.run.log_dir), first)
        recorder.facts.was_complete = recorder.kept is not None
        if recorder.facts.was_complete:
            recorder.outputs.keep_result()
        recorder.outputs.open(shown_bytes=self._shown_bytes())
        if recorder.facts.was_complete:
            self._already_complete(plan, first)
        else:
            self._begun(plan, ready)
        return recorder.facts.was_complete

    def _begun(self, plan: LaunchPlan, ready: Sequence[Ready]) -> None:
        """The run begins, with what its ranks have built."""
        first, recorder = ready[0], self._recorder
        recorder.published.begin()
        if recorder.facts.took_over:
            recorder.outputs.keep_points()
            log_dir = Path(plan.settings.run.log_dir)
            recorder.accounting.before = faults_before(
                log_dir / "events.jsonl", run_id=recorder.facts.run_id
            )
        recorder.record(
            events.RunBegins(
                run_id=recorder.facts.run_id,
                command=tuple(plan.command),
                world_size=plan.world_size,
                resumed_step=max(one.committed_step for one in ready),
                total_steps=first.total_steps,
                took_over=recorder.facts.took_over,
                lines=lines_of_begin(plan, ready),
                warnings=config.unread_warning(
                    plan.settings, plan.origins, is_given_all=first.is_given_all
                ),
            )
        )

    def _already_complete(self, plan: LaunchPlan, first: Ready) -> None:
        """There is nothing to train: the result stands, and what was asked for without effect is named."""
        self._recorder.record(
            events.AlreadyComplete(
                run_id=self._recorder.facts.run_id,
                command=tuple(plan.command),
                step=first.committed_step,
                total_steps=first.total_steps,
                text=tuple(lines_of_kept(plan, first)),
            )
        )


# A run that was complete before this launch: which result stands, and what to say.


def kept_summary(log_dir: Path, first: Ready) -> RunSummary | None:
    """The summary of the run that ``first`` has loaded and finds complete; None where it must conclude.

    A run whose last save is there and whose summary is not (it was killed in between, its logs were
    removed) is formed once more, evaluates and sums up.
    """
    if not first.is_complete:
        return None
    try:
        summary = read_summary(log_dir / "summary.json")
    except (OSError, ValueError):
        return None
    is_it = summary.run_id == first.run_id and summary.steps == first.committed_step
    return summary if is_it and summary.status is RunStatus.COMPLETED else None


def lines_of_kept(plan: LaunchPlan, first: Ready) -> list[str]:
    """What a person reads who starts a complete run again: that it is, and what has no effect."""
    settings = plan.as_written
    where = f"{first.committed_step:,} of {first.total_steps:,} steps"
    lines = [f"already complete: {where}, nothing to train; the result is kept"]
    without_effect = changed_settings(settings)
    if without_effect:
        lines.append(f"not applied to it: {', '.join(without_effect)}")
    if first.changed_task:
        lines.append(
            f"{first.changed_task} has changed since this run; the result is from the old version"
        )
    length = "--max-steps" if settings.run.max_steps else "--epochs"
    if plan.loop is not None:
        length = "max_steps or epochs of run.steps()"
    elif plan.stages:
        length = "the end of the last stage"
    lines.append(
        f"raise {length} to train longer; {config.own_folder(settings)} or"
        f" {config.words_of(resume='none')} starts over"
    )
    return lines


def changed_settings(settings: Settings) -> list[str]:
    """``optim.learning_rate 0.001 -> 0.0001`` for each setting that the run was not made with."""
    try:
        old = config.read_yaml(read_small(Path(settings.run.log_dir) / "config.yaml").decode())
    except (OSError, ValueError):
        return []
    # Both as they are written: what is not shown in the one is not shown in the other.
    new = config.read_yaml(config.to_yaml(settings))
    # A file of before lacks the settings that are new since: these had their defaults, as it were.
    before = {**_flat(config.read_yaml(config.to_yaml(Settings()))), **_flat(old)}
    changes = config.difference(before, _flat(new))
    keys = (line.partition(": ") for line in changes)
    return [f"{key} {change}" for key, _, change in keys if key not in _SAYS_NOTHING]


def _flat(record: Mapping[str, object]) -> dict[str, object]:
    return {
        f"{section}.{name}": value
        for section, values in record.items()
        if isinstance(values, Mapping)
        for name, value in values.items()
    }
