"""Which signals end a run at once: a person who asks again, never kernel, shell or scheduler."""

from __future__ import annotations

import pytest

from ddp_runner.kernel.rules.stopping import (
    PRESS_GAP_S,
    TERMINATE_AGAIN_S,
    StopSignal,
    StopSignals,
)

INTERRUPT, TERMINATE, OTHER = StopSignal.INTERRUPT, StopSignal.TERMINATE, StopSignal.OTHER
LATER_S = 1000.0


def ends_at_once(*heard):
    """Whether the signals ``(signal, at_s)`` end a run at once, at the end of all."""
    signals = StopSignals()
    for signal, at_s in heard:
        assert not signals.ends_at_once(at_s), "before that one"
        signals.heard(signal, at_s)
    return signals.ends_at_once(LATER_S)


def test_a_second_press_of_the_keys_ends_at_once():
    """However late; one press alone does not."""
    assert ends_at_once((INTERRUPT, 0.0), (INTERRUPT, 0.3))
    assert ends_at_once((INTERRUPT, 0.0), (INTERRUPT, 60.0))
    assert not ends_at_once((INTERRUPT, 0.0))


def test_a_press_that_comes_twice_is_one():
    """The terminal signals the whole group, and a parent there passes it on; two presses are two."""
    first = ((INTERRUPT, 0.0), (INTERRUPT, 0.004), (INTERRUPT, 0.03))
    assert not ends_at_once(*first)
    assert ends_at_once(*first, (INTERRUPT, 1.0), (INTERRUPT, 1.004))


@pytest.mark.parametrize("every_s", [0.02, 0.033, 0.1])
def test_a_key_that_is_held_down_is_one_press(every_s):
    """It repeats after half a second; pressed once more after that it ends the run."""
    held = [(INTERRUPT, 0.0), *((INTERRUPT, 0.5 + number * every_s) for number in range(20))]
    assert not ends_at_once(*held)
    assert ends_at_once(*held, (INTERRUPT, 9.0))


def test_two_presses_count_when_the_second_is_over():
    """Until then it may be a key that is held down."""
    signals = StopSignals()
    signals.heard(INTERRUPT, 0.0)
    signals.heard(INTERRUPT, 1.0)
    assert not signals.ends_at_once(1.0 + PRESS_GAP_S)
    assert signals.ends_at_once(1.01 + PRESS_GAP_S)


def test_a_second_sigterm_counts_only_after_a_while():
    """Schedulers and shells send several; who asks again later means it."""
    assert not ends_at_once((TERMINATE, 0.0), (TERMINATE, 0.05), (TERMINATE, TERMINATE_AGAIN_S))
    assert ends_at_once((TERMINATE, 0.0), (TERMINATE, 0.05), (TERMINATE, TERMINATE_AGAIN_S + 0.01))


def test_no_other_signal_ends_at_once():
    """A closed terminal sends SIGHUP twice; nor does one of each kind."""
    assert not ends_at_once(*((OTHER, at_s) for at_s in (0.0, 0.05, 10.0, 100.0)))
    assert not ends_at_once((OTHER, 0.0), (TERMINATE, 10.0), (INTERRUPT, 20.0), (OTHER, 30.0))
