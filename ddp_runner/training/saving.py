"""One rank's saves: begins them beside training, reports them, and makes the last one at once.

Lives as long as the rank's process: a save goes on while its rank leaves one generation and joins
the next, and nobody waits for it. Only the group's rank 0 is asked to save.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ddp_runner.checkpoint.background import BackgroundSaver
from ddp_runner.checkpoint.snapshot import size_in_memory
from ddp_runner.checkpoint.store import CheckpointStore, Loaded, Saved
from ddp_runner.core import messages
from ddp_runner.core.board import Cell
from ddp_runner.core.duties import last_save_due, saves_to_skip
from ddp_runner.core.faults import FaultError, FaultKind
from ddp_runner.core.pacing import SavePace
from ddp_runner.core.phases import Phase
from ddp_runner.core.settings import Settings
from ddp_runner.memory.manager import MemoryManager
from ddp_runner.training.build import Workload, versions
from ddp_runner.training.progress import Progress
from ddp_runner.training.runtime import Runtime
from ddp_runner.training.state import TrainState

INTERVAL = "interval"  # the reason of a save between others
PATIENCE_S = 0.5  # for the save before, when the next one comes due
ROOM_SHARE_MAX = 0.5  # of the memory that is left, for the copy of the state


class Saving:
    """What of a rank's state goes to its store, and when. All calls come from the training thread."""

    def __init__(
        self,
        *,
        settings: Settings,
        workload: Workload,
        state: TrainState,
        store: CheckpointStore,
        memory: MemoryManager,
        runtime: Runtime,
        progress: Progress,
    ) -> None:
        self._settings = settings
        self._workload = workload
        self._state = state
        self._store = store
        self._memory = memory
        self._runtime = runtime
        self._progress = progress
        self._saver = BackgroundSaver()
        self._begun_step = 0  # of the newest save
        self._put_off = ""  # why a save came due while another one was under way
        self._failures = 0  # in a row
        self._skips = 0  # saves that come due and are not tried
        self._is_asked_for = False  # by a person: the next save is tried, whatever failed before
        self._said_waiting = False
        self._pace = SavePace(now_s=time.monotonic())
        self._knows_the_past = False  # what a process before has seen is counted in the pace
        self._saves_by_time = settings.checkpoint.save_every_steps == "auto"
        state.before_change = self._release_state

    def due(self, reason: str) -> None:
        """Save the state as it is at this boundary, beside the next step.

        While another save is under way this one is put off: made of a later step, once that ended.
        """
        if not self._put_off and self._saver.is_busy:
            self._collect(timeout_s=PATIENCE_S)
        if self._skips and not self._is_asked_for:
            self._skips -= 1
            return
        if not self._saver.is_busy:
            self._begin(reason)
        elif not self._put_off:
            self._runtime.logger.info(
                "the checkpoint before is still being written: this one waits for it",
                step=self._state.committed_step,
            )
            self._put_off = reason

    def has_to_make_up(self) -> bool:
        """Whether the newest save that was due is on no disk, nor on its way there.

        The rank that wrote it has died, or a repair came before it.
        """
        if self._saves_by_time and self._runtime.slot.get(Cell.GENERATION) > 1:
            self._take_over_pace()
        due = last_save_due(
            self._state.committed_step, self._workload.length, self._settings.checkpoint
        )
        if due <= max(0, self._progress.checkpoint_step):
            return False
        if self._saver.is_busy and self._begun_step >= due:
            return False
        return all(entry.step < due for entry in self._store.catalog.entries())

    def asks(self) -> bool:
        """Between two steps: report the save that has ended; whether one should come after the next.

        That is the one that was put off, or one whose time has come.
        """
        self._collect(timeout_s=0.0)
        if self._put_off:
            return not self._saver.is_busy
        return self._saves_by_time and self._is_time()

    def asked_for(self) -> None:
        """A person wants the next save: it is tried, however many have failed."""
        self._is_asked_for = True

    def resumed(self, loaded: Loaded) -> None:
        """Go on from a checkpoint: one that no stop has made was needed because of a fault."""
        self._knows_the_past = True
        self._pace.go_on_from(loaded.manifest.pace, after_fault=loaded.manifest.reason == INTERVAL)

    def compared(self, compare_s: float) -> None:
        """So long all ranks have compared their replicas, for a save's sake."""
        self._pace.compared(compare_s)

    def stepped(self, step_s: float) -> None:
        """A step has ended, which took so long without what it waited for a save."""
        self._pace.stepped(step_s, beside_save=self._saver.is_busy)

    def rolled_back(self) -> None:
        """A checkpoint was needed within this process."""
        self._pace.faults += 1

    def settle(self) -> None:
        """Wait for the save under way and report it. Nothing to do, at no cost, without one."""
        self._collect(timeout_s=None)

    def finish(self, reason: str) -> None:
        """Have the state as it is now on disk. Raises FaultError if it cannot be saved."""
        self.settle()
        if self._progress.checkpoint_step != self._state.committed_step:
            self._report(self._save_at_once(reason))

    def report_ended(self) -> None:
        """Report the save that has ended, if one has; for a rank that leaves its generation."""
        self._collect(timeout_s=0.0)

    def _is_time(self) -> bool:
        now_s, step_s = time.monotonic(), self._runtime.slot.get(Cell.STEP_NS) / 1e9
        if not self._pace.is_due(now_s=now_s, step_s=step_s):
            if news := self._pace.news(now_s=now_s, step_s=step_s):
                self._runtime.logger.info(news, step=self._state.committed_step)
            return False
        if not self._skips:
            return True
        self._skips -= 1
        self._pace.began(now_s=now_s)
        return False

    def _take_over_pace(self) -> None:
        """Count from the newest file: ranks 0 that die one after the other must not put saves off.

        What the one before has learnt about the cost of a save is in its newest manifest.
        """
        written_s, entries = 0.0, self._store.catalog.entries()
        known = next((entry.manifest.pace for entry in entries if entry.manifest), None)
        if known and not self._knows_the_past and not self._pace.has_learnt:
            self._knows_the_past = True
            self._pace.go_on_from(known, after_fault=False)
        for entry in entries:
            with contextlib.suppress(OSError):  # no file, or retention was faster
                written_s = max(written_s, entry.path.stat().st_mtime)
        age_s = max(0.0, time.time() - written_s)
        self._pace.began(now_s=time.monotonic() - age_s)

    def _begin(self, reason: str) -> None:
        self._begun_step = self._state.committed_step
        self._put_off, self._is_asked_for = "", False
        self._pace.began(now_s=time.monotonic())
        began_ns = self._enter()
        try:
            state = self._captured()
            if self._has_room_for(state):
                try:
                    write = self._writer(reason)
                    self._saver.begin(state, steady=self._state.steady_tensors(), write=write)
                except (RuntimeError, MemoryError) as error:  # no memory, or no thread, for it
                    self._say_waiting(f"no copy of the state can be made ({error})")
                else:
                    return
        finally:
            self._leave(began_ns)
        self._conclude(partial(self._save_at_once, reason))

    def _has_room_for(self, state: Mapping[str, Any]) -> bool:
        """Whether a copy of the state fits beside it."""
        if self._saver.memory.size_bytes:
            return True
        needed_bytes = size_in_memory(state)
        if needed_bytes <= ROOM_SHARE_MAX * self._memory.room_bytes():
            return True
        self._say_waiting(
            f"no room in memory for a copy of the state ({needed_bytes / 1e9:.2f} GB)"
        )
        return False

    def _say_waiting(self, why: str) -> None:
        if not self._said_waiting:
            self._runtime.logger.warning(
                f"{why}: training waits for each checkpoint", step=self._state.committed_step
            )
        self._said_waiting = True

    def _captured(self) -> dict[str, Any]:
        return {**self._state.capture(), "versions": versions()}

    def _writer(self, reason: str) -> Callable[[Mapping[str, Any]], Saved]:
        """The store's save of this very step, for any thread."""
        step = self._state.committed_step
        return partial(
            self._store.save,
            step=step,
            epoch=self._workload.length.epoch_of(step),
            samples=self._state.samples,
            run_id=self._runtime.run_id,
            meaning=dict(self._workload.meaning),
            settings_digest=self._workload.settings_digest,
            monitored=self._monitored(),
            reason=reason,
            pace=self._pace.to_record(now_s=time.monotonic()),
        )

    def _save_at_once(self, reason: str) -> Saved:
        began_ns = self._enter()
        try:
            return self._writer(reason)(self._captured())
        finally:
            self._leave(began_ns)

    def _collect(self, *, timeout_s: float | None) -> None:
        """Report the save under way if it ends within the time."""
        if not self._saver.is_busy:
            return
        began_ns = self._enter() if timeout_s != 0.0 else None
        try:
            ended = self._saver.take_ended(timeout_s)
        finally:
            if began_ns is not None:
                self._leave(began_ns)
        if ended is not None:
            self._conclude(ended.result, blocked_s=ended.blocked_s)

    def _conclude(self, result: Callable[[], Saved], *, blocked_s: float | None = None) -> None:
        """Report a save between others: one that the disk refused costs a warning, and a pause."""
        try:
            saved = result()
        except FaultError as error:
            if error.fault.kind is not FaultKind.STORAGE_FAILED:
                raise
            self._failed(error.fault.cause)
            return
        except (
            MemoryError,
            OSError,
            RuntimeError,
        ) as error:  # no memory, or no thread, to write it
            self._failed(f"a checkpoint could not be written ({type(error).__name__}: {error})")
            return
        self._report(saved, blocked_s=blocked_s)

    def _failed(self, cause: str) -> None:
        self._failures += 1
        self._skips = saves_to_skip(self._failures)
        if not self._is_asked_for:
            self._put_off = ""  # it belongs to the pause
        pause = f", without the next {self._skips} checkpoints" if self._skips else ""
        self._runtime.logger.warning(
            f"{cause}; training goes on{pause}", step=self._state.committed_step
        )

    def _report(self, saved: Saved, *, blocked_s: float | None = None) -> None:
        self._failures = self._skips = 0
        step, blocked_s = saved.manifest.step, saved.blocked_s if blocked_s is None else blocked_s
        self._pace.measured(blocked_s=blocked_s, write_s=saved.blocked_s)
        self._progress.checkpoint = str(saved.path)
        self._progress.checkpoint_step = step
        self._runtime.logger.info(
            f"saved {saved.path} ({saved.blocked_s:.2f} s, training waited {blocked_s:.2f} s)",
            step=step,
        )
        for note in saved.notes:
            self._runtime.logger.info(note, step=step)
        self._runtime.tell(
            messages.Saved(
                rank=self._runtime.place.rank,
                step=step,
                path=str(saved.path),
                blocked_s=blocked_s,
                size_bytes=saved.manifest.size_bytes,
            )
        )

    def _monitored(self) -> float | None:
        wanted = self._settings.checkpoint.monitor
        validation = self._progress.validation_loss
        if wanted == "validation_loss" or (wanted == "auto" and validation is not None):
            return validation
        smoothed = self._state.monitor.smoothed
        return smoothed if smoothed is not None and math.isfinite(smoothed) else None

    def _release_state(self) -> None:
        """Called before anything changes what a copy may still be reading."""
        if self._saver.reads_state:
            began_ns = self._enter()
            self._saver.release_state()
            self._leave(began_ns)

    def _enter(self) -> int:
        now_ns = time.monotonic_ns()
        self._runtime.slot.stamp(Phase.CHECKPOINT, now_ns)
        return now_ns

    def _leave(self, began_ns: int) -> None:
        self._runtime.slot.add(Cell.CHECKPOINT_NS, time.monotonic_ns() - began_ns)
