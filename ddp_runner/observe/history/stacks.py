"""The stacks that ranks wrote into their logs around a moment: a fault's. Reads; never raises for a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from ddp_runner.observe.format import printable
from ddp_runner.observe.history.json_lines import opened, read_at

CHARACTERS_MAX = 20_000  # of one log
_BEFORE_S, _AFTER_S = (
    2.0,
    5.0,
)  # stacks are asked for when a fault is noticed, and again before a kill
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3,} ")
_BEGINS = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+ ")
_GOES_ON = ("  File ", "  <", "  ...")
_NEAR_BYTES = 1024 * 1024
_READ_BYTES = 4 * 1024 * 1024
_LOOK_BYTES = 64 * 1024


def stacks_in(path: Path, at_s: float) -> str:
    """Those of one log. ``at_s``: seconds since 1970."""
    with opened(path) as descriptor:
        if descriptor is None:
            return ""
        begin = _before(descriptor, at_s - _BEFORE_S)
        data = read_at(descriptor, begin, _READ_BYTES)
    return stacks_around(data.decode(errors="replace").splitlines(), at_s)


def stacks_around(lines: Iterable[str], at_s: float) -> str:
    """The stacks between records of which one may be of that moment: they have no time of their own."""
    kept: list[str] = []
    block: list[str] = []
    before_s = float("-inf")

    def close(after_s: float) -> None:
        if before_s <= at_s + _AFTER_S and after_s >= at_s - _BEFORE_S:
            kept.extend(block)
        block.clear()

    for line in lines:
        stamp_s = _stamp_s(line)
        if stamp_s is not None:
            close(stamp_s)
            before_s = stamp_s
            if stamp_s > at_s + _AFTER_S:
                break
        elif _BEGINS.match(line) or (block and line.startswith(_GOES_ON)):
            block.append(line)
    close(float("inf"))
    return printable("\n".join(kept)[:CHARACTERS_MAX])


def _stamp_s(line: str) -> float | None:
    if not _STAMP.match(line):
        return None
    try:
        return datetime.fromisoformat(line[:23]).timestamp()  # logs have the time of their machine
    except (ValueError, OverflowError):
        return None


def _before(descriptor: int, at_s: float) -> int:
    """A place in the file before whose records are older; their stamps rise."""
    low, high = 0, os.fstat(descriptor).st_size
    while high - low > _NEAR_BYTES:
        middle = (low + high) // 2
        text = read_at(descriptor, middle, _LOOK_BYTES).decode(errors="replace")
        found = (one for line in text.split("\n")[1:] if (one := _stamp_s(line)) is not None)
        if next(found, float("inf")) < at_s:
            low = middle
        else:
            high = middle
    return max(0, low - _LOOK_BYTES)
