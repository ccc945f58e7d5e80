"""The checkpoints and the settings of a run, and where its time went. Reads names and manifests, no content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nicegui import run, ui

from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.observe.format import byte_size, count, duration, figure, percent
from ddp_runner.observe.history.figures import time_shares
from ddp_runner.observe.history.run_history import RunHistory, SettingRow


class CheckpointsPanel:
    """The files that the run can go on from, newest first."""

    def __init__(self, one: RunHistory) -> None:
        self._folder = one.checkpoint_folder()
        ui.label(f"in {self._folder}" if self._folder else "The run names no folder.").classes(
            "ddp-small"
        )
        names = ("step", "epoch", "size", "loss", "written (UTC)", "state")
        columns = [{"name": n, "label": n, "field": n, "align": "left"} for n in names]
        self._table = ui.table(columns=columns, rows=[], row_key="step").classes("w-full")
        self._table.props("flat dense hide-pagination :rows-per-page-options=[0]")

    async def update(self) -> None:
        """Look again."""
        if self._folder is None:
            return
        rows = await run.io_bound(checkpoint_rows, self._folder) or []
        if rows != self._table.rows:
            self._table.rows = rows
            self._table.update()


def checkpoint_rows(folder: Path) -> list[dict[str, Any]]:
    """The checkpoints of a folder as a table has them."""
    catalog = Catalog(folder)
    try:
        entries, best = catalog.entries(), catalog.best()
    except OSError:
        return []
    rows = []
    for entry in entries:
        manifest = entry.manifest
        is_best = best is not None and best.step == entry.step
        monitored = None if manifest is None else manifest.monitored
        rows.append(
            {
                "step": count(entry.step),
                "epoch": "-" if manifest is None else str(manifest.epoch),
                "size": "-" if manifest is None else byte_size(manifest.size_bytes),
                "loss": "-" if monitored is None else figure(monitored),
                "written (UTC)": "-" if manifest is None else manifest.created_utc[:19],
                "state": entry.problem or ("best" if is_best else "size as in its manifest"),
            }
        )
    return rows


class SettingsPanel:
    """Every setting of the newest launch; what differs from its default first."""

    def __init__(self, one: RunHistory) -> None:
        if one.faults.command:
            ui.label(" ".join(one.faults.command)).classes("ddp-mono")
        search = ui.input("search").props("clearable dense")
        names = ("setting", "value", "default", "differs")
        columns = [{"name": n, "label": n, "field": n, "align": "left"} for n in names]
        rows = [_setting(row) for row in one.settings()]
        table = ui.table(columns=columns, rows=rows, row_key="setting").classes("w-full")
        table.props("flat dense wrap-cells hide-pagination :rows-per-page-options=[0]")
        search.bind_value_to(table, "filter")


def _setting(row: SettingRow) -> dict[str, str]:
    return {
        "setting": row.key,
        "value": _written(row.value),
        "default": _written(row.default),
        "differs": "≠ differs" if row.differs else "",
    }


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "(empty)"
    return "(empty)" if value == "" else str(value)


def draw_time_shares(one: RunHistory) -> None:
    """Bars of where the time of a run that has ended went."""
    shares = time_shares(one.summary)
    total = sum(seconds for _, seconds in shares)
    if not total:
        return
    ui.label("Where the time went").classes("text-subtitle1 text-weight-medium")
    with ui.column().classes("w-full gap-1").style("max-width: 640px"):
        for what, seconds in shares:
            with ui.row().classes("w-full no-wrap items-center gap-2"):
                ui.label(what).style("width: 7rem")
                bar = ui.linear_progress(seconds / total, show_value=False, size="12px")
                bar.classes("col").props("instant-feedback")
                ui.label(f"{duration(seconds)} ({percent(seconds / total)})").style("width: 8rem")
