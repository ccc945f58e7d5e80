"""The displays on real pipes, terminals and streams."""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading

import pytest

from ddp_runner.config import from_flat
from ddp_runner.features.display.live import LiveDisplay
from ddp_runner.observe.display import Display, PlainDisplay, make_display
from ddp_runner.observe.terminal import HELD_LINES_MAX, ConsoleWriter
from ddp_runner.observe.view import LAST
from ddp_runner.start import COMMAND
from tests.observe.views import rank_view, run_summary, run_view


@pytest.fixture(autouse=True)
def patient_ends(monkeypatch):
    """A display's last words have the time that a busy machine takes to wake the one who writes them."""
    for module in ("observe.display", "features.display.live"):
        monkeypatch.setattr(f"ddp_runner.{module}._FINISH_TIMEOUT_S", 60.0)


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Screen:
    """A terminal's lower end: enough of one to follow text, cursor-up, erase-line and returns."""

    def __init__(self):
        self.rows, self.row, self.column = [""], 0, 0

    def feed(self, text):
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\n":
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif part == "\r":
                self.column = 0
            elif part.endswith("A"):
                self.row -= int(part[2:-1] or 1)
            elif part.endswith("K"):
                self.rows[self.row] = ""
            elif part[0] != "\x1b":
                row = self.rows[self.row].ljust(self.column)
                end = self.column + len(part)
                self.rows[self.row] = row[: self.column] + part + row[end:]
                self.column = end
            else:
                assert part.endswith("m"), f"{part!r} changes more of the terminal than colours"


def shown(stream):
    screen = Screen()
    screen.feed(stream.getvalue())
    return [row.rstrip() for row in screen.rows]


def live(clock, *, width=80, height=30, **options):
    stream = io.StringIO()
    return stream, LiveDisplay(stream, size=(width, height), now_s=clock, **options)


@pytest.mark.parametrize("width", [80, 120])
def test_the_live_frame_is_redrawn_in_place_below_the_log_lines(width):
    """After several redraws there is one frame, log lines above it, and nothing is too wide."""
    clock = Clock()
    stream, display = live(clock, width=width)
    display.start()
    for step in (100, 200, 300):
        clock.now_s += 1.0
        display.line(f"epoch with step {step}", level="INFO")
        display.update(run_view(8, step=step))
    clock.now_s += 1.0
    display.line("slow disk (rank 1)", level="WARNING")
    rows = shown(stream)
    assert rows[:3] == [f"epoch with step {step}" for step in (100, 200, 300)]
    assert rows[3] == "WARNING: slow disk (rank 1)"
    assert sum("step 300/1,500" in row for row in rows) == 1
    assert not any("step 200/" in row for row in rows)
    assert sum("running" in row for row in rows) == 9
    assert max(len(row) for row in rows) < width


def test_steady_log_lines_do_not_hold_up_the_frame():
    """A line before each update, ten times a second, still leaves the frame fresh."""
    clock = Clock()
    stream, display = live(clock)
    display.start()
    for step in range(20):
        clock.now_s += 0.1
        display.line(f"line {step}", level="INFO")
        display.update(run_view(2, step=step))
    (bar,) = [row for row in shown(stream) if "/1,500" in row]
    assert int(bar.split()[-1].split("/")[0]) >= 16
    display.finish(None)


def test_the_live_display_leaves_no_trace_but_lines_and_summary():
    """The frame is gone at the end; lines and the final block stay; a second finish adds none."""
    clock = Clock()
    stream, display = live(clock)
    display.start()
    display.update(run_view(2))
    display.line("last words", level="INFO")
    display.finish(run_summary())
    display.finish(run_summary())
    rows = [row for row in shown(stream) if row]
    assert rows[0] == "last words"
    assert rows[1].split() == ["status", "completed"]
    assert rows[-2].split() == ["logs", "logs"]
    assert rows[-1].split() == ["report", COMMAND, "report", "-l", "logs"]
    assert sum("status" in row for row in rows) == 1


def test_the_live_display_draws_only_news_four_times_a_second():
    """Ten updates a second cost four redraws, and none where nothing visible changed."""
    clock = Clock()
    stream, display = live(clock)
    display.start()
    draws = 0
    for tenth in range(20):
        clock.now_s += 0.1
        before = len(stream.getvalue())
        display.update(run_view(2, step=tenth))
        draws += len(stream.getvalue()) > before
    assert 5 <= draws <= 8
    clock.now_s += 1.0
    display.update(run_view(2, step=500))
    size = len(stream.getvalue())
    clock.now_s += 1.0
    display.update(run_view(2, step=500))
    assert len(stream.getvalue()) == size
    display.finish(None)


def test_no_color_is_honoured(monkeypatch):
    """With NO_COLOR set no colour is used; without it states are coloured."""
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = {}
    for value in ("", "1"):
        monkeypatch.setenv("NO_COLOR", value)
        stream, display = live(Clock())
        display.start()
        display.update(run_view(2, ranks=(rank_view(0), rank_view(1, state="dead"))))
        display.finish(None)
        coloured[value] = bool(re.search(r"\x1b\[(?:\d+;)*3[0-7]m", stream.getvalue()))
    assert coloured == {"": True, "1": False}


