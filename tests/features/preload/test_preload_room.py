"""How much memory preloaded samples are estimated to need, and whether that is there."""

from __future__ import annotations

import pytest

from ddp_runner.features.preload.reading import PROBES, estimated_bytes, fits, may_go_on, probes


@pytest.mark.parametrize("samples", [1, 2, 31, 32, 33, 1000, 10**12])
def test_probes_are_spread_from_the_first_to_the_last_sample(samples):
    """Data that is sorted by length has its short samples at one end."""
    found = probes(samples)
    assert len(found) == len(set(found)) == min(PROBES, samples)
    assert (found[0], found[-1], list(found)) == (0, samples - 1, sorted(found))


def test_data_without_samples_needs_no_look():
    """An empty validation set."""
    assert (probes(0), estimated_bytes([], samples=0)) == ((), 0)


def test_the_estimate_is_the_mean_times_the_number_rounded_up():
    """Whole bytes, also where the mean is none."""
    assert estimated_bytes([10, 11], samples=3) == 32
    assert estimated_bytes([64], samples=10**9) == 64 * 10**9


def test_nine_tenths_of_what_is_available_may_be_taken():
    """Training needs the rest."""
    assert fits(90, available_bytes=100)
    assert not fits(91, available_bytes=100)


def test_reading_ends_where_samples_are_larger_than_estimated():
    """Half of what was to be left over is the least."""
    assert may_go_on(6, first_available_bytes=100)
    assert not may_go_on(4, first_available_bytes=100)
