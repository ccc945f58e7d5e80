"""Every generator is a function of (seed, step, rank, micro-step)."""

# ruff: noqa: NPY002 - the legacy global generator is what is under test

import itertools
import random

import numpy as np
import pytest
import torch

from ddp_runner.values.generators import seed_all, seed_step

PLACE = {"seed": 1234, "step": 7, "rank": 1, "micro_step": 0}


@pytest.fixture(autouse=True)
def generators_are_restored():
    """Leave the global generators as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draws():
    return (random.random(), float(np.random.rand()), float(torch.rand(())))


def drawn_at(**changes):
    seed_step(**{**PLACE, **changes})
    return draws()


def test_the_same_place_gives_the_same_draws_whatever_came_before():
    """A retried step repeats exactly."""
    first = drawn_at()
    draws()
    assert drawn_at() == first


@pytest.mark.parametrize(
    "change", [{"seed": 1235}, {"step": 8}, {"rank": 0}, {"micro_step": 1}], ids=str
)
def test_another_place_changes_every_generator(change):
    """Seed, step, rank and micro-step each change Python's, NumPy's and torch's draws."""
    assert all(a != b for a, b in zip(drawn_at(), drawn_at(**change), strict=True))


def test_no_two_places_share_a_stream():
    """4096 neighbouring places give 4096 different streams, and swapped numbers are different."""
    places = itertools.product(range(4), range(16), range(8), range(8))
    seen = set()
    for seed, step, rank, micro_step in places:
        seed_step(seed=seed, step=step, rank=rank, micro_step=micro_step)
        seen.add(float(torch.rand((), dtype=torch.float64)))
    assert len(seen) == 4096


def test_large_seeds_and_steps_are_accepted():
    """Seeds of 63 bits fit every generator."""
    assert drawn_at(seed=2**63 - 1, step=10**12, rank=10**5) == drawn_at(
        seed=2**63 - 1, step=10**12, rank=10**5
    )


def test_neighbouring_steps_are_unrelated():
    """The first draws of 2000 steps are uniform: mean and neighbour correlation are small."""
    first = torch.tensor([drawn_at(step=step)[2] for step in range(2000)])
    assert abs(first.mean().item() - 0.5) < 0.03
    pairs = torch.corrcoef(torch.stack([first[:-1], first[1:]]))
    assert abs(pairs[0, 1].item()) < 0.08


def test_seed_all_makes_models_equal():
    """Two models built after the same seed have the same weights; another seed differs."""
    built = []
    for seed in (5, 5, 6):
        seed_all(seed)
        built.append(torch.nn.Linear(3, 3).weight.detach().clone())
    assert torch.equal(built[0], built[1])
    assert not torch.equal(built[0], built[2])


@pytest.mark.parametrize("is_built", [False, True])
def test_devices_are_seeded_where_torch_has_any(monkeypatch, is_built):
    """The host's generators are seeded alike in both cases."""
    asked = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_built)
    monkeypatch.setattr(torch, "manual_seed", asked.append)
    seed_all(5)
    first = draws()
    seed_all(5)
    assert draws() == first
    assert len(set(asked)) == is_built
    assert asked[:1] == [torch.initial_seed()][: len(asked)]
