"""What a page that is looked at costs: steps per second and the page's share of a core, with viewers and without.

Run by hand, with the extra ``page``: ``python benchmarks/page_viewers.py [--viewers 10] [--rounds 8]``. A run
has ``--page``; by turns nobody looks on, and so many viewers have its curves open. A viewer fetches the page
and keeps the socket that a browser does, with its answers; it draws nothing, as browsers do that elsewhere.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import multiprocessing
import os
import re
import statistics
import time
import uuid
from html import unescape
from urllib.parse import urlencode

import psutil
from contenders import SIZES, Contender, end_by_signal, machine, show_machine

STEPS_FOR_EVER = 10**7
WARM_UP_LINES = 20
SETTLE_S = 3.0
_LINK = re.compile(r"page: (http://127\.0\.0\.1:\d+)/run/~\?token=")
_QUERY = re.compile(r"query: (\{.*?\}),\n")


async def _view(base: str, counts: dict[str, int]) -> None:
    """One viewer, until it is cancelled."""
    import aiohttp
    import socketio

    async with aiohttp.ClientSession() as session:
        async with session.get(f"{base}/run/~") as answer:
            text = await answer.text()
        query = ast.literal_eval(unescape(_QUERY.search(text)[1]))
        ids = {name: str(uuid.uuid4()) for name in ("document_id", "tab_id")}
        query |= {**ids, "old_tab_id": ids["tab_id"], "implicit_handshake": "true"}
        socket = socketio.AsyncClient()

        async def script(message: dict) -> None:
            counts["updates"] += 1
            counts["bytes"] += len(message["code"])
            if "request_id" in message:
                named = {"client_id": query["client_id"], "request_id": message["request_id"]}
                await socket.emit("javascript_response", {**named, "result": False})

        async def update(message: dict) -> None:
            counts["updates"] += 1
            counts["bytes"] += len(json.dumps(message))

        socket.on("run_javascript", script)
        socket.on("update", update)
        await socket.connect(
            f"{base}?{urlencode(query)}",
            headers={"Origin": base},
            socketio_path="_nicegui_ws/socket.io",
            transports=["websocket"],
        )
        try:
            await asyncio.sleep(3600)
        finally:
            await socket.disconnect()


async def _view_all(base: str, viewers: int, seconds: float) -> dict[str, int]:
    counts = {"updates": 0, "bytes": 0}
    tasks = [asyncio.create_task(_view(base, counts)) for _ in range(viewers)]
    done, _ = await asyncio.wait(tasks, timeout=seconds)
    for task in done:
        task.result()  # a viewer that could not look on has counted nothing
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return counts


def _look_on(base: str, viewers: int, seconds: float, results: multiprocessing.Queue) -> None:
    os.nice(19)
    results.put(asyncio.run(_view_all(base, viewers, seconds)))


def _slice(run: Contender, page: psutil.Process, slice_s: float) -> tuple[float, float]:
    """(steps per second, the page's share of a core) over that time from now."""
    began_s, before = time.time(), page.cpu_times()
    time.sleep(slice_s)
    after = page.cpu_times()
    used_s = after.user + after.system - before.user - before.system
    found = [one for one in run.intervals() if one.ended_s - one.duration_s >= began_s]
    return sum(one.steps for one in found) / sum(one.duration_s for one in found), used_s / slice_s


def main() -> None:
    """Print both, with the ratio of each round."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    args = parser.parse_args()
    end_by_signal()
    show_machine(machine())
    settings = ("--page", "log.page_port=18080")
    rates: dict[int, list[float]] = {0: [], args.viewers: []}
    shares: dict[int, list[float]] = {0: [], args.viewers: []}
    sent = []
    with Contender("ddp_runner", SIZES[args.size], steps=STEPS_FOR_EVER, settings=settings) as run:
        run.wait_for_lines(WARM_UP_LINES)
        base = _LINK.search(run.said())[1]
        (page,) = [one for one in run.tree() if one.name() == "ddp:page"]
        for turn in range(args.rounds):
            order = (0, args.viewers) if turn % 2 else (args.viewers, 0)
            for viewers in order:
                results = multiprocessing.Queue()
                words = (base, viewers, args.seconds + SETTLE_S, results)
                watching = multiprocessing.Process(target=_look_on, args=words)
                if viewers:
                    watching.start()
                time.sleep(SETTLE_S)
                rate, share = _slice(run, page, args.seconds)
                rates[viewers].append(rate)
                shares[viewers].append(share)
                if viewers:
                    sent.append(results.get(timeout=60)["bytes"])
                    watching.join()
    ratios = [on / off for on, off in zip(rates[args.viewers], rates[0], strict=True)]
    for viewers, found in rates.items():
        share = statistics.median(shares[viewers])
        print(
            f"{viewers:3} viewers: {statistics.median(found):.2f} steps/s, page {share:.2%} of a core"
        )
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"steps/s with over without: {middle:.3f} ({low:.3f} to {high:.3f})")
    seconds = args.viewers * (args.seconds + SETTLE_S)
    print(f"each viewer got {statistics.median(sent) / seconds / 1e3:.0f} kB a second")


if __name__ == "__main__":
    main()
