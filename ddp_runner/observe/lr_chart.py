"""Draws losses over learning rates with characters, and says where which rate is. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_runner.observe.format import figure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

COLUMNS, ROWS = 64, 14
_LABEL = 9  # columns of the losses at the left
_HEADROOM = 1.3  # above the first loss, in units of what the loss falls; what is higher is cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """What is drawn with."""

    point: str
    side: str
    floor: str
    corner: str


UNICODE = Glyphs(point="•", side="│", floor="─", corner="└")
ASCII = Glyphs(point="*", side="|", floor="-", corner="+")


def chart(
    points: Sequence[tuple[float, float]], *, marks: Mapping[str, float], glyphs: Glyphs
) -> list[str]:
    """Lines of at most 79 columns: ``points`` are rates, growing, and losses; ``marks``: a letter for a rate."""
    if not points:
        return []
    low, high = math.log10(points[0][0]), math.log10(points[-1][0])
    losses = [loss for _, loss in points]
    bottom = min(losses)
    top = min(max(losses), bottom + _HEADROOM * (losses[0] - bottom))
    if top <= bottom:
        top = max(losses)

    def column(rate: float) -> int:
        share = (math.log10(rate) - low) / (high - low) if high > low else 0.0
        return round(max(0.0, min(1.0, share)) * (COLUMNS - 1))

    def row(loss: float) -> int:
        share = (top - loss) / (top - bottom) if top > bottom else 1.0
        return round(max(0.0, min(1.0, share)) * (ROWS - 1))

    grid = [[" "] * COLUMNS for _ in range(ROWS)]
    for rate, loss in points:
        grid[row(loss)][column(rate)] = glyphs.point
    labels = {0: figure(top), ROWS - 1: figure(bottom)}
    lines = [
        f"{labels.get(number, ''):>{_LABEL}} {glyphs.side}{''.join(cells)}".rstrip()
        for number, cells in enumerate(grid)
    ]
    floor = [glyphs.floor] * COLUMNS
    for letter, rate in marks.items():
        floor[column(rate)] = letter
    lines.append(f"{'loss':>{_LABEL}} {glyphs.corner}{''.join(floor)}")
    lines.append(" " * (_LABEL + 2) + _scale(low, high, column))
    return lines


def _scale(low: float, high: float, column: Callable[[float], int]) -> str:
    """Powers of ten below the floor, each at its place as far as there is room."""
    text = ""
    for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1):
        label = f"1e{power}"
        place = min(column(10.0**power), COLUMNS - len(label))
        if place >= len(text) + bool(text):
            text += " " * (place - len(text)) + label
    return text or "learning rate"
