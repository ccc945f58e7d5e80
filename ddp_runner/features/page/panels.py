"""The panels of one run's page: its curves and faults, its checkpoints and settings, where its time went."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from nicegui import events, run, ui

from ddp_runner.features.page.frame_of_page import Plot
from ddp_runner.features.page.shared_figures import SharedFigures, Wanted
from ddp_runner.features.page.verification import COLUMNS, Verifications, checkpoint_rows
from ddp_runner.observe.format import count, duration, percent, setting_value
from ddp_runner.observe.history.figures import (
    Figure,
    Look,
    curves_figure,
    extent,
    points_max,
)
from ddp_runner.observe.history.run_history import RunHistory, SettingRow
from ddp_runner.observe.history.table_rows import FaultRow
from ddp_runner.observe.summary import time_parts

_FAULTS_SHOWN_MAX = 200
_ROWS_LOCAL = "%Y-%m-%d %H:%M:%S"


class CurvesPanel:
    """One browser's view of the curves: its smoothing, axis and zoom."""

    def __init__(
        self, one: RunHistory, figures: SharedFigures, *, dark: bool, of_use: bool = False
    ) -> None:
        self._run = one
        self._figures = figures
        self._dark = dark
        self._of_use = of_use
        self._range: tuple[float, float] | None = None
        self._revision = 0
        with ui.row().classes("items-center gap-4"):
            self._axis = ui.toggle({False: "steps", True: "time"}, value=False).props(
                "dense no-caps"
            )
            self._axis.props('aria-label="Axis"').on_value_change(self._show_all)
            with ui.row().classes("gap-0"):
                for icon, says, act in (
                    ("zoom_in", "Zoom in", lambda: self._look_at(0.5, 0.0)),
                    ("zoom_out", "Zoom out", lambda: self._look_at(2.0, 0.0)),
                    ("chevron_left", "Earlier", lambda: self._look_at(1.0, -0.5)),
                    ("chevron_right", "Later", lambda: self._look_at(1.0, 0.5)),
                    ("zoom_out_map", "All of it", self._show_all),
                ):
                    button = ui.button(icon=icon, on_click=act).props("flat dense")
                    button.props(f'aria-label="{says}"').tooltip(says)
            ui.label("smoothing").classes("ddp-small")
            self._smoothing = ui.slider(min=0, max=0.98, step=0.02, value=0).props("label")
            self._smoothing.style("width: 9rem").props('aria-label="Smoothing"')
            self._note = ui.label("").classes("ddp-small")
        self._plot = Plot("ddp-use" if of_use else "ddp-curves")
        self._plot.on("plotly_relayout", self._zoomed)

    def _show_all(self) -> None:
        self._range = None
        self._revision += 1

    def _look_at(self, factor: float, shift: float) -> None:
        """Another part of the axis: so many times as wide, and moved by a share of its width."""
        first, last = extent(self._run.metrics.curves, by_time=bool(self._axis.value))
        low, high = self._range or (first, last)
        middle, width = (low + high) / 2 + shift * (high - low), (high - low) * factor
        if width >= last - first:
            self._show_all()
            return
        low = min(max(middle - width / 2, first), last - width)
        self._range = (low, low + width)
        self._revision += 1

    def _zoomed(self, event: events.GenericEventArguments) -> None:
        args = event.args if isinstance(event.args, dict) else {}
        low, high = args.get("xaxis.range[0]"), args.get("xaxis.range[1]")
        if isinstance(low, (int, float)) and isinstance(high, (int, float)):
            self._range = (float(low), float(high))
        elif args.get("xaxis.autorange"):
            self._range = None

    async def update(self, *, dark: bool) -> None:
        """Draw again what has changed."""
        self._dark = dark
        look = Look(
            smoothing=float(self._smoothing.value),
            by_time=bool(self._axis.value),
            dark=dark,
            of_use=self._of_use,
            shown=self._range,
            revision=self._revision,
        )
        marks, version = self._run.faults.marks, self._run.version
        at_once = (len(marks), marks[-1] if marks else None)
        wanted = Wanted(key=(self._run.folder, look), at_once=at_once, version=version)
        drawn = self._figures.known(wanted) or await run.io_bound(
            self._figures.get, wanted, lambda: self._figure(look)
        )
        if drawn is None or self._plot.is_deleted:
            return
        self._plot.show(drawn)
        note = "a sample of the logged steps is drawn; zoom in for all of them"
        note = note if drawn.is_sample else ""
        if self._note.text != note:
            self._note.set_text(note)

    def _figure(self, look: Look) -> tuple[Figure, bool]:
        curves = self._run.metrics.curves
        if look.shown is not None and not look.by_time:
            beside = (look.shown[1] - look.shown[0]) / 2
            curves = self._run.metrics.window(look.shown[0] - beside, look.shown[1] + beside)
        is_thinned = curves.is_thinned or curves.longest() > points_max(look)
        return curves_figure(curves, self._run.faults.marks, look), is_thinned


