"""Data of the largest samples alone: what a step can need at most. Loads a part of the samples to see which."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Subset

from ddp_runner.core.settings import Settings
from ddp_runner.data.by_number import sample_at
from ddp_runner.data.host_generators import generators_kept
from ddp_runner.training.components.rng import seed_all
from ddp_runner.training.task import Datasets

SAMPLES_MEASURED = 256
_NUMBER_BYTES = 8
_PARTS_MAX = 100_000  # containers and objects that are looked into, of one sample


def largest_only(settings: Settings, datasets: Datasets, *, count: int) -> Datasets:
    """The same with ``count`` training samples, the largest there are.

    ``SAMPLES_MEASURED`` of them are loaded, evenly spread, and of these those are taken that are as
    large as the largest ``count`` of all would be; they come several times then. The same on every rank.
    """
    size = len(datasets.train)  # type: ignore[arg-type] # map-style
    sizes = _measured(settings, datasets.train, size)
    if not sizes:  # none can be loaded: the run says so itself
        return datasets
    taken = max(1, min(len(sizes), count * len(sizes) // size))
    largest = heapq.nsmallest(taken, sizes, key=lambda place: (-sizes[place], place))
    places = [largest[number % taken] for number in range(count)]
    train: Any = Subset(datasets.train, places)
    return replace(datasets, train=train, weights=None)


def _measured(settings: Settings, dataset: Any, size: int) -> dict[int, int]:
    """Bytes of samples by index. One that raises is left out: who trains on it says what is wrong."""
    found = {}
    measured = min(size, SAMPLES_MEASURED)
    with generators_kept():
        seed_all(settings.run.seed)
        for number in range(measured):
            place = number * size // measured
            try:
                found[place] = byte_count(sample_at(dataset, place))
            except Exception:  # noqa: BLE001, S112 - a dataset may raise anything
                continue
    return found


def byte_count(sample: Any) -> int:
    """Bytes of the tensors, arrays, images, texts and numbers in a sample, each object once."""
    total, rest = 0, [sample]
    seen: set[int] = set()
    while rest and len(seen) < _PARTS_MAX:
        value = rest.pop()
        own = _own_bytes(value)
        if own is not None:
            total += own
        elif id(value) not in seen:
            seen.add(id(value))
            rest += _parts(value)
    return total


def _own_bytes(value: Any) -> int | None:
    """Of what has no parts; None of what may have some."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (np.ndarray, np.generic)):
        return int(value.nbytes)
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, (int, float, complex)) or value is None:
        return _NUMBER_BYTES
    if hasattr(value, "getbands"):  # an image of PIL
        return int(value.width * value.height * len(value.getbands()))
    return None


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())
