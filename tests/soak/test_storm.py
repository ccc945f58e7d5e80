"""A run whose processes are hit at random, every second or two: the weights of a run without faults.

By hand: ``pytest -m soak tests/soak/test_storm.py -s``; ``STORM_RUNS`` and ``STORM_SEED`` ask for more.
"""

from __future__ import annotations

import os

import pytest

from tests.soak.storm import main

RUNS = int(os.environ.get("STORM_RUNS", "3"))
SEED = int(os.environ.get("STORM_SEED", "1"))

pytestmark = [pytest.mark.soak, pytest.mark.whole_run, pytest.mark.timeout(7200)]


def test_a_storm_of_signals_at_random_costs_no_weight(tmp_path):
    """Any process, any of five signals, any moment: every run ends completed, and none gives up."""
    assert main(["--runs", str(RUNS), "--seed", str(SEED), "--folder", str(tmp_path)]) == 0
