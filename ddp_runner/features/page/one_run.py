"""The view of one run: how it stands, and a tab each for training, timeline, ranks, checkpoints, settings."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

from nicegui import run, ui

from ddp_runner.features.page.access import ACTIONS
from ddp_runner.features.page.actions import INJECTIONS
from ddp_runner.features.page.frame_of_page import Figures, Frame, Plot, set_state, state_badge
from ddp_runner.features.page.panels import (
    CheckpointsPanel,
    CurvesPanel,
    FaultsPanel,
    SettingsPanel,
    TimePanel,
)
from ddp_runner.features.page.shared_figures import SharedFigures, Wanted
from ddp_runner.features.page.verification import Verifications
from ddp_runner.observe.history.figures import Figure, timeline_figure
from ddp_runner.observe.history.json_lines import LINES_MAX, last_lines, whole
from ddp_runner.observe.history.run_history import RunHistory
from ddp_runner.observe.history.table_rows import (
    GPU_COLUMNS,
    RANK_COLUMNS,
    Columns,
    gpu_rows,
    rank_rows,
    shown_columns,
)

_EVERY_S = 0.5
_TIMELINE_EVERY_S = 2.0
_TABS = ("training", "timeline", "ranks", "checkpoints", "settings")
_BUTTON = "dense outline no-caps"
_ACT = """
const answer = await fetch('{path}', {{method: 'POST', credentials: 'same-origin'}});
return (await answer.text()).slice(0, 300);
"""


class OneRun:
    """The page at ``/run/NAME``, for one browser."""

    def __init__(
        self,
        key: str,
        one: RunHistory,
        figures: SharedFigures,
        verified: Verifications,
        *,
        can_inject: bool,
    ) -> None:
        self._figures_of_all = figures
        self._key = key
        self._verified = verified
        self._can_inject = can_inject
        self._run = one

    async def build(self) -> None:
        """Draw it, and keep it up to date."""
        await run.io_bound(self._run.read)
        self._frame = Frame(self._run.state.name, home=True)
        self._head()
        with ui.tabs().props("dense no-caps mobile-arrows outside-arrows align=left") as tabs:
            for name in _TABS:
                ui.tab(name)
        tabs.classes("w-full")
        dark = bool(self._frame.dark.value)
        with ui.tab_panels(tabs, value="training", animated=False).classes(
            "w-full bg-transparent"
        ) as self._tabs:
            with ui.tab_panel("training"):
                self._curves = CurvesPanel(self._run, self._figures_of_all, dark=dark)
                self._faults = FaultsPanel(self._run)
            with ui.tab_panel("timeline"):
                self._timeline = Plot("ddp-timeline")
                ui.label("Ticks mark a new process group after a repair.").classes("ddp-small")
                self._times = TimePanel(self._run)
            with ui.tab_panel("ranks"):
                self._ranks = RanksPanel(self._run, self._figures_of_all, dark=dark)
            with ui.tab_panel("checkpoints"):
                self._checkpoints = CheckpointsPanel(
                    self._run, self._verified, verify=lambda: self._ask("verify")
                )
            with ui.tab_panel("settings"):
                SettingsPanel(self._run)
        self._show()
        client = ui.context.client
        await client.connected()
        if client.is_deleted:  # it was no browser: a program that only took the page
            return
        await self._frame.ask_browser()
        await self._update()
        ui.timer(_EVERY_S, self._update, immediate=False)

    def _head(self) -> None:
        with ui.row().classes("items-center gap-2 w-full"):
            self._badge = state_badge()
            self._doing = ui.label("").classes("ddp-small")
            ui.space()
            with ui.row().classes("gap-2") as self._actions:
                ui.button("save now", on_click=lambda: self._ask("save")).props(_BUTTON)
                ui.button("stop", on_click=self._ask_stop).props(_BUTTON)
                if self._can_inject:
                    ui.button("inject", on_click=self._ask_fault).props(_BUTTON)
        self._bar = ui.linear_progress(0.0, show_value=False, size="6px").props(
            'aria-label="Progress"'
        )
        self._figures = Figures()

    async def _ask_stop(self) -> None:
        with ui.dialog() as dialog, ui.card():
            ui.label("Stop after this step? The run saves; run the same command again to resume.")
            ui.label(
                "Stop now? The run does not save; the same command resumes from its newest checkpoint."
            ).classes("ddp-small")
            with ui.row():
                ui.button("stop", on_click=lambda: dialog.submit("stop")).props("no-caps")
                ui.button("stop now", on_click=lambda: dialog.submit("end")).props(_BUTTON)
                ui.button("go on", on_click=lambda: dialog.submit("")).props("flat no-caps")
        if what := await dialog:
            await self._ask(str(what))

    async def _ask_fault(self) -> None:
        ranks = [whole(rank.get("rank")) for rank in self._run.state.ranks]
        with ui.dialog() as dialog, ui.card():
            ui.label("Cause a fault, to see it repaired")
            kinds = {kind: says for kind, (says, _) in INJECTIONS.items()}
            kind = ui.select(kinds, value="kill", label="fault").classes("w-full")
            rank = ui.select(ranks, value=ranks[-1] if ranks else None, label="rank")
            with ui.row():
                ui.button("do it", on_click=lambda: dialog.submit(True)).props("no-caps")
                ui.button("leave it", on_click=lambda: dialog.submit(False)).props("flat no-caps")
        if await dialog:
            await self._ask(f"inject?kind={kind.value}&rank={rank.value}")

    async def _ask(self, what: str) -> None:
        path = f"{ACTIONS}{quote(self._key, safe='')}/{what}"
        answer = await ui.run_javascript(_ACT.format(path=path), timeout=10.0)
        ui.notify(str(answer))

    async def _update(self) -> None:
        if self._run.is_due:
            await run.io_bound(self._run.read)
        if self._tabs.is_deleted:  # the browser has gone on meanwhile
            return
        self._show()
        dark = bool(self._frame.dark.value)
        match self._tabs.value:
            case "training":
                self._faults.update()
                await self._curves.update(dark=dark)
            case "timeline":
                await self._draw_timeline(dark=dark)
                self._times.update()
            case "ranks":
                await self._ranks.update(dark=dark)
            case "checkpoints":
                await self._checkpoints.update()

    def _show(self) -> None:
        state = self._run.state
        set_state(self._badge, state.what)
        doing = " · ".join(
            one for one in (f"stage {state.stage}" if state.stage else "", state.doing) if one
        )
        if self._doing.text != doing:
            self._doing.set_text(doing)
        share = min(1.0, state.step / state.max_steps) if state.max_steps > 0 else 0.0
        if abs(self._bar.value - share) > 1e-4:
            self._bar.set_value(share)
        self._actions.set_visibility(state.is_live)
        self._figures.set(state.shown)

    async def _draw_timeline(self, *, dark: bool) -> None:
        tick = int(time.time() / _TIMELINE_EVERY_S) if self._run.state.is_live else 0
        wanted = Wanted(
            key=(self._run.folder, "timeline", dark),
            at_once=(len(self._run.timeline.spans), self._run.timeline.last_s, tick),
        )
        drawn = self._figures_of_all.known(wanted) or await run.io_bound(
            self._figures_of_all.get, wanted, lambda: (self._timeline_figure(dark), False)
        )
        if drawn is not None and not self._timeline.is_deleted:
            self._timeline.show(drawn)

    def _timeline_figure(self, dark: bool) -> Figure:
        timeline = self._run.timeline
        now_s = time.time() if self._run.state.is_live else timeline.last_s
        return timeline_figure(timeline, dark=dark, now_s=now_s, nodes=self._run.nodes)


# The ranks and devices as they stand, what they use over time, and their logs, followed live
# and searched. A log's lines are text, whatever they hold.

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
