"""Samples of a map-style dataset by their numbers, also where it gives several at once only. Keeps none."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, Subset


def gives_by_number(dataset: object) -> bool:
    """Return True if a dataset has samples by number: ``__getitem__``, or ``__getitems__`` for several."""
    return hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")


def gives_several_only(dataset: object) -> bool:
    """Return True if only ``__getitems__`` gives samples; torch's own ``__getitem__`` merely raises."""
    inner = dataset
    while isinstance(inner, Subset):
        inner = inner.dataset
    own = getattr(type(inner), "__getitem__", None)
    return own in (None, Dataset.__getitem__) and hasattr(inner, "__getitems__")


def sample_at(dataset: Any, index: int) -> Any:
    """Return one sample. Raises what the dataset raises."""
    if gives_several_only(dataset):
        (sample,) = dataset.__getitems__([index])
        return sample
    return dataset[index]
