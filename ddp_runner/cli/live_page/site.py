"""Puts the live page together and serves it until it is interrupted. The only module that starts a server."""

from __future__ import annotations

import signal
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from nicegui import ui

from ddp_runner.cli.live_page.access import ACTIONS, Access
from ddp_runner.cli.live_page.frame_of_page import Frame
from ddp_runner.cli.live_page.known_runs import KnownRuns
from ddp_runner.cli.live_page.one_run import OneRun
from ddp_runner.cli.live_page.overview import Overview
from ddp_runner.system.run_holder import signal_holder

_SIGNALS = {"save": signal.SIGUSR2, "stop": signal.SIGINT}
_SAYS = {
    "save": "asked to save after this step",
    "stop": "asked to stop after this step; it saves",
}


def serve(root: Path, *, host: str, port: int, token: str, is_open: bool) -> None:
    """Serve the runs in ``root`` until SIGINT or SIGTERM."""
    app = site(KnownRuns(root))
    guarded = Access(app, token=token, port=port, is_open=is_open)
    # A run of this program may be in the same terminal: nothing but trouble is printed.
    uvicorn.run(guarded, host=host, port=port, log_level="error", ws_ping_interval=20.0)


def site(runs: KnownRuns) -> FastAPI:
    """The application without its guard."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    async def overview() -> None:
        ui.page_title("runs")
        await Overview(runs).build()

    async def one_run(key: str) -> None:
        found = runs.get(key)
        ui.page_title(found.name if found else "no such run")
        if found is None:
            Frame("There is no such run", home=True)
        else:
            await OneRun(key, found).build()

    async def act(request: Request) -> PlainTextResponse:
        key, what = request.path_params["key"], request.path_params["what"]
        found = runs.get(key)
        if found is None or what not in _SIGNALS:
            return PlainTextResponse("there is no such run, or nothing such to do", 404)
        found.read_status()
        if not signal_holder(found.folder, found.state.pid, _SIGNALS[what]):
            return PlainTextResponse("the run is not alive on this machine", 409)
        return PlainTextResponse(_SAYS[what])

    app.add_route(ACTIONS + "{key}/{what}", act, methods=["POST"])
    ui.page("/")(overview)
    ui.page("/run/{key}")(one_run)
    ui.run_with(app, title="ddp_runner", show_welcome_message=False, reconnect_timeout=10.0)
    return app
