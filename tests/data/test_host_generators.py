"""The host's generators come back exactly as they were, whichever way their states are copied."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from ddp_runner.data import host_generators
from ddp_runner.data.host_generators import generators_kept, keep_numpy, seed_host

LEGACY = np.random.rand.__self__  # what numpy's own functions draw from


@pytest.fixture(params=["copied", "by their methods"])
def way(request, monkeypatch):
    """How states are kept: as their words lie in memory, or where those were not found."""
    if request.param == "by their methods":
        monkeypatch.setattr(host_generators, "_place_in_python", lambda: None)
        monkeypatch.setattr(host_generators, "_place_in_numpy", lambda: None)


def drawn():
    """Some of each, of all kinds that move a state in a way of their own."""
    return (
        [random.random(), random.gauss(0.0, 1.0), random.getrandbits(80)],
        [LEGACY.rand(), LEGACY.randn(), LEGACY.randint(9)],
        torch.rand(3).tolist(),
    )


@pytest.mark.usefixtures("way")
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


@pytest.mark.usefixtures("way")
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


def test_the_words_are_found_in_the_memory_of_this_python():
    """Where they are not, each micro-batch without workers takes 0.1 ms longer."""
    assert host_generators._place_in_python() is not None
    assert host_generators._place_in_numpy() is not None


def test_a_copy_that_does_not_come_back_is_not_used():
    """One that is not whole, and one of something else, which no draw moves."""
    draws = random.Random(1)
    nothing = lambda: lambda: None  # noqa: E731
    assert not host_generators._comes_back(draws.getstate, draws.random, nothing)
    assert not host_generators._comes_back(lambda: 1, draws.random, nothing)


def test_other_bits_below_numpys_functions_come_back_too():
    """Given by the user's program."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        give = keep_numpy()
        expected = LEGACY.rand(3).tolist()
        give()
        assert LEGACY.rand(3).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


def test_numpys_words_are_copied_under_its_lock():
    """A thread of the user's may be drawing."""
    given = []
    copying = threading.Thread(target=lambda: given.append(keep_numpy()), daemon=True)
    with np.random.get_bit_generator().lock:
        copying.start()
        copying.join(0.2)
        assert not given
    copying.join(10.0)
    giving = threading.Thread(target=given[0], daemon=True)
    expected = LEGACY.rand()
    with np.random.get_bit_generator().lock:
        giving.start()
        giving.join(0.2)
        assert giving.is_alive()
    giving.join(10.0)
    assert LEGACY.rand() == expected
