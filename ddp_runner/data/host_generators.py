"""Keeps, gives back and seeds Python's, numpy's and torch's CPU generator, at a few microseconds. Never draws.

``getstate`` of Python's and ``get_state`` of numpy's make numbers of 624 words, which takes 20 to 40 us each. Here the words
are copied as they lie in memory. Where they lie is looked for, and tried, once; where that fails the methods serve.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

_MASK32 = 0xFFFFFFFF
_WORDS = 624
_GAUSS = 1.2345678901234567e-201  # nothing else in an object's memory is this number
_TRIED = (0, 1, 623, 1)  # so many draws between looks, around the end of the words

_python: Any = random.random.__self__  # type: ignore[attr-defined]  # what the module's functions draw from
_numpy: Any = np.random.rand.__self__  # type: ignore[attr-defined]
_seed_python = super(random.Random, _python).seed  # without the checks of the class above it

Give = Callable[[], None]


def seed_host(seed: int) -> None:
    """Seed all three with ``seed``, of 64 bits, as ``random.seed``, ``np.random.seed`` and ``manual_seed`` would."""
    _seed_python(seed)
    _python.gauss_next = None
    np.random.seed(seed & _MASK32)  # noqa: NPY002 - the generator that datasets draw from
    torch.default_generator.manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Give python's, numpy's and torch's CPU generator back as they were."""
    give_python, give_numpy = keep_python(), keep_numpy()
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        give_python()
        give_numpy()
        torch.default_generator.set_state(torch_state)


def keep_python() -> Give:
    """What puts Python's generator back to where it is now."""
    place = _place_in_python()
    if place is None:
        state = random.getstate()
        return lambda: random.setstate(state)
    return _keep_python(_python, place)


def keep_numpy() -> Give:
    """What puts numpy's global generator back to where it is now."""
    place = _place_in_numpy()
    # Somebody may have given it other bits. Their getter is of numpy 1.24 on.
    if place is None or type(_numpy._bit_generator) is not np.random.MT19937:  # noqa: SLF001
        state = np.random.get_state(legacy=False)  # noqa: NPY002 - as above
        return lambda: np.random.set_state(state)  # noqa: NPY002 - as above
    return _keep_numpy(_numpy, place)


def _keep_python(generator: Any, place: int) -> Give:
    words = _memory(id(generator) + place, 4 * (1 + _WORDS))
    kept, gauss = bytes(words), generator.gauss_next

    def give() -> None:
        words[:] = kept
        generator.gauss_next = gauss

    return give


def _keep_numpy(generator: Any, place: int) -> Give:
    bits = generator._bit_generator  # noqa: SLF001 - as above
    words = _memory(bits.ctypes.state_address, 4 * (_WORDS + 1))
    gauss = _memory(id(generator) + place, 16)
    # INVARIANT locked-words: numpy's words are copied, and put back, under its lock.
    # Broken if: the lock is left out: a thread that draws meanwhile would read behind the words.
    # Guarded by: test_numpys_words_are_copied_under_its_lock.
    with bits.lock:
        kept, kept_gauss = bytes(words), bytes(gauss)

    def give() -> None:
        with bits.lock:
            words[:] = kept
            gauss[:] = kept_gauss

    return give


@lru_cache(maxsize=8)
def _memory(address: int, size: int) -> memoryview:
    """Of an object that lives. Copied without letting another thread run."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


@cache
def _place_in_python() -> int | None:
    """Where in a ``random.Random`` its place and words are, in bytes; None where that is not sure."""
    tried = random.Random(7)  # noqa: S311 - no secret
    memory = ctypes.string_at(id(tried), random.Random.__basicsize__)
    place = memory.find(struct.pack(f"{_WORDS}I", *tried.getstate()[1][:_WORDS])) - 4
    if type(_python) is not random.Random or place < object.__basicsize__:
        return None
    is_alike = _comes_back(
        tried.getstate, lambda: tried.gauss(0.0, 1.0), lambda: _keep_python(tried, place)
    )
    return place if is_alike else None


@cache
def _place_in_numpy() -> int | None:
    """Where in a ``RandomState`` the second number of a Gaussian pair is, and whether there is one."""
    tried: Any = np.random.RandomState(7)
    name, words, number, *_ = tried.get_state()
    tried.set_state((name, words, number, 1, _GAUSS))
    memory = ctypes.string_at(id(tried), np.random.RandomState.__basicsize__)
    place = memory.find(struct.pack("d", _GAUSS)) - 8
    if place < object.__basicsize__ or memory[place : place + 4] != struct.pack("i", 1):
        return None

    def state() -> tuple[Any, ...]:
        _, words, *others = tried.get_state()
        return (words.tolist(), *others)

    is_alike = _comes_back(state, tried.standard_normal, lambda: _keep_numpy(tried, place))
    return place if is_alike else None


def _comes_back(
    state: Callable[[], Any], draw: Callable[[], Any], keep: Callable[[], Give]
) -> bool:
    """Whether what is kept, and given back after draws, is the whole state."""
    for count in _TRIED:
        for _ in range(count):
            draw()
        before, give = state(), keep()
        for _ in range(_WORDS + count):
            draw()
        moved = state()
        give()
        if moved == before or state() != before:
            return False
    return True
