"""How a rank in a test joins a generation; used inside the processes of tests.processes."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import torch

from ddp_runner.kernel.group.abort import AbortSwitch
from ddp_runner.kernel.group.group import Membership, joined
from ddp_runner.kernel.group.tcp_store import StoreLink
from tests.processes import poll

CPU = torch.device("cpu")
STORE_TIMEOUT_S = 20.0
GONE_WITHIN_S = 30.0
SECRET = "of these ranks alone"


_links: dict[int, StoreLink] = {}


def link_to(port, *, timeout_s=STORE_TIMEOUT_S):
    """This process's way to the store on ``port``, kept from generation to generation."""
    if port not in _links:
        _links[port] = StoreLink("127.0.0.1", port, timeout_s=timeout_s)
    return _links[port]


def membership(me, *, generation=1, world_size=None, secret=SECRET):
    """The membership of this rank in ``generation``."""
    size = world_size or me.world_size
    return Membership(
        generation=generation,
        rank=me.rank,
        world_size=size,
        local_rank=me.rank,
        local_world_size=size,
        secret=secret,
    )


def join(
    me,
    port,
    *,
    generation=1,
    switch=None,
    timeout_s=20.0,
    world_size=None,
    secret=SECRET,
    backend="gloo",
):
    """Be a member of ``generation`` for the length of the block; port 0: a world of one."""
    return joined(
        membership(me, generation=generation, world_size=world_size, secret=secret),
        link=link_to(port),
        backend=backend,
        device=CPU,
        timeout_s=timeout_s,
        switch=switch or AbortSwitch(),
    )


def trip_when_asked(me, switch):
    """Trip ``switch`` from another thread when the test says so; gives a list for the moment."""
    moments = []

    def wait_and_trip():
        me.hear()
        moments.append(time.monotonic())
        switch.trip()

    threading.Thread(target=wait_and_trip, name="trip", daemon=True).start()
    return moments


def freed_after_s(moments):
    """Seconds from the trip until now; 0 where a peer's leaving was faster than our own trip."""
    now_s = time.monotonic()
    poll(lambda: moments, what="the trip")
    return max(0.0, now_s - moments[0])


def is_stopped(process):
    """Whether SIGSTOP has done its work."""
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def held():
    """How many descriptors and threads this process has."""
    return tuple(len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task"))


def held_once_left():
    """The same, when nothing of a generation that broke is left."""
    poll(
        lambda: not any(thread.name in ("leave", "trip") for thread in threading.enumerate()),
        what="the end of what was left",
    )
    # A thread that has ended stands in /proc a moment longer.
    by_s = time.monotonic() + GONE_WITHIN_S
    while held()[1] > threading.active_count() and time.monotonic() < by_s:
        time.sleep(0.002)
    return held()
