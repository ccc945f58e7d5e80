"""Where ``data.preload`` has its part in a rank's start: what data it takes, and when it is read."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ddp_runner import installed
from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from ddp_runner.core.settings import Settings
    from ddp_runner.kernel.step.runtime import Runtime
    from ddp_runner.training.state import TrainState
    from ddp_runner.training.workload import TaskWorkload

OPTION = "data.preload"


def refuse_unfit(settings: Settings, *, is_stream: bool) -> None:
    """Raise BadInputError for data that cannot be preloaded because of its kind. Reads no sample."""
    if settings.data.preload and is_stream:
        expected = (
            "needs data with an index: what an iterable dataset gives is not known ahead; leave it out, or"
            " give the samples by __getitem__"
        )
        raise BadInputError(OPTION, "true", expected)


def with_preloaded_data(
    settings: Settings,
    workload: TaskWorkload,
    state: TrainState,
    runtime: Runtime,
    *,
    ending: contextlib.ExitStack,
) -> TaskWorkload:
    """Return the workload with its data in memory, by ``preloaded()`` of a ``child.py``; as it is where that is not asked for.

    Blocks until all is read. Raises BadInputError where it cannot be kept. What is to be closed is left to ``ending``.
    """
    for part in installed.parts("child") if settings.data.preload else ():
        if hasattr(part, "preloaded"):
            workload = part.preloaded(settings, workload, state, runtime, ending=ending)
    return workload
