"""The parts that one rank trains a user's own loop with, from its start to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ddp_runner.config.identity import DIGEST
from ddp_runner.core.settings import JsonValue
from ddp_runner.training.exactness.held_values import DataWatch
from ddp_runner.training.own_loop.kept import KeptState
from ddp_runner.training.own_loop.misuse import digest_there
from ddp_runner.training.rank_context import Feed, RankParts
from ddp_runner.training.workload import Workload

FILE = "the file "  # in a recipe: and its path, one that the program is made of


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
class LoopWorkload(Workload):
    """The same for a loop of one's own: its recipe has the files that the program has imported so far."""

    recipe: dict[str, JsonValue]

    def note_files(self, files: Mapping[str, str]) -> None:
        """Have the recipe name these files, with their hashes."""
        self.recipe.update({f"{FILE}{name}": f"{DIGEST}{one}" for name, one in files.items()})

    def complete_recipe(self, before: Mapping[str, Any]) -> None:
        """Add the files that a checkpoint names and that this process has not imported yet, as they are now."""
        names = [key.removeprefix(FILE) for key in before if key.startswith(FILE)]
        missing = [name for name in names if f"{FILE}{name}" not in self.recipe]
        self.note_files({name: one for name in missing if (one := digest_there(name))})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts(RankParts):
    """The parts of any rank, with the state that is kept and the loop's batches."""

    workload: LoopWorkload
    state: KeptState
    data_digest: str  # of what of the data lies in memory; empty where nothing does
    loader: Batches