def test_a_log_line_cannot_break_the_frame():
    """Escape sequences inside a log line are taken out; a long line is left whole."""
    clock = Clock()
    stream, display = live(clock)
    display.start()
    display.line("\x1b[2J\x1b[Hgone" + "x" * 200, level="INFO")
    display.update(run_view(2))
    display.finish(None)
    assert "\x1b[2J" not in stream.getvalue()
    assert r"\x1b[2J\x1b[Hgone" + "x" * 200 in shown(stream)


def test_plain_output_has_no_control_characters_and_is_paced():
    """A line per logged step, at most one each interval, the last one always, and the block."""
    clock = Clock()
    stream = io.StringIO()
    display = PlainDisplay(stream, interval_s=2.0, now_s=clock)
    display.start()
    for step in range(10, 60, 10):
        display.update(run_view(2, logged_step=step))
        display.update(run_view(2, logged_step=step))
        clock.now_s += 1.0
    display.line("\x1b[31mcareful\x1b[0m\n  why", level="warning")
    display.update(run_view(2, logged_step=60))
    display.update(run_view(2, logged_step=70))
    display.finish(run_summary())
    text = stream.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    steps = re.findall(r"^step (\d+)/", text, re.MULTILINE)
    assert steps == ["10", "30", "50", "70"]
    assert "WARNING: \\x1b[31mcareful\\x1b[0m\n  why\n" in text
    assert text.rstrip().endswith("report -l logs")


def test_a_quiet_display_shows_warnings_and_how_the_run_has_ended():
    """Neither progress nor what is only informative; the last lines are those of any run."""
    stream = io.StringIO()
    quiet = from_flat({"console": "quiet"})
    display = make_display("live", stream=stream, settings=quiet)
    for level in ("INFO", "DETAIL", "WARNING", LAST, "RAW"):
        display.line(f"line {level}", level=level)
    display.update(run_view(2, step=5, logged_step=5))
    display.finish(run_summary())
    shown = stream.getvalue().splitlines()
    assert shown[:3] == ["WARNING: line WARNING", f"line {LAST}", "line RAW"]
    assert [shown[3], *shown[4].split()] == ["", "status", "completed"]


def test_plain_output_is_silent_before_the_first_step():
    """No line is spent on step 0, and none twice on one step."""
    stream = io.StringIO()
    display = PlainDisplay(stream, interval_s=0.0)
    display.update(run_view(2, step=0, logged_step=None))
    assert stream.getvalue() == ""
    display.update(run_view(2, step=1, logged_step=None))
    display.update(run_view(2, step=1, logged_step=None))
    display.finish(None)
    assert stream.getvalue().count("step 1/") == 1


@pytest.mark.parametrize("make", [LiveDisplay, PlainDisplay])
def test_a_stream_that_fails_never_hurts(make):
    """A closed stream silences the display; every call still returns."""
    stream = io.StringIO()
    stream.close()
    display = make(stream)
    display.start()
    display.update(run_view(2))
    display.line("x", level="ERROR")
    display.finish(run_summary())


@pytest.mark.parametrize("make", [LiveDisplay, PlainDisplay])
def test_a_reader_that_goes_away_never_hurts(make):
    """Writing to a pipe whose reader has gone ends the output, not the run."""
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w", encoding="utf-8")
    display = make(stream)
    display.start()
    os.close(reader)
    for step in range(1, 20):
        display.line(f"line {step}", level="INFO")
        display.update(run_view(2, step=step, logged_step=step))
    display.finish(run_summary())
    assert display._out.broken
    stream.close()


@pytest.mark.parametrize("make", [LiveDisplay, PlainDisplay])
def test_a_reader_that_stops_reading_never_blocks(make):
    """A full pipe: calls go on returning, memory stays bounded, and later the count is reported."""
    clock = Clock()
    reader, writer = os.pipe()
    # Full before the first line: the thread that writes may get no turn until the last one is held,
    # and what is written then would leave room.
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b" " * 4096):
            pass
    os.set_blocking(writer, True)
    stream = os.fdopen(writer, "w", encoding="utf-8")
    display = make(stream, now_s=clock)
    display.start()
    for number in range(5 * HELD_LINES_MAX):
        clock.now_s += 1.0
        display.line(f"line {number} " + "x " * 40, level="INFO")
        display.update(run_view(2, step=number + 1, logged_step=number + 1))
    assert display._out.busy
    assert len(display._held) <= HELD_LINES_MAX
    received = []

    def read():
        while chunk := os.read(reader, 65536):
            received.append(chunk)

    thread = threading.Thread(target=read)
    thread.start()
    display.finish(run_summary())
    stream.close()
    thread.join(60)
    os.close(reader)
    text = b"".join(received).decode()
    assert "lines not shown: see the log files" in text
    assert f"line {5 * HELD_LINES_MAX - 1} " in text
    assert "completed" in text


