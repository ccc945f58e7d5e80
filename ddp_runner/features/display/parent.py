"""Gives the run's screen a display that draws, where one is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Collection

    from ddp_runner.features.display.live import LiveDisplay


def live_display(stream: TextIO, *, hidden: Collection[str]) -> LiveDisplay:
    """Return a display that draws on a terminal, without lines of ``hidden`` levels."""
    from ddp_runner.features.display.live import LiveDisplay  # noqa: PLC0415 - rich is big

    return LiveDisplay(stream, hidden=hidden)
