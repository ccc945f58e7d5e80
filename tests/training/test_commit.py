"""What stands between a step's gradients and the change of the state."""

from __future__ import annotations

import pytest

from ddp_runner.kernel.step.commit import Commit
from tests.training.building import build_state, make_slot


class Unreduced:
    """A replica whose sums have not come to their end; whatever else is asked of it is noted."""

    def __init__(self):
        self.asked = []

    def check_reduced(self):
        raise RuntimeError("Expected to have finished reduction")

    def __getattr__(self, name):
        self.asked.append(name)
        return lambda *_, **__: pytest.fail(f"{name}() with gradients that are not summed")


def test_nothing_is_done_with_gradients_that_are_not_reduced():
    """Neither are signals exchanged, nor may the optimizer run."""
    replica = Unreduced()
    commit = Commit(build_state(), replica, slot=make_slot())
    with pytest.raises(RuntimeError, match="finished reduction"):
        commit.ready_to_change()
    assert replica.asked == []
