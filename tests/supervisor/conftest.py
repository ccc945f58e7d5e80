"""What the tests of the supervisor share: simulated runs."""

from __future__ import annotations

import pytest

from tests.supervisor.simulated import Simulation


@pytest.fixture
def simulate():
    """``simulate(**settings)``: a run whose processes and clock are simulated."""
    made = []

    def simulation(**changes):
        made.append(Simulation(**changes))
        return made[-1]

    yield simulation
    for one in made:
        one.close()
