"""The ranks as they stand, and their logs, followed live and searched. A log's lines are text, whatever they hold."""

from __future__ import annotations

from typing import Any

from nicegui import run, ui

from ddp_runner.observe.format import byte_size, count, duration, percent, rate
from ddp_runner.observe.history.json_lines import number, whole
from ddp_runner.observe.history.log_lines import LINES_MAX, last_lines
from ddp_runner.observe.history.run_history import RunHistory

_COLUMNS = (
    ("rank", "rank"),
    ("state", "state"),
    ("step", "step"),
    ("phase", "phase"),
    ("device", "device"),
    ("memory", "memory"),
    ("samples", "samples/s"),
    ("wait", "data wait"),
    ("own", "own time a step"),
)
_AT_END = "const e = getHtmlElement({id}); if (e) e.scrollTop = e.scrollHeight"


class RanksPanel:
    """A table, and below it one log."""

    def __init__(self, one: RunHistory) -> None:
        self._run = one
        self._shown: tuple[object, str] = (None, "")
        columns = [
            {"name": key, "label": label, "field": key, "align": "left", "sortable": True}
            for key, label in _COLUMNS
        ]
        self._table = ui.table(columns=columns, rows=[], row_key="rank").classes("w-full")
        self._table.props("flat dense hide-pagination :rows-per-page-options=[0]")
        names = one.log_names()
        with ui.row().classes("items-center gap-3 w-full"):
            self._name = ui.select(names, value=names[0] if names else None, label="log")
            self._name.style("min-width: 9rem")
            self._search = ui.input("search").props("clearable dense debounce=300")
            self._follows = ui.switch("follow", value=True)
            self._note = ui.label("").classes("ddp-small")
        with ui.element("div").classes("ddp-log").props("tabindex=0 role=log") as self._box:
            self._text = ui.label("").classes("ddp-mono ddp-log-text")

    async def update(self) -> None:
        """Bring both up to date."""
        rows = self._rows()
        if rows != self._table.rows:
            self._table.rows = rows
            self._table.update()
        await self._log()

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

    def _rows(self) -> list[dict[str, Any]]:
        own = self._run.metrics.curves.newest("step_s")
        return [_row(rank, own) for rank in self._run.state.ranks]


def _row(rank: Any, own: dict[int, float]) -> dict[str, Any]:
    number_ = whole(rank.get("rank"), 0)
    samples, wait = number(rank.get("samples_per_s")), number(rank.get("data_wait_share"))
    own_s = own.get(number_)
    phase = str(rank.get("building") or rank.get("phase", ""))
    age_s = number(rank.get("phase_age_s")) or 0.0
    return {
        "rank": number_,
        "state": str(rank.get("state", "")),
        "step": count(whole(rank.get("step"), 0)),
        "phase": f"{phase} {duration(age_s)}" if age_s >= 2 else phase,
        "device": str(rank.get("device", "")),
        "memory": byte_size(whole(rank.get("rss_bytes"), 0)),
        "samples": "-" if samples is None else rate(samples),
        "wait": "-" if wait is None else percent(wait),
        "own": "-" if own_s is None else f"{own_s * 1e3:.1f} ms",
    }
