"""When a spare is forked ahead, and when one that was made a rank is taken back."""

from __future__ import annotations

import importlib
import inspect

import pytest

from ddp_runner.features.spare.rules import (
    BEGIN_TIMEOUT_S,
    BUILDS_MIN_S,
    LOST_BUILDING_MAX,
    SLOW_BEGIN_TIMEOUT_S,
    SPARE,
    builds_ahead,
    must_give_back,
    wants_spare,
)


def test_the_module_of_its_role_has_the_process():
    """The zygote imports it by name."""
    main = importlib.import_module(SPARE.module).main
    assert list(inspect.signature(main).parameters) == ["request", "descriptors"]


@pytest.mark.parametrize("fault_free", [True, False])
@pytest.mark.parametrize("stepped", [True, False])
def test_no_spare_is_wanted_beside_a_repair_or_a_first_step(fault_free, stepped):
    """It would take time from what matters; a run without faults wants one."""
    assert wants_spare(fault_free=fault_free, stepped=stepped) is (fault_free and stepped)


def test_who_has_not_begun_in_time_is_taken_back():
    """A spare that was stopped just then; control: in time, or once it has begun."""
    for is_stopped, limit_s in ((True, BEGIN_TIMEOUT_S), (False, SLOW_BEGIN_TIMEOUT_S)):
        late, just = (
            must_give_back(has_begun=False, is_stopped=is_stopped, since_s=since_s)
            for since_s in (limit_s + 0.01, limit_s)
        )
        assert (late, just) == (True, False)
        assert not must_give_back(has_begun=True, is_stopped=is_stopped, since_s=1000.0)


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
