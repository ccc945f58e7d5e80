"""The figures of a page, made once for all who look at the same, and not too often. Draws nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ddp_runner.observe.history.figures import Figure

_KEPT_MAX = 24
_WAIT_MIN_S = 2.0  # a browser takes a tenth of a second to draw one
_WAIT_TIMES = (
    80  # as long as it took to make: points of a long run may be late, for little of a core
)


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A figure as text. ``is_sample``: not every logged step is in it."""

    text: str
    is_sample: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The wanted figure (``key``), and its time: ``at_once`` must be current, ``version`` may be a little older."""

    key: Hashable
    at_once: Hashable
    version: int = 0


@dataclass(frozen=True, slots=True)
class _Kept:
    drawn: Drawn
    wanted: Wanted
    due_s: float


class SharedFigures:
    """The newest figures by what is looked at. Making one blocks who wants another meanwhile.

    ``encode``: a figure as JSON.
    """

    def __init__(self, encode: Callable[[Figure], str]) -> None:
        self._encode = encode
        self._kept: dict[Hashable, _Kept] = {}
        self._lock = threading.Lock()

    def known(self, wanted: Wanted) -> Drawn | None:
        """The figure, if it need not be made again."""
        kept = self._kept.get(wanted.key)
        if kept is None or kept.wanted.at_once != wanted.at_once:
            return None
        is_late = kept.wanted.version != wanted.version and time.monotonic() >= kept.due_s
        return None if is_late else kept.drawn

    def get(self, wanted: Wanted, make: Callable[[], tuple[Figure, bool]]) -> Drawn:
        """The figure; made where it must be."""
        with self._lock:
            drawn = self.known(wanted)
            if drawn is None:
                began_s = time.thread_time()
                figure, is_sample = make()
                drawn = Drawn(self._encode(figure), is_sample)
                took_s = time.thread_time() - began_s
                due_s = time.monotonic() + max(_WAIT_MIN_S, _WAIT_TIMES * took_s)
                self._kept.pop(wanted.key, None)
                self._kept[wanted.key] = _Kept(drawn, wanted, due_s)
                while len(self._kept) > _KEPT_MAX:
                    del self._kept[next(iter(self._kept))]
            return drawn
