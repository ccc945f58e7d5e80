"""Draws what happens between a rank's death and the next step: ``python docs/images/make_fault.py`` writes fault.svg."""

from __future__ import annotations

from html import escape
from pathlib import Path

LANES = {"rank 0": 150, "supervisor": 430, "rank 1": 710}
WIDTH, STEP, TOP = 860, 46, 70
TEXT, QUIET, GROUND, GOOD, BAD = "#d6d8dc", "#80858f", "#181a1f", "#68be78", "#e5695e"
# (from, to, words): a message; (where, where, words): what happens there.
ACTS = (
    ("rank 1", "rank 1", "killed (SIGKILL)"),
    ("rank 1", "supervisor", "its process ends"),
    ("supervisor", "rank 0", "leave generation 1"),
    ("rank 0", "rank 0", "the collective raises; step dropped"),
    ("rank 0", "supervisor", "ready, 128 steps committed"),
    ("supervisor", "supervisor", "culprit: rank 1; plan: replace it"),
    ("supervisor", "rank 1", "the spare becomes rank 1"),
    ("rank 1", "supervisor", "ready, nothing committed"),
    ("supervisor", "rank 0", "form generation 2"),
    ("supervisor", "rank 1", "form generation 2"),
    ("rank 0", "rank 1", "model, optimizer, counters"),
    ("rank 0", "rank 0", "step 129"),
    ("rank 1", "rank 1", "step 129"),
)
ENDED, BEGUN = 0, 6  # the acts with which rank 1 ends, and begins again


def picture() -> str:
    """The diagram, which needs neither a script nor a network."""
    height = TOP + STEP * len(ACTS) + 20
    out = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
            ' aria-label="What happens between the death of a rank and the next step"'
            ' font-family="sans-serif" font-size="14">'
        ),
        (
            '<defs><marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8"'
            f' orient="auto"><path d="M0 0 8 4 0 8z" fill="{TEXT}"/></marker></defs>'
        ),
        f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>',
    ]
    for name, x in LANES.items():
        parts = [(TOP - 20, height - 20)]
        if name == "rank 1":
            parts = [(TOP - 20, _y(ENDED)), (_y(BEGUN), height - 20)]
        for top, bottom in parts:
            out.append(
                f'<path d="M{x} {top}V{bottom}" stroke="{QUIET}" stroke-width="2" stroke-dasharray="2 4"/>'
            )
        out.append(_words(x, 34, name, TEXT, bold=True))
    for number, (source, target, words) in enumerate(ACTS):
        y, begin, end = _y(number), LANES[source], LANES[target]
        if begin == end:
            colour = BAD if number == ENDED else GOOD
            width = 8 * len(words) * 0.85 + 24
            place = f'x="{begin - width / 2:.0f}" y="{y - 15}" width="{width:.0f}" height="26"'
            out.append(f'<rect {place} rx="5" fill="{GROUND}" stroke="{colour}"/>')
            out.append(_words(begin, y + 3, words, colour))
        else:
            out.append(
                f'<path d="M{begin} {y}H{end}" stroke="{TEXT}" stroke-width="1.5" marker-end="url(#a)"/>'
            )
            # Beside the lane in the middle where the arrow crosses it.
            middle = (
                (begin + end) // 2 if "supervisor" in (source, target) else (begin * 3 + end) // 4
            )
            out.append(_words(middle, y - 7, words, TEXT))
    return "\n".join([*out, "</svg>"]) + "\n"


def _y(act: int) -> int:
    return TOP + STEP * act + STEP // 2


def _words(x: int, y: int, words: str, colour: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="middle"{weight}>{escape(words)}</text>'
    )


if __name__ == "__main__":
    Path(__file__).with_name("fault.svg").write_text(picture(), encoding="utf-8")
