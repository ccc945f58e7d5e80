"""Records a real run in which ranks are killed, and draws what its terminal showed as an animated SVG.

With the extra ``film``, ``PYTHONPATH=. python docs/images/make_run.py`` writes ``run.svg`` beside this file. The run has a terminal of its
own (a pty); signals go to its ranks as from another terminal, whose lines stand below. Nothing is retouched.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import math
import os
import pty
import select
import signal
import struct
import subprocess
import tempfile
import termios
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path

import psutil
import pyte

ROOT = Path(__file__).resolve().parents[2]
RANKS = 3
COLUMNS, ROWS = 106, 25
WORDS = ("-n", str(RANKS), "--task", "synthetic", "hidden_size=32", "--max-steps", "120")
PROMPT = "$ ./launch_training.sh " + " ".join(WORDS)
# Seconds after all ranks train; whom; how.
STRIKES = ((1.5, 1, signal.SIGKILL), (4.5, 2, signal.SIGSTOP), (10.0, 0, signal.SIGKILL))
FRAMES_PER_S, END_S, LIMIT_S = 3.0, 5.0, 150.0
CHAR, LINE, MARGIN, SIZE = 8.4, 18.0, 14.0, 14
TEXT, GROUND = "#d6d8dc", "#181a1f"
FILM_S = 30.0  # a longer run is shown faster, and the picture says so
DIM = b"\x1b[90m"  # pyte knows no dim text, but grey
COLOURS = {
    "brightblack": "#80858f",
    "green": "#68be78",
    "cyan": "#5cb3c8",
    "brown": "#deb454",
    "red": "#e5695e",
}
Row = tuple[tuple[int, str, str, bool], ...]  # column, text, colour, bold


@dataclass(frozen=True)
class Frame:
    """What was on the screen from ``at_s`` on."""

    at_s: float
    rows: tuple[Row, ...]


def record(folder: Path) -> list[Frame]:
    """Run, strike, and look at the screen some times a second."""
    screen = pyte.Screen(COLUMNS, ROWS - 1)
    stream = pyte.ByteStream(screen)
    other: list[Row] = []
    frames: list[Frame] = []
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS - 1, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    run = subprocess.Popen(  # noqa: S603 - our own command
        [ROOT / "launch_training.sh", *WORDS],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    began_s, trains_s, strikes = time.monotonic(), 0.0, list(STRIKES)
    while time.monotonic() < began_s + LIMIT_S:
        with contextlib.suppress(OSError):  # how a pty says that nobody writes any more
            if select.select([ours], [], [], 1 / FRAMES_PER_S)[0]:
                time.sleep(1 / FRAMES_PER_S)
                stream.feed(os.read(ours, 1 << 20).replace(b"\x1b[2m", DIM))
        now_s = time.monotonic() - began_s
        text = "\n".join(screen.display)
        if not trains_s and text.count("training") >= RANKS:
            trains_s = now_s
        if trains_s and strikes and now_s > trains_s + strikes[0][0]:
            _, rank, number = strikes.pop(0)
            os.kill(process_of(run.pid, rank), number)
            typed = f"$ kill -{number.name.removeprefix('SIG')} $(pgrep -f ddp:rank{rank})"
            other.append(((0, typed, TEXT, False),))
        rows = rows_of(screen)
        below = ((), ((0, "in another terminal", "#80858f", False),), *other) if other else ()
        shown = (((0, PROMPT, TEXT, True),), *rows, *below)
        if not frames or frames[-1].rows != shown:
            frames.append(Frame(now_s, shown))
        if not trains_s:  # the film begins just before
            frames = frames[-1:]
        if run.poll() is not None:
            break
    os.close(ours)
    if run.wait(timeout=30) != 0:
        raise SystemExit("the run failed:\n" + "\n".join(screen.display))
    return [Frame(frame.at_s - frames[0].at_s, frame.rows) for frame in frames]


def process_of(launcher: int, rank: int) -> int:
    """The process of a rank, by the name that it has."""
    for child in psutil.Process(launcher).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if f"ddp:rank{rank}" in (child.name(), *child.cmdline()):
                return child.pid
    raise SystemExit(f"rank {rank} is not there")


def rows_of(screen: pyte.Screen) -> tuple[Row, ...]:
    """The screen's lines as pieces of one colour."""
    rows = []
    for number in range(screen.lines):
        pieces: list[tuple[int, str, str, bool]] = []
        for column in range(screen.columns):
            cell = screen.buffer[number][column]
            colour = COLOURS.get(cell.fg, TEXT)
            if pieces and pieces[-1][2:] == (colour, cell.bold):
                first, text, *_ = pieces[-1]
                pieces[-1] = (first, text + cell.data, colour, cell.bold)
            else:
                pieces.append((column, cell.data, colour, cell.bold))
        rows.append(tuple(piece for piece in pieces if piece[1].strip()))
    while rows and not rows[-1]:
        rows.pop()
    return tuple(rows)


