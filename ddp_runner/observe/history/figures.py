"""The pictures of a run as values that plotly draws: curves with marks, the timeline. Pure, knows no plotly."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from ddp_runner.core.monitor import ALONE, LOSS, figure_name, is_of_evaluation, parts_of
from ddp_runner.observe.history.metrics_history import Curves, Series
from ddp_runner.observe.history.table_rows import MARK_KINDS, Mark
from ddp_runner.observe.history.timeline import GONE, STARTS, TRAINS, WAITS, Span, Timeline

Figure = dict[str, Any]
POINTS_MAX = 2_000  # of a curve: more than a screen has columns
MARKS_MAX = 600  # of a kind, the newest: more look like one
# Colours that look different to people with any kind of colour vision (Okabe and Ito); each mark has a shape, too.
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_SKY, _PINK, _GREY, _YELLOW = "#56B4E9", "#CC79A7", "#8A8A8A", "#F0E442"
_LINE_COLOURS = (_BLUE, _ORANGE, _GREEN, _PINK, _SKY, _RED, _GREY)
_RANK_COLOURS = (*_LINE_COLOURS[2:], *_LINE_COLOURS[:2])  # those of the run's own curves come last
MARK_STYLES = {
    "fault": (_RED, "x"),
    "repair": (_GREEN, "triangle-up"),
    "save": (_BLUE, "circle"),
    "roll back": (_PINK, "triangle-left"),
    "injected": (_ORANGE, "star"),
    "stage": (_SKY, "hexagon"),
    "start": (_GREY, "diamond"),
    "end": (_GREY, "square"),
}
_DRAWN_THROUGH = ("fault", "roll back", "stage")  # as lines over all curves
_SPAN_COLOURS = {STARTS: _GREY, TRAINS: _SKY, WAITS: _ORANGE, GONE: _RED}
_TITLES = {
    "loss": "loss",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "samples_per_s": "samples/s",
    "tokens_per_s": "tokens/s",
    "steps_per_s": "steps/s",
    "data_wait_share": "data wait (share)",
    "step_s": "own time a step (s)",
    "rss_bytes": "host memory (GB)",
    "device_used_bytes": "device memory (GB)",
    "loader_bytes": "memory of loader workers (GB)",
    "cpu_share": "cores in use",
    "gpu_use": "GPU in use (share)",
    "gpu_memory_used_bytes": "GPU memory, all processes (GB)",
    "gpu_temperature_c": "GPU temperature (°C)",
    "gpu_power_w": "GPU power (W)",
    "gpu_clock_mhz": "GPU clock (MHz)",
    "device_allocated_bytes": "memory of tensors (GB)",
    "device_reserved_bytes": "memory that torch holds (GB)",
}
# What is used, in this order; the others say how it trains.
OF_USE = (
    *(
        "rss_bytes",
        "device_used_bytes",
        "gpu_use",
        "gpu_memory_used_bytes",
        "device_allocated_bytes",
    ),
    *("device_reserved_bytes", "cpu_share", "loader_bytes"),
    *("gpu_temperature_c", "gpu_power_w", "gpu_clock_mhz"),
)
_IN_BOTH = ("rss_bytes", "device_used_bytes")
_PER_GB = 1e9
# In the order in which people look: losses, evaluations, the rate, the throughput; then the others.
_FIRST_SHOWN = (
    *("learning_rate", "samples_per_s", "tokens_per_s", "steps_per_s", "grad_norm"),
    *("data_wait_share", "step_s"),
)
_NOT_SHOWN = ("epoch", "tokens", "device_total_bytes")
_BY_RANK = ("step_s", "data_wait_share", *OF_USE)
RANKS_DRAWN_MAX = 16
_LEGEND_PX = 62  # three rows of it, on a telephone
_PANEL_PX, _MARKS_PX, _AROUND_PX = 190, 46, _LEGEND_PX + 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The display of curves. ``by_time``: over hours since the first point, not steps. ``of_use``: resources in use.

    ``shown``: the visible part of the axis; ``revision``: its number if it was not chosen in the plot itself.
    """

    smoothing: float = 0.0
    by_time: bool = False
    of_use: bool = False
    shown: tuple[float, float] | None = None
    revision: int = 0
    dark: bool = False


