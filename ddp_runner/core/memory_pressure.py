"""Decides how tight memory is: a share of a limit -> a level, with hysteresis. Never measures."""

from __future__ import annotations

from enum import IntEnum


class Level(IntEnum):
    """How close memory is to its limit; a higher number is worse."""

    OK = 0
    WARN = 1
    REACT = 2
    LIMIT = 3

    @property
    def label(self) -> str:
        """The lower-case name that people and files see."""
        return self.name.lower()


def next_level(
    current: Level,
    share: float,
    *,
    warn: float,
    react: float,
    limit: float,
    hysteresis: float = 0.05,
) -> Level:
    """The level after ``share`` (used / limit; may exceed 1) was seen while at ``current``.

    A level is entered at once when its threshold is reached, and left only when the share has
    fallen ``hysteresis`` below that threshold: a share that swings around a threshold is one event.
    Raises ValueError unless ``0 <= warn <= react <= limit`` and ``hysteresis >= 0``.
    """
    if not 0 <= warn <= react <= limit or hysteresis < 0:
        raise ValueError(f"thresholds must rise: warn={warn} react={react} limit={limit}")
    thresholds = ((Level.LIMIT, limit), (Level.REACT, react), (Level.WARN, warn))
    for level, threshold in thresholds:
        margin = hysteresis if level <= current else 0.0
        if share >= threshold - margin:
            return level
    return Level.OK


def may_collect_fully(*, since_last_s: float, cost_s: float, cost_share: float = 0.005) -> bool:
    """Whether a full garbage collection of ``cost_s`` stays within its share of the time.

    A full collection walks every object of the process: 40-60 ms with torch imported, which is a
    step or more of a small model. ``since_last_s`` is the time since the last one.
    """
    return cost_s <= cost_share * since_last_s
