"""What machines with folders of their own load."""

from __future__ import annotations

import pytest

from ddp_runner.checkpoint.catalog import NewestCheckpoint
from ddp_runner.features.machines.rules.nodes import loads_own


def at(step, run_id="a"):
    return NewestCheckpoint(step=step, run_id=run_id)


@pytest.mark.parametrize(
    ("theirs", "ours", "resume", "expected"),
    [
        (at(40), None, "auto", True),
        (at(40), at(20), "auto", True),
        (at(40), at(40), "auto", False),  # the same folder, or the same file
        (at(20), at(40), "auto", False),
        (at(40, "b"), at(20), "auto", False),  # what another run has left there
        (None, None, "auto", False),
        (None, at(20), "auto", False),
        (at(40), None, "none", False),
        (at(40), at(20), "best", False),
        (at(40), at(20), "step_00000020.pt", False),
    ],
)
def test_a_machine_loads_what_is_newer_and_of_this_run(theirs, ours, resume, expected):
    """Else the coordinator's is what the run goes on from."""
    assert loads_own(theirs, ours, resume=resume) is expected