def points_max(look: Look) -> int:
    """Return the maximum number of a curve's points; outside the visible part there are as many more."""
    return POINTS_MAX if look.shown is None else 2 * POINTS_MAX


def extent(curves: Curves, *, by_time: bool) -> tuple[float, float]:
    """The ends of the axis."""
    every = [one for name in curves.names() for one in curves.ranks(name).values() if one.steps]
    if by_time:
        last_s = max((one.times[-1] for one in every), default=0.0)
        return 0.0, max(0.0, last_s - _origin_s(curves)) / 3600
    first = min((one.steps[0] for one in every), default=0)
    return float(first), float(max((one.steps[-1] for one in every), default=1))


def panels(names: Sequence[str], *, of_use: bool = False) -> list[list[str]]:
    """Return the figures of each panel, in a fixed order: losses share one, as does a figure of several data sets."""
    if of_use:
        return [[name] for name in OF_USE if name in names]
    names = [name for name in names if name not in OF_USE or name in _IN_BOTH]
    losses = [name for name in names if _is_loss(name)]
    others = [name for name in names if name not in (*losses, *_NOT_SHOWN)]
    shared: dict[str, list[str]] = {}
    for name in others:
        data, figure = parts_of(name)
        shared.setdefault(f"/{figure}" if data else name, []).append(name)
    ordered = sorted(shared.values(), key=lambda of_panel: (_place(of_panel[0]), min(of_panel)))
    training_first = sorted(losses, key=lambda name: ("/" in name, name))
    return ([training_first] if losses else []) + [sorted(of_panel) for of_panel in ordered]


def _is_loss(name: str) -> bool:
    return name == LOSS or (is_of_evaluation(name) and parts_of(name)[1] == LOSS)


def _place(name: str) -> int:
    if is_of_evaluation(name):
        return -1
    return _FIRST_SHOWN.index(name) if name in _FIRST_SHOWN else len(_FIRST_SHOWN)


def curves_figure(curves: Curves, marks: Sequence[Mark], look: Look) -> Figure:
    """Panels over one axis, below a strip of marks; hovering over a mark shows its first cause."""
    shown = _shown(curves, of_use=look.of_use)
    origin_s = _origin_s(curves)
    height = _PANEL_PX * max(1, len(shown)) + _MARKS_PX + _AROUND_PX
    inner = height - _AROUND_PX
    strip = _MARKS_PX / inner
    layout = _layout(look, height)
    layout["yaxis"] = _axis(look, title="", domain=[1 - strip * 0.75, 1]) | {
        "visible": False,
        "range": [-1, 1],
        "fixedrange": True,
    }
    room = (1 - strip) / max(1, len(shown))
    data: list[Figure] = []
    named: set[str] = set()
    for place, names in enumerate(shown):
        top = 1 - strip - place * room
        axis = f"y{place + 2}"
        layout[f"yaxis{place + 2}"] = _axis(
            look,
            title=_title(names),
            domain=[top - room * 0.84, top],
        )
        drawn: list[Figure] = []
        for in_panel, name in enumerate(names):
            is_named = len(names) > 1 or name in _BY_RANK  # else the axis says it
            lines = _lines(curves, name, axis, look, origin_s, colour=_colour_of(name, in_panel))
            if is_named and name in _BY_RANK:  # each rank once, not in each panel
                lines = [line | {"showlegend": line["legendgroup"] not in named} for line in lines]
                named |= {line["legendgroup"] for line in lines}
            drawn += lines if is_named else [line | {"showlegend": False} for line in lines]
        layout[f"yaxis{place + 2}"]["rangemode"] = _range_mode(names[0], drawn)
        data += drawn
    layout["xaxis"] = _axis(look, title="hours" if look.by_time else "step") | {
        "anchor": f"y{len(shown) + 1}" if shown else "y",
        "tickformat": "" if look.by_time else ",d",
    }
    if look.shown is not None:
        layout["xaxis"] |= {"range": list(look.shown), "autorange": False}
    layout["shapes"] = _through(marks, look, origin_s)
    return {
        "data": [*data, *_mark_traces(marks, look, origin_s)],
        "layout": layout,
        "config": CONFIG,
    }


