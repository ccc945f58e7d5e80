"""When a spare is forked ahead, and when one that was made a rank is taken back."""

from __future__ import annotations

import pytest

from ddp_runner.core.spare import (
    BEGIN_TIMEOUT_S,
    BUILDS_MIN_S,
    LOST_BUILDING_MAX,
    LOST_MAX,
    LOST_WAIT_S,
    SLOW_BEGIN_TIMEOUT_S,
    YOUNG_S,
    SpareFacts,
    SpareKind,
    SparePlan,
    builds_ahead,
    lost_after,
    must_end,
    must_give_back,
    spare_plan,
    wants_spare,
)


def facts(**changes):
    known = {
        "fault_free": True,
        "stepped": True,
        "exists": False,
        "starts_there": False,
        "lost_in_a_row": 0,
        "since_lost_s": 1000.0,
    }
    return SpareFacts(**{**known, **changes})


def test_a_run_without_faults_wants_one():
    """The ordinary case."""
    assert wants_spare(facts())


@pytest.mark.parametrize(
    "change",
    [{"fault_free": False}, {"stepped": False}, {"exists": True}, {"starts_there": True}],
    ids=lambda c: next(iter(c)),
)
def test_no_spare_beside_a_repair_a_first_step_or_another_spare(change):
    """It would take time from what matters, or be one too many."""
    assert not wants_spare(facts(**change))


def test_spares_that_keep_dying_come_later_and_later_and_then_no_more():
    """Bounded, whatever ends them."""
    lost = 0
    while wants_spare(facts(lost_in_a_row=lost)):
        assert wants_spare(facts(lost_in_a_row=lost, since_lost_s=lost * LOST_WAIT_S))
        if lost:
            assert not wants_spare(facts(lost_in_a_row=lost, since_lost_s=lost * LOST_WAIT_S - 0.1))
        lost = lost_after(lost, lived_s=YOUNG_S - 1)
    assert lost == LOST_MAX


def test_a_spare_that_has_lived_for_long_was_none_of_a_row():
    """A machine that takes one process an hour is not to end what is useful."""
    assert lost_after(LOST_MAX - 1, lived_s=YOUNG_S) == 1


def test_who_has_not_begun_in_time_is_taken_back():
    """A spare that was stopped just then; control: in time, or once it has begun."""
    for is_stopped, limit_s in ((True, BEGIN_TIMEOUT_S), (False, SLOW_BEGIN_TIMEOUT_S)):
        late, just = (
            must_give_back(has_begun=False, is_stopped=is_stopped, since_s=since_s)
            for since_s in (limit_s + 0.01, limit_s)
        )
        assert (late, just) == (True, False)
        assert not must_give_back(has_begun=True, is_stopped=is_stopped, since_s=1000.0)


ON_GPUS = [("cuda:0", 10.0), ("cuda:1", 10.1), ("cuda:2", 10.2)]
ON_CPU = [("cpu", 10.0), ("cpu", 10.1)]
NOWHERE = SparePlan(kind=SpareKind.LIBRARIES)
LAST = SparePlan(kind=SpareKind.DEVICE, device="cuda:2")


@pytest.mark.parametrize(
    ("setting", "processes", "plan"),
    [
        (False, ON_GPUS, None),
        (False, ON_CPU, None),
        (True, ON_GPUS, NOWHERE),
        ("libraries", ON_GPUS, NOWHERE),
        ("device", ON_GPUS, LAST),
        ("model", ON_GPUS, NOWHERE),
        ("process", ON_GPUS, NOWHERE),
        *(
            (word, ON_CPU, SparePlan(kind=SpareKind.CPU))
            for word in (True, "process", "libraries", "device")
        ),
    ],
)
def test_which_spare_a_run_keeps(setting, processes, plan):
    """On GPUs no memory is held unless somebody says so; on the CPU there is one kind."""
    assert spare_plan(setting, processes=processes) == plan


def test_what_is_built_ahead_is_built_on_the_cpu_only():
    """On GPUs it would have to be brought to one."""
    assert spare_plan(True, processes=ON_CPU, is_built=True) == SparePlan(kind=SpareKind.MODEL)
    assert spare_plan(True, processes=ON_GPUS, is_built=True) == NOWHERE


@pytest.mark.parametrize(
    ("setting", "changes", "expected"),
    [
        (True, {}, True),
        (True, {"build_s": BUILDS_MIN_S}, False),
        (True, {"rank_bytes": 251}, False),
        (True, {"rank_bytes": 0}, False),
        (True, {"lost_in_a_row": LOST_BUILDING_MAX}, False),
        (True, {"lost_in_a_row": LOST_BUILDING_MAX - 1}, True),
        ("process", {}, False),
        ("device", {}, False),
        (False, {}, False),
        ("model", {"build_s": 0.0, "rank_bytes": 2000}, True),
        ("model", {"lost_in_a_row": LOST_BUILDING_MAX}, False),
    ],
)
def test_a_spare_builds_ahead_what_takes_long_and_fits(setting, changes, expected):
    """By itself only in a quarter of the memory that is free, where a rank's building takes a moment."""
    known = {
        "build_s": BUILDS_MIN_S * 1.01,
        "rank_bytes": 250,
        "free_bytes": 1000,
        "lost_in_a_row": 0,
    }
    assert builds_ahead(setting, **{**known, **changes}) is expected


def test_a_spare_that_holds_memory_serves_the_newest_lost_gpu():
    """Its process is the youngest; two ranks on one GPU are both served."""
    lost = [("cuda:0", 10.0), ("cuda:1", 99.0), ("cuda:2", 10.2)]
    assert spare_plan("device", processes=lost).device == "cuda:1"
    shared = spare_plan("device", processes=[("cuda:0", 10.0), ("cuda:0", 10.1)])
    assert shared.serves("cuda:0")
    assert not shared.serves("cuda:1")
    assert all(NOWHERE.serves(device) for device, _ in lost)


def test_where_a_rank_ran_out_of_memory_no_spare_holds_any():
    """The next one has the libraries; control: another GPU is as before."""
    assert spare_plan("device", processes=ON_GPUS, refused={"cuda:2"}) == NOWHERE
    assert spare_plan("device", processes=ON_GPUS, refused={"cuda:1"}) == LAST


@pytest.mark.parametrize(
    ("spare", "changes", "ends"),
    [
        (LAST, {}, False),
        (LAST, {"starting": {"cuda:2"}}, True),
        (LAST, {"starting": {"cuda:2"}, "fault_free": False}, True),
        (LAST, {"starting": {"cuda:0"}, "fault_free": False}, False),
        (LAST, {"refused": {"cuda:2"}, "fault_free": False}, True),
        (LAST, {"refused": {"cuda:0"}}, False),
        (SparePlan(kind=SpareKind.DEVICE, device="cuda:1"), {}, True),
        (SparePlan(kind=SpareKind.DEVICE, device="cuda:1"), {"fault_free": False}, False),
        (NOWHERE, {"starting": {"cuda:2"}, "refused": {"cuda:2"}}, False),
    ],
)
def test_a_spare_gives_its_memory_back_where_it_is_needed(spare, changes, ends):
    """At once for a rank that starts there or lacks memory; without faults when it serves the wrong GPU."""
    known = {"fault_free": True, "starting": set(), "refused": set(), **changes}
    assert must_end(spare, LAST, **known) is ends
