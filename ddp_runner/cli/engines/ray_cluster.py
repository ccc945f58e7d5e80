"""Ray's cluster, as the driver finds it: how it is reached, what machines it has, and what Ray itself may say."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from ddp_runner import start
from ddp_runner.core.errors import BadInputError
from ddp_runner.core.placing import ENGINE, RAY, Machine

_ANSWERS_S = 5.0


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def quiet(*, shows: bool) -> Iterator[None]:
    """Ray prints of each lost machine a page of its internals, from a thread; they are in its logs as well."""
    if shows:
        yield
        return
    with contextlib.redirect_stdout(_Nowhere()):
        yield


def machines(ray: ModuleType) -> list[Machine]:
    """Return the machines that are alive, as far as Ray knows."""
    return [
        Machine(
            key=node["NodeID"],
            name=node["NodeManagerHostname"] or node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def connected() -> ModuleType:
    """Ray, with a connection to the cluster that is there. Raises BadInputError."""
    _refuse_address(os.environ.get("RAY_ADDRESS", ""))
    try:
        ray = import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != RAY:
            raise
        wanted = "`pip install 'ddp_runner[ray]'`"
        if start.IS_CHECKOUT:
            wanted = f"`{start.COMMAND} environment --extra ray`, or `pip install 'ray>=2.40,<3'`"
        expected = f"ray is not installed for {sys.executable}: {wanted}"
        raise BadInputError(ENGINE, RAY, expected) from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        expected = (
            "no Ray cluster was found: `ray start --head` starts one, or RAY_ADDRESS names it"
        )
        raise BadInputError(ENGINE, RAY, expected) from error
    except RuntimeError as error:  # such as another version of Ray, or of Python
        raise BadInputError(ENGINE, RAY, " ".join(str(error).split())) from error
    return ray


def _refuse_address(address: str) -> None:
    """Ray itself would try for minutes."""
    if address in ("", "auto"):
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        expected = "must be HOST:PORT of the cluster; from outside of it take `ray job submit`"
        raise BadInputError("RAY_ADDRESS", address, expected)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_S).close()
    except (OSError, OverflowError) as error:
        expected = f"no Ray cluster answers there: {error}"
        raise BadInputError("RAY_ADDRESS", address, expected) from error
