"""The parts that one rank trains a user's own loop with, from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ddp_runner.training.exactness.held_values import DataWatch
from ddp_runner.training.own_loop.kept import KeptState
from ddp_runner.training.rank_context import Feed, RankParts


class Batches(Feed, Protocol):
    """The source of a loop's batches. ``watch`` looks at its data, if anything does."""

    watch: DataWatch | None

    @property
    def counted(self) -> tuple[str, ...]:
        """The numbers that loads count up in the dataset; one that a replaced rank counts from 0."""
        ...

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """The pids of processes that load for this rank, and that it must end."""
        ...

    def shrink_prefetch(self) -> None:
        """Load less ahead, where that can be."""
        ...

    def take(self, step: int) -> list[Any]:
        """Give this rank's batches of ``step``; blocks until they are loaded."""
        ...

    def close(self) -> None:
        """No batch is wanted any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts(RankParts):
    """The parts of any rank, with the state that is kept and the loop's batches."""

    state: KeptState
    data_digest: str  # of what of the data lies in memory; empty where nothing does
    loader: Batches
