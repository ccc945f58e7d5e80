"""What bounds a step and what to try, decided from times alone."""

from __future__ import annotations

import pytest

from ddp_runner.config import from_flat
from ddp_runner.core.phases import PHASE_NAMES
from ddp_runner.core.step_times import STEP, judge, parts_of, slowness

TIMES = {"data": 1.0, "forward": 30.0, "backward": 60.0, "communication": 5.0, "optimizer": 4.0}


def record(rank=0, **changes):
    times = {**TIMES, **changes}
    values = {f"{name}_ms": took for name, took in times.items()}
    return {**values, "rank": rank, "step_s": sum(times.values()) / 1e3}


def verdict(given=None, *, ranks=2, is_on_gpu=False, records=None, **changes):
    records = records or [record(rank, **changes) for rank in range(ranks)]
    return judge(
        parts_of(records),
        from_flat(given or {}),
        ranks=ranks,
        is_on_gpu=is_on_gpu,
        slow=slowness(records),
    )


def test_each_part_has_its_median_and_middle_half():
    """In the order of a step, the whole step last; shares are of its median."""
    records = [record(forward=took) for took in (10.0, 20.0, 30.0, 40.0, 100.0)]
    parts = {part.name: part for part in parts_of(records)}
    assert list(parts) == [*PHASE_NAMES, STEP]
    forward = parts["forward_ms"]
    assert (forward.low_ms, forward.median_ms, forward.high_ms) == (20.0, 30.0, 40.0)
    assert parts[STEP].median_ms == pytest.approx(100.0)
    assert forward.share == pytest.approx(0.3)
    (alone,) = (one for one in parts_of([record()]) if one.name == "data_ms")
    assert (alone.low_ms, alone.high_ms) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "bound", "first_try"),
    [
        ({}, "computation", "run.compile=true"),
        ({"data": 40.0}, "data", "num_workers=4"),
        ({"communication": 60.0}, "communication", "accumulation=4"),
        ({"optimizer": 80.0}, "optimizer", "--find-batch-size"),
    ],
)
def test_the_largest_avoidable_part_bounds_the_step(changes, bound, first_try):
    """Computation is what is left where nothing else is large."""
    found = verdict(**changes)
    assert found.bound == bound
    assert found.tries[0][0] == first_try
    assert "%" in found.why


def test_one_rank_has_nobody_to_communicate_with():
    """The control: the same times of a run with one rank are no matter of ranks."""
    assert verdict(ranks=1, communication=60.0).bound != "communication"


def test_ranks_that_wait_for_a_slow_one_are_shown_which():
    """Then the sums are not what takes the time."""
    records = [
        *(record(0, forward=20.0, backward=20.0, communication=80.0) for _ in range(3)),
        *(record(1, forward=50.0, backward=70.0, communication=1.0) for _ in range(3)),
    ]
    assert slowness(records)[0] == 1
    found = verdict(records=records)
    assert found.bound == "a slow rank"
    assert "rank 1" in found.why
    assert found.tries[0][0] == "data.shares=..."
    assert slowness([record(0), record(1)]) == (0, 1.0)


@pytest.mark.parametrize(
    ("given", "is_on_gpu", "absent", "present"),
    [
        ({"compile": True}, False, "run.compile=true", "--profile steps=10:15"),
        ({"mode": "data_parallel"}, False, "run.compile=true", "--profile steps=10:15"),
        ({"precision": "fp32"}, True, "run.matmul_precision=high", "optim.precision=auto"),
        ({"precision": "bf16"}, True, "optim.precision=auto", "run.matmul_precision=high"),
        (
            {"activation_checkpointing": "all"},
            False,
            "nothing",
            "memory.activation_checkpointing=off",
        ),
        ({}, False, "optim.precision=auto", "run.compile=true"),
    ],
)
def test_what_is_set_already_is_not_suggested(given, is_on_gpu, absent, present):
    """Nor what the device has no use for."""
    tries = [words for words, _ in verdict(given, is_on_gpu=is_on_gpu).tries]
    assert absent not in tries
    assert present in tries


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "accumulation=4"),
        ({"accumulation": 2}, "accumulation=8"),
        ({"accumulation_total": 10}, "accumulation_total=40"),
        ({"global_batch_size": 100}, "global_batch_size=400"),
    ],
)
def test_a_larger_step_is_suggested_in_the_words_it_was_given_in(given, words):
    """So that it can be typed beside them."""
    assert verdict(given, communication=60.0).tries[0][0] == words
    assert words in [one for one, _ in verdict(given, optimizer=60.0).tries]


def test_a_total_of_workers_grows_as_one():
    """A number for each rank beside it is refused."""
    assert verdict({"workers_total": 6}, data=90.0).tries[0][0] == "workers_total=12"


def test_data_that_is_preloaded_is_not_preloaded_again():
    """And the number of workers grows from what it is."""
    tries = [words for words, _ in verdict({"preload": True, "num_workers": 3}, data=90.0).tries]
    assert tries == ["num_workers=6", "prefetch_factor=4"]
