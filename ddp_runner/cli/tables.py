"""Tables of the demo (what was done to a run, how it was noticed and repaired) and of ``check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_runner.core.injection import InjectKind
from ddp_runner.observe.format import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddp_runner.cli.repairs import Repaired

_WHAT_WAS_DONE = {
    InjectKind.KILL: "SIGKILL",
    InjectKind.STOP: "SIGSTOP",
    InjectKind.EXIT: "exit(0)",
    InjectKind.RAISE: "exception",
    InjectKind.HANG: "sleep",
    InjectKind.SPIN: "endless loop",
    InjectKind.GIL: "GIL held",
    InjectKind.SLOW: "slow rank",
    InjectKind.LOADER_KILL: "loader kill",
    InjectKind.LOADER_STOP: "loader stop",
    InjectKind.OOM: "out of memory",
    InjectKind.UNUSED: "unused layer",
    InjectKind.NAN: "loss is NaN",
    InjectKind.SPIKE: "loss x 10,000",
    InjectKind.DIVERGE: "flipped bit",
    InjectKind.BAD_SAMPLE: "bad sample",
    InjectKind.DISK_FULL: "disk full",
    InjectKind.DISK_ERROR: "I/O error",
    InjectKind.SLOW_DISK: "slow disk",
    InjectKind.CORRUPT_CHECKPOINT: "file damaged",
}


def show_repairs(repairs: Sequence[Repaired]) -> None:
    """Print one row for each, with its times; at most 80 columns."""
    _show(
        ("fault", "rank", "step", "phase", "noticed by", "after", "repaired", "lost"),
        (
            (
                *_what_and_where(repair),
                repair.phase or "-",
                repair.noticed_by,
                _seconds(repair.noticed_s),
                _seconds(repair.repaired_s),
                str(repair.steps_lost),
            )
            for repair in repairs
        ),
    )


def show_changes(repairs: Sequence[Repaired]) -> None:
    """Print one row for each, with what was done; at most 80 columns."""
    _show(
        ("fault", "rank", "step", "noticed by", "what is done"),
        ((*_what_and_where(repair), repair.noticed_by, repair.done) for repair in repairs),
        last_wraps=True,
    )


def show_checked(rows: Iterable[tuple[str, bool, float | None, str]]) -> None:
    """Print one row for each thing that was checked: whether it holds, how long it took, and why not."""
    _show(
        ("what", "holds", "seconds", ""),
        (
            (what, "yes" if holds else "NO", "-" if seconds is None else f"{seconds:.2f}", says)
            for what, holds, seconds, says in rows
        ),
        last_wraps=True,
    )


def _what_and_where(repair: Repaired) -> tuple[str, str, str]:
    what = "not injected" if repair.injected is None else _WHAT_WAS_DONE[repair.injected]
    return what, "all" if repair.others else str(repair.rank), str(repair.step)


def _show(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, last_wraps: bool = False
) -> None:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - rich is big
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in titles:
        right = title in ("rank", "step", "after", "repaired", "lost", "seconds")
        wraps = last_wraps and title == titles[-1]
        table.add_column(title, justify="right" if right else "left", no_wrap=not wraps)
    for row in rows:
        # As text: rich would read its own markup in what came from a run.
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console(highlight=False).print(table)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
