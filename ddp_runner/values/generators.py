"""Keeps, gives back and seeds Python's, numpy's and torch's CPU generator. Never draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MASK32 = 0xFFFFFFFF

_python: Any = random.random.__self__  # type: ignore[attr-defined]  # what the module's functions draw from
_seed_python = super(random.Random, _python).seed  # without the checks of the class above it


def seed_host(seed: int) -> None:
    """Seed all three with ``seed``, of 64 bits, as ``random.seed``, ``np.random.seed`` and ``manual_seed`` would."""
    _seed_python(seed)
    _python.gauss_next = None
    np.random.seed(seed & _MASK32)  # noqa: NPY002 - the generator that datasets draw from
    torch.default_generator.manual_seed(seed)


def moved_generators(before: tuple[Any, ...]) -> tuple[str, ...]:
    """Whose generators are no more as in ``before``, which :func:`generator_states` gave."""
    names = ("Python's random", "numpy", "torch")
    return tuple(
        name for name, old, new in zip(names, before, generator_states(), strict=True) if old != new
    )


def generator_states() -> tuple[Any, ...]:
    """Of Python's, numpy's and torch's CPU generator, to be compared."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - as above
    state = numpy["state"]
    rest = (state["pos"], numpy["has_gauss"], numpy["gauss"])
    return (
        random.getstate(),
        state["key"].tobytes() + repr(rest).encode(),
        torch.default_generator.get_state().numpy().tobytes(),
    )


@contextmanager
def generators_kept() -> Iterator[None]:
    """Give python's, numpy's and torch's CPU generator back as they were."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002 - as above
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - as above
        torch.default_generator.set_state(torch_state)
