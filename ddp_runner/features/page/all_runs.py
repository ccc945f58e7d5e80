"""The pages of all runs: their list, those that run first, and the form that one is started from.

The list reads only their status and summary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from nicegui import run, ui

from ddp_runner.cli.usage import shown_default
from ddp_runner.config import SettingsError
from ddp_runner.config.fields import FieldSpec, known_fields
from ddp_runner.config.meanings import meanings
from ddp_runner.core.settings.declaration import SWITCH, TEXT
from ddp_runner.features.page.access import ACTIONS
from ddp_runner.features.page.frame_of_page import Figures, Frame, set_state, state_badge
from ddp_runner.features.page.known_runs import KnownRuns
from ddp_runner.features.page.run_starter import SETTINGS, RunStarter
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.observe.history.run_history import RunHistory

_EVERY_S = 1.0
_LEFT_OUT = ("samples/s", "elapsed")
_FIRST = (
    *("run.task", "data.path", "run.name", "run.max_steps", "run.epochs"),
    *("data.batch_size", "optim.learning_rate", "run.nproc_per_node", "run.device"),
)
_WAIT_S = 15.0
_POST = """
const answer = await fetch('{path}', {{method: 'POST', credentials: 'same-origin', body: {body}}});
return [answer.status, (await answer.text()).slice(0, 2000)];
"""


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
        return _Card(badge, bar, Figures(left_out=_LEFT_OUT))


class StartPage:
    """The page at ``/start``, for one browser."""

    def __init__(self, starter: RunStarter) -> None:
        self._starter = starter
        self._inputs: dict[str, Any] = {}

    async def build(self) -> None:
        """Draw it."""
        frame = Frame("Start a run", home=True)
        ui.label("Empty fields keep their default.").classes("ddp-small")
        with ui.element("div").classes("ddp-form"):
            for key in _FIRST:
                self._field(key)
        for section in dict.fromkeys(key.partition(".")[0] for key in SETTINGS):
            keys = [key for key in SETTINGS if key.startswith(f"{section}.") and key not in _FIRST]
            self._section(section, keys)
        with ui.column().classes("w-full gap-1 ddp-command").props("role=status"):
            ui.label("This runs:").classes("ddp-small")
            self._command = ui.label("").classes("ddp-mono")
            self._problem = ui.label("").classes("ddp-mono ddp-problem").props("role=alert")
            with ui.row().classes("items-center gap-3"):
                self._button = ui.button("start", on_click=self._start).props("no-caps")
                ui.link("All runs", "/")
        self._show()
        client = ui.context.client
        await client.connected()
        if not client.is_deleted:
            await frame.ask_browser()

    def _section(self, section: str, keys: list[str]) -> None:
        """Its fields are made when it is opened: a hundred and more are much for a telephone."""
        with ui.expansion(section).classes("w-full").props("dense expand-separator") as item:
            place = ui.element("div").classes("ddp-form")
        is_made = False

        def make() -> None:
            nonlocal is_made
            if not is_made:
                is_made = True
                with place:
                    for key in keys:
                        self._field(key)

        item.on_value_change(make)

    def _field(self, key: str) -> None:
        spec, says = known_fields()[key], meanings().get(key, "")
        label = f"{key} = {shown_default(spec)}"
        with ui.column().classes("gap-0"):
            words = _words(spec)
            if words:
                field: Any = ui.select(["", *words], value="", label=label)
            else:
                field = ui.input(label)
            field.props("dense outlined stack-label").classes("w-full")
            legal = "" if words or spec.written is TEXT else f" Legal: {spec.expected()}."
            ui.label(f"{says}{legal}").classes("ddp-small")
        field.on_value_change(self._show)
        self._inputs[key] = field

    def _values(self) -> dict[str, str]:
        found = {key: str(field.value or "").strip() for key, field in self._inputs.items()}
        return {key: value for key, value in found.items() if value}

    def _show(self) -> None:
        """Show the command, or the problems, each also at its field; nothing is touched yet."""
        problems: tuple[BadInputError, ...] = ()
        try:
            self._command.set_text(self._starter.shown(self._starter.words(self._values())))
        except BadInputError as error:
            problems = error.problems if isinstance(error, SettingsError) else (error,)
        at_field = {_key(one.option): one.expected for one in problems}
        for key, field in self._inputs.items():
            field.error = at_field.get(key)
        self._problem.set_text("\n".join(map(str, problems)))
        self._button.set_enabled(not problems)

    async def _start(self) -> None:
        body = json.dumps(json.dumps(self._values())).replace("<", "\\u003c")
        self._button.set_enabled(False)
        try:
            script = _POST.format(path=f"{ACTIONS}start", body=body)
            status, said = await ui.run_javascript(script, timeout=_WAIT_S)
        except TimeoutError:
            status, said = 0, "no answer came: the list of runs shows whether it has begun"
        self._button.set_enabled(True)
        if status == 200:
            ui.notify(str(said))
            ui.navigate.to("/")
        else:
            self._problem.set_text(str(said))


def _key(option: str) -> str:
    """Return the setting that an error names, as an option or by its key."""
    if not option.startswith("--"):
        return option
    name = option.removeprefix("--").replace("-", "_")
    return next((key for key in SETTINGS if key.rpartition(".")[2] == name), option)


def _words(spec: FieldSpec) -> tuple[str, ...]:
    """The values to choose from, where there is nothing else."""
    if spec.written is SWITCH:
        return ("true", "false", *spec.words)
    return spec.words if spec.written is None else ()
