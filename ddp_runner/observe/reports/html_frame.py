"""The one file that a report is: its styles, its script and its order. Knows nothing of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape

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
    vertical-align: top; overflow-wrap: anywhere; }
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
    """What a run says, as text of HTML."""
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
