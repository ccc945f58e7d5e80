"""The state of a random generator of python, numpy or torch as plain values, and back. Never draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from ddp_runner.data.stream_state import from_plain, to_plain

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)

GeneratorState = tuple[str, str, Any]  # class, class of the bits, plain


def state_of(generator: Any) -> GeneratorState | None:
    """None of one that has none, or is of a class of its own."""
    of_bits = ""
    state: Any
    if type(generator) is random.Random:
        version, words, gauss = generator.getstate()
        state = (version, np.asarray(words, dtype=np.uint32), gauss)
    elif isinstance(generator, torch.Generator):
        state = generator.get_state().numpy()
    elif isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
    elif isinstance(generator, np.random.Generator):
        of_bits = type(generator.bit_generator).__name__
        state = generator.bit_generator.state
    else:
        return None
    return type(generator).__name__, of_bits, to_plain(state)


def generator_of(plain: GeneratorState) -> Any:
    """A new one of that class, in that state."""
    name, of_bits, _ = plain
    generator: Any
    if name == "Generator" and of_bits:
        generator = np.random.Generator(getattr(np.random, of_bits)())
    elif name == "RandomState":
        generator = np.random.RandomState()
    else:
        generator = random.Random() if name == "Random" else torch.Generator()  # noqa: S311 - no secret
    set_state(generator, plain)
    return generator


def set_state(generator: Any, plain: GeneratorState) -> None:
    """Have one of that class be in that state."""
    state = from_plain(plain[2])
    if isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words.tolist()), gauss))
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.from_numpy(state.copy()))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