class FaultsPanel:
    """The faults, newest first; each opens to its cause, traceback, plan and what followed."""

    def __init__(self, one: RunHistory) -> None:
        self._run = one
        self._rows: dict[int, _Row] = {}
        self._title = ui.label("Faults").classes("text-subtitle1 text-weight-medium")
        self._place = ui.column().classes("w-full gap-0 ddp-faults").props("role=list")

    def update(self) -> None:
        """Add what is new, and bring the rest up to date."""
        rows = self._run.faults.rows[-_FAULTS_SHOWN_MAX:]
        if self._rows and (not rows or next(iter(self._rows)) < rows[0].id):
            self._place.clear()
            self._rows = {}
        total = len(self._run.faults.rows)
        title = f"Faults: {count(total)}" if total else "Faults: none"
        if self._title.text != title:
            self._title.set_text(title)
        for row in rows:
            if row.id not in self._rows:
                with self._place:
                    self._rows[row.id] = _Row(self._run)
            self._rows[row.id].update(row)


class _Row:
    """What stands in it may change while the incident is open: the culprit is known last. Logs are read once it is opened."""

    def __init__(self, one: RunHistory) -> None:
        self._run = one
        self._fault: FaultRow | None = None
        self._item = ui.expansion(on_value_change=self._opened).classes("w-full ddp-fault")
        self._item.move(target_index=0)
        self._item.props("dense-toggle expand-separator header-class=q-px-xs role=listitem")
        with self._item, ui.column().classes("gap-1 w-full"):
            self._said = ui.label("")
            self._plan = ui.label("")
            ui.label("What followed").classes("ddp-small")
            self._followed = ui.label("").classes("ddp-mono")
            self._title = ui.label("Tracebacks and stacks").classes("ddp-small")
            self._detail = ui.label("").classes("ddp-mono ddp-stacks").props("tabindex=0")
        self._shown: tuple[Any, ...] = ()
        self._stacks: list[tuple[str, str]] = []  # of the logs, once it has been opened

    async def _opened(self) -> None:
        if self._fault is not None and self._item.value:
            self._stacks = await run.io_bound(self._run.stacks, self._fault) or []
            if not self._item.is_deleted:
                self._show_details(self._fault)

    def _show_details(self, row: FaultRow) -> None:
        found = [*row.details, *self._stacks]
        self._title.set_visibility(bool(found))
        self._detail.set_visibility(bool(found))
        text = "\n\n".join(f"{whose}:\n{said}" for whose, said in found)
        if self._detail.text != text:
            self._detail.set_text(text)

    def update(self, row: FaultRow) -> None:
        now = (row.outcome, row.plan, row.text, len(row.followed))
        if now == self._shown:
            return
        self._shown, self._fault = now, row
        when = time.strftime(_ROWS_LOCAL, time.localtime(row.at_s))
        self._item.set_text(f"step {count(max(0, row.step))}: {row.text}")
        self._item.props["caption"] = row.caption
        self._item.update()
        self._said.set_text(f"{when}, {row.said}")
        self._plan.set_text(f"plan: {row.plan or '-'}; {row.outcome}")
        self._followed.set_text("\n".join(row.followed) or "nothing yet")
        self._show_details(row)


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
