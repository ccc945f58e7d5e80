"""The chart of a range test: each point at its place, within a terminal, in plain characters."""

import math

from ddp_runner.features.tuning.find_learning_rate import ASCII, COLUMNS, ROWS, UNICODE, chart


def falling(count=100, low=1e-7, high=10.0):
    rates = [low * (high / low) ** (place / (count - 1)) for place in range(count)]
    return [(rate, 2.0 + math.cos(place / count * 4)) for place, rate in enumerate(rates)]


def test_points_and_marks_are_where_they_belong():
    """The first is at the left, the lowest at the bottom, and a mark stands below its rate."""
    points = falling()
    lines = chart(points, marks={"S": 1e-5}, glyphs=ASCII)
    assert len(lines) == ROWS + 2
    assert all(len(line) <= 79 for line in lines)
    grid = [line.partition("|")[2] for line in lines[:ROWS]]
    assert all(
        any(len(row) > place and row[place] == "*" for row in grid) for place in (0, COLUMNS - 1)
    )
    lowest = min(range(len(points)), key=lambda place: points[place][1])
    assert grid[-1][round(lowest / (len(points) - 1) * (COLUMNS - 1))] == "*"
    floor = lines[ROWS].partition("+")[2]
    assert floor.index("S") == round(2 / 8 * (COLUMNS - 1))
    assert floor.count("S") == 1
    scale = lines[ROWS + 1]
    assert scale.index("1e-5") == lines[ROWS].index("S")
    assert scale.rstrip().endswith("1e1")


def test_without_utf_the_chart_is_ascii():
    """And with it the same shape."""
    plain = chart(falling(), marks={}, glyphs=ASCII)
    assert all(line.isascii() for line in plain)
    fine = chart(falling(), marks={}, glyphs=UNICODE)
    assert [len(line) for line in fine] == [len(line) for line in plain]
    assert any(not line.isascii() for line in fine)


def test_few_points_and_equal_losses_can_be_drawn():
    """One point, none, all alike, and a loss far above the first, which is cut."""
    assert chart([], marks={}, glyphs=ASCII) == []
    for points in ([(1e-3, 1.0)], [(1e-4, 1.0), (1e-3, 1.0)], [(1e-4, 0.0), (1e-3, -1.0)]):
        lines = chart(points, marks={"M": 1e-9}, glyphs=ASCII)
        assert sum(line.count("*") for line in lines) == len(points)
    lines = chart([(1e-4, 2.0), (1e-3, 1.0), (1e-2, 1e9)], marks={}, glyphs=ASCII)
    assert "2.3000" in lines[0]
