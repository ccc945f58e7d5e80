"""Puts the live page together and serves it until it is interrupted. The only module that starts a server."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from nicegui import json, ui

from ddp_runner.features.page.access import Access
from ddp_runner.features.page.actions import Actions
from ddp_runner.features.page.all_runs import Overview, StartPage
from ddp_runner.features.page.frame_of_page import Frame
from ddp_runner.features.page.known_runs import KnownRuns
from ddp_runner.features.page.one_run import OneRun
from ddp_runner.features.page.run_starter import RunStarter
from ddp_runner.features.page.shared_figures import SharedFigures
from ddp_runner.features.page.verification import Verifications
from ddp_runner.observe.history.run_history import ROOT

_ANSWERS_WITHIN_S = 60.0  # a huge file is read first, on a machine that may be busy


def serve(
    root: Path,
    listener: socket.socket,
    *,
    token: str,
    is_open: bool,
    can_inject: bool = False,
) -> None:
    """Serve the runs in ``root`` until SIGINT or SIGTERM, on that socket."""
    app = site(KnownRuns(root), can_inject=can_inject)
    guarded = Access(app, token=token, port=listener.getsockname()[1], is_open=is_open)
    # A run of this program may be in the same terminal: nothing but trouble is printed.
    # What is sent is not compressed: that takes longer than the sending.
    config = uvicorn.Config(
        guarded, log_level="error", ws_ping_interval=20.0, ws_per_message_deflate=False
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def site(runs: KnownRuns, *, can_inject: bool) -> FastAPI:
    """The application without its guard."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    # A folder that is a run's own holds no others.
    starter = None if ROOT in runs.all() else RunStarter(runs.root)
    figures, verified = SharedFigures(json.dumps), Verifications()
    Actions(app, runs, verified, can_inject=can_inject, starter=starter)

    async def overview() -> None:
        ui.page_title("runs")
        await Overview(runs, can_start=starter is not None).build()

    async def one_run(key: str) -> None:
        found = runs.get(key)
        ui.page_title(found.name if found else "no such run")
        if found is None:
            Frame("There is no such run", home=True)
        else:
            await OneRun(key, found, figures, verified, can_inject=can_inject).build()

    async def start() -> None:
        ui.page_title("start a run")
        if starter is None:
            Frame("No run is started from this page", home=True)
        else:
            await StartPage(starter).build()

    ui.page("/", response_timeout=_ANSWERS_WITHIN_S)(overview)
    ui.page("/run/{key}", response_timeout=_ANSWERS_WITHIN_S)(one_run)
    ui.page("/start", response_timeout=_ANSWERS_WITHIN_S)(start)
    ui.run_with(app, title="ddp_runner", show_welcome_message=False, reconnect_timeout=10.0)
    return app
