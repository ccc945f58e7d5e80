"""A run as one page of HTML to send to somebody: curves, timeline, faults, settings. Text of a run is only text."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html import escape
from typing import Any

from ddp_runner.features.report.improvements import EndedRun, improvements
from ddp_runner.kernel.rules.secrets import masked, masked_words
from ddp_runner.observe.format import count, duration, percent, setting_value
from ddp_runner.observe.history.figures import (
    Look,
    curves_figure,
    is_anything_used,
    timeline_figure,
)
from ddp_runner.observe.history.run_history import RunHistory, RunStanding
from ddp_runner.observe.history.table_rows import (
    GPU_COLUMNS,
    RANK_COLUMNS,
    Columns,
    FaultRow,
    gpu_rows,
    rank_rows,
    shown_columns,
)
from ddp_runner.observe.summary import RunSummary, time_parts

FAULTS_SHOWN_MAX = 500
_WRITTEN = "%Y-%m-%d %H:%M:%S"


def html_report(
    run: RunHistory, summary: RunSummary | None, *, plotly: str, now_s: float, version: str
) -> str:
    """The file. ``run`` has been read; ``summary`` is None of a run that goes on or was killed."""
    state = run.state
    parts = (
        _head(state),
        _improve(summary, run),
        _training(run),
        *_faults(run),
        '<h2>Timeline</h2><div class=plot id=timeline role=img aria-label="Timeline"></div>',
        _time(summary),
        _ranks(run, summary),
        _settings(run),
        _foot(run, now_s, version),
    )
    figures = {
        "steps": _curves(run, Look()),
        "time": _curves(run, Look(by_time=True)),
        "timeline": _timeline(run, now_s),
        "use": _curves(run, Look(of_use=True)),
    }
    return page(title=state.name, body="\n".join(parts), figures=figures, plotly=plotly)


def _foot(run: RunHistory, now_s: float, version: str) -> str:
    return (
        f"<p class=small>Written {_utc(now_s)} by ddp_runner {text(version)} from {text(run.folder)}. "
        "Plotly's script is inside; this file fetches nothing.</p>"
    )


def _curves(run: RunHistory, look: Look) -> dict[str, Any]:
    curves, marks = run.metrics.curves, run.faults.marks
    light = curves_figure(curves, marks, look)
    dark = curves_figure(curves, marks, replace(look, dark=True))
    return _both(light, dark)


def _timeline(run: RunHistory, now_s: float) -> dict[str, Any]:
    until_s = now_s if run.state.is_live else run.timeline.last_s
    light, dark = (
        timeline_figure(run.timeline, dark=dark, now_s=until_s, nodes=run.nodes)
        for dark in (False, True)
    )
    return _both(light, dark)


def _both(light: Mapping[str, Any], dark: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "data": light["data"],
        "light": light["layout"],
        "dark": dark["layout"],
        "config": light["config"],
    }


def _head(state: RunStanding) -> str:
    shown = {"time" if name == "elapsed" else name: value for name, value in state.shown.items()}
    shown.pop("time left", None)
    if not state.is_script:
        shown["exact"] = "no" if state.inexact_reasons else "yes" if state.step else "-"
    grid = "".join(
        f"<div><span class=small>{text(name)}</span><span>{text(value)}</span></div>"
        for name, value in shown.items()
    )
    reasons = "".join(f"<li>{text(reason)}</li>" for reason in state.inexact_reasons)
    inexact = f"<p>Not exact:</p><ul>{reasons}</ul>" if reasons else ""
    return (
        f"<header><h1>{text(state.name)}</h1><span class=state>{text(state.what)}</span>"
        f"<span class=small>{text(state.title)}</span>"
        "<button type=button>dark or light</button></header>"
        f"<div class=figures>{grid}</div>{inexact}"
    )


def _improve(summary: RunSummary | None, run: RunHistory) -> str:
    if summary is None:
        said = "<p>Suggestions appear once the run has ended.</p>"
    else:
        found = improvements(EndedRun.of(run, summary))
        said = "".join(
            f"<li>{text(one.what)}<br><span class=mono>{text(one.change)}</span></li>"
            for one in found
        )
        said = (
            f"<ol>{said}</ol>"
            if found
            else "<p>Nothing stands out: data, saves, ranks and restarts took little.</p>"
        )
    return f"<h2>What to improve first</h2>{said}"


def _training(run: RunHistory) -> str:
    note = "a sample of the logged steps is drawn" if run.metrics.curves.is_thinned else ""
    return (
        "<h2>Training</h2><p>over <button type=button data-axis=steps>steps</button> "
        "<button type=button data-axis=time>time</button> "
        f"<span class=small>Drag to zoom, double-click to go back. {note}</span></p>"
        '<div class=plot id=curves role=img aria-label="Curves"></div>'
    )


def _faults(run: RunHistory) -> Iterator[str]:
    rows = run.faults.rows
    yield f"<h2>Faults: {count(len(rows)) if rows else 'none'}</h2>"
    for row in reversed(rows[-FAULTS_SHOWN_MAX:]):
        yield _fault(row)
    if len(rows) > FAULTS_SHOWN_MAX:
        yield f"<p>and {count(len(rows) - FAULTS_SHOWN_MAX)} older ones</p>"


def _fault(row: FaultRow) -> str:
    parts = [
        f"<details><summary>step {count(max(0, row.step))}: {text(row.text)}<br>",
        f"<span class=small>{text(row.caption)}</span></summary>",
        f"<p>{_utc(row.at_s)}, {text(row.said)}</p>",
        f"<p class=small>What followed</p><div class=mono>{text(chr(10).join(row.followed) or 'nothing')}</div>",
    ]
    for whose, detail in row.details:
        parts.append(f"<p class=small>{text(whose)}</p><div class=mono>{text(detail)}</div>")
    return "".join([*parts, "</details>"])


def _time(summary: RunSummary | None) -> str:
    if summary is None or summary.wall_s <= 0:
        return ""
    lines = [
        f"<div class=share><span>{text(name)}</span>"
        f'<i style="width:{min(100.0, 100 * seconds / summary.wall_s):.2f}%"></i>'
        f"<span>{duration(seconds)} ({percent(seconds / summary.wall_s)})</span></div>"
        for name, seconds in time_parts(summary.time_s)
    ]
    return f"<h2>Where the time went</h2>{''.join(lines)}"


def _ranks(run: RunHistory, summary: RunSummary | None) -> str:
    own = run.metrics.curves.newest("step_s")
    if summary is not None:
        own |= {int(rank): value for rank, value in summary.own_step_s.items() if rank.isdecimal()}
    slow = run.state.stragglers
    rows = rank_rows(run.state.ranks, own_s=own, slow=slow)
    gpus = gpu_rows(run.state.gpus)
    found = [
        _table(columns, rows_)
        for columns, rows_ in ((RANK_COLUMNS, rows), (GPU_COLUMNS, gpus))
        if rows_
    ]
    if not found:
        return ""
    is_drawn = is_anything_used(run.metrics.curves)
    plot = '<div class=plot id=use role=img aria-label="What is used"></div>' if is_drawn else ""
    return f"<h2>Ranks and devices</h2>{''.join(found)}{plot}"


def _table(columns: Columns, rows: list[dict[str, Any]]) -> str:
    shown = shown_columns(columns, rows)
    return table(
        tuple(label for _, label in shown), [tuple(row[key] for key, _ in shown) for row in rows]
    )


def _settings(run: RunHistory) -> str:
    rows = run.settings()
    shown: list[tuple[bool, tuple[object, ...]]] = [
        (
            row.differs,
            (row.key, setting_value(masked(row.value, row.key)), setting_value(row.default)),
        )
        for row in rows
    ]
    titles = ("setting", "value", "default")
    changed = table(titles, [cells for differs, cells in shown if differs])
    rest = table(titles, [cells for differs, cells in shown if not differs])
    command = " ".join(masked_words(run.faults.command))
    return (
        f"<h2>Settings</h2><div class=mono>{text(command)}</div>{changed}"
        f"<details><summary>those that have their defaults</summary>{rest}</details>"
    )


def _utc(at_s: float) -> str:
    return time.strftime(_WRITTEN, time.gmtime(at_s)) + " UTC"


# The one file that a report is: its styles, its script and its order. Knows nothing of a run.

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
_STYLE = """
:root { color-scheme: light; --ink: #1c1c1c; --back: #fff; --line: #bbb; --small: #555; --bar: #0072B2; }
:root[data-theme=dark] { color-scheme: dark; --ink: #e6e6e6; --back: #16181a; --line: #555;
    --small: #aaa; --bar: #56B4E9; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 1400px; color: var(--ink); background: var(--back);
    font: 15px/1.45 system-ui, sans-serif; }
header { display: flex; flex-wrap: wrap; gap: .4rem 1rem; align-items: center; }
h1 { font-size: 1.35rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
p, ol { margin: .3rem 0; }
.state { border: 2px solid var(--ink); border-radius: 6px; padding: 0 .5rem; }
.small { color: var(--small); font-size: .85rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.5rem, 1fr)); gap: .4rem 1rem;
    margin: .8rem 0; }
