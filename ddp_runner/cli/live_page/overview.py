"""The list of runs: those that run first. Reads only their status and summary."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from nicegui import run, ui

from ddp_runner.cli.live_page.frame_of_page import Figures, Frame, set_state, state_badge
from ddp_runner.cli.live_page.known_runs import KnownRuns
from ddp_runner.observe.history.run_history import RunHistory

_EVERY_S = 1.0
_FIGURES = ("step", "loss", "faults", "goodput", "ranks", "time left")


@dataclass(slots=True)
class _Card:
    badge: ui.badge
    bar: ui.linear_progress
    figures: Figures

    def show(self, run_: RunHistory) -> None:
        state = run_.state
        set_state(self.badge, state.what)
        share = min(1.0, state.step / state.max_steps) if state.max_steps > 0 else 0.0
        if abs(self.bar.value - share) > 1e-4:
            self.bar.set_value(share)
        self.figures.set(state.shown)


class Overview:
    """The page at ``/``."""

    def __init__(self, runs: KnownRuns, *, can_start: bool) -> None:
        self._runs = runs
        self._can_start = can_start
        self._order: list[str] = []
        self._cards: dict[str, _Card] = {}

    async def build(self) -> None:
        """Draw it, and keep it up to date."""
        frame = Frame("Runs", home=False)
        if self._can_start:
            ui.link("Start a run", "/start")
        self._place = ui.column().classes("w-full gap-2").props("role=list")
        await self._update()
        client = ui.context.client
        await client.connected()
        if client.is_deleted:  # it was no browser: a program that only took the page
            return
        await frame.ask_browser()
        ui.timer(_EVERY_S, self._update, immediate=False)

    async def _update(self) -> None:
        listed = await run.io_bound(self._runs.listed) or []
        if self._place.is_deleted:  # the browser has gone on meanwhile
            return
        order = [key for key, _ in listed]
        if order != self._order or not order:
            self._order, self._cards = order, {}
            self._place.clear()
            with self._place:
                if not listed:
                    ui.label(f"{self._runs.root} holds no run yet.")
                for key, one in listed:
                    self._cards[key] = _card(key, one)
        for key, one in listed:
            self._cards[key].show(one)


def _card(key: str, one: RunHistory) -> _Card:
    with ui.link(target=f"/run/{quote(key, safe='')}").classes("ddp-card").props("role=listitem"):
        with ui.row().classes("items-center gap-2"):
            ui.label(one.name).classes("text-subtitle1 text-weight-medium")
            badge = state_badge()
            ui.label(one.state.title if one.state.title != one.name else "").classes("ddp-small")
        bar = ui.linear_progress(0.0, show_value=False, size="5px").classes("q-my-xs")
        return _Card(badge, bar, Figures(_FIGURES))
