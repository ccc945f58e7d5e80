"""Work beside the steps of a rank, by features. It changes no bit of the run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from ddp_runner import installed
from ddp_runner.data.loader import MicroBatch
from ddp_runner.kernel.group.group import Group
from ddp_runner.training.rank_context import TaskParts
from ddp_runner.training.step import Stepper


class BesideSteps:
    """Lives as long as the rank's process. All calls come from the training thread; what is not overridden does nothing."""

    def beside(
        self, stepper: Stepper, group: Group, micro_batches: Sequence[MicroBatch]
    ) -> AbstractContextManager[None]:
        """Return what surrounds the step that begins now, of ``micro_batches``."""
        del stepper, group, micro_batches
        return nullcontext()

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
