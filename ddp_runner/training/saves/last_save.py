"""The save after which there is none: tried for a while, then elsewhere. And what room there is.

No later save makes up for the last one, and people need time to free a disk that is full.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_runner.checkpoint.codec import stored_bytes, tensor_bytes
from ddp_runner.checkpoint.store import CheckpointStore, Saved
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.system.disk import Disk
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.system.launch_folder import at_launch
from ddp_runner.training.components.optimizer import bytes_to_come
from ddp_runner.training.components.start_weights import without
from ddp_runner.training.saves.disk_faults import DiskFaults
from ddp_runner.training.state import TrainState

BEFORE_END = (
    "before_end"  # the reason of a save that a rank makes alone, since the run cannot go on
)
FIRST_PAUSES_S = (0.2, 1.0, 2.0)  # what may be a passing error
PAUSE_S = 5.0
WARN_EVERY_S = 60.0
# By a limit of the process or of the file system: no person frees what it lacks.
_TOO_LARGE = os.strerror(errno.EFBIG)

Save = Callable[[CheckpointStore], Saved]


class LastSave:
    """One rank's. All calls come from the training thread."""

    def __init__(
        self,
        settings: Settings,
        store: CheckpointStore,
        runtime: Runtime,
        *,
        disk_faults: DiskFaults,
    ) -> None:
        self._settings = settings
        self._store = store
        self._runtime = runtime
        self._disk_faults = disk_faults

    def make(self, save: Save, *, reason: str) -> tuple[Saved, Fault | None]:
        """Save where the other checkpoints are, or else elsewhere: then with the fault of the first place.

        Blocks for as long as the disk may take to be freed. Raises FaultError where nobody takes it.
        """
        try:
            return self._save_patiently(save, limit_s=self._limit_s(reason)), None
        except FaultError as error:
            if not self._is_of_disk(error):
                raise
            return self._rescued(save, error.fault)

    def _limit_s(self, reason: str) -> float:
        recovery = self._settings.recovery
        if reason == StopReason.COMPLETED.value:
            return recovery.checkpoint_timeout_s
        if reason == BEFORE_END:
            return recovery.checkpoint_timeout_s / 2  # which has to do for the other place as well
        return min(recovery.checkpoint_timeout_s, recovery.stop_timeout_s / 2)

    def _save_patiently(self, save: Save, *, limit_s: float) -> Saved:
        began_s = time.monotonic()
        warn_at_s = began_s
        may_hurry = self._runtime.stop_asked() is None  # once a stop is asked for, nobody will wait
        for pause_s in itertools.chain(FIRST_PAUSES_S, itertools.repeat(PAUSE_S)):
            try:
                return save(self._store)
            except FaultError as error:
                now_s = time.monotonic()
                left_s = began_s + limit_s - now_s
                is_hurried = may_hurry and self._runtime.stop_asked() is not None
                is_in_vain = _TOO_LARGE in error.fault.cause
                if not self._is_of_disk(error) or left_s <= 0 or is_hurried or is_in_vain:
                    raise
                if now_s >= warn_at_s:
                    warn_at_s = now_s + WARN_EVERY_S
                    self._disk_faults.warn(error.fault, f"tried again for {left_s:.0f} s")
            time.sleep(min(pause_s, left_s))
            waited_ns = round((time.monotonic() - now_s) * 1e9)
            self._runtime.slot.add(Cell.CHECKPOINT_NS, waited_ns)
        raise AssertionError("the pauses have no end")

    def _rescued(self, save: Save, fault: Fault) -> tuple[Saved, Fault]:
        folder = rescue_folder(self._settings, self._runtime.run_id)
        store = CheckpointStore(folder, keep_last=self._store.keep_last, disk=self._runtime.disk)
        try:
            saved = save(store)
        except FaultError as error:
            with contextlib.suppress(OSError):  # not empty, or never made
                folder.rmdir()
            raise FaultError(
                replace(fault, cause=f"{fault.cause}; nor elsewhere: {error.fault.cause}")
            ) from error
        action = f"saved as {saved.path} instead: resume from it with --resume {saved.path}"
        return saved, replace(fault, cause=f"{fault.cause}; {action}")

    def _is_of_disk(self, error: FaultError) -> bool:
        """Return True if a disk has refused the save, not the fence of a rank that is about to be killed."""
        is_of_disk = error.fault.kind is FaultKind.STORAGE_FAILED
        return is_of_disk and not self._runtime.slot.get(Cell.FENCED)


def rescue_folder(settings: Settings, run_id: str) -> Path:
    """Return the folder for a save that its own disk refuses; of this run alone, as nothing is set aside there."""
    base = settings.checkpoint.rescue_dir or settings.run.log_dir
    return at_launch(base) / f"rescued_{run_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRoom:
    """The size of one checkpoint, the free bytes on its disk, and the bytes of those that will be deleted."""

    needed_bytes: int
    free_bytes: int
    kept_bytes: int


def checkpoint_bytes(state: TrainState) -> int:
    """About how large a file with ``state`` is, once a step has been made."""
    left_out = state.start.get("hashes", {}) if state.only_trained else {}
    needed_bytes = stored_bytes(_captured(state))
    if not state.optimizer.state:
        needed_bytes += bytes_to_come(state.optimizer)
    if state.ema is not None and not state.ema.started:
        needed_bytes += state.ema.bytes_to_come(but=left_out)
    return needed_bytes


def _captured(state: TrainState) -> dict[str, Any]:
    """Return what a checkpoint holds of ``state``."""
    return without(state.capture(), state.start.get("hashes", {}) if state.only_trained else {})


def refuse_small_files(state: TrainState) -> None:
    """Raise BadInputError where the system allows no file as large as a checkpoint: none would ever be saved."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit_bytes == resource.RLIM_INFINITY:
        return
    needed_bytes = tensor_bytes(_captured(state))  # alone, without what is only estimated
    if limit_bytes < needed_bytes:
        needed = f"a checkpoint takes more than {needed_bytes:,}"
        raise BadInputError("ulimit -f", "", f"allows files of {limit_bytes:,} bytes; {needed}")


def existing_folder(folder: Path) -> Path:
    """``folder``, or the nearest one above it that is there: it is made once a run may write."""
    return next(one for one in (folder, *folder.absolute().parents) if one.exists())


def checkpoint_room(state: TrainState, store: CheckpointStore, disk: Disk) -> CheckpointRoom | None:
    """Return the room for future checkpoints; None if the disk does not tell: the first save will show it."""
    try:
        return CheckpointRoom(
            needed_bytes=checkpoint_bytes(state),
            free_bytes=disk.free_bytes(existing_folder(store.directory)),
            kept_bytes=sum(
                entry.path.stat().st_size
                for entry in store.catalog.entries()
                if not entry.problem and not store.is_for_good(entry.step)
            ),
        )
    except OSError:
        return None
