"""One rank's saves: begins them beside training, reports them, and makes the last one at once.

Lives as long as the rank's process: a save goes on while its rank leaves one generation and joins
the next, and nobody waits for it.
"""

from __future__ import annotations

import contextlib
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ddp_runner import config
from ddp_runner.checkpoint.background import BackgroundSave, BackgroundSaver
from ddp_runner.checkpoint.left_out import start_sha256
from ddp_runner.checkpoint.manifest import AMID_SKIPPED, CheckpointFacts
from ddp_runner.checkpoint.snapshot import storage_sizes
from ddp_runner.checkpoint.store import CheckpointStore, Loaded, Saved
from ddp_runner.core.save_policy import Due, SavePolicy
from ddp_runner.core.settings import JsonValue, Settings
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.step.durable import Keep, KeepVotes, Owed, Trust
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.wire import events, messages
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.system.launch_folder import as_given
from ddp_runner.training.saves.described import about_file, tracker_ids
from ddp_runner.training.saves.disk_faults import DiskFaults
from ddp_runner.training.saves.last_save import BEFORE_END, LastSave
from ddp_runner.training.saves.save_room import SaveRoom
from ddp_runner.training.starting.resume import newest_to_restore, restore_newest
from ddp_runner.training.starting.stage_begin import OtherStageError, leave_for
from ddp_runner.training.state import Progress, TrainState
from ddp_runner.training.workload import Workload, versions

INTERVAL = "interval"  # the reason of a save between others
COPY = "copy"  # of one that is no file, but stays in memory
PATIENCE_S = 0.5  # for the save before, when the next one comes due


