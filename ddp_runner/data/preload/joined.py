"""Several map-style datasets as one, and one as several, by where each begins. Reads no sample by itself."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset

from ddp_runner.data.by_number import sample_at


class _Joined(Dataset[Any]):
    """All samples of the parts, one part behind the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))
        self.deterministic = all(getattr(part, "deterministic", False) for part in parts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        number = bisect_right(self._ends, index)
        return sample_at(self._parts[number], index - (self._ends[number - 1] if number else 0))


class _Part(Dataset[Any]):
    """So many samples of a dataset, from one on."""

    def __init__(self, of: Any, *, first: int, size: int) -> None:
        self._of = of
        self._first = first
        self._size = size
        self.deterministic = getattr(of, "deterministic", False)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._size:
            raise IndexError(index)
        return sample_at(self._of, self._first + index)


def joined(parts: Sequence[Any]) -> Any:
    """One dataset of all; the only one itself."""
    return parts[0] if len(parts) == 1 else _Joined(parts)


def parts_of(whole: Any, sizes: Sequence[int]) -> list[Any]:
    """The datasets again that :func:`joined` has made one of; it itself where it is the only one."""
    if len(sizes) == 1:
        return [whole]
    firsts = [0, *accumulate(sizes)]
    return [
        _Part(whole, first=first, size=size) for first, size in zip(firsts, sizes, strict=False)
    ]
