"""Samples drawn by weight: a function of seed and epoch alone."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from ddp_runner.data.draws import Draws
from ddp_runner.data.order import SampleOrder

SIZE, BATCH = 400, 8
FOR_EVER = {
    "with": [7, 5, 6, 5, 7, 4, 5, 5],
    "without": [5, 3, 6, 4, 2, 1, 7, 0],
}
WEIGHTS = [1.0 + index % 4 for index in range(SIZE)]


def order_of(seed=3, **given):
    draws = Draws.of(size=SIZE, **{"weights": None, "replacement": True, **given})
    return SampleOrder(seed=seed, dataset_size=SIZE, global_batch_size=BATCH, draws=draws)


def epoch_of(order, epoch=0):
    steps = order.steps_per_epoch
    taken = [order.indices(step) for step in range(epoch * steps, (epoch + 1) * steps)]
    return np.concatenate(taken)


def test_samples_come_in_proportion_to_their_weights():
    """Over fifty epochs, within five standard deviations of the share of each weight."""
    order = order_of(weights=WEIGHTS)
    drawn = np.concatenate([epoch_of(order, epoch) for epoch in range(50)])
    counts = collections.Counter(int(index) % 4 for index in drawn)
    for kind in range(4):
        share = (1 + kind) / 10
        deviation = np.sqrt(share * (1 - share) * len(drawn))
        assert abs(counts[kind] - share * len(drawn)) < 5 * deviation


def test_a_sample_without_weight_is_never_drawn():
    """Nor is any other lost, however small its weight beside the rest."""
    weights = np.full(SIZE, 1e-9)
    weights[::2], weights[1] = 0.0, 1e9
    drawn = epoch_of(order_of(weights=weights))
    assert set(drawn % 2) == {1}
    assert np.count_nonzero(drawn == 1) > 0.99 * len(drawn)


def test_without_replacement_each_comes_once_and_heavy_ones_earlier():
    first = epoch_of(order_of(weights=WEIGHTS, replacement=False))
    assert sorted(first) == list(range(SIZE))
    places = {int(index): place for place, index in enumerate(first)}
    means = [np.mean([places[i] for i in range(kind, SIZE, 4)]) for kind in range(4)]
    assert means == sorted(means, reverse=True)
    assert means[0] - means[3] > SIZE / 5


def test_the_logarithm_is_that_of_a_library():
    """Its own, so that no library decides about the order."""
    from ddp_runner.data.draws import _log

    values = np.concatenate([np.linspace(1e-12, 1.0, 10_001), 2.0 ** -np.arange(1, 60)])
    np.testing.assert_allclose(_log(values), np.log(values), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    "given",
    [
        {"weights": WEIGHTS},
        {"weights": WEIGHTS, "replacement": False},
    ],
)
def test_epochs_and_seeds_differ_and_repeat(given):
    """In any process, from any step on, whatever was asked for before."""
    order, other = order_of(**given), order_of(**given)
    late = [other.indices(step).tolist() for step in (90, 7, 60)]
    assert [order.indices(step).tolist() for step in (7, 60, 90)] == [late[1], late[2], late[0]]
    assert epoch_of(order).tolist() != epoch_of(order, 1).tolist()
    assert epoch_of(order).tolist() != epoch_of(order_of(seed=4, **given)).tolist()


def test_draws_are_the_same_for_ever():
    """A resumed run continues them: on another machine, with other versions of everything."""
    weights = [1, 2, 3, 4, 5, 6, 7, 8]
    found = {}
    for name, given in {
        "with": {"weights": weights},
        "without": {"weights": weights, "replacement": False},
    }.items():
        draws = Draws.of(size=8, **{"weights": None, "replacement": True, **given})
        order = SampleOrder(seed=7, dataset_size=8, global_batch_size=2, draws=draws)
        found[name] = epoch_of(order).tolist()
    assert found == FOR_EVER


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"weights": [1.0] * 3},
            r"Datasets\(weights=...\) has 3 entries, and the data 400 samples",
        ),
        ({"weights": [-1.0, *WEIGHTS[1:]]}, "the weight of sample 0 is -1: it must be 0 or more"),
        ({"weights": [*WEIGHTS[1:], float("nan")]}, "the weight of sample 399 is nan"),
        ({"weights": [0.0] * SIZE}, "all weights are 0"),
        ({"weights": [0.0, *WEIGHTS[1:]], "replacement": False}, "sample 0 is 0, and without repl"),
        ({"weights": ["a"] * SIZE}, "must be numbers, one for each sample"),
        ({"weights": [[1.0]] * SIZE}, "has 400x1 entries"),
    ],
)
def test_what_fits_no_data_is_named(given, says):
    with pytest.raises(ValueError, match=says):
        order_of(**given)


def test_a_digest_is_that_of_earlier_versions():
    """Their checkpoints have it, and go on."""
    draws = Draws.of(size=4, weights=[1.0, 2.0, 3.0, 4.0], replacement=False)
    assert draws.digest() == "dc88c77400a0b9f2"
