"""The line that shows how far a training is that nobody supervises: a script's, or a notebook's."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping

from ddp_runner.observe import format as fmt

_REDRAWN_EVERY_S = 0.2
_LINE_EVERY_S = 5.0  # where lines cannot be redrawn


class ProgressLine:
    """Redrawn in place on a terminal and in a notebook, else a line every few seconds."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._shown_at_s = float("-inf")
        self._shown_step = -1
        self._newest = (0, "")
        self._width = 0

    def show(self, step: int, total: int, values: Mapping[str, float]) -> None:
        """Show the figures of ``step``, unless the ones before have just been shown."""
        if "loss" not in values:
            return
        parts = [f"step {fmt.count(step)}/{fmt.count(total)}", f"loss {fmt.figure(values['loss'])}"]
        rate = values.get("samples_per_s", 0.0)
        if rate > 0.0:
            parts.append(f"{fmt.rate(rate)} samples/s")
        if step_s := values.get("step_s", 0.0):
            parts.append(f"eta {fmt.duration(max(0, total - step) * step_s)}")
        self._newest = (step, "  ".join(parts))
        every_s = _REDRAWN_EVERY_S if _can_redraw() else _LINE_EVERY_S
        if self._now_s() - self._shown_at_s >= every_s:
            self._draw()

    def say(self, text: str) -> None:
        """A line of its own."""
        self.finish()
        _write(f"{text}\n")

    def finish(self) -> None:
        """Show the last figures, and leave the line."""
        if self._newest[0] > 0 and self._newest[0] != self._shown_step:
            self._draw()
        if self._width:
            _write("\n")
        self._width = 0

    def _draw(self) -> None:
        self._shown_at_s = self._now_s()
        self._shown_step, text = self._newest
        if _can_redraw():
            _write(f"\r{text:<{self._width}}")
            self._width = max(self._width, len(text))
        else:
            _write(f"{text}\n")


def _can_redraw() -> bool:
    """Whether the reader takes a carriage return as one: a terminal, or a notebook's output."""
    if "ipykernel" in sys.modules:
        return True
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):
        return False


def _write(text: str) -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # nobody reads
        sys.stdout.write(text)
        sys.stdout.flush()
