"""A dataset with bad samples on request, for ``--inject bad_sample``. Only used with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddp_runner.data.order import SampleOrder, share

if TYPE_CHECKING:
    from collections.abc import Sequence


class InjectedSampleError(ValueError):
    """What such a sample raises."""


class WithBadSamples:
    """``dataset``, where the samples at ``bad`` raise whenever they are loaded, whoever loads them."""

    def __init__(self, dataset: Any, bad: frozenset[int]) -> None:
        self._dataset = dataset
        self._bad = bad
        self.deterministic = bool(getattr(dataset, "deterministic", False))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if index in self._bad:
            raise InjectedSampleError(f"an injected bad sample, {index}")
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples at ``indices``, as the dataset itself would give them."""
        if self._bad.isdisjoint(indices) and hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(list(indices)))
        return [self[index] for index in indices]


def with_bad_samples(
    dataset: Any, places: Sequence[tuple[int, int]], *, order: SampleOrder, world_size: int
) -> Any:
    """``dataset`` with a bad sample at each ``(rank, step)`` of ``places``: the rank's first there."""
    if not places:
        return dataset
    shares = [share(order.indices(step), rank=rank, world_size=world_size) for rank, step in places]
    return WithBadSamples(dataset, frozenset(int(mine[0]) for mine in shares if len(mine)))
