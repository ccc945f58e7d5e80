"""How long a launch may take: as people write it, and as a scheduler ends it."""

from __future__ import annotations

import pytest

from ddp_runner.core.launch_plan import time_limit
from ddp_runner.core.settings.declaration import seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("23h30m", 84_600),
        ("90m", 5_400),
        ("1d2h", 93_600),
        ("45s", 45),
        ("3600", 3_600),
        ("1.5", 1.5),
        ("23:30:00", 84_600),
        ("1:00:00:05", 86_405),
    ],
)
def test_times_are_read_as_people_write_them(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0h", "-5", "soon", "5 minutes", "inf", "nan", "1h1d"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match=r".*"):
        seconds_of(text)


def limit(**known):
    usual = {"max_time_s": None, "job_end": "", "now_utc_s": 1_000_000.0, "stop_timeout_s": 300.0}
    return time_limit(**{**usual, **known})


def test_a_launch_stops_at_the_first_of_its_limits():
    """Before the end of a job there is time for a save: as long as a stop may take, or a tenth."""
    assert limit() is None
    assert limit(max_time_s=60.0).seconds == 60.0
    assert limit(job_end="1010000").seconds == 10_000 - 300
    assert limit(job_end="1000100").seconds == 90
    assert limit(job_end="1010000", max_time_s=60.0).seconds == 60.0
    assert "SLURM" in limit(job_end="1000100", max_time_s=95.0).why


@pytest.mark.parametrize("job_end", ["Unknown", "999999", ""])
def test_an_end_that_nobody_understands_is_none(job_end):
    assert limit(job_end=job_end) is None
