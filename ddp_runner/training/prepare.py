"""Prepares one rank, whoever's loop trains on it: takes up the run, and makes what keeps and watches its state."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.core.settings import JsonValue
from ddp_runner.kernel.group.device import (
    DeviceProgress,
    device_progress,
)
from ddp_runner.kernel.rules.phases import Stage
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.messages import Built
from ddp_runner.memory.manager import Loads, MemoryManager
from ddp_runner.system.launch_folder import at_launch
from ddp_runner.training.figures.train_report import BuiltParts
from ddp_runner.training.loading.loaders import watch_memory
from ddp_runner.training.saves.last_save import refuse_small_files
from ddp_runner.training.saves.save_room import SaveRoom
from ddp_runner.training.saves.saving import Saving
from ddp_runner.training.starting.changes import report_changes
from ddp_runner.training.starting.fork_safety import make_forks_safe
from ddp_runner.training.starting.resume import TakenUp, take_up
from ddp_runner.training.starting.stage_begin import OtherStageError, begin_of, leave_for
from ddp_runner.training.state import Progress

Parts_co = TypeVar("Parts_co", covariant=True)


class Opened(Loads, Protocol):
    """A loader that was opened."""

    def close(self) -> None:
        """Load nothing more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What keeps a rank's state and watches the rank, the same for every client."""

    store: CheckpointStore
    progress: Progress
    memory: MemoryManager
    saving: Saving
    device: DeviceProgress


class Setup(BuiltParts, Protocol[Parts_co]):
    """What a client has built to be trained, with a state that the run's newest checkpoint fills."""

    def take_in(self, start: TakenUp) -> None:
        """Take in where this process begins, before data is loaded."""
        ...

    def open_loader(self) -> Opened:
        """Open the loader of the training data, which is closed with the rank."""
        ...

    def seen_data(self) -> Mapping[str, JsonValue]:
        """Return what the ranks have seen of their data, for a file that is saved."""
        ...

    def parts(self, kept: Kept) -> Parts_co:
        """Return all that the rank trains with."""
        ...


class StageClock:
    """Says how far a rank is in its start: on the board while it lasts, in a message when it is over.

    The stages come one after the other; the last one entered is ``Stage.NONE``.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._stage = Stage.NONE
        self._since_s = 0.0

    def enter(self, stage: Stage) -> None:
        """The stage before this one is over, and its seconds are reported."""
        now_s = time.monotonic()
        self._runtime.slot.set(Cell.STAGE, stage)
        if self._stage is not Stage.NONE:
            took_s = round(now_s - self._since_s, 4)
            if self._stage in (Stage.DATA, Stage.MODEL):
                self._runtime.slot.add(Cell.BUILD_NS, int(took_s * 1e9))
            rank = self._runtime.rank_info.rank
            self._runtime.report(Built(rank=rank, stage=int(self._stage), seconds=took_s))
        self._stage, self._since_s = stage, now_s


def begin_start(runtime: Runtime) -> StageClock:
    """Begin the start of a rank, before anything of the user's is built."""
    runtime.slot.set(Cell.DIRTY, 0)  # of a predecessor that died inside its optimizer
    make_forks_safe()
    return StageClock(runtime)


def prepare(
    setup: Setup[Parts_co], runtime: Runtime, *, stages: StageClock, ending: contextlib.ExitStack
) -> tuple[Parts_co, str]:
    """Return what this rank trains with, and the run that it resumes; what is to be closed is left to ``ending``.

    Raises BadInputError for a checkpoint that does not fit, or that the system would not let it write.
    """
    settings, workload, state = setup.settings, setup.workload, setup.state
    store = CheckpointStore(
        at_launch(settings.run.checkpoint_dir),
        keep_last=settings.checkpoint.keep_last,
        keep_every=settings.checkpoint.keep_every,
        disk=runtime.disk,
    )
    try:
        start = take_up(settings, workload, state, store, runtime=runtime, entering=stages.enter)
    except OtherStageError as error:
        leave_for(error.stage, runtime)
    setup.take_in(start)
    refuse_small_files(state)
    stages.enter(Stage.NONE)
    runtime.slot.set(Cell.TOTAL_STEPS, workload.length.total_steps)
    loader = setup.open_loader()
    ending.callback(loader.close)
    memory = watch_memory(settings, loader, runtime)
    saving = Saving(
        settings=settings,
        workload=workload,
        state=state,
        room=SaveRoom(store, memory, runtime),
        runtime=runtime,
        progress=start.progress,
        data=setup.seen_data,
    )
    device = (
        device_progress(runtime.slot, workload.device, warn=runtime.logger.warning)
        if runtime.is_watched
        else DeviceProgress()
    )
    parts = setup.parts(
        Kept(store=store, progress=start.progress, memory=memory, saving=saving, device=device)
    )
    if start.loaded is not None:
        saving.resumed(start.loaded)
        report_changes(runtime, state, known=start.loaded.manifest.changes)
    elif state.changes:  # of what the run, or the stage, begins with
        begin = begin_of(settings)
        report_changes(runtime, state, known=() if begin is None else begin.changes)
    return parts, start.run_id
