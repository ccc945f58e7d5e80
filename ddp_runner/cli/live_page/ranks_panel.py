"""The ranks and devices as they stand, what they use over time, and their logs, followed live and searched.

A log's lines are text, whatever they hold.
"""

from __future__ import annotations

from typing import Any

from nicegui import run, ui

from ddp_runner.cli.live_page.shared_figures import SharedFigures
from ddp_runner.cli.live_page.training_panel import CurvesPanel
from ddp_runner.observe.history.device_rows import (
    GPU_COLUMNS,
    RANK_COLUMNS,
    Columns,
    gpu_rows,
    rank_rows,
    shown_columns,
)
from ddp_runner.observe.history.log_lines import LINES_MAX, last_lines
from ddp_runner.observe.history.run_history import RunHistory

_AT_END = "const e = getHtmlElement({id}); if (e) e.scrollTop = e.scrollHeight"


class RanksPanel:
    """Tables of ranks and GPUs, one log, and curves of what is used."""

    def __init__(self, one: RunHistory, figures: SharedFigures, *, dark: bool) -> None:
        self._run = one
        self._shown: tuple[object, str] = (None, "")
        self._ranks = _Table(RANK_COLUMNS, key="rank")
        self._gpus = _Table(GPU_COLUMNS, key="id")
        names = one.log_names()
        with ui.row().classes("items-center gap-3 w-full"):
            self._name = ui.select(names, value=names[0] if names else None, label="log")
            self._name.style("min-width: 9rem")
            self._search = ui.input("search").props("clearable dense debounce=300")
            self._follows = ui.switch("follow", value=True)
            self._note = ui.label("").classes("ddp-small")
        with ui.element("div").classes("ddp-log").props("tabindex=0 role=log") as self._box:
            self._text = ui.label("").classes("ddp-mono ddp-log-text")
        self._curves = CurvesPanel(one, figures, dark=dark, of_use=True)

    async def update(self, *, dark: bool) -> None:
        """Bring all up to date."""
        own = self._run.metrics.curves.newest("step_s")
        state = self._run.state
        self._ranks.show(rank_rows(state.ranks, own_s=own, slow=state.stragglers))
        self._gpus.show(gpu_rows(state.gpus))
        await self._log()
        await self._curves.update(dark=dark)

    async def _log(self) -> None:
        names = self._run.log_names()
        if names != self._name.options:
            self._name.set_options(names, value=self._name.value or (names[0] if names else None))
        name, search = self._name.value, str(self._search.value or "")
        is_other = (name, search) != self._shown
        if name not in names or not (self._follows.value or is_other):
            return
        self._shown = (name, search)
        path = self._run.folder / name
        lines = await run.io_bound(last_lines, path, search=search) or []
        text = "\n".join(lines)
        if text == self._text.text:
            return
        self._text.set_text(text)
        self._note.set_text(f"the newest {LINES_MAX} lines" if len(lines) == LINES_MAX else "")
        if self._follows.value:
            ui.run_javascript(_AT_END.format(id=self._box.id))


class _Table:
    """Rows that are sent where they change; columns that say nothing are left out, and all of an empty one."""

    def __init__(self, columns: Columns, *, key: str) -> None:
        self._columns = columns
        self._table = ui.table(columns=[], rows=[], row_key=key).classes("w-full")
        self._table.props("flat dense hide-pagination :rows-per-page-options=[0]")
        self._table.set_visibility(False)

    def show(self, rows: list[dict[str, Any]]) -> None:
        if rows == self._table.rows:
            return
        self._table.set_visibility(bool(rows))
        self._table.columns = [
            {"name": key, "label": label, "field": key, "align": "left", "sortable": True}
            for key, label in shown_columns(self._columns, rows)
        ]
        self._table.rows = rows
        self._table.update()