def draw(frames: list[Frame]) -> str:
    """All frames below each other in one picture, of which one is seen at a time; equal lines once."""
    rows = sorted({row for frame in frames for row in frame.rows if row})
    number = {row: index for index, row in enumerate(rows)}
    lines = max(len(frame.rows) for frame in frames) + 1
    width, height = COLUMNS * CHAR + 2 * MARGIN, lines * LINE + 2 * MARGIN
    speed = max(1, math.ceil(frames[-1].at_s / FILM_S))
    total_s = frames[-1].at_s / speed + END_S
    keys = "".join(
        f"{100 * frame.at_s / speed / total_s:.2f}%{{transform:translateY({-index * height:.0f}px)}}"
        for index, frame in enumerate(frames)
    )
    last = -(len(frames) - 1) * height
    out = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img"'
            ' aria-label="A run of three ranks that are killed, stopped and replaced">'
        ),
        (
            f"<style>.f{{animation:f {total_s:.1f}s steps(1,end) infinite}}@keyframes f{{{keys}"
            f"to{{transform:translateY({last:.0f}px)}}}}@media(prefers-reduced-motion:reduce){{.f{{"
            f"animation:none;transform:translateY({last:.0f}px)}}}}text{{white-space:pre}}</style>"
        ),
        f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/><defs>',
    ]
    caption = ""
    if speed > 1:
        note = f"shown {speed} times as fast"
        place = f'x="{width - MARGIN:.0f}" y="{height - MARGIN:.0f}" text-anchor="end"'
        style = 'font-family="sans-serif" font-size="12" fill="#80858f"'
        caption = f"<text {place} {style}>{note}</text>"
    for row in rows:
        pieces = "".join(span(*stripped(piece)) for piece in row)
        out.append(f'<text id="r{number[row]}">{pieces}</text>')
    out.append(
        f"</defs><g font-family=\"'DejaVu Sans Mono','Liberation Mono',Menlo,Consolas,monospace\" "
        f'font-size="{SIZE}" fill="{TEXT}"><g class="f">'
    )
    for index, frame in enumerate(frames):
        uses = "".join(
            f'<use href="#r{number[row]}" y="{index * round(height) + MARGIN + (line + 1) * LINE:.0f}"/>'
            for line, row in enumerate(frame.rows)
            if row
        )
        out.append(uses)
    out.append(f"</g></g>{caption}</svg>")
    return "\n".join(out) + "\n"


def span(column: int, text: str, colour: str, bold: bool) -> str:
    """A piece of a line, drawn as wide as on a terminal whatever the font is."""
    fill = f' fill="{colour}"' if colour != TEXT else ""
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{MARGIN + column * CHAR:.1f}" textLength="{len(text) * CHAR:.1f}"'
    return f"<tspan {place}{fill}{weight}>{escape(text)}</tspan>"


def stripped(piece: tuple[int, str, str, bool]) -> tuple[int, str, str, bool]:
    """Without the blanks around it, which need not be drawn."""
    column, text, colour, bold = piece
    return column + len(text) - len(text.lstrip()), text.strip(), colour, bold


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("run.svg"))
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        frames = record(Path(folder))
    picture = draw(frames)
    if str(ROOT) in picture or str(Path.home()) in picture:
        raise SystemExit("a path of this machine is in the picture")
    out.write_text(picture, encoding="utf-8")
    print(f"{out}: {len(frames)} frames, {frames[-1].at_s:.0f} s, {len(picture) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
