"""A supervisor that an engine has placed, as its driver sees it: its phase, and its output."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO, TypedDict

LINES_MAX = 10  # of what another machine's supervisor wrote before it ended


class Look(TypedDict):
    """The answer of an actor: pieces of output (1) and errors (2), the exit code, the owner of the checkpoints."""

    written: Sequence[tuple[int, bytes]]
    code: int | None
    owner: str


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
