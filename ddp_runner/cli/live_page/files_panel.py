"""The checkpoints and the settings of a run, and where its time went."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from nicegui import run, ui

from ddp_runner.cli.live_page.verification import COLUMNS, Verifications, checkpoint_rows
from ddp_runner.observe.format import duration, percent, setting_value
from ddp_runner.observe.history.run_history import RunHistory, SettingRow
from ddp_runner.observe.reports.text_report import time_parts


class CheckpointsPanel:
    """The files that the run can go on from, newest first. ``verify``: what a button asks for."""

    def __init__(
        self, one: RunHistory, verified: Verifications, *, verify: Callable[[], Awaitable[None]]
    ) -> None:
        self._folder = one.checkpoint_folder()
        self._verified = verified
        ui.label(f"in {self._folder}" if self._folder else "The run names no folder.").classes(
            "ddp-small"
        )
        if self._folder is not None:
            button = ui.button("verify all", on_click=verify).props("dense outline no-caps")
            button.tooltip("read each file whole, and compare it with its manifest")
        columns = [{"name": n, "label": n, "field": n, "align": "left"} for n in COLUMNS]
        self._table = ui.table(columns=columns, rows=[], row_key="step").classes("w-full")
        self._table.props("flat dense hide-pagination :rows-per-page-options=[0]")

    async def update(self) -> None:
        """Look again."""
        if self._folder is None:
            return
        rows = await run.io_bound(checkpoint_rows, self._folder, self._verified) or []
        if rows != self._table.rows:
            self._table.rows = rows
            self._table.update()


class SettingsPanel:
    """Every setting of the newest launch; what differs from its default first."""

    def __init__(self, one: RunHistory) -> None:
        if one.faults.command:
            ui.label(" ".join(one.faults.command)).classes("ddp-mono")
        search = ui.input("search").props("clearable dense")
        names = ("setting", "value", "default", "differs")
        columns = [{"name": n, "label": n, "field": n, "align": "left"} for n in names]
        rows = [_setting(row) for row in one.settings()]
        table = ui.table(columns=columns, rows=rows, row_key="setting").classes("w-full ddp-wraps")
        table.props("flat dense wrap-cells hide-pagination :rows-per-page-options=[0]")
        search.bind_value_to(table, "filter")


def _setting(row: SettingRow) -> dict[str, str]:
    return {
        "setting": row.key,
        "value": setting_value(row.value),
        "default": setting_value(row.default),
        "differs": "≠" if row.differs else "",
    }


class TimePanel:
    """Bars of where the time went so far."""

    def __init__(self, one: RunHistory) -> None:
        self._run = one
        self._bars: dict[str, tuple[ui.linear_progress, ui.label]] = {}
        self._title = ui.label("Where the time went").classes("text-subtitle1 text-weight-medium")
        self._place = ui.column().classes("w-full gap-1").style("max-width: 640px")
        self.update()

    def update(self) -> None:
        """Bring them up to date; what has not changed is not sent."""
        shares = time_parts(self._run.state.time_s)
        total = sum(seconds for _, seconds in shares)
        self._title.set_visibility(bool(shares))
        if [name for name, _ in shares] != list(self._bars):
            self._place.clear()
            with self._place:
                self._bars = {name: _bar(name) for name, _ in shares}
        for name, seconds in shares:
            bar, label = self._bars[name]
            text = f"{duration(seconds)} ({percent(seconds / total)})"
            if label.text != text:
                label.set_text(text)
                bar.set_value(seconds / total)


def _bar(name: str) -> tuple[ui.linear_progress, ui.label]:
    with ui.row().classes("w-full no-wrap items-center gap-2"):
        ui.label(name).style("width: 7rem")
        bar = ui.linear_progress(0.0, show_value=False, size="12px")
        bar.classes("col").props("instant-feedback")
        return bar, ui.label("").style("width: 8rem")