CLOSED = """
import os, sys
from ddp_runner.observe.display import make_display
from tests.observe.views import run_summary, run_view
os.close(1)
for mode in ("auto", "live", "plain", "none"):
    display = make_display(mode, stream=sys.stdout)
    display.start(); display.update(run_view(2)); display.line("x", level="INFO")
    display.finish(run_summary())
os._exit(7)
"""


def test_a_process_without_stdout_runs_to_its_end():
    """Descriptor 1 closed from the start: every display still works through its calls."""
    done = subprocess.run([sys.executable, "-c", CLOSED], timeout=200, check=False)
    assert done.returncode == 7


def test_auto_is_live_on_a_capable_terminal_only(monkeypatch):
    """A terminal gets the live display; a dumb one and a stream in memory get plain lines."""
    master, slave = pty.openpty()
    try:
        with os.fdopen(os.dup(slave), "w", encoding="utf-8") as terminal:
            monkeypatch.setenv("TERM", "xterm-256color")
            assert isinstance(make_display("auto", stream=terminal), LiveDisplay)
            assert isinstance(make_display("plain", stream=terminal), PlainDisplay)
            assert type(make_display("none", stream=terminal)) is Display
            monkeypatch.setenv("TERM", "dumb")
            assert isinstance(make_display("auto", stream=terminal), PlainDisplay)
        monkeypatch.setenv("TERM", "xterm-256color")
        assert isinstance(make_display("auto", stream=io.StringIO()), PlainDisplay)
    finally:
        os.close(master)
        os.close(slave)


def test_the_live_display_follows_a_real_terminal(monkeypatch):
    """On a pseudo-terminal the frame fits its size and the cursor is never hidden."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 70, 0, 0))
    with os.fdopen(slave, "w", encoding="utf-8") as terminal:
        display = LiveDisplay(terminal, size=(70, 12))
        display.start()
        display.update(run_view(8))
        assert display._out.drain(timeout_s=60)
        drawn = b""
        # A read gives what the terminal has passed on by then, up to the middle of a character.
        while b"ranks are alike" not in drawn:
            drawn += os.read(master, 1 << 16)
        display.finish(None)
        os.read(master, 1 << 16)
    os.close(master)
    text = drawn.decode(errors="ignore")
    assert "\x1b[?25l" not in text
    rows = ESCAPES.sub("", text).replace("\r", "").split("\n")
    assert max(len(row) for row in rows) <= 70
    assert len(rows) <= 12


@pytest.mark.parametrize("kind", [LiveDisplay, PlainDisplay])
def test_the_summary_fits_a_narrow_terminal(monkeypatch, kind):
    """40 columns: no line but a path is left for the terminal to break in the middle of a word."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 40, 0, 0))
    with os.fdopen(slave, "w", encoding="utf-8") as terminal:
        # rich asks the process's own descriptors for a size; the runner's are this terminal.
        display = LiveDisplay(terminal, size=(40, 12)) if kind is LiveDisplay else kind(terminal)
        display.start()
        display.finish(run_summary())
    shown = b""
    with contextlib.suppress(OSError):  # EIO: all is read, and nobody writes any more
        while piece := os.read(master, 1 << 16):
            shown += piece
    os.close(master)
    text = ESCAPES.sub("", shown.decode()).replace("\r", "")
    rows = [row for row in text.split("\n") if ".pt" not in row]
    assert "samples, 2 ranks" in " ".join(text.split())
    assert max(len(row) for row in rows) < 40


def test_text_beyond_the_encoding_is_replaced():
    """A terminal that knows only ASCII still gets every line."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    writer = ConsoleWriter(stream)
    writer.write("grüße ━\n")
    assert raw.getvalue() == b"gr??e ?\n"
    assert not writer.broken


def test_importing_the_display_pulls_neither_torch_nor_rich():
    """The supervisor pays for rich only where the live display is chosen, and never for torch."""
    script = (
        "import sys, ddp_runner.observe.display, ddp_runner.observe.logger, "
        "ddp_runner.observe.console, ddp_runner.observe.journal, ddp_runner.observe.view\n"
        "assert not {'torch', 'numpy', 'rich', 'pydantic'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)


def test_plain_output_says_what_a_start_still_is_at():
    """After 2, 10, 30 and 60 s, then each minute; what comes next is counted again."""
    stream = io.StringIO()
    display = PlainDisplay(stream, interval_s=0.0)
    for tenths in range(2000):
        view = run_view(2, step=0, logged_step=None, doing="building data", doing_s=tenths / 10)
        display.update(view)
    view = run_view(2, step=0, logged_step=None, doing="forming", doing_s=2.5)
    display.update(view)
    display.update(run_view(2, step=0, logged_step=None))
    said = stream.getvalue().splitlines()
    data = [f"building data ... {seconds} s so far" for seconds in (2, 10, 30, 60, 120, 180)]
    assert said == [*data, "forming ... 2 s so far"]
