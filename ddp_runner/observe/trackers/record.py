"""Reads one line of ``metrics.jsonl`` as trackers need it."""

from __future__ import annotations

from datetime import datetime

from ddp_runner.core.tracking import Values
from ddp_runner.observe.trackers.follow import Record

_HEAD = ("step", "rank", "utc")


def values_of(record: Record) -> Values:
    """Its figures; None stands for one that is not finite."""
    return {
        name: None if value is None else float(value)
        for name, value in record.fields.items()
        if name not in _HEAD and (value is None or isinstance(value, (int, float)))
    }


def when_s(record: Record) -> float:
    """When it was written, in seconds since 1970; 0.0 where it does not say so."""
    try:
        return datetime.fromisoformat(record.utc.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
