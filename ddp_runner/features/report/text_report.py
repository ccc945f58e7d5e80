"""Lines for a terminal about a run that was read: curves, where the time went, what to change first. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from ddp_runner.core.monitor import LOSS, is_of_evaluation, parts_of
from ddp_runner.features.report.improvements import Improvement
from ddp_runner.observe.format import bar, byte_size, count, duration, figure, percent, sparkline
from ddp_runner.observe.history.metrics_history import Curves
from ddp_runner.observe.summary import TimeShares, time_parts

CURVE_COLUMNS, BAR_COLUMNS = 40, 30
IMPROVEMENTS_SHOWN_MAX = 3
_LINE_COLUMNS = 79
_SHOWN_FIRST, _SHOWN_LAST = ("loss",), ("grad_norm", "samples_per_s", "tokens_per_s")
_EVALUATED_MAX = 8


def curve_lines(curves: Curves, *, labels: int, unicode: bool) -> Iterator[str]:
    """A line for each of the main figures: name, curve, first and last value."""
    evaluated = sorted(filter(is_of_evaluation, curves.names()), key=_losses_first)
    for name in (*_SHOWN_FIRST, *evaluated[:_EVALUATED_MAX], *_SHOWN_LAST):
        series = curves.of_run(name)
        known = [value for value in series.values if math.isfinite(value)]
        if len(known) < 2:
            continue
        drawn = sparkline(series.values, columns=CURVE_COLUMNS, unicode=unicode)
        title = name.replace("_per_s", "/s").replace("_", " ")
        arrow = "→" if unicode else "->"
        ends = f"{figure(known[0])} {arrow} {figure(known[-1])}"
        yield f"{title:<{labels - 1}} {drawn}  {ends}, {count(len(known))} points"


def _losses_first(name: str) -> tuple[bool, str]:
    return parts_of(name)[1] != LOSS, name


def time_lines(time_s: TimeShares, *, wall_s: float, labels: int, unicode: bool) -> Iterator[str]:
    """A bar for each part of the time, longest first."""
    shares = sorted(time_parts(time_s), key=lambda one: -one[1])
    for place, (name, seconds) in enumerate(shares if wall_s > 0 else ()):
        drawn = bar(seconds / wall_s, columns=BAR_COLUMNS, unicode=unicode)
        label = "where it went" if place == 0 else ""
        text = f"{name:<12} {duration(seconds):>8} {percent(seconds / wall_s):>4}  {drawn}"
        yield f"{label:<{labels}}{text}".rstrip()


_GPU_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("use", "use", percent),
    ("memory_used_bytes", "memory", byte_size),
    ("memory_efficiency", "memory efficiency", percent),
    ("temperature_c", "temperature", lambda value: f"{value:.0f} °C"),
    ("power_w", "power", lambda value: f"{value:.0f} W"),
)


def gpu_use(records: Sequence[Mapping[str, Any]]) -> str:
    """Means over GPUs with the highest peak, as text; empty where nothing is known of any."""
    shown = []
    for name, title, form in _GPU_FIGURES:
        known = [one[name] for one in records if isinstance(one.get(name), Mapping)]
        if known:
            mean = sum(one["mean"] for one in known) / len(known)
            peak = form(max(one["peak"] for one in known))
            text = form(mean)
            shown.append(f"{title} {text}" + (f" (peak {peak})" if peak != text else ""))
    return ", ".join(shown)


def improvement_lines(found: Sequence[Improvement], *, labels: int) -> Iterator[str]:
    """Yield the suggested changes, each setting below its cost; or a line that says that nothing stands out."""
    if not found:
        yield f"{'improve':<{labels}}nothing stands out: data, saves, ranks and restarts took little"
    for place, one in enumerate(found[:IMPROVEMENTS_SHOWN_MAX]):
        label = "improve" if place == 0 else ""
        yield f"{label:<{labels}}{place + 1}. {one.what}"
        for line in wrap(f"-> {one.change}", max(30, _LINE_COLUMNS - labels - 3)):
            yield f"{'':<{labels}}   {line}"
