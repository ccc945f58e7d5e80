"""A plot on the page, whose figure is sent as text. Knows nothing of a run."""

from __future__ import annotations

from nicegui import ui

from ddp_runner.cli.live_page.shared_figures import Drawn
from ddp_runner.observe.history.figures import CONFIG

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


class Plot:
    """One browser's plot. Its points are no properties of an element: each would be looked at again and again."""

    def __init__(self, *classes: str) -> None:
        self._plot = ui.plotly({"data": [], "layout": {}, "config": CONFIG})
        self._plot.classes(" ".join(("ddp-plot", *classes)))
        self.on = self._plot.on
        self._shown: Drawn | None = None

    @property
    def is_deleted(self) -> bool:
        """Whether the browser has gone on."""
        return bool(self._plot.is_deleted)

    def show(self, drawn: Drawn) -> None:
        """Send it, where it is another one."""
        if drawn is not self._shown:
            self._shown = drawn
            self._plot.client.run_javascript(_DRAW.format(figure=drawn.text, id=self._plot.id))
