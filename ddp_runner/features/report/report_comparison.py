"""``report --compare A B``: two runs that have ended, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Any

from ddp_runner.cli.command import Arguments, is_unicode, show
from ddp_runner.cli.runs import log_dir_of
from ddp_runner.config.fields import known_fields
from ddp_runner.config.run_names import is_name
from ddp_runner.features.report.improvements import EndedRun
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.observe.format import byte_size, count, duration, figure, percent, rate, sparkline
from ddp_runner.observe.history.run_history import RunHistory
from ddp_runner.observe.summary import RunSummary, other_report, read_summary, time_parts

_NAME_COLUMNS_MAX, _VALUE_COLUMNS = 36, 24


def compare(words: Sequence[str]) -> int:
    """Print both; the exit code. Raises BadInputError for what is no run that has ended."""
    first, second = (_ended(word) for word in words)
    _show_rows(compared(first, second, unicode=is_unicode()))
    settings = list(differing_settings(first, second))
    show("")
    show("settings that differ" if settings else "settings: all the same")
    _show_rows(settings)
    return ExitCode.DONE


def _ended(word: str) -> EndedRun:
    if Path(word).expanduser().is_dir():
        folder = log_dir_of(Arguments(values={"--log-dir": word}))
    elif is_name(word):
        folder = log_dir_of(Arguments(values={"--name": word}))
    else:
        raise BadInputError("--compare", word, "is neither a log folder nor the name of a run")
    try:
        if (other := other_report(folder / "summary.json")) is not None:
            expected = f"is the run of {other.what}, which has nothing to compare"
            raise BadInputError("--compare", word, expected)
        summary = read_summary(folder / "summary.json")
    except FileNotFoundError:
        raise BadInputError("--compare", word, "has no summary.json: it has not ended") from None
    except (OSError, ValueError, TypeError, OverflowError, AttributeError) as error:  # not by us
        raise BadInputError("--compare", word, f"its summary.json cannot be read: {error}") from error  # fmt: skip
    history = RunHistory(folder)
    history.read()
    return EndedRun.of(history, summary)


def _show_rows(rows: Sequence[ComparedRow]) -> None:
    names = min(_NAME_COLUMNS_MAX, max((len(row.name) for row in rows), default=0))
    widths = (names, _VALUE_COLUMNS, _VALUE_COLUMNS)
    for row in rows:
        columns = zip((row.name, row.first, row.second), widths, strict=True)
        # As it stands where it fits: the names of parts are indented.
        cells = [[text] if len(text) <= width else wrap(text, width) for text, width in columns]
        for number, parts in enumerate(zip_longest(*cells, fillvalue="")):
            line = "  ".join(f"{part:<{width}}" for part, width in zip(parts, widths, strict=True))
            show(f"{line}  {row.change if number == 0 else ''}".rstrip())


# Two runs side by side: how they ended, what they cost, in which settings they differ. Pure.

_CURVE_COLUMNS = 24
# These say where a run is, not what it does.
_NOT_COMPARED = ("run.name", "run.log_dir", "run.checkpoint_dir")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """A figure of both runs; ``change`` of the second against the first, where that is a number."""

    name: str
    first: str
    second: str
    change: str = ""


def compared(first: EndedRun, second: EndedRun, *, unicode: bool) -> list[ComparedRow]:
    """Return rows on how the runs ended and what they cost."""
    a, b = first.summary, second.summary
    figures = list({**a.figures, **b.figures})
    return [
        ComparedRow(name="run", first=first.name, second=second.name),
        ComparedRow(name="status", first=a.status.words, second=b.status.words),
        ComparedRow(name="steps", first=count(a.steps), second=count(b.steps)),
        ComparedRow(name="samples", first=count(a.samples), second=count(b.samples)),
        ComparedRow(name="ranks", first=count(a.world_size), second=count(b.world_size)),
        *_curve(first, second, unicode=unicode),
        _row("loss", a.final_loss, b.final_loss, figure),
        *(
            _row(name.replace("_", " "), a.figures.get(name), b.figures.get(name), figure)
            for name in figures
        ),
        _row("wall time", a.wall_s, b.wall_s, duration),
        _row("steps/s", first.steps_per_s, second.steps_per_s, rate),
        ComparedRow(name="goodput", first=percent(a.goodput), second=percent(b.goodput)),
        *_parts(a, b),
        *_own_times(a, b),
        _row("host memory", a.peak_rss_bytes, b.peak_rss_bytes, byte_size),
        _row("device memory", a.peak_device_bytes, b.peak_device_bytes, byte_size),
        _row("faults", first.faults_total, second.faults_total, count),
        ComparedRow(name="exact", first=_yes(a.exact), second=_yes(b.exact)),
        ComparedRow(
            name="weights",
            first=(a.weights_sha256 or "-")[:12],
            second=(b.weights_sha256 or "-")[:12],
            change="the same" if a.weights_sha256 and a.weights_sha256 == b.weights_sha256 else "",
        ),
    ]


def differing_settings(first: EndedRun, second: EndedRun) -> Iterator[ComparedRow]:
    """Yield the settings that differ between the runs, without the places of files."""
    a, b = first.settings, second.settings
    known = known_fields()
    for key in sorted({**a, **b}):
        # A version that did not have it did what the default does now.
        default = known[key].default if key in known else "-"
        values = a.get(key, default), b.get(key, default)
        if key not in _NOT_COMPARED and values[0] != values[1]:
            yield ComparedRow(name=key, first=_written(values[0]), second=_written(values[1]))


def _row(name: str, a: float | None, b: float | None, form: Callable[[Any], str]) -> ComparedRow:
    written = ["-" if one is None else form(one) for one in (a, b)]
    return ComparedRow(name=name, first=written[0], second=written[1], change=_change(a, b))


def _change(a: float | None, b: float | None) -> str:
    if a is None or b is None or not a or not math.isfinite(a) or not math.isfinite(b) or a == b:
        return ""
    share = b / a - 1
    return f"{100 * share:+.1f}%" if abs(share) < 10 else f"x {b / a:.0f}"


def _curve(first: EndedRun, second: EndedRun, *, unicode: bool) -> Iterator[ComparedRow]:
    drawn = [
        sparkline(run.curves.of_run("loss").values, columns=_CURVE_COLUMNS, unicode=unicode)
        for run in (first, second)
    ]
    if any(drawn):
        yield ComparedRow(name="loss, over the run", first=drawn[0] or "-", second=drawn[1] or "-")


def _parts(a: RunSummary, b: RunSummary) -> Iterator[ComparedRow]:
    of_a, of_b = dict(time_parts(a.time_s)), dict(time_parts(b.time_s))
    for name in {**of_a, **of_b}:
        yield _row(f"  {name}", of_a.get(name, 0.0), of_b.get(name, 0.0), duration)


def _own_times(a: RunSummary, b: RunSummary) -> Iterator[ComparedRow]:
    """Yield a row on the slowest rank of each run, outside collectives."""
    of_a, of_b = (max(one.own_step_s.values(), default=None) for one in (a, b))
    if of_a is not None or of_b is not None:
        yield _row("slowest rank's step", of_a, of_b, lambda seconds: f"{seconds * 1e3:.1f} ms")


def _yes(is_so: bool | None) -> str:
    return "-" if is_so is None else "yes" if is_so else "no"


def _written(value: object) -> str:
    if value in ("", None, ()):
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
