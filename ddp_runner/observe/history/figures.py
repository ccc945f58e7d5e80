"""The pictures of a run as values that plotly draws: curves with marks, the timeline. Pure, knows no plotly."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from ddp_runner.observe.history.fault_rows import MARK_KINDS, Mark
from ddp_runner.observe.history.metrics_history import Curves, Series
from ddp_runner.observe.history.thinning import smoothed, thinned
from ddp_runner.observe.history.timeline import GONE, STARTS, TRAINS, WAITS, Timeline

Figure = dict[str, Any]
POINTS_MAX = 2_000  # of a curve: more than a screen has columns
MARKS_MAX = 600  # of a kind, the newest: more look like one
# Colours that look different to people with any kind of colour vision (Okabe and Ito); each mark has a shape, too.
_BLUE, _ORANGE, _GREEN, _RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
_SKY, _PINK, _GREY, _YELLOW = "#56B4E9", "#CC79A7", "#8A8A8A", "#F0E442"
_LINE_COLOURS = (_BLUE, _ORANGE, _GREEN, _PINK, _SKY, _RED, _GREY)
MARK_STYLES = {
    "fault": (_RED, "x"),
    "repair": (_GREEN, "triangle-up"),
    "save": (_BLUE, "circle"),
    "roll back": (_PINK, "triangle-left"),
    "injected": (_ORANGE, "star"),
    "start": (_GREY, "diamond"),
    "end": (_GREY, "square"),
}
_DRAWN_THROUGH = ("fault", "roll back")  # as lines over all curves
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
}
_FIRST_SHOWN = ("loss", "learning_rate", "grad_norm", "samples_per_s", "steps_per_s")
_NOT_SHOWN = ("epoch",)
_LOSSES = ("loss", "validation_loss")
_BY_RANK = ("step_s", "data_wait_share")
RANKS_DRAWN_MAX = 16
_PANEL_PX, _MARKS_PX, _AROUND_PX = 190, 46, 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How curves are wanted. ``by_time``: over hours since the first point, not steps."""

    smoothing: float = 0.0
    by_time: bool = False
    dark: bool = False


def panels(names: Sequence[str]) -> list[list[str]]:
    """Which figures share a panel: the losses do, each other one has its own; in a fixed order."""
    losses = [name for name in names if name in _LOSSES]
    others = [name for name in names if name not in (*losses, *_NOT_SHOWN)]
    ordered = sorted(others, key=lambda name: (_place(name), name))
    return ([sorted(losses)] if losses else []) + [[name] for name in ordered]


def _place(name: str) -> int:
    return _FIRST_SHOWN.index(name) if name in _FIRST_SHOWN else len(_FIRST_SHOWN)


def curves_figure(curves: Curves, marks: Sequence[Mark], look: Look) -> Figure:
    """Panels over one axis, below a strip of marks; hovering over a mark shows its first cause."""
    shown = panels(curves.names())
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
    for number, names in enumerate(shown):
        top = 1 - strip - number * room
        axis = f"y{number + 2}"
        layout[f"yaxis{number + 2}"] = _axis(
            look,
            title=_TITLES.get(names[0], names[0].replace("_", " ")),
            domain=[top - room * 0.84, top],
        )
        for name in names:
            is_named = len(names) > 1 or name in _BY_RANK  # else the axis says it
            lines = _lines(curves, name, axis, look, origin_s)
            data += lines if is_named else [line | {"showlegend": False} for line in lines]
    layout["xaxis"] = _axis(look, title="hours" if look.by_time else "step") | {
        "anchor": f"y{len(shown) + 1}" if shown else "y",
        "tickformat": "" if look.by_time else ",d",
    }
    layout["shapes"] = _through(marks, look, origin_s)
    return {
        "data": [*data, *_mark_traces(marks, look, origin_s)],
        "layout": layout,
        "config": _CONFIG,
    }


_CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "showSendToCloud": False,
    "modeBarButtonsToRemove": ["lasso2d", "select2d", "toImage"],
}


def _origin_s(curves: Curves) -> float:
    firsts = [
        one.times[0]
        for name in curves.names()
        for one in curves.ranks(name).values()
        if one.times and not math.isnan(one.times[0])
    ]
    return min(firsts, default=0.0)


