"""Ray's cluster as its driver sees it: how it is reached, its machines, and the supervisor on each of them."""

from __future__ import annotations

import contextlib
import enum
import io
import os
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, TextIO, TypedDict

from ddp_runner.cli.extras import how_to_install
from ddp_runner.features.machines.rules.node_options import ENGINE
from ddp_runner.features.ray.rules import RAY, Machine
from ddp_runner.kernel.rules.errors import BadInputError

_ANSWERS_S = 5.0
LINES_MAX = 10  # of what another machine's supervisor wrote before it ended


class Phase(enum.Enum):
    """The phases of a placed supervisor."""

    INTRODUCING = "introducing"  # the actor is to say who it is, once it is somewhere
    READY = "ready"  # it may begin when due
    BEGINNING = "beginning"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """The driver's output streams, which stay even if other code replaces the streams of these names."""

    out: TextIO
    err: TextIO

    def say(self, text: str) -> None:
        """A line for people."""
        self.out.write(f"{text}\n")
        self.out.flush()

    def pass_on(self, stream: int, written: bytes) -> None:
        """Output (1) or errors (2), as they are."""
        out = self.out if stream == 1 else self.err
        out.buffer.write(written)
        out.buffer.flush()


@dataclass(slots=True, kw_only=True, eq=False)
class Seat:
    """One placed supervisor. ``number``: 0 is the coordinator's. ``handle``: of the actor.

    ``answer``: the call that the driver waits for. ``found``: how it introduced itself. ``code``: how its
    supervisor has ended, until another one begins.
    """

    number: int
    handle: Any
    terminal: Terminal
    phase: Phase = Phase.INTRODUCING
    answer: Any = None
    found: Mapping[str, Any] = field(default_factory=dict)
    has_begun: bool = False
    code: int | None = None
    due_s: float = 0.0
    ended_at_s: list[float] = field(default_factory=list)
    _lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES_MAX))
    _rest: dict[int, bytes] = field(default_factory=dict)  # of a line that has not ended

    @property
    def name(self) -> str:
        """The seat's name for people."""
        host = self.found.get("host", "")
        return f"machine {self.number}{f' ({host})' if host else ''}"

    @property
    def is_running(self) -> bool:
        """True if there is a supervisor that can be asked to stop."""
        return self.phase in (Phase.BEGINNING, Phase.RUNNING)

    def await_(self, phase: Phase, answer: Any) -> None:
        """It has been asked for something."""
        self.phase, self.answer = phase, answer

    def ready(self, due_s: float) -> None:
        """It may begin from then on."""
        self.phase, self.due_s = Phase.READY, due_s

    def show(self, stream: int, written: bytes) -> None:
        """The coordinator's as it is; of another one its errors, by line."""
        if self.number == 0:
            self.terminal.pass_on(stream, written)
            return
        *lines, self._rest[stream] = (self._rest.get(stream, b"") + written).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if stream == 1:
                self._lines.append(text)
            else:
                self.terminal.err.write(f"{self.name}: {text}\n")

    def show_rest(self) -> None:
        """Show the last lines that it wrote."""
        for line in self._lines:
            self.terminal.say(f"{self.name}: {line}")
        self._lines.clear()


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
        expected = how_to_install(RAY, "ray>=2.40,<3", extra="ray")
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


class Look(TypedDict):
    """The answer of an actor: pieces of output (1) and errors (2), the exit code, the owner of the checkpoints."""

    written: Sequence[tuple[int, bytes]]
    code: int | None
    owner: str