def _range_mode(name: str, lines: Sequence[Figure]) -> str:
    """Return plotly's rangemode of a panel: around a value that never changes plotly adds 1, so that 0.01 looks like 0."""
    if len({y for line in lines for y in line["y"] if y is not None}) == 1:
        return "tozero"
    return "nonnegative" if name in _BY_RANK else "normal"


CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "showSendToCloud": False,
    "modeBarButtonsToRemove": ["lasso2d", "select2d", "toImage", "autoScale2d"],
}


def _shown(curves: Curves, *, of_use: bool) -> list[list[str]]:
    """The panels there are: loader workers that there are none of use nothing."""
    found = panels(curves.names(), of_use=of_use)
    return [names for names in found if names[0] not in OF_USE or _is_used(curves, names[0])]


def is_anything_used(curves: Curves) -> bool:
    """Return True if the panels of resources in use show anything."""
    return bool(_shown(curves, of_use=True))


def _is_used(curves: Curves, name: str) -> bool:
    return any(any(one.values) for one in curves.ranks(name).values())


def _origin_s(curves: Curves) -> float:
    firsts = [
        one.times[0]
        for name in curves.names()
        for one in curves.ranks(name).values()
        if one.times and not math.isnan(one.times[0])
    ]
    return min(firsts, default=0.0)


def _title(names: Sequence[str]) -> str:
    data, figure = parts_of(names[0])
    name = figure if data else names[0]
    return _TITLES.get(name, name.replace("_", " "))


def _colour_of(name: str, place: int) -> str:
    """Return the colour of a curve that is drawn once; ``place``: its number in its panel."""
    if name == figure_name(ALONE, LOSS):
        return _ORANGE
    return _LINE_COLOURS[place % len(_LINE_COLOURS)]


def _lines(
    curves: Curves, name: str, axis: str, look: Look, origin_s: float, *, colour: str
) -> list[Figure]:
    by_rank = curves.ranks(name)
    if name not in _BY_RANK:
        shown, one = name.replace("_", " "), curves.of_run(name)
        return [_line(one, shown, colour=colour, axis=axis, look=look, origin_s=origin_s)]
    ranks = sorted(by_rank.items())[:RANKS_DRAWN_MAX]
    colours = {rank: _RANK_COLOURS[rank % len(_RANK_COLOURS)] for rank, _ in ranks}
    unit = _PER_GB if name.endswith("_bytes") else 1
    return [
        _line(
            one,
            f"rank {rank}",
            colour=colours[rank],
            axis=axis,
            look=look,
            origin_s=origin_s,
            unit=unit,
        )
        | {"legendgroup": f"rank {rank}"}
        for rank, one in ranks
    ]


def _line(
    one: Series,
    name: str,
    *,
    colour: str,
    axis: str,
    look: Look,
    origin_s: float,
    unit: float = 1,
) -> Figure:
    xs: Sequence[float] = one.steps
    if look.by_time:
        xs = [(time_s - origin_s) / 3600 for time_s in one.times]
    values = [value / unit for value in one.values] if unit != 1 else one.values
    xs, ys = thinned(xs, smoothed(values, look.smoothing), points_max=points_max(look))
    figure: Figure = {
        "type": "scatter",
        "mode": "lines" if len(xs) > 1 else "markers",
        "name": html.escape(name),
        "x": [None if math.isnan(x) else x for x in xs],
        "y": [None if math.isnan(y) else y for y in ys],
        "yaxis": axis,
        "line": {"color": colour, "width": 1.6},
        "hovertemplate": "%{y:.6g}<extra>" + html.escape(name) + "</extra>",
    }
    if is_of_evaluation(name.replace(" ", "_")):
        figure["mode"] = "lines+markers"
    return figure


