"""The host's generators come back exactly as they were."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ddp_runner.values.generators import generators_kept, seed_host

LEGACY = np.random.rand.__self__  # what numpy's own functions draw from


def drawn():
    """Some of each, of all kinds that move a state in a way of their own."""
    return (
        [random.random(), random.gauss(0.0, 1.0), random.getrandbits(80)],
        [LEGACY.rand(), LEGACY.randn(), LEGACY.randint(9)],
        torch.rand(3).tolist(),
    )


@pytest.mark.parametrize("before", [0, 1, 104, 311])
def test_what_is_drawn_meanwhile_moves_nothing(before):
    """Also amid a pair of Gaussian numbers, of which the second one is kept for the next call."""
    seed_host(5)
    for _ in range(before):
        drawn()
    expected = drawn()
    seed_host(5)
    for _ in range(before):
        drawn()
    with generators_kept():
        seed_host(6)
        for _ in range(7):
            drawn()
    assert drawn() == expected


def test_they_come_back_from_an_error_and_more_than_once():
    seed_host(5)
    expected = drawn()
    seed_host(5)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), generators_kept():
            random.random() / (0 * LEGACY.rand())
    assert drawn() == expected


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 + 5, 2**64 - 1])
def test_a_seed_gives_the_numbers_that_each_ones_own_seed_does(seed):
    """And the second of a pair of Gaussian numbers is forgotten."""
    random.seed(seed)
    LEGACY.seed(seed % 2**32)
    torch.manual_seed(seed)
    expected = [drawn() for _ in range(3)]
    random.gauss(0.0, 1.0)
    LEGACY.randn()
    seed_host(seed)
    assert [drawn() for _ in range(3)] == expected


def test_other_bits_below_numpys_functions_come_back_too():
    """Given by the user's program."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        with generators_kept():
            expected = LEGACY.rand(3).tolist()
        assert LEGACY.rand(3).tolist() == expected
    finally:
        np.random.set_bit_generator(before)
