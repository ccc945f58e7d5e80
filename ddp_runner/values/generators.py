"""The one keeper of random generators: it seeds them, and gives them back as they were. Never draws.

The global ones are Python's, NumPy's, torch's of the CPU and torch's of each CUDA device. Those of a task are of any
of these kinds; :func:`generator_kind` knows them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

MASK64 = 2**64 - 1
_MASK32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15  # odd; 2**64 over the golden ratio

_python: Any = random.random.__self__  # type: ignore[attr-defined]  # what the module's functions draw from
_numpy: Any = np.random.random.__self__  # type: ignore[attr-defined]  # the same of NumPy
_seed_python = super(random.Random, _python).seed  # without the checks of the class above it


def mix64(value: int) -> int:
    """Scramble 64 bits one-to-one: the finaliser of SplitMix64.

    Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def _next_mixed(value: int) -> int:
    """Return one output of SplitMix64 for the state ``value`` (taken modulo 2**64)."""
    return mix64((value + _GOLDEN) & MASK64)


def is_global(value: Any) -> bool:
    """Return True for a generator that :func:`seed_host` seeds."""
    return any(value is one for one in (_python, _numpy, torch.default_generator))


# Seeding.


def seed_host(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generator with ``seed``, of 64 bits, as their own functions would.

    NumPy's takes 32 bits. About 6 us: ``torch.manual_seed`` alone takes 71 us, since it also visits every device.
    """
    _seed_python(seed)
    _python.gauss_next = None
    np.random.seed(seed & _MASK32)  # noqa: NPY002 - users' code draws from the global generator
    torch.default_generator.manual_seed(seed)


def seed_step(*, seed: int, step: int, rank: int, micro_step: int) -> None:
    """Seed the host's and all initialised CUDA generators for one forward, from where the run is.

    So a retried step repeats exactly, and nothing needs to be saved. The seed is SplitMix64 absorbed over its four
    arguments: neighbouring steps and ranks get unrelated streams. Call it before each forward of a micro-batch. Does
    not create a CUDA context.
    """
    mixed = _next_mixed(_next_mixed(_next_mixed(_next_mixed(seed) ^ step) ^ rank) ^ micro_step)
    seed_host(mixed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for generator in torch.cuda.default_generators:
            generator.manual_seed(mixed)


def seed_all(seed: int) -> None:
    """Seed everything once, before a model is built; CUDA devices also if they start later.

    For those, ``torch.manual_seed`` keeps the stack of its caller, which takes 4 ms in a new process.
    """
    mixed = _next_mixed(seed)
    seed_host(mixed)
    if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        torch.manual_seed(mixed)


def seed_offset(generator: torch.Generator, *, first: int, offset: int) -> None:
    """Seed a generator with ``first + offset``, for another pass over the data."""
    generator.manual_seed((first + offset) % 2**63)


# The global generators, given back as they were.


class HostGenerators:
    """Captures the state of the host's generators, to restore it any number of times.

    ``with_torch``: torch's CPU generator too, and not Python's and NumPy's alone. ``also``: other generators of torch's.
    """

    def __init__(self, *, with_torch: bool = True, also: Iterable[torch.Generator] = ()) -> None:
        own = (torch.default_generator,) if with_torch else ()
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - as above
        self._torch = [(one, one.get_state()) for one in (*own, *also)]

    def give_back(self) -> None:
        """Put them there again."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002 - as above
        for generator, state in self._torch:
            generator.set_state(state)


@contextmanager
def generators_kept(*, also: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Give the host's generators, and those of torch's in ``also``, back as they were before the block."""
    before = HostGenerators(also=also)
    try:
        yield
    finally:
        before.give_back()


def device_generators() -> tuple[torch.Generator, ...]:
    """The global generators of CUDA devices; none where CUDA has not been started."""
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]


def generator_states() -> tuple[Any, ...]:
    """The states of Python's, NumPy's and torch's CPU generator, to be compared."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - as above
    state = numpy["state"]
    rest = (state["pos"], numpy["has_gauss"], numpy["gauss"])
    return (
        random.getstate(),
        state["key"].tobytes() + repr(rest).encode(),
        torch.default_generator.get_state().numpy().tobytes(),
    )


def moved_generators(before: tuple[Any, ...]) -> tuple[str, ...]:
    """The names of the generators that are no longer as in ``before``, which :func:`generator_states` gave."""
    names = ("Python's random", "numpy", "torch")
    return tuple(
        name for name, old, new in zip(names, before, generator_states(), strict=True) if old != new
    )


# A task's own generators.

GENERATOR_TYPES: dict[str, type] = {
    "torch": torch.Generator,
    "random": random.Random,
    "numpy": np.random.Generator,
    "numpy.RandomState": np.random.RandomState,
    "numpy.BitGenerator": np.random.BitGenerator,
}


def generator_kind(value: Any) -> str:
    """A key of :data:`GENERATOR_TYPES`; empty for other objects, and for one without a state: the system's."""
    for name, kind in GENERATOR_TYPES.items():
        if issubclass(type(value), kind) and not isinstance(value, random.SystemRandom):
            return name
    return ""


def read_generator(kind: str, generator: Any) -> Any:
    """The state of a generator of this kind."""
    return _WAYS[kind][0](generator)


def set_generator(kind: str, generator: Any, state: Any) -> None:
    """Put a generator of this kind into a state that :func:`read_generator` gave."""
    _WAYS[kind][1](generator, state)


def new_generator(kind: str, state: Any) -> Any:
    """A generator of this kind for ``state``, which :func:`set_generator` puts into it next."""
    return _WAYS[kind][2](state)


def _set_numpy_state(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


def _bit_generator(state: Any) -> Any:
    return getattr(np.random, state["bit_generator"])()


def _set_bit_state(generator: Any, state: Any) -> None:
    generator.state = state


# How to read, set and make each.
_WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "torch": (
        lambda generator: generator.get_state(),
        lambda generator, state: generator.set_state(state),
        lambda _: torch.Generator(),
    ),
    "random": (
        lambda generator: generator.getstate(),
        lambda generator, state: generator.setstate(state),
        lambda _: random.Random(),  # noqa: S311 - no secrets
    ),
    "numpy": (
        lambda generator: generator.bit_generator.state,
        _set_numpy_state,
        lambda state: np.random.Generator(_bit_generator(state)),
    ),
    "numpy.RandomState": (
        lambda generator: generator.get_state(),
        lambda generator, state: generator.set_state(state),
        lambda _: np.random.RandomState(),
    ),
    "numpy.BitGenerator": (lambda generator: generator.state, _set_bit_state, _bit_generator),
}