def _place_of(mark: Mark, look: Look, origin_s: float) -> float:
    return (mark.at_s - origin_s) / 3600 if look.by_time else float(mark.step)


def _mark_traces(marks: Sequence[Mark], look: Look, origin_s: float) -> list[Figure]:
    traces = []
    for kind in MARK_KINDS:
        of_kind = [mark for mark in marks if mark.kind == kind][-MARKS_MAX:]
        if not of_kind:
            continue
        colour, symbol = MARK_STYLES[kind]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": kind,
                "x": [_place_of(mark, look, origin_s) for mark in of_kind],
                "y": [0.5 if kind in ("fault", "injected", "roll back") else -0.5 for _ in of_kind],
                "text": [hover_text(f"step {mark.step:,}: {mark.text}") for mark in of_kind],
                "hovertemplate": "%{text}<extra>" + kind + "</extra>",
                "marker": {"color": colour, "symbol": symbol, "size": 10},
                "yaxis": "y",
            }
        )
    return traces


def _through(marks: Sequence[Mark], look: Look, origin_s: float) -> list[Figure]:
    return [
        _upright(_place_of(mark, look, origin_s), MARK_STYLES[kind][0], "dot")
        for kind in _DRAWN_THROUGH
        for mark in [mark for mark in marks if mark.kind == kind][-MARKS_MAX:]
    ]


def _upright(x: float, colour: str, dash: str) -> Figure:
    """A line over all panels."""
    ends = {"x0": x, "x1": x, "y0": 0, "y1": 1}
    line = {"color": colour, "width": 1, "dash": dash}
    return {"type": "line", "xref": "x", "yref": "paper", **ends, "line": line}