def _lines(curves: Curves, name: str, axis: str, look: Look, origin_s: float) -> list[Figure]:
    by_rank = curves.ranks(name)
    if name not in _BY_RANK or len(by_rank) <= 1:
        colour = _ORANGE if name == "validation_loss" else _BLUE
        shown, one = name.replace("_", " "), curves.of_run(name)
        return [_line(one, shown, colour=colour, axis=axis, look=look, origin_s=origin_s)]
    ranks = sorted(by_rank.items())[:RANKS_DRAWN_MAX]
    colours = {rank: _LINE_COLOURS[rank % len(_LINE_COLOURS)] for rank, _ in ranks}
    return [
        _line(one, f"rank {rank}", colour=colours[rank], axis=axis, look=look, origin_s=origin_s)
        | {"legendgroup": f"rank {rank}", "showlegend": name == _BY_RANK[0]}
        for rank, one in ranks
    ]


def _line(one: Series, name: str, *, colour: str, axis: str, look: Look, origin_s: float) -> Figure:
    xs: Sequence[float] = one.steps
    if look.by_time:
        xs = [(time_s - origin_s) / 3600 for time_s in one.times]
    xs, ys = thinned(xs, smoothed(one.values, look.smoothing), points_max=POINTS_MAX)
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
    if name == "validation loss":
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
        {
            "type": "line",
            "xref": "x",
            "yref": "paper",
            "x0": (at := _place_of(mark, look, origin_s)),
            "x1": at,
            "y0": 0,
            "y1": 1,
            "line": {"color": MARK_STYLES[kind][0], "width": 1, "dash": "dot"},
        }
        for kind in _DRAWN_THROUGH
        for mark in [mark for mark in marks if mark.kind == kind][-MARKS_MAX:]
    ]


def hover_text(text: str) -> str:
    """Text of a run as plotly shows it: it knows some tags, so none may be one."""
    lines = wrap(text[:400], 60) or [""]
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def _layout(look: Look, height: int) -> Figure:
    ink = "#E6E6E6" if look.dark else "#222222"
    return {
        "height": height,
        "margin": {"l": 64, "r": 40, "t": 8, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": ink, "size": 12, "family": "system-ui, sans-serif"},
        "hoverlabel": {"align": "left", "font": {"family": "system-ui, sans-serif"}},
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        "hovermode": "closest",
        "dragmode": "zoom",
        "modebar": {"orientation": "v", "bgcolor": "rgba(0,0,0,0)", "color": "#8A8A8A"},
        "uirevision": f"time {look.by_time}",  # a new point does not undo a zoom, another axis does
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


def timeline_figure(timeline: Timeline, *, dark: bool, now_s: float) -> Figure:
    """A row a rank over seconds since the first start; generations as lines."""
    look = Look(dark=dark)
    spans = timeline.spans
    origin_s = min((span.begin_s for span in spans), default=now_s)
    ranks = sorted({span.rank for span in spans})
    data: list[Figure] = []
    for what, colour in _SPAN_COLOURS.items():
        of_kind = [span for span in spans if span.what == what]
        if not of_kind:
            continue
        ends = [now_s if span.end_s is None else span.end_s for span in of_kind]
        lengths = [max(0.0, end - span.begin_s) for span, end in zip(of_kind, ends, strict=True)]
        texts = [
            hover_text(f"rank {span.rank} {what}, {length:.2f} s. {span.text}")
            for span, length in zip(of_kind, lengths, strict=True)
        ]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": what,
                "y": [f"rank {span.rank}" for span in of_kind],
                "base": [span.begin_s - origin_s for span in of_kind],
                "x": lengths,
                "text": texts,
                "textposition": "none",
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {"color": colour, "pattern": {"shape": "/" if what == WAITS else ""}},
            }
        )
    layout = _layout(look, max(220, 34 * len(ranks) + 120))
    layout |= {"barmode": "overlay", "bargap": 0.25}
    layout["xaxis"] = _axis(look, title="seconds since the first start")
    layout["yaxis"] = _axis(look, title="") | {
        "categoryorder": "array",
        "categoryarray": [f"rank {rank}" for rank in reversed(ranks)],
    }
    layout["shapes"] = [
        {
            "type": "line",
            "xref": "x",
            "yref": "paper",
            "x0": at_s - origin_s,
            "x1": at_s - origin_s,
            "y0": 0,
            "y1": 1,
            "line": {"color": _GREY, "width": 1, "dash": "dash"},
        }
        for at_s, _ in timeline.generations[-MARKS_MAX:]
    ]
    return {"data": data, "layout": layout, "config": _CONFIG}


def time_shares(summary: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Where the time of a run that has ended went, as (what, seconds), longest first."""
    found = summary.get("time_s")
    items = found.items() if isinstance(found, dict) else ()
    shares = [(str(k).replace("_", " "), float(v)) for k, v in items if isinstance(v, (int, float))]
    return sorted((one for one in shares if one[1] > 0), key=lambda one: -one[1])