class Saving:
    """Keeps a rank's state in its store: :class:`~ddp_runner.kernel.step.durable.Durable` with checkpoints.

    All calls come from the training thread.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        workload: Workload,
        state: TrainState,
        room: SaveRoom,
        runtime: Runtime,
        progress: Progress,
        data: Callable[[], Mapping[str, JsonValue]] = dict,
    ) -> None:
        """``data``: what the ranks have seen of their data, for the file."""
        self._settings = settings
        self._workload = workload
        self._state = state
        self._store = store = room.store
        self._runtime = runtime
        self._progress = progress
        self._data = data
        self._disk_faults = DiskFaults(state, runtime)
        self._last = LastSave(settings, store, runtime, disk_faults=self._disk_faults)
        self._room = room
        self._is_leader = True
        self._keeps_copies = False  # in the memory of this machine, which is not the leader's
        self._is_copying = False  # the save under way is no file
        self._begun_step = 0  # of the newest save
        self._compare_s: float | None = (
            None  # what training waited to have it proven; None: not yet
        )
        slots = self._room.slots
        self.policy = SavePolicy(
            settings.checkpoint,
            now_s=time.monotonic(),
            copy_age_s=None if slots is None else slots.age_s,
        )
        self._makes_files = bool(
            settings.checkpoint.save_every_steps or settings.checkpoint.save_interval
        )
        self._reserves = workload.device.type == "cuda" or slots is not None
        state.readers.append(self._release_state)

    @property
    def _saver(self) -> BackgroundSaver:
        return self._room.saver

    @cached_property
    def _settings_record(self) -> dict[str, JsonValue]:
        # When the first file needs it: others wait while a replacement starts.
        return config.record_to_show(self._settings)

    def lead(self, *, is_leader: bool, is_first_here: bool) -> Owed:
        """Implement the port: the save that a rank before has left to be written is waited for as an own one."""
        self._is_leader = is_leader
        self._keeps_copies = is_first_here and not is_leader
        if is_first_here:
            self._room.forget_later_than(self._state.committed_step)
        if is_leader:
            self._take_over()
        else:
            self.settle()  # a save of a former rank 0 ends before the new one saves anything
        return Owed(
            is_due=is_leader and self._has_to_make_up(),
            wanted_step=self.policy.wanted_step,
            covered_step=self._covered_step() if is_leader else 0,
        )

    def vote(self, *, is_asked: bool) -> KeepVotes:
        """Implement the port: again and again, until all have heard of it. A save that has ended is reported."""
        if is_asked:
            self.policy.ask()
        if not self._is_leader:
            return KeepVotes(file=self.policy.is_asked, copy=False)
        return KeepVotes(file=self._wants_file(), copy=self._wants_copy())

    def committed(self, step: int, *, step_s: float, is_wanted: bool, is_mine: bool) -> None:
        """Implement the port. ``step_s`` is without what the step waited for a save."""
        if self._is_leader:
            self._stepped(step_s)
        if self._is_leader or self._keeps_copies:
            self._reserve()
        if is_wanted:
            self.policy.heard(step, is_mine=is_mine, fulfils=self._is_leader)

    def keep(self, how: Keep) -> None:
        """Implement the port: as a file or a copy beside the next step, or at once."""
        if not self._is_leader:
            if self._keeps_copies and how in (Keep.FILE, Keep.COPY):
                self._begin_copy()
                if self._room.slots is None:  # the leader's file of before is there by now
                    self._room.file_is_there()
            return
        match how:
            case Keep.FILE:
                self._begin_file()
            case Keep.COPY:
                self._begin_copy()
            case Keep.BEST:
                self._keep_best(is_calm=self._state.monitor.is_calm)
            case Keep.LATER:
                self.policy.put_off()

    def judge(self, trust: Trust, *, compare_s: float | None = None) -> None:
        """Implement the port; an UNKNOWN state is that of a rank that leaves, which reports what has ended."""
        match trust:
            case Trust.SOUND:
                self._prove()
            case Trust.WRONG:
                self._drop()
            case Trust.UNKNOWN:
                if self._drop():
                    self.policy.put_off()
                self._collect(timeout_s=0.0)
        if compare_s is not None:
            self._compared(compare_s)

    def newest_step(self) -> int:
        """Implement the port: what is being written is the newest there will be."""
        self.settle()
        return newest_to_restore(self._settings, self._state, self._store)

    def give_back(self) -> None:
        """Implement the port: what :func:`restore_newest` finds."""
        try:
            loaded = restore_newest(self._settings, self._workload, self._state, self._store)
        except OtherStageError as error:
            leave_for(error.stage, self._runtime)
        self.policy.needed_one()
        if loaded is not None:
            self._disk_faults.report_unusable(self._store, loaded)

    def end(
        self, reason: StopReason | None, *, compare_s: float = 0.0, has_news: bool = False
    ) -> Fault | None:
        """Implement the port; ``compare_s``: how long the comparison before it took."""
        if reason is None:
            return self._save_alone()
        self.settle()
        if self._progress.checkpoint_step == self._state.committed_step and not has_news:
            return None
        return self._save_last(reason.value, compare_s=compare_s)

    def _begin_file(self) -> None:
        """Begin a save, or put it off while another one is under way: it is then made of a later step."""
        # One that was dropped has put this one off, and has ended by now.
        self._collect(timeout_s=0.0 if self.policy.is_put_off else PATIENCE_S)
        match self.policy.comes_due(is_busy=self._saver.is_busy):
            case Due.NOW:
                self._begin(INTERVAL)
            case Due.LATER:
                step = self._state.committed_step
                self._runtime.logger.detail(
                    f"the checkpoint before is still being written: that of step {step} waits for it",
                    step=step,
                )

    def _begin_copy(self) -> None:
        """Nothing happens while a save is under way, nor where no memory outlives this process."""
        self._collect(timeout_s=0.0)
        if self._room.slots is not None and not self._saver.is_busy:
            self._begin(COPY)

    def _take_over(self) -> None:
        """Go on with the save that a rank before has left to be written, if there is one."""
        order = self._runtime.take_owed()
        # One that comes while a save is under way is this rank's own.
        if order is not None and not self._saver.is_busy:
            self._is_copying, self._begun_step, self._compare_s = False, order.step, 0.0
            self._room.take_up(order)

    def copies_of(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Implement the port: waits for the copy."""
        save = self._saver.undecided
        return tensors if save is None else save.copies_of(tensors)

    def _keep_best(self, *, is_calm: bool) -> None:
        """Have the state as it is now, which all ranks have, on disk: tried twice, whatever failed before.

        ``is_calm``: no step was skipped shortly before. Else nothing goes back to it, and it takes no other's place.
        """
        was_put_off = self.policy.is_put_off
        for _ in range(2):
            self.settle()
            self._begin(INTERVAL if is_calm else AMID_SKIPPED)
            self._prove()
            self.settle()
            if not self.policy.has_failed:
                break
        if was_put_off and not is_calm:
            self.policy.put_off()

    def _prove(self) -> None:
        """The state that the save under way was begun with is what it should be: it is written."""
        if save := self._saver.undecided:
            save.prove()

    def _drop(self) -> bool:
        """Never write the save that waits for a proof. Whether it was to be a file."""
        save = self._saver.undecided
        if save is None:
            return False
        save.drop()
        self._begun_step = 0
        return not self._is_copying

    def _has_to_make_up(self) -> bool:
        """Return True if the newest save that was due is on no disk, nor on its way there."""
        policy, formed_again = self.policy, self._runtime.slot.get(Cell.GENERATION) > 1
        if policy.saves_by_time and formed_again and not policy.is_pausing:
            self._take_over_interval()
        # With "auto" what was begun from may be on another machine's disk alone.
        resumes = self._settings.run.resume == "auto"
        return policy.must_make_up(
            self._state.committed_step,
            self._workload.length,
            at_least=self._state.begun_step if resumes else 0,
            saved_step=max(self._newest_step(), self._progress.checkpoint_step),
            under_way_step=self._begun_step if self._saver.is_busy else 0,
        )

    def _newest_step(self) -> int:
        return max((entry.step for entry in self._store.catalog.entries()), default=0)

    def _wants_file(self) -> bool:
        """Return True if a save should follow the next step; one that has ended is reported."""
        self._collect(timeout_s=0.0)
        now_s, step_s = time.monotonic(), self._step_s
        if news := self.policy.news(now_s=now_s, step_s=step_s):
            self._runtime.logger.detail(news, step=self._state.committed_step)
        return self.policy.wants_file(now_s=now_s, step_s=step_s, is_busy=self._saver.is_busy)

    def _wants_copy(self) -> bool:
        """Return True if the state should be copied into memory after the next step."""
        return self._room.slots is not None and self.policy.wants_copy(
            self._state.committed_step + 1,
            now_s=time.monotonic(),
            step_s=self._step_s,
            is_busy=self._saver.is_busy,
        )

    @property
    def _step_s(self) -> float:
        return self._runtime.slot.get(Cell.STEP_NS) / 1e9

    def forget(self) -> None:
        """Implement the port."""
        self._room.forget()

    def _covered_step(self) -> int:
        """Up to which step what was wanted is written, on its way, or refused by the disk."""
        if self.policy.is_pausing:
            return self._state.committed_step
        return max(self._newest_step(), self._begun_step if self._saver.is_busy else 0)

    def resumed(self, loaded: Loaded) -> None:
        """Go on from a checkpoint."""
        self._disk_faults.report_unusable(self._store, loaded)

    def _compared(self, compare_s: float) -> None:
        """So long training has waited for the comparison of the replicas, for a save's sake."""
        self.policy.compared(compare_s, is_file=not self._is_copying)
        # Once it is known the save is being written, and another comparison is not for its sake.
        if not self._is_copying and self._compare_s is None:
            self._compare_s = compare_s

    def _stepped(self, step_s: float) -> None:
        self.policy.stepped(
            step_s,
            beside_file=self._saver.is_busy and not self._is_copying,
            beside_copy=self._saver.is_busy and self._is_copying,
        )

    def _reserve(self) -> None:
        if self._reserves:  # after the first step, when the optimizer has its state
            self._reserves = False
            self._room.reserve(storage_sizes(self._for_file()))

    def settle(self) -> None:
        """Wait for the save under way and report it. Nothing to do, at no cost, without one."""
        self._collect(timeout_s=None)

    def _save_alone(self) -> Fault:
        """Save at the end of the run, alone, and report what became of it; why this process ends."""
        state = self._state
        reported_step, cause, is_its_own = self._progress.checkpoint_step, "", True
        try:
            self.settle()
            just_reported = reported_step != self._progress.checkpoint_step == state.committed_step
            if state.is_in_doubt:
                cause = "its state differs from that of other ranks"
            elif not just_reported:
                self._save_last(BEFORE_END)
        except FaultError as error:
            cause = error.fault.cause
            is_its_own = error.fault.kind is not FaultKind.STORAGE_FAILED
        except Exception as error:  # noqa: BLE001 - a named boundary: what cannot be saved is reported
            cause = f"{type(error).__name__}: {error}"
        if cause:
            self._runtime.report(
                messages.NotSaved(
                    rank=self._runtime.rank_info.rank,
                    step=state.committed_step,
                    cause=cause,
                    is_its_own=is_its_own,
                )
            )
        return self._disk_faults.storage_failed(cause or "the run ends")

    def _take_over_interval(self) -> None:
        """Count from the newest file: ranks 0 that die one after the other must not put saves off."""
        written_s = 0.0
        for entry in self._store.catalog.entries():
            with contextlib.suppress(OSError):  # no file, or retention was faster
                written_s = max(written_s, entry.path.stat().st_mtime)
        age_s = max(0.0, time.time() - written_s)
        self.policy.take_over(now_s=time.monotonic(), age_s=age_s)

    def _begin(self, reason: str) -> None:
        self._is_copying = reason == COPY
        is_file = not self._is_copying
        self.policy.began(is_file=is_file, now_s=time.monotonic())
        self._begun_step, self._compare_s = self._state.committed_step if is_file else 0, None
        with self._at_disk():
            try:
                self._start_saving(reason)
            except (RuntimeError, MemoryError) as error:
                cause = f"no checkpoint could be begun ({type(error).__name__}: {error})"
                if is_file:
                    self._failed(self._disk_faults.storage_failed(cause))

    def _start_saving(self, reason: str) -> None:
        """Raises RuntimeError or MemoryError where there is no thread, or no memory at all, for it."""
        state, steady = self._for_file(), self._state.steady_tensors()
        facts = self.facts(state, reason)
        self._room.begin(state, facts, steady=steady, is_file=not self._is_copying)
        if self._is_copying and self._room.slots is None and self._makes_files:
            self.policy.put_off()  # instead of the copies that are made no more

    def captured(self) -> dict[str, Any]:
        """The whole state of this very step, as a file has it: references, not copies."""
        return {**self._state.capture_of_all(), "versions": versions()}

    def _for_file(self) -> dict[str, Any]:
        """The same, without what the settings leave out of checkpoints."""
        return {**self._state.capture_for_file(), "versions": versions()}

    def facts(self, state: Mapping[str, Any], reason: str) -> CheckpointFacts:
        """Return the facts about a file with ``state``, captured now."""
        step, workload = self._state.committed_step, self._workload
        monitor = self._state.monitor
        return CheckpointFacts(
            step=step,
            epoch=workload.length.epoch_of(step),
            samples=self._state.samples,
            run_id=self._runtime.run_id,
            meaning=dict(workload.resume_key),
            settings_digest=workload.settings_digest,
            versions={"python": platform.python_version(), "torch": str(torch.__version__)},
            created_utc=datetime.now(tz=timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            recipe=dict(workload.recipe),
            changes=self._state.changes,
            data=self._data(),
            start_sha256=start_sha256(state),
            about=about_file(
                self._state,
                loss=math.nan if monitor.last is None else monitor.last,
                settings=self._settings_record,
                monitor=workload.monitor,
                place=self._settings.stage,
                trackers=tracker_ids(self._settings),
            ),
            monitored=self._state.judged(workload.monitor),
            monitor=workload.monitor.name,
            mode=workload.monitor.mode,
            reason=reason,
            order=self._state.order_version,
        )

    def _save_at_once(self, store: CheckpointStore, *, reason: str) -> Saved:
        with self._at_disk():
            state = self._for_file()
            return store.save(state, self.facts(state, reason))

    def _save_last(self, reason: str, *, compare_s: float = 0.0) -> Fault | None:
        """Save, if need be elsewhere: then what the disk says that has the other checkpoints."""
        if self._state.first_step and not self._state.own_step:
            return None  # the file of that step is the last one of the stage before
        saved, refusal = self._last.make(partial(self._save_at_once, reason=reason), reason=reason)
        self._report(saved, compare_s=compare_s, is_rescued=refusal is not None)
        return refusal

    def _collect(self, *, timeout_s: float | None) -> None:
        """Report the save under way if it ends within the time."""
        if not self._saver.is_busy:
            return
        with self._at_disk() if timeout_s != 0.0 else contextlib.nullcontext():
            ended = self._saver.take_ended(timeout_s)
        if ended is not None:
            self._conclude(ended)

    def _conclude(self, ended: BackgroundSave) -> None:
        """Report a save between others: one that the disk refused costs a warning, and a pause."""
        if self._is_copying:
            self._conclude_copy(ended)
            return
        try:
            saved = ended.result()
        except FaultError as error:
            if error.fault.kind is not FaultKind.STORAGE_FAILED:
                raise
            self._failed(error.fault)
            return
        except (MemoryError, OSError, RuntimeError) as error:  # no memory, or no thread, for it
            cause = f"a checkpoint could not be written ({type(error).__name__}: {error})"
            self._failed(self._disk_faults.storage_failed(cause))
            return
        if saved is not None:
            self._report(saved, blocked_s=ended.blocked_s, compare_s=self._compare_s or 0.0)

    def _conclude_copy(self, ended: BackgroundSave) -> None:
        """One that is no file; without it the one before is still there."""
        try:
            ended.result()
        except (MemoryError, OSError, RuntimeError) as error:
            cause = f"{type(error).__name__}: {error}"
            self._runtime.logger.warning(f"no copy of the state could be kept in memory ({cause})")
        self.policy.copied(blocked_s=ended.blocked_s)

    def _failed(self, fault: Fault) -> None:
        if self._runtime.slot.get(Cell.FENCED):
            return  # no disk refused it but the fence, and this process is about to be killed
        skips = self.policy.failed()
        pause = (
            f"; skipping the next {'checkpoint' if skips == 1 else f'{skips} checkpoints'}"
            if skips
            else ""
        )
        self._disk_faults.warn(fault, f"training continues{pause}")

    def _report(
        self,
        saved: Saved,
        *,
        blocked_s: float | None = None,
        compare_s: float = 0.0,
        is_rescued: bool = False,
    ) -> None:
        """``blocked_s``: what training waited beside the comparison, if not for the whole write."""
        self._room.file_is_there()
        step, blocked_s = saved.manifest.step, saved.blocked_s if blocked_s is None else blocked_s
        waited_s = blocked_s + compare_s
        self.policy.saved(blocked_s=blocked_s, write_s=saved.blocked_s)
        run, rescue_dir = self._settings.run, self._settings.checkpoint.rescue_dir
        path = as_given(saved.path, run.checkpoint_dir, run.log_dir, rescue_dir)
        self._progress.checkpoint = str(path)
        self._progress.checkpoint_step = step
        self._runtime.logger.info(
            f"saved {path} (blocked training for {waited_s:.2f} s)",
            step=step,
        )
        for note in saved.notes:
            self._runtime.logger.info(note, step=step)
        self._runtime.report(
            events.CheckpointSaved(
                rank=self._runtime.rank_info.rank,
                step=step,
                path=str(path),
                blocked_s=waited_s,
                size_bytes=saved.manifest.size_bytes,
                sha256=saved.manifest.sha256,
                is_rescued=is_rescued,
            )
        )

    def _release_state(self) -> None:
        """Called before anything changes what a copy may still be reading."""
        if self._saver.reads_state:
            with self._at_disk():
                self._saver.release_state()

    @contextlib.contextmanager
    def _at_disk(self) -> Iterator[None]:
        """Show and count the time that the training thread spends on a save."""
        began_ns = time.monotonic_ns()
        self._runtime.slot.stamp(Phase.CHECKPOINT, began_ns)
        try:
            yield
        finally:
            self._runtime.slot.add(Cell.CHECKPOINT_NS, time.monotonic_ns() - began_ns)
