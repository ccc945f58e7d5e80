"""The report on the run of a script, from its summary.json. Decides nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.cli.report_comparison import OtherReport
from ddp_runner.features.script.script_summary import ScriptSummary, read_script_summary
from ddp_runner.observe.format import count, duration

if TYPE_CHECKING:
    from collections.abc import Iterator

_LABEL_COLUMNS = 12
_FAULTS_SHOWN_MAX = 20


def read(path: Path) -> OtherReport | None:
    """Return the report; None where the summary is of no script. Raises OSError and ValueError."""
    summary = read_script_summary(path)
    return None if summary is None else OtherReport("a script", tuple(_lines(summary)))


def _lines(summary: ScriptSummary) -> Iterator[str]:
    """Yield what is known: a script has its own checkpoints, so nothing is known of its weights."""
    attempts = len(summary.attempts)
    newest = f" in the newest of {attempts} attempts" if attempts > 1 else ""
    failed = [one for one in summary.attempts if one.cause]
    rows = (
        ("run", summary.called),
        ("status", f"{summary.status.words} (exit {summary.exit_code})"),
        ("script", summary.script),
        (
            "trained",
            f"{count(summary.steps)} optimizer steps on {summary.world_size} ranks{newest}",
        ),
        ("wall time", duration(summary.wall_s)),
        ("faults", str(len(failed))),
    )
    yield from (f"{name:<{_LABEL_COLUMNS}}{value}" for name, value in rows)
    for one in failed[:_FAULTS_SHOWN_MAX]:
        who = "" if one.rank is None or one.cause.startswith("rank ") else f"rank {one.rank}: "
        yield (
            f"  attempt {one.attempt}  {who}{one.cause}, after {count(one.steps)} optimizer steps"
            f" in {duration(one.seconds)}"
        )
    if len(failed) > _FAULTS_SHOWN_MAX:
        yield f"  and {len(failed) - _FAULTS_SHOWN_MAX} more in summary.json"
