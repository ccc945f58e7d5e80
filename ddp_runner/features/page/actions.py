"""Performs a page's actions, each by POST and with the token: save, stop, inject, verify, start. Draws nothing."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse

from ddp_runner.features.page.access import ACTIONS
from ddp_runner.features.page.known_runs import KnownRuns
from ddp_runner.features.page.run_starter import RunStarter
from ddp_runner.features.page.verification import Verifications
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.observe.format import printable
from ddp_runner.observe.history.json_lines import whole
from ddp_runner.observe.history.run_history import RunHistory
from ddp_runner.system.run_holder import signal_below_holder, signal_holder

_BODY_BYTES_MAX = 1 << 20
_SIGNALS = {"save": signal.SIGUSR2, "stop": signal.SIGINT, "end": signal.SIGQUIT}
_SAYS = {
    "save": "asked to save after this step",
    "stop": "asked to stop after this step; it saves",
    "end": "asked to end at once",
}
# As --inject calls them; of a loader its first worker.
INJECTIONS = {
    "kill": ("end a rank (SIGKILL)", signal.SIGKILL),
    "stop": ("stop a rank (SIGSTOP)", signal.SIGSTOP),
    "loader_kill": ("end a loader worker of it (SIGKILL)", signal.SIGKILL),
    "loader_stop": ("stop a loader worker of it (SIGSTOP)", signal.SIGSTOP),
}


class Actions:
    """``starter`` None: no run is started from here."""

    def __init__(
        self,
        app: FastAPI,
        runs: KnownRuns,
        verified: Verifications,
        *,
        can_inject: bool,
        starter: RunStarter | None,
    ) -> None:
        self._runs = runs
        self._verified = verified
        self._can_inject = can_inject
        self._starter = starter
        app.add_route(ACTIONS + "start", self._start, methods=["POST"])
        app.add_route(ACTIONS + "{key}/{what}", self._act, methods=["POST"])

    async def _act(self, request: Request) -> PlainTextResponse:
        key, what = request.path_params["key"], request.path_params["what"]
        found = self._runs.get(key)
        is_known = what in (*_SIGNALS, "verify") or (what == "inject" and self._can_inject)
        if found is None or not is_known:
            return PlainTextResponse("there is no such run, or nothing such to do", 404)
        if what == "verify":
            return self._verify(found)
        found.read_status()
        if what == "inject":
            return self._inject(found, request.query_params)
        if not signal_holder(found.folder, found.state.pid, _SIGNALS[what]):
            return PlainTextResponse("the run is not alive on this machine", 409)
        return PlainTextResponse(_SAYS[what])

    def _verify(self, found: RunHistory) -> PlainTextResponse:
        folder = found.checkpoint_folder()
        if folder is None:
            return PlainTextResponse("the run names no folder", 409)
        is_begun = self._verified.begin(folder)
        return PlainTextResponse(
            "checkpoints are read: the table shows which are whole"
            if is_begun
            else "this page is reading checkpoints already"
        )

    def _inject(self, found: RunHistory, asked: Mapping[str, str]) -> PlainTextResponse:
        kind, number = asked.get("kind", ""), asked.get("rank", "")
        ranks = {whole(rank.get("rank")): rank for rank in found.state.ranks}
        rank = ranks.get(int(number)) if number.isdecimal() and len(number) < 8 else None
        if kind not in INJECTIONS or rank is None:
            return PlainTextResponse("there is no such fault, or no such rank", 404)
        pid = _first_loader(rank) if kind.startswith("loader") else whole(rank.get("pid"), 0)
        if not signal_below_holder(found.folder, found.state.pid, pid, INJECTIONS[kind][1]):
            return PlainTextResponse(f"rank {number} has no such process on this machine", 409)
        return PlainTextResponse(f"done to rank {number}, process {pid}: {INJECTIONS[kind][0]}")

    async def _start(self, request: Request) -> PlainTextResponse:
        if self._starter is None:
            return PlainTextResponse("no run is started from this page", 404)
        values = await _values(request)
        if values is None:
            return PlainTextResponse("these are no settings", 400)
        try:
            return PlainTextResponse(await self._starter.start(values))
        except (BadInputError, OSError) as error:
            return PlainTextResponse(printable(str(error)), 422)


def _first_loader(rank: Mapping[str, Any]) -> int:
    pids = rank.get("loader_pids")
    return whole(pids[0], 0) if isinstance(pids, list) and pids else 0


async def _values(request: Request) -> dict[str, str] | None:
    """The settings that a form sends; None for anything else."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _BODY_BYTES_MAX:
            return None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    is_it = isinstance(found, dict) and all(isinstance(one, str) for one in found.values())
    return found if is_it else None
