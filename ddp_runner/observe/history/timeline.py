"""Makes spans of each rank from the events: when it trained, waited, or was lost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddp_runner.observe.history.json_lines import epoch_s, whole

STARTS, TRAINS, WAITS, GONE = "starting", "training", "waiting for a repair", "lost"
SPANS_MAX = 20_000
_RANKS_MAX = 4_096
_ENDS_IT = ("rank_killed", "rank_exited", "rank_raised", "node_lost")


@dataclass(slots=True, kw_only=True)
class Span:
    """A rank did ``what`` from ``begin_s`` to ``end_s`` (seconds since 1970; None: until now)."""

    rank: int
    what: str
    begin_s: float
    end_s: float | None = None
    text: str = ""


@dataclass(slots=True, kw_only=True)
class Timeline:
    """Fed with the events in their order. ``generations``: when each began to train."""

    spans: list[Span] = field(default_factory=list)
    generations: list[tuple[float, int]] = field(default_factory=list)
    last_s: float = 0.0  # of the newest event
    _open: dict[int, Span] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event."""
        at_s = epoch_s(event.get("utc"))
        if at_s is None:
            return
        match event.get("event"):
            case "run_begins":
                self._begin(event, at_s)
            case "world_formed" | "repaired":
                for one in list(self._open):
                    self._turn(one, TRAINS, at_s)
                self.generations.append((at_s, whole(event.get("generation"), 0)))
            case "fault":
                self._fault(event, at_s)
            case "plan":
                self._plan(event, at_s)
            case "rank_formed":
                self._formed(whole(event.get("rank")), at_s)
            case "run_ends":
                self._end_all(at_s)
        self.last_s = at_s

    def _begin(self, event: Mapping[str, Any], at_s: float) -> None:
        self._end_all(self.last_s or at_s)
        for one in range(min(_RANKS_MAX, whole(event.get("world_size"), 0))):
            self._turn(one, STARTS, at_s)

    def _formed(self, rank: int, at_s: float) -> None:
        span = self._open.get(rank)
        if 0 <= rank < _RANKS_MAX and (span is None or span.what == GONE):
            self._turn(rank, WAITS, at_s)

    def _fault(self, event: Mapping[str, Any], at_s: float) -> None:
        text, rank = str(event.get("text", "")), whole(event.get("rank"))
        if event.get("cause") is None:
            for one, span in list(self._open.items()):
                if span.what == TRAINS:
                    self._turn(one, WAITS, at_s, text)
        if rank in self._open and event.get("kind") in _ENDS_IT:
            self._turn(rank, GONE, at_s, text)

    def _plan(self, event: Mapping[str, Any], at_s: float) -> None:
        for key in ("replaced", "dropped"):
            ranks = event.get(key)
            for one in ranks if isinstance(ranks, list) else []:
                if one in self._open and self._open[one].what != GONE:
                    self._turn(one, GONE, at_s, self._open[one].text)
                if key == "dropped" and one in self._open:
                    self._open.pop(one).end_s = at_s

    def _turn(self, rank: int, what: str, at_s: float, text: str = "") -> None:
        now = self._open.get(rank)
        if now is not None:
            if now.what == what:
                return
            now.end_s = at_s
            if now.begin_s == at_s and self.spans and now in self.spans[-64:]:
                self.spans.remove(now)
        self._open[rank] = Span(rank=rank, what=what, begin_s=at_s, text=text)
        if len(self.spans) >= SPANS_MAX:
            del self.spans[: SPANS_MAX // 10]
        self.spans.append(self._open[rank])

    def _end_all(self, at_s: float) -> None:
        for span in self._open.values():
            span.end_s = at_s
        self._open.clear()
