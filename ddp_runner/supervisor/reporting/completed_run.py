"""A run that was complete before this launch: which result stands, and what to say. Changes no file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ddp_runner import config
from ddp_runner.core.exits import RunStatus
from ddp_runner.core.messages import Ready
from ddp_runner.core.settings import Settings
from ddp_runner.observe.summary import RunSummary, read_summary
from ddp_runner.system.run_files import read_small

# Where the files are, what is resumed, and what is shown.
_SAYS_NOTHING = (
    "run.name",
    "run.log_dir",
    "run.checkpoint_dir",
    "run.resume",
    "log.display",
    "log.trackers",
    "log.page",
    "log.page_port",
    "log.page_can_inject",
)


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


def lines_of_kept(settings: Settings, first: Ready) -> list[str]:
    """Return lines for a person who starts a complete run again: that it is, and which settings have no effect."""
    where = f"{first.committed_step:,} of {first.total_steps:,} steps"
    lines = [f"already complete: {where}, nothing to train; the result is kept"]
    without_effect = changed_settings(settings)
    if without_effect:
        lines.append(f"without effect on it: {', '.join(without_effect)}")
    if first.changed_task:
        lines.append(f"{first.changed_task} has changed since: the result is of what it was")
    length = "--max-steps" if settings.run.max_steps else "--epochs"
    lines.append(
        f"a larger {length} trains on; {config.own_folder(settings)} or --resume none starts fresh"
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
