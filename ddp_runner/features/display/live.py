"""The live display on a terminal, drawn with rich, redrawn at most 4 times a second.

The cursor stays visible and no screen mode is changed, so that even SIGKILL leaves the terminal as
it was. Log lines scroll above the frame, whole, so that they can be copied.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.segment import Segment, SegmentLines, Segments

from ddp_runner.features.display.frame import frame
from ddp_runner.features.display.rank_table import BAD, CARE, PLAIN, QUIET
from ddp_runner.observe.display import Display
from ddp_runner.observe.format import printable
from ddp_runner.observe.progress_report import summary_block
from ddp_runner.observe.terminal import ConsoleWriter, HeldLines, fitted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from ddp_runner.observe.summary import RunSummary
    from ddp_runner.observe.view import RunView

REFRESHES_PER_S = 4.0
_FRAME_SHARE = 0.75  # of the terminal's lines at most: the rest is for what scrolls above
_FINISH_TIMEOUT_S = 2.0
_LINES_WAIT_S = 1.0  # longest that a line waits for an update to come along
_STYLE_OF_LEVEL = {"DEBUG": QUIET, "WARNING": CARE, "ERROR": BAD}


class _Console(Console):
    def show_cursor(self, show: bool = True) -> bool:  # noqa: ARG002 - rich's signature
        """Leave the cursor alone: nothing would bring it back after SIGKILL."""
        return False


class LiveDisplay(Display):
    """A frame that is redrawn in place, with the log lines above it."""

    def __init__(
        self,
        stream: TextIO,
        *,
        size: tuple[int, int] | None = None,
        hidden: Collection[str] = (),
        refreshes_per_s: float = REFRESHES_PER_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``size`` in columns and lines; None follows the terminal. ``hidden``: levels of lines that are left out."""
        self._out = ConsoleWriter(stream)
        width, height = size or (None, None)
        self._console = _Console(
            file=cast("TextIO", self._out),
            width=width,
            height=height,
            force_terminal=True,
            force_interactive=True,
            legacy_windows=False,
        )
        # One object for good, so that lines printed above it bring its newest content along.
        self._frame = SegmentLines([], new_lines=True)
        self._live = Live(
            self._frame,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._held = HeldLines(hidden)
        self._interval_s = 1.0 / refreshes_per_s
        self._now_s = now_s
        self._drawn_at_s = float("-inf")
        self._lines_at_s = float("-inf")
        self._log_dir = ""
        self._finished = False

    def start(self) -> None:
        """Take the lower end of the terminal."""
        self._live.start()

    def update(self, view: RunView) -> None:
        """Redraw if it is time, something changed and the terminal has taken what came before."""
        self._log_dir = view.log_dir
        now_s = self._now_s()
        if now_s - self._drawn_at_s < self._interval_s or self._out.busy or self._out.broken:
            return
        self._drawn_at_s = now_s
        height = self._console.height
        lines_max = min(height - 1, int(height * _FRAME_SHARE))
        lines = frame(view, self._console, lines_max=lines_max)
        if lines != self._frame.lines or len(self._held):
            self._frame.lines = lines
            self._draw()

    def line(self, text: str, *, level: str) -> None:
        """Hold ``text`` for the next redraw, which puts it above the frame."""
        self._held.add(text, level.upper())
        # Only where no update has come for a while: a line must not put off the redraw that is due.
        now_s = self._now_s()
        quiet_s = now_s - max(self._drawn_at_s, self._lines_at_s)
        if quiet_s >= _LINES_WAIT_S and not self._out.busy:
            self._lines_at_s = now_s
            self._draw()

    def finish(self, summary: RunSummary | None) -> None:
        """Take the frame away and print what is left."""
        if self._finished:
            return
        self._finished = True
        self._out.drain(timeout_s=_FINISH_TIMEOUT_S)
        if len(self._held):
            self._draw()
        self._live.stop()
        if summary is not None:
            width = self._console.size.width
            block = summary_block(summary, log_dir=self._log_dir, width=width)
            self._print((text, "INFO") for text in ("", *block))
        self._out.close(timeout_s=_FINISH_TIMEOUT_S)

    def _draw(self) -> None:
        held = self._held.take()
        if held:
            self._print(held)
        else:
            self._live.refresh()

    def _print(self, lines: Iterable[tuple[str, str]]) -> None:
        segments = []
        for text, level in lines:
            style = self._console.get_style(_STYLE_OF_LEVEL.get(level, PLAIN))
            for line in fitted(printable(text), level, self._console.width):
                segments += [Segment(line, style), Segment.line()]
        # Not cropped: the terminal itself wraps a long word, as a path, which can be copied whole.
        self._console.print(Segments(segments), crop=False, soft_wrap=True)
