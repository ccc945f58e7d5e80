"""What is remembered of evaluations: counted once each, kept with the state, without effect when off."""

from __future__ import annotations

import copy
import json
import random

import pytest

from ddp_runner.core.improvement import ImprovementRules
from ddp_runner.core.monitor import Monitor
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.components.improvement_watch import ImprovementWatch
from ddp_runner.training.starting.resume import is_complete

from .building import build_state
from .test_build import PACED, build

RULES = ImprovementRules(plateau_patience=2, plateau_factor=0.5, stop_patience=5)


def observed(losses, watch=None, *, start=1):
    watch = watch or ImprovementWatch(RULES)
    for step, loss in enumerate(losses, start=start):
        watch.observe(step=step, value=loss)
    return watch


def standing(watch):
    return watch.rate_factor, watch.is_over, watch.state_dict()["now"]


def test_an_evaluation_that_is_made_again_counts_once():
    """A rank that had come to its end, and one that had not, stand alike; the last value holds."""
    chance = random.Random(1)
    for _ in range(50):
        losses = [chance.choice([1.0, 2.0, 3.0]) for _ in range(9)]
        early, late = observed(losses[:-1]), observed(losses[:-1])
        early.observe(step=9, value=chance.choice([0.5, 9.0]))
        for watch in (early, late):
            watch.observe(step=9, value=losses[-1])
        assert standing(early) == standing(late)
        for watch in (early, late):
            observed([1.0, 5.0], watch, start=10)
        assert standing(early) == standing(late)


def test_what_follows_is_said_with_its_figures():
    """A plateau once for each, the end at each evaluation that finds it."""
    watch = ImprovementWatch(RULES)
    news = [watch.observe(step=step, value=loss) for step, loss in enumerate([3, 2, 2, 2, 2, 2, 2])]
    plateau = "no improvement on 2 in 2 evaluations: learning rate x {}"
    assert news == [
        *("", "", "", plateau.format(0.5), "", plateau.format(0.25)),
        "no improvement on 2 in 5 evaluations: the run ends early",
    ]


@pytest.mark.parametrize("at", range(1, 9))
def test_a_process_that_follows_goes_on_as_the_one_before(at):
    """From plain values, at any evaluation, also at one that is made again."""
    losses = [3.0, 2.0, 2.5, 2.6, 1.9, 2.0, 2.0, 2.0, 2.0]
    whole, follower = observed(losses), ImprovementWatch(RULES)
    record = observed(losses[:at]).state_dict()
    follower.load_state_dict(json.loads(json.dumps(record)))
    observed(losses[at - 1 :], follower, start=at)
    assert standing(follower) == standing(whole)


def test_it_goes_with_the_state_and_back_with_a_roll_back():
    """Captured, restored, and gone where a state of before it is taken up."""
    source, other = build_state(), build_state()
    for state in (source, other):
        state.improvement = ImprovementWatch(RULES)
    before = copy.deepcopy(source.capture())
    observed([3.0, 3.0, 3.0], source.improvement)
    other.restore(copy.deepcopy(source.capture()))
    assert standing(other.improvement) == standing(source.improvement)
    assert other.improvement.rate_factor == 0.5
    del before["improvement"]
    other.restore(before)
    assert other.improvement.rate_factor == 1.0


def test_without_patience_nothing_is_kept_or_follows():
    """The control: the state is as it always was."""
    state = build_state()
    assert observed([1.0] * 50, state.improvement).rate_factor == 1.0
    assert not state.improvement.is_over
    assert "improvement" not in state.capture()


def test_a_run_that_ended_early_is_complete_until_it_may_go_on():
    """By the patience of this launch: a longer one goes on."""
    for patience, complete in ((3, True), (9, False), (0, False)):
        workload, state = build(**PACED, early_stopping_patience=patience)
        state.committed_step = 5
        rules = ImprovementRules(stop_patience=3)
        state.improvement.load_state_dict(
            observed([1.0] * 4, ImprovementWatch(rules, monitor=workload.monitor)).state_dict()
        )
        assert is_complete(workload, state) is complete


def test_a_monitor_that_no_evaluation_gives_is_refused_before_the_first_step():
    """Of a task without validation data; control: what needs none."""
    streamed = {"monitor": "validation_loss", "num_workers": 0}  # a task without validation data
    with pytest.raises(BadInputError, match=r"checkpoint\.monitor=validation_loss: the task"):
        build(**streamed)
    for wanted in ("auto", "train_loss"):
        build(**{**streamed, "monitor": wanted}, early_stopping_patience=2)


def test_the_higher_the_better_where_that_is_asked_for():
    """The same decisions as of the negative figure; said with the figure itself."""
    watch = ImprovementWatch(RULES, monitor=Monitor(name="validation_hits", mode="max"))
    news = [watch.observe(step=step, value=one) for step, one in enumerate([1, 2, 2, 2, 1])]
    assert news == ["", "", "", "no improvement on 2 in 2 evaluations: learning rate x 0.5", ""]
    assert standing(watch) == standing(observed([-1, -2, -2, -2, -1]))


def test_what_was_counted_of_another_figure_does_not_count():
    """A resume that judges by something else begins to count again; control: by the same it goes on."""
    record = observed([1.0, 1.0, 1.0, 1.0]).state_dict()
    for monitor, count in ((Monitor(), 3), (Monitor(mode="max"), 0), (Monitor(name="x"), 0)):
        watch = ImprovementWatch(RULES, monitor=monitor)
        watch.load_state_dict(record)
        assert watch.state_dict()["now"]["stop"]["count"] == count
