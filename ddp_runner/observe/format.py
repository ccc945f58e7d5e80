"""Turns figures into short text for people, and curves and shares into characters. Pure; never for files that programs read."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

# Escape sequences: CSI ("\x1b[31m"), OSC up to BEL or ST (window titles, links), two-byte ones.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# What a terminal obeys, or what changes a line without being seen: controls (tab and line end apart),
# the ends of line of other systems, marks of direction and joining, spaces of no width, "tags", and
# halves of characters, which is how Python holds bytes that are no text.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    "\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff"
    "\U0001bca0-\U0001bca3\U00013430-\U0001345f\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_BLOCKS = "▁▂▃▄▅▆▇█"
_PLAIN = "_.-~=+*#"  # for terminals without Unicode
_EIGHTHS = " ▏▎▍▌▋▊▉"


def duration(seconds: float) -> str:
    """``0.4s``, ``12.3s``, ``2m 03s``, ``1h 02m``, ``3d 04h``; at most 7 columns below 100 days."""
    if not math.isfinite(seconds):
        return "-"
    seconds = max(0.0, seconds)
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02d}h"


def clock(seconds: float) -> str:
    """Elapsed time that ticks calmly: ``0:07``, ``12:34``, ``1:02:03``."""
    whole = int(max(0.0, seconds)) if math.isfinite(seconds) else 0
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def byte_size(size_bytes: float) -> str:
    """Decimal units, at most 7 columns: ``512 B``, ``3.1 MB``, ``0.4 GB``, ``138 GB``."""
    if size_bytes < 1_000:
        return f"{size_bytes:.0f} B"
    if size_bytes < 99_500:
        return f"{size_bytes / 1e3:.1f} kB"
    if size_bytes < 99_500_000:
        return f"{size_bytes / 1e6:.1f} MB"
    scaled, unit = (size_bytes / 1e9, "GB") if size_bytes < 999.5e9 else (size_bytes / 1e12, "TB")
    return f"{scaled:.1f} {unit}" if scaled < 99.95 else f"{scaled:.0f} {unit}"


def count(number: int) -> str:
    """A whole number with thousands separated: ``1,234``."""
    return f"{number:,}"


def counted(number: int, noun: str) -> str:
    """``1 step``, ``1,234 steps``."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def rate(per_second: float) -> str:
    """Things per second without the unit, at most 8 columns: ``3.21``, ``45.6``, ``1,234``."""
    if not math.isfinite(per_second):
        return "-"
    if per_second < 9.995:
        return f"{per_second:.2f}"
    if per_second < 99.95:
        return f"{per_second:.1f}"
    if per_second < 999_999.5:
        return f"{per_second:,.0f}"
    return f"{per_second / 1e6:.2f}M"


def figure(value: float) -> str:
    """A loss or norm, at most 8 columns: ``2.3456``, ``1234.6``, ``1.2e+09``, ``nan``."""
    size = abs(value)
    if not math.isfinite(value):
        return f"{value}"
    if value != 0 and (size < 0.001 or size >= 99_999.5):
        return f"{value:.1e}"
    for limit, digits in ((9.99995, 4), (99.9995, 3), (999.995, 2)):
        if size < limit:
            return f"{value:.{digits}f}"
    return f"{value:.1f}"


def percent(share: float) -> str:
    """A share of one: ``0.016`` -> ``2%``."""
    return f"{100 * share:.0f}%" if math.isfinite(share) else "-"


def setting_value(value: object) -> str:
    """Return the value as people write it; an empty one is shown as such."""
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or "(empty)"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return "(empty)" if value == "" else str(value)


def printable(text: str) -> str:
    """``text`` as a terminal may show it: what is obeyed or not seen is written out (backslash, x1b).

    Tabs and line ends stay. Everything that comes from files, paths, tasks or exceptions goes through
    here before it is shown.
    """
    return _UNSEEN.sub(_written_out, text)


def without_styles(text: str) -> str:
    """``text`` without whole escape sequences, as of colours: in a task's own output they mean nothing."""
    return _ESCAPES.sub("", text)


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x1_0000 else f"\\U{code:08x}"


def sparkline(values: Sequence[float], *, columns: int, unicode: bool = True) -> str:
    """Return one character for each stretch of ``values``, by its mean between the lowest and the highest mean.

    A stretch without a finite value is a blank. Fewer values than ``columns`` give as many characters.
    """
    marks = _BLOCKS if unicode else _PLAIN
    stretches = min(columns, len(values))
    means = [
        _mean(values[i * len(values) // stretches : (i + 1) * len(values) // stretches])
        for i in range(stretches)
    ]
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * stretches
    low, high = min(known) / 2, max(known) / 2  # halves: their difference is finite
    top = len(marks) - 1

    def mark(mean: float) -> str:
        share = (mean / 2 - low) / (high - low) if high > low else 0.5
        return marks[round(share * top)]

    return "".join(" " if mean is None else mark(mean) for mean in means)


def bar(share: float, *, columns: int, unicode: bool = True) -> str:
    """A bar over ``share`` of the columns; what is more than nothing shows."""
    share = min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0
    if not unicode:
        return "#" * max(round(share * columns), int(share > 0))
    eighths = max(round(share * columns * 8), int(share > 0))
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    mean = sum(value / len(finite) for value in finite) if finite else math.nan
    return mean if math.isfinite(mean) else None
