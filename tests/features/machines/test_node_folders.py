"""What machines with folders of their own load and complete."""

from __future__ import annotations

import pytest

from ddp_runner.features.machines.rules.nodes import NewestCheckpoint, loads_own, who_completes


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


@pytest.mark.parametrize(
    ("folders", "steps", "expected"),
    [
        ((0, 0, 0, 0), (7, 7, -1, 7), {0: 0}),
        ((0, 0, 0, 0), (-1, 7, 7, 7), {0: 1}),  # who is the source
        ((0, 0, 1, 1), (7, 7, -1, 7), {0: 0, 1: 3}),
        ((0, 0, 1, 1), (6, -1, 7, 7), {1: 2}),
        ((0, 0, 1, 1), (7, 7, -1, -1), {0: 0}),
        ((0, 0, 1, 0), (7, 7, 7, 7), {0: 0, 1: 2}),  # some share a folder
    ],
)
def test_each_folder_of_logs_has_one_rank_that_completes_it(folders, steps, expected):
    """The lowest that is at the newest step: it has made that, and nobody else writes there."""
    assert who_completes(folders, steps=steps) == expected
