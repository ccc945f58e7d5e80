"""Gives the run's screen a display that draws, where one is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from ddp_runner.features.display.live import LiveDisplay


def live_display(stream: TextIO) -> LiveDisplay:
    """Return a display that draws on a terminal."""
    from ddp_runner.features.display.live import LiveDisplay  # noqa: PLC0415 - rich is big

    return LiveDisplay(stream)
