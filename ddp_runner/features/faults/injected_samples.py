"""A dataset with bad samples on request, for ``--inject bad_sample``. Only used with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_runner.data.by_number import sample_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddp_runner.data.order import SampleOrder


class InjectedSampleError(ValueError):
    """What such a sample raises."""


class WithBadSamples:
    """``dataset``, where the samples of ``find_bad`` raise whenever they are loaded, whoever loads them.

    They are found when the first sample is loaded: only then is the order of the run known.
    """

    def __init__(self, dataset: Any, find_bad: Callable[[], frozenset[int]]) -> None:
        self._dataset = dataset
        self._find_bad = find_bad
        self._found: frozenset[int] | None = None
        self.deterministic = bool(getattr(dataset, "deterministic", False))

    @property
    def _bad(self) -> frozenset[int]:
        if self._found is None:
            self._found = self._find_bad()
        return self._found

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if index in self._bad:
            raise InjectedSampleError(f"an injected bad sample, {index}")
        return sample_at(self._dataset, index)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples at ``indices``, as the dataset itself would give them."""
        if self._bad.isdisjoint(indices) and hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(list(indices)))
        return [self[index] for index in indices]


def with_bad_samples(
    dataset: Any,
    places: Sequence[tuple[int, int]],
    *,
    order: Callable[[], SampleOrder],
    world_size: int,
) -> Any:
    """``dataset`` with a bad sample at each ``(rank, step)`` of ``places``: the rank's first there.

    ``order`` gives that of the run, once samples are loaded.
    """
    if not places:
        return dataset

    def find_bad() -> frozenset[int]:
        found = order()
        shares = [found.share_of(step, rank=rank, world_size=world_size) for rank, step in places]
        return frozenset(int(mine[0]) for mine in shares if len(mine))

    return WithBadSamples(dataset, find_bad)
