"""Figures that many look at are made once, and seldom where making them takes long."""

from __future__ import annotations

import threading
import time

import pytest

from ddp_runner.features.page import shared_figures
from ddp_runner.features.page.shared_figures import SharedFigures, Wanted


class Maker:
    def __init__(self):
        self.made = 0

    def __call__(self):
        self.made += 1
        return {"data": [self.made]}, False


@pytest.fixture
def figures():
    return SharedFigures(str)


def test_ten_who_look_at_the_same_get_one_figure(figures):
    """Also those who come while it is made."""
    maker, got = Maker(), []
    wanted = Wanted(key="loss", at_once=0, version=1)
    looks = [threading.Thread(target=lambda: got.append(figures.get(wanted, maker))) for _ in range(10)]  # fmt: skip
    for look in looks:
        look.start()
    for look in looks:
        look.join()
    assert maker.made == 1
    assert len(set(map(id, got))) == 1
    assert got[0].text == "{'data': [1]}"


def test_points_may_be_late_and_marks_may_not(figures, monkeypatch):
    """A new version waits until it is due; what is to be seen at once is made at once; another look is its own."""
    maker, now_s = Maker(), time.monotonic()
    monkeypatch.setattr(shared_figures.time, "monotonic", lambda: now_s)
    first = figures.get(Wanted(key="loss", at_once=0, version=1), maker)
    assert figures.known(Wanted(key="loss", at_once=0, version=2)) is first
    assert figures.get(Wanted(key="loss", at_once=0, version=2), maker) is first
    assert figures.known(Wanted(key="loss", at_once=1, version=2)) is None
    assert figures.known(Wanted(key="dark", at_once=0, version=1)) is None
    marked = figures.get(Wanted(key="loss", at_once=1, version=2), maker)
    assert marked is not first
    now_s += 2.1
    assert figures.known(Wanted(key="loss", at_once=1, version=2)) is marked
    assert figures.known(Wanted(key="loss", at_once=1, version=3)) is None


def test_what_takes_long_is_made_seldom(figures, monkeypatch):
    """Less than a fiftieth of a core for one look, whatever a run is like."""
    clock = {"thread_s": 0.0, "now_s": 0.0}

    def make():
        clock["thread_s"] += 0.1
        return {}, True

    monkeypatch.setattr(shared_figures.time, "thread_time", lambda: clock["thread_s"])
    monkeypatch.setattr(shared_figures.time, "monotonic", lambda: clock["now_s"])
    for tick in range(1_000):
        clock["now_s"] = tick / 10
        figures.get(Wanted(key="loss", at_once=0, version=tick), make)
    assert clock["thread_s"] / clock["now_s"] < 1 / 50


def test_figures_that_nobody_looks_at_are_forgotten(figures):
    """Each zoom is one more."""
    for zoom in range(100):
        figures.get(Wanted(key=zoom, at_once=0), Maker())
    assert figures.known(Wanted(key=0, at_once=0)) is None
    assert figures.known(Wanted(key=99, at_once=0)) is not None
