"""What every view of the live page has: colours, the line at the top, dark and light, a plot. Knows nothing of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping

from nicegui import ui

from ddp_runner.features.page.shared_figures import Drawn
from ddp_runner.observe.history.figures import CONFIG

STATE_COLOURS = {
    "running": "blue-8",
    "completed": "teal-8",
    "done": "teal-8",
    "recovering": "orange-9",
    "starting": "grey-8",
    "stopping": "grey-8",
    "failed": "deep-orange-10",
    "gave up": "deep-orange-10",
    "lost": "deep-orange-10",
}
_STYLE = """
:root { --q-primary: #0072B2; }
body { font-family: system-ui, sans-serif; font-size: 15px; }
.nicegui-content { padding: 0.75rem; gap: 0.75rem; max-width: 1500px; margin: 0 auto; width: 100%; }
.ddp-mono { font-family: ui-monospace, monospace; font-size: 12.5px; white-space: pre-wrap;
            overflow-wrap: anywhere; line-height: 1.45; }
.ddp-figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.2rem, 1fr)); gap: 0.4rem 1rem;
               width: 100%; }
.ddp-small { font-size: 12px; opacity: 0.78; }
.ddp-value { font-size: 17px; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.ddp-card { width: 100%; border: 1px solid rgba(128,128,128,.35); border-radius: 8px; padding: 0.7rem 0.9rem;
            color: inherit; text-decoration: none; display: block; }
a.ddp-card:hover { border-color: #0072B2; }
a:focus-visible, button:focus-visible, [tabindex]:focus-visible { outline: 3px solid #E69F00 !important;
            outline-offset: 2px; }
.ddp-form { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr));
            gap: 0.8rem 1.4rem; width: 100%; }
.ddp-command { position: sticky; bottom: 0; z-index: 1; padding: 0.6rem 0; border-top: 2px solid #0072B2;
               background: var(--q-dark-page, #fff); }
body:not(.body--dark) .ddp-command { background: #fff; }
.ddp-problem { color: #D55E00; font-weight: 600; }
.ddp-problem:empty { display: none; }
.ddp-plot { width: 100%; min-width: 0; }
.q-tab-panel { padding: 0.6rem 0 !important; }
.ddp-wraps td { overflow-wrap: break-word; max-width: 22rem; }
.ddp-wraps td, .ddp-wraps th { padding: 5px 8px !important; height: auto !important; }
.q-table td, .q-table th { font-variant-numeric: tabular-nums; }
.ddp-stacks { max-height: 50vh; overflow: auto; width: 100%; }
.ddp-log { max-height: 62vh; overflow: auto; width: 100%; border: 1px solid rgba(128,128,128,.35);
           border-radius: 8px; padding: 0.6rem; }
"""
_WANTS_DARK = (
    "(localStorage.getItem('ddp_dark') ?? "
    "String(matchMedia('(prefers-color-scheme: dark)').matches)) === 'true'"
)
# The element is there, and its library has drawn once, some time after the page has come.
_DRAW = """
let left = 200;
const figure = {figure};
const draw = () => {{
  const one = getElement({id});
  if (one && one.last_options) one.Plotly.react(one.$el, figure.data, figure.layout);
  else if (left-- > 0) setTimeout(draw, 50);
}};
draw();
"""


class Frame:
    """The top of a page. ``dark`` is known once the browser has said what it wants."""

    def __init__(self, title: str, *, home: bool) -> None:
        ui.add_css(_STYLE)
        self.dark = ui.dark_mode(value=False)
        with ui.row().classes("w-full items-center no-wrap justify-between").props("role=banner"):
            with ui.row().classes("items-center no-wrap gap-2").style("min-width:0"):
                if home:
                    ui.link("All runs", "/").props('aria-label="All runs"').classes("ddp-small")
                ui.label(title).classes("text-h6").style("overflow-wrap:anywhere")
            button = ui.button(icon="dark_mode", on_click=self._turn).props("flat round dense")
            button.props('aria-label="Dark or light"')

    async def ask_browser(self) -> None:
        """Dark or light, as was chosen before, or as its system has it."""
        with contextlib.suppress(TimeoutError):  # it is gone again
            self.dark.value = bool(await ui.run_javascript(_WANTS_DARK, timeout=5.0))

    def _turn(self) -> None:
        self.dark.value = not self.dark.value
        ui.run_javascript(f"localStorage.setItem('ddp_dark', '{str(self.dark.value).lower()}')")


class Figures:
    """Names with values that are set again and again, in a grid. ``left_out``: names that this place does not show."""

    def __init__(self, *, left_out: Collection[str] = ()) -> None:
        self._left_out = left_out
        self._labels: dict[str, ui.label] = {}
        self._grid = ui.element("div").classes("ddp-figures")

    def set(self, values: Mapping[str, str]) -> None:
        """Show these; what has not changed is not sent."""
        shown = {name: text for name, text in values.items() if name not in self._left_out}
        if list(shown) != list(self._labels):
            self._grid.clear()
            with self._grid:
                self._labels = {name: _figure(name) for name in shown}
        for name, label in self._labels.items():
            if label.text != shown[name]:
                label.set_text(shown[name])


def _figure(name: str) -> ui.label:
    with ui.column().classes("gap-0"):
        ui.label(name).classes("ddp-small")
        return ui.label("-").classes("ddp-value")


def state_badge() -> ui.badge:
    """A place for the state in words; its colour only repeats it."""
    return ui.badge("-").props("color=grey-8").classes("text-body2 q-pa-xs")


def set_state(badge: ui.badge, what: str) -> None:
    """Show that state."""
    if badge.text != what:
        badge.set_text(what)
        badge.props(f"color={STATE_COLOURS.get(what, 'grey-8')}")


class Plot:
    """One browser's plot. Its points are no properties of an element: each would be looked at again and again."""

    def __init__(self, *classes: str) -> None:
        self._plot = ui.plotly({"data": [], "layout": {}, "config": CONFIG})
        self._plot.classes(" ".join(("ddp-plot", *classes)))
        self.on = self._plot.on
        self._shown: Drawn | None = None

    @property
    def is_deleted(self) -> bool:
        """True if the browser has left the page."""
        return bool(self._plot.is_deleted)

    def show(self, drawn: Drawn) -> None:
        """Send it, where it is another one."""
        if drawn is not self._shown:
            self._shown = drawn
            self._plot.client.run_javascript(_DRAW.format(figure=drawn.text, id=self._plot.id))
