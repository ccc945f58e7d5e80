"""Work beside the steps of a rank, by features. It changes no bit of the run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from ddp_runner import installed
from ddp_runner.data.loader import MicroBatch
from ddp_runner.kernel.group.group import Group
from ddp_runner.training.exactness.own_share import ShareNotes
from ddp_runner.training.own_loop.declared import OwnLoop
from ddp_runner.training.rank_context import RankParts, TaskParts

NOTHING: AbstractContextManager[None] = nullcontext()  # of a step with nothing beside it


class Noting(Protocol):
    """Makes steps, and can note this rank's share of one."""

    def noted(self) -> AbstractContextManager[ShareNotes]:
        """Note the results of this rank's own share of a step that is made inside the block."""
        ...


class BesideSteps:
    """Lives as long as the rank's process. All calls come from the training thread; what is not overridden does nothing."""

    def beside(
        self, stepper: Noting, group: Group, micro_batches: Sequence[MicroBatch]
    ) -> AbstractContextManager[None]:
        """Return a context for the step of ``micro_batches`` that begins now; a loop's step gives no micro-batches."""
        del stepper, group, micro_batches
        return NOTHING

    def conclude(self, group: Group) -> None:
        """Take note that the last step is made, and the run complete."""


def beside_steps(parts: TaskParts) -> tuple[BesideSteps, ...]:
    """Make whoever the features bring along: ``beside_steps(TaskParts)`` of a ``child.py``. Nobody works beside an unwatched rank."""
    if not parts.runtime.is_watched:
        return ()
    return tuple(
        part.beside_steps(parts)
        for part in installed.parts("child")
        if hasattr(part, "beside_steps")
    )


def beside_loop(parts: RankParts, loop: OwnLoop) -> tuple[BesideSteps, ...]:
    """Make the same for a user's own loop, by ``beside_loop(LoopParts, OwnLoop)`` of each ``child.py``."""
    if not parts.runtime.is_watched:
        return ()
    return tuple(
        part.beside_loop(parts, loop)
        for part in installed.parts("child")
        if hasattr(part, "beside_loop")
    )
