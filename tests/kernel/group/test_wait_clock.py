"""Whose clock shows how long a rank has waited for the others."""

from __future__ import annotations

import torch

from ddp_runner.kernel.group.device import DeviceClock, WaitClock, wait_clock


class _Stream:
    """A device that does its work later, at a time of its own."""

    def __init__(self):
        self.now_ms = 0.0
        self.reported = []

    def run(self):
        for act in self.reported:
            act()
        self.reported.clear()


class _Event:
    def __init__(self, stream):
        self._stream = stream
        self.at_ms = None

    def record(self):
        self._stream.reported.append(lambda: setattr(self, "at_ms", self._stream.now_ms))

    def elapsed_time(self, other):
        assert self.at_ms is not None, "a device that has not come here has no time to give"
        return other.at_ms - self.at_ms


def _pass(stream, ms):
    stream.reported.append(lambda: setattr(stream, "now_ms", stream.now_ms + ms))


def test_a_device_separates_its_own_time_from_the_time_for_others():
    """The host has asked for all in no time, and reads the sums when everything is over."""
    stream = _Stream()
    clock = DeviceClock(lambda: _Event(stream))
    assert clock.waited_ns() == 0, "no step yet"
    for own_ms, others_ms in ((30.0, 2.0), (5.0, 27.0)):
        _pass(stream, own_ms)
        clock.own_is_done()
        _pass(stream, others_ms)
        clock.is_reduced()
        stream.run()
        assert clock.waited_ns() == others_ms * 1e6


def test_on_the_cpu_what_is_waited_ends_with_the_sums():
    """However late it is asked for."""
    clock = wait_clock(torch.device("cpu"))
    assert type(clock) is WaitClock
    clock.own_is_done()
    clock.is_reduced()
    first = clock.waited_ns()
    assert 0 <= first == clock.waited_ns()