def hover_text(text: str) -> str:
    """Text of a run as plotly shows it: it knows some tags, so none may be one."""
    lines = wrap(text[:400], 60) or [""]
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def _layout(look: Look, height: int) -> Figure:
    ink = "#E6E6E6" if look.dark else "#222222"
    return {
        "height": height,
        "margin": {"l": 64, "r": 40, "t": _LEGEND_PX, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": ink, "size": 12, "family": "system-ui, sans-serif"},
        "hoverlabel": {"align": "left", "font": {"family": "system-ui, sans-serif"}},
        "legend": {"orientation": "h", "y": 1.0, "yref": "container", "yanchor": "top", "x": 0},
        "hovermode": "closest",
        "dragmode": "zoom",
        "modebar": {"orientation": "v", "bgcolor": "rgba(0,0,0,0)", "color": "#8A8A8A"},
        "uirevision": f"{look.by_time} {look.revision}",  # a new point does not undo a zoom, another axis does
    }


def _axis(look: Look, *, title: str, domain: Sequence[float] | None = None) -> Figure:
    grid = "#3A3A3A" if look.dark else "#DDDDDD"
    axis: Figure = {
        "title": {"text": html.escape(title), "standoff": 6},
        "gridcolor": grid,
        "zeroline": False,
        "automargin": True,
    }
    return axis if domain is None else axis | {"domain": [max(0.0, domain[0]), min(1.0, domain[1])]}


def timeline_figure(
    timeline: Timeline, *, dark: bool, now_s: float, nodes: Mapping[int, int] | None = None
) -> Figure:
    """A row a rank over seconds since the first start; generations as lines. ``nodes``: the machine of each rank."""
    look = Look(dark=dark)
    origin_s = min((span.begin_s for span in timeline.spans), default=now_s)
    of_rank = nodes or {}
    ranks = sorted(
        {span.rank for span in timeline.spans}, key=lambda rank: (of_rank.get(rank, 0), rank)
    )
    are_several = len(set(of_rank.values())) > 1
    names = {
        rank: f"node {of_rank.get(rank, 0)}, rank {rank}" if are_several else f"rank {rank}"
        for rank in ranks
    }
    layout = _layout(look, max(220, 34 * len(ranks) + _AROUND_PX + 30))
    layout |= {"barmode": "overlay", "bargap": 0.25}
    layout["xaxis"] = _axis(look, title="seconds since the first start")
    layout["yaxis"] = _axis(look, title="") | {
        "categoryorder": "array",
        "categoryarray": [names[rank] for rank in reversed(ranks)],
    }
    firsts = [i for i in range(1, len(ranks)) if of_rank.get(ranks[i]) != of_rank.get(ranks[i - 1])]
    layout["shapes"] = [
        *(
            _upright(at_s - origin_s, _GREY, "dash")
            for at_s, _ in timeline.generations[-MARKS_MAX:]
        ),
        *(_between(len(ranks) - first - 0.5, look) for first in firsts),
    ]
    bars = [
        _bars(of_kind, names, origin_s=origin_s, now_s=now_s)
        for what in _SPAN_COLOURS
        if (of_kind := [span for span in timeline.spans if span.what == what])
    ]
    return {"data": bars, "layout": layout, "config": CONFIG}


def _bars(
    spans: Sequence[Span], names: Mapping[int, str], *, origin_s: float, now_s: float
) -> Figure:
    """Bars of spans of one kind, each in the row of its rank; one without an end lasts until now."""
    what = spans[0].what
    lengths = [
        max(0.0, (now_s if span.end_s is None else span.end_s) - span.begin_s) for span in spans
    ]
    return {
        "type": "bar",
        "orientation": "h",
        "name": what,
        "y": [names[span.rank] for span in spans],
        "base": [span.begin_s - origin_s for span in spans],
        "x": lengths,
        "text": [
            hover_text(f"rank {span.rank} {what}, {length:.2f} s. {span.text}")
            for span, length in zip(spans, lengths, strict=True)
        ],
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {
            "color": _SPAN_COLOURS[what],
            "pattern": {"shape": "/" if what == WAITS else ""},
        },
    }


def _between(row: float, look: Look) -> Figure:
    """A line between two machines' ranks."""
    ends = {"x0": 0, "x1": 1, "y0": row, "y1": row}
    line = {"color": "#E6E6E6" if look.dark else "#222222", "width": 1.5}
    return {"type": "line", "xref": "paper", "yref": "y", **ends, "line": line}


# Fewer points that look the same, and smooth ones. Pure.

Points = tuple[list[float], list[float]]


def thinned(xs: Sequence[float], ys: Sequence[float], *, points_max: int) -> Points:
    """Return at most ``points_max`` of the points: first, lowest, highest and last of each stretch.

    So a single spike among a million points is still there, at its place.
    """
    if len(xs) <= points_max:
        return list(xs), list(ys)
    stretches = max(1, points_max // 4)
    kept: list[int] = []
    for stretch in range(stretches):
        begin = stretch * len(xs) // stretches
        end = (stretch + 1) * len(xs) // stretches
        known = [i for i in range(begin, end) if not math.isnan(ys[i])]
        if not known:
            kept.append(begin)  # a gap stays one
            continue
        lowest, highest = min(known, key=ys.__getitem__), max(known, key=ys.__getitem__)
        kept += sorted({known[0], lowest, highest, known[-1]})
    return [xs[i] for i in kept], [ys[i] for i in kept]


def smoothed(ys: Sequence[float], share: float) -> list[float]:
    """An exponential average that begins at the first value: each counts ``1 - share``; 0 changes nothing."""
    if share <= 0:
        return list(ys)
    found, weight, total = [], 0.0, 0.0
    for y in ys:
        if math.isnan(y):
            found.append(y)
            continue
        total = share * total + (1 - share) * y
        weight = share * weight + (1 - share)
        found.append(total / weight)
    return found
