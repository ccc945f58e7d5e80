"""Short text for people."""

import math
import sys
import unicodedata

import pytest

from ddp_runner.kernel.rules import faults
from ddp_runner.observe import format as fmt


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"),
        (12.34, "12.3s"),
        (59.96, "1m 00s"),
        (123, "2m 03s"),
        (3599.6, "1h 00m"),
        (3720, "1h 02m"),
        (86_400 * 3 + 3600 * 4, "3d 04h"),
        (math.nan, "-"),
        (-1, "0.0s"),
    ],
)
def test_durations(seconds, text):
    """A duration has two units at most, and rounding never shows sixty of anything."""
    assert fmt.duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1_500, "1.5 kB"),
        (412_000_000, "0.4 GB"),
        (31_000_000, "31.0 MB"),
        (138_400_000_000, "138 GB"),
        (2.5e12, "2.5 TB"),
    ],
)
def test_byte_sizes(size_bytes, text):
    """Sizes are decimal and fit the memory column."""
    assert fmt.byte_size(size_bytes) == text
    assert len(fmt.byte_size(size_bytes)) <= 7


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.34561, "2.3456"),
        (9.99996, "10.000"),
        (123.456, "123.46"),
        (1234.56, "1234.6"),
        (99_999.9, "1.0e+05"),
        (0.0004, "4.0e-04"),
        (0.0, "0.0000"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_figures(value, text):
    """A loss keeps about five digits, whatever its size."""
    assert fmt.figure(value) == text


@pytest.mark.parametrize(
    ("per_second", "text"),
    [(3.214, "3.21"), (45.62, "45.6"), (1234.4, "1,234"), (1.5e6, "1.50M"), (math.inf, "-")],
)
def test_rates(per_second, text):
    """A rate shows the digits that matter."""
    assert fmt.rate(per_second) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([1], "rank 1"), ([0, 1, 2, 3], "ranks 0-3"), ([4, 0, 1], "ranks 0-1,4"), ([2, 2], "rank 2")],
)
def test_rank_lists(ranks, text):
    """Neighbouring ranks are reported as a range, each once."""
    assert faults.rank_list(ranks) == text


def test_styles_of_a_tasks_output_vanish():
    """Colours, titles, links and cursor moves; the text stays."""
    raw = "\x1b[1;31mred\x1b[0m \x1b]0;title\x07a\tb\nc\x1b]8;;http://x\x1b\\link\x1b[2K é"
    assert fmt.without_styles(raw) == "red a\tb\nclink é"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain é 漢字 e\u0301 \u00a0\t\n", "plain é 漢字 e\u0301 \u00a0\t\n"),
        ("\x1b[2Jgone\x07\r", r"\x1b[2Jgone\x07\x0d"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("abc\u202egpj.exe", r"abc\u202egpj.exe"),
        ("a\u200bb\u2066c\ufeff", r"a\u200bb\u2066c\ufeff"),
        ("line\u2028line\x85line", r"line\u2028line\x85line"),
        ("file\udcff", r"file\udcff"),
        ("tag\U000e0041", r"tag\U000e0041"),
    ],
)
def test_what_a_terminal_obeys_or_hides_is_written_out(raw, shown):
    """A name that clears the screen or reads backwards is shown as it is."""
    assert fmt.printable(raw) == shown
    shown.encode()  # and can be written


def test_no_character_that_is_obeyed_or_unseen_gets_through():
    """Control, format and half characters and foreign line ends, as Unicode itself sorts them."""
    visible_marks = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}
    got_through = [
        code
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        and fmt.printable(chr(code)) == chr(code)
    ]
    assert set(got_through) - visible_marks == {ord("\t"), ord("\n")}


def test_elapsed_time_ticks_by_the_second():
    """Elapsed time shows whole seconds."""
    assert [fmt.clock(s) for s in (7.9, 754, 3723)] == ["0:07", "12:34", "1:02:03"]
