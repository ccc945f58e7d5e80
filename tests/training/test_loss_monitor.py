"""The loss monitor: targets, best, skipped steps, state."""

import json
import math

import pytest

from ddp_runner.training.components.loss_monitor import LossMonitor, Verdict


def monitor(**changes):
    return LossMonitor(**{"target_loss": 1.0, "window": 4, "max_errors_per_epoch": 2, **changes})


def observe_all(watch, losses, *, start=0, epoch=0):
    return [
        watch.observe(step=start + i, epoch=epoch, loss=loss, applied=True)
        for i, loss in enumerate(losses)
    ]


def test_target_is_reached_by_the_mean_of_a_full_window():
    """The mean of four, not one lucky batch, must be at the target."""
    verdicts = observe_all(monitor(), [3.0, 0.0, 2.0, 1.0, 1.0])
    assert verdicts == [Verdict.CONTINUE] * 4 + [Verdict.TARGET_REACHED]


def test_a_window_that_is_not_full_reaches_nothing():
    """Control: low first losses do not end the run."""
    assert set(observe_all(monitor(), [0.1, 0.1, 0.1])) == {Verdict.CONTINUE}


def test_without_a_target_nothing_is_reached():
    """Control: target None is off, also for a loss of zero and below."""
    assert set(observe_all(monitor(target_loss=None), [0.0, -5.0] * 6)) == {Verdict.CONTINUE}


def test_more_skipped_steps_than_allowed_in_one_epoch_are_too_many():
    """Two are allowed; the third of one epoch is one too many."""
    watch = monitor()
    verdicts = [watch.observe(step, 0, math.nan, applied=False) for step in range(3)]
    assert verdicts == [Verdict.CONTINUE, Verdict.CONTINUE, Verdict.TOO_MANY_ERRORS]


def test_no_allowed_error_means_the_first_is_too_many():
    """max_errors_per_epoch=0 tolerates none."""
    watch = monitor(max_errors_per_epoch=0)
    assert watch.observe(0, 0, math.inf, applied=False) is Verdict.TOO_MANY_ERRORS


def test_a_search_for_the_loss_scale_of_fp16_is_no_error():
    """However many steps it takes; the one that is not finite at the last scale is."""
    watch = monitor(max_errors_per_epoch=0)
    for step in range(16):
        assert watch.observe(step, 0, 1.0, applied=False, overflowed=True) is Verdict.CONTINUE, step
    assert watch.errors_in_epoch == 0
    assert watch.observe(16, 0, 1.0, applied=False) is Verdict.TOO_MANY_ERRORS


def test_skipped_steps_are_counted_by_epoch():
    """Control: two in each of many epochs are allowed, and their losses are not averaged."""
    watch = monitor()
    for step in range(20):
        assert watch.observe(step, step // 2, math.nan, applied=False) is Verdict.CONTINUE
    assert watch.errors_in_epoch == 2
    assert watch.smoothed is None


def test_it_is_calm_once_enough_steps_have_followed_a_skipped_one():
    """Also in another process that goes on from its state."""
    watch = monitor()
    assert watch.is_calm, "control: nothing has happened"
    watch.observe(4, 0, math.nan, applied=False)
    calm = []
    for step in range(5, 16):
        other = monitor()
        other.load_state_dict(json.loads(json.dumps(watch.state_dict())))
        assert other.is_calm == watch.is_calm
        watch.observe(step, 0, 1.0, applied=True)
        calm.append(watch.is_calm)
    assert calm == [False] * 9 + [True] * 2


def test_a_repair_restarts_the_count():
    """What was skipped before the rate was lowered does not count against the lower one."""
    watch = monitor()
    for step in range(2):
        watch.observe(step, 0, math.nan, applied=False)
    watch.restart_count()
    for step in range(2, 4):
        assert watch.observe(step, 0, math.nan, applied=False) is Verdict.CONTINUE
    assert watch.observe(4, 0, math.nan, applied=False) is Verdict.TOO_MANY_ERRORS


def test_smoothed_best_and_last():
    """Best is the lowest mean of a full window; smoothed and last follow the newest."""
    watch = monitor()
    observe_all(watch, [4.0, 4.0])
    assert (watch.smoothed, watch.best, watch.last) == (4.0, None, 4.0)
    observe_all(watch, [2.0, 2.0, 2.0, 2.0, 10.0], start=2)
    assert (watch.smoothed, watch.best, watch.last) == (4.0, 2.0, 10.0)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_an_applied_step_without_a_finite_loss_is_an_error(loss):
    """The check before the step must have skipped it."""
    with pytest.raises(ValueError, match="was applied with loss"):
        monitor().observe(0, 0, loss, applied=True)


def test_a_step_is_observed_once():
    """A step again, or an older one, without loading a state is a wrong program."""
    watch = monitor()
    watch.observe(5, 0, 1.0, applied=True)
    for step in (5, 4):
        with pytest.raises(ValueError, match="observed after"):
            watch.observe(step, 0, 1.0, applied=True)


def test_state_continues_exactly_after_any_step():
    """Saved as plain values and loaded anywhere, verdicts and figures go on the same."""
    losses = [3.0, 2.0, 1.5, 1.0, 0.5, 0.9, 0.1, 2.0, 0.3]
    for cut in range(len(losses) + 1):
        whole, first, second = monitor(), monitor(), monitor()
        expected = observe_all(whole, losses)
        observe_all(first, losses[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert observe_all(second, losses[cut:], start=cut) == expected[cut:]
        assert second.state_dict() == whole.state_dict()


def test_a_window_below_one_is_refused():
    """An average over nothing has no meaning."""
    with pytest.raises(ValueError, match="window=0"):
        monitor(window=0)
