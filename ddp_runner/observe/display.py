"""The display protocol and its plain forms; a live one is a feature's.

No display ever raises for its terminal or waits for it: when the reader goes, output ends and the
run goes on.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Literal, TextIO

from ddp_runner import installed
from ddp_runner.observe.console import hidden_levels
from ddp_runner.observe.progress_report import progress_line, summary_block
from ddp_runner.observe.terminal import ConsoleWriter, HeldLines, fitted
from ddp_runner.observe.view import LAST

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ddp_runner.core.settings import Settings
    from ddp_runner.observe.summary import RunSummary
    from ddp_runner.observe.view import RunView

Mode = Literal["auto", "live", "plain", "none"]
PLAIN_INTERVAL_S = 2.0
_FINISH_TIMEOUT_S = 2.0
_STILL_AT_S = (2.0, 10.0, 30.0)  # how long a part of the start has lasted when that is said
_STILL_EVERY_S = 60.0  # and from then on


class Display:
    """What the supervisor calls, from one thread: start, then update and line, then finish. This one shows nothing."""

    def start(self) -> None:
        """Begin to show."""

    def update(self, view: RunView) -> None:
        """Show ``view``; may be called far more often than the screen changes."""

    def line(self, text: str, *, level: str) -> None:
        """Show a line (or several) that stays; ``level`` as in the log, RAW for raw output."""

    def finish(self, summary: RunSummary | None) -> None:
        """Show how it ended (nothing for None) and give the terminal back. Harmless twice."""


def make_display(mode: Mode, *, stream: TextIO, settings: Settings | None = None) -> Display:
    """Return the display for ``mode``; ``auto`` is live on a terminal that we own, else plain.

    It leaves out the levels that ``settings`` hide. Without INFO, as on a quiet console, there is no progress to show.
    """
    hidden = frozenset() if settings is None else hidden_levels(settings)
    if mode == "none":
        return Display()
    if "INFO" in hidden:
        return PlainDisplay(stream, hidden=hidden)
    if mode == "live" or (mode == "auto" and _suits_live(stream)):
        for part in installed.parts("parent"):
            if hasattr(part, "live_display"):
                display: Display = part.live_display(stream, hidden=hidden)
                return display
    return PlainDisplay(stream, hidden=hidden)


def _suits_live(stream: TextIO) -> bool:
    """Return True if ``stream`` is a capable terminal with this process in its foreground."""
    try:
        fd = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    # TERM describes the terminal; it is no setting of ours, so config.py has no say in it.
    if not os.isatty(fd) or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return False
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return True  # a terminal that controls nobody: no one else draws on it


class PlainDisplay(Display):
    """Writes lines for files, pipes and CI: no control characters, a progress line every few seconds, at level INFO."""

    def __init__(
        self,
        stream: TextIO,
        *,
        interval_s: float = PLAIN_INTERVAL_S,
        hidden: Collection[str] = (),
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = ConsoleWriter(stream)
        self._held = HeldLines(hidden)
        self._interval_s = interval_s
        self._now_s = now_s
        self._shown_step = -1
        self._shown_at_s = -interval_s
        self._log_dir = ""
        self._last: RunView | None = None
        self._still = ("", 0)  # what the start is at, and how often that was said
        self._finished = False

    def update(self, view: RunView) -> None:
        """Write a progress line if a step was logged and the last line is old enough."""
        self._log_dir = view.log_dir
        self._last = view
        if view.doing:
            self._say_what_lasts(view)
        due = self._now_s() - self._shown_at_s >= self._interval_s
        if due and self._news(view):
            self._show_progress(view)
        self._flush()

    def line(self, text: str, *, level: str) -> None:
        """Write ``text``, marked where it is a warning or an error."""
        self._held.add(text, level.upper())
        self._flush()

    def finish(self, summary: RunSummary | None) -> None:
        """Write the last progress line and the final block."""
        if self._finished:
            return
        self._finished = True
        if self._last is not None and self._news(self._last):
            self._show_progress(self._last)
        if summary is not None:
            block = summary_block(summary, log_dir=self._log_dir, width=self._out.columns)
            for text in ("", *block):
                self._held.add(text, LAST)
        self._out.drain(timeout_s=_FINISH_TIMEOUT_S)
        self._flush()
        self._out.close(timeout_s=_FINISH_TIMEOUT_S)

    def _say_what_lasts(self, view: RunView) -> None:
        times = self._still[1] if self._still[0] == view.doing else 0
        later = times - len(_STILL_AT_S) + 1
        limit_s = _STILL_AT_S[times] if later <= 0 else later * _STILL_EVERY_S
        if view.doing_s >= limit_s:
            times += 1
            self._held.add(f"{view.doing} ... {view.doing_s:.0f} s so far", "INFO")
        self._still = (view.doing, times)

    def _news(self, view: RunView) -> bool:
        step = view.step if view.logged_step is None else view.logged_step
        return step > 0 and step != self._shown_step

    def _show_progress(self, view: RunView) -> None:
        self._shown_step = view.step if view.logged_step is None else view.logged_step
        self._shown_at_s = self._now_s()
        self._held.add(progress_line(view), "INFO")

    def _flush(self) -> None:
        if len(self._held) and not self._out.busy:
            columns = self._out.columns if self._out.isatty() else None
            lines = [
                line for text, level in self._held.take() for line in fitted(text, level, columns)
            ]
            self._out.write("".join(f"{line}\n" for line in lines))