.figures div span { display: block; }
.figures div span + span { font-size: 1.1rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.plot { width: 100%; min-width: 0; }
.mono { font: 12.5px/1.45 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--line);
    vertical-align: top; overflow-wrap: break-word; max-width: 22rem; }
th { white-space: nowrap; }
.wide { overflow-x: auto; }
details { border-bottom: 1px solid var(--line); padding: .25rem 0; }
summary { cursor: pointer; overflow-wrap: anywhere; }
.share { display: grid; grid-template-columns: 7rem 1fr 8rem; gap: .6rem; align-items: center;
    max-width: 46rem; }
.share i { display: block; height: 12px; background: var(--bar); min-width: 1px; }
button { font: inherit; color: inherit; background: none; border: 1px solid var(--line);
    border-radius: 6px; padding: .1rem .6rem; cursor: pointer; }
button[aria-pressed=true] { border-color: var(--bar); box-shadow: inset 0 0 0 1px var(--bar); }
:focus-visible { outline: 3px solid #E69F00; outline-offset: 2px; }
"""
_SCRIPT = """
const figures = JSON.parse(document.getElementById('figures').textContent);
let isDark = matchMedia('(prefers-color-scheme: dark)').matches, axis = 'steps';
function draw() {
  document.documentElement.dataset.theme = isDark ? 'dark' : 'light';
  for (const place of document.querySelectorAll('.plot')) {
    const figure = figures[place.id === 'curves' ? axis : place.id];
    Plotly.react(place, figure.data, isDark ? figure.dark : figure.light, figure.config);
  }
  for (const button of document.querySelectorAll('button[data-axis]'))
    button.setAttribute('aria-pressed', String(button.dataset.axis === axis));
}
document.addEventListener('click', event => {
  const button = event.target.closest('button');
  if (!button) return;
  if (button.dataset.axis) axis = button.dataset.axis; else isDark = !isDark;
  draw();
});
draw();
"""


def page(*, title: str, body: str, figures: Mapping[str, object], plotly: str) -> str:
    """The whole file. ``body`` is HTML, made with ``text``; ``plotly`` the library's own script."""
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text(title)}</title><style>{_STYLE}</style></head><body>",
            body,
            f'<script type="application/json" id="figures">{_in_script(figures)}</script>',
            f"<script>{plotly.replace('</script', '<' + chr(92) + '/script')}</script>",
            f"<script>{_SCRIPT}</script></body></html>\n",
        )
    )


def text(value: object) -> str:
    """Return a run's value as text of HTML."""
    return escape(str(value))


def table(titles: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    """A table of texts, which scrolls where it is too wide."""
    head = "".join(f"<th scope=col>{text(title)}</th>" for title in titles)
    lines = "".join(
        "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f"<div class=wide tabindex=0><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{lines}</tbody></table></div>"
    )


def _in_script(figures: Mapping[str, object]) -> str:
    # INVARIANT report-is-text: nothing that a run has written ends a script or begins one in a report.
    # Broken if: a value is put into the page without text() or without this.
    # Guarded by: test_a_report_holds_no_tag_of_a_run.
    found = json.dumps(figures, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        found = found.replace(sign, f"\\u{ord(sign):04x}")
    return found
