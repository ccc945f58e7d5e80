"""Does a rank's part in a fire drill: writes the state in the background, and notes the results of its share.

``comparison.py`` recomputes the share and compares; ``rules.py`` decides when. The state is copied and written
as for a save, into a separate folder from which no checkpoint is read.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ddp_runner.checkpoint.background import BackgroundSaver
from ddp_runner.checkpoint.manifest import CheckpointFacts
from ddp_runner.checkpoint.snapshot import size_in_memory
from ddp_runner.checkpoint.store import CheckpointStore, Saved
from ddp_runner.core.injection import changes_loss
from ddp_runner.data.loader import MicroBatch
from ddp_runner.data.source import copied
from ddp_runner.features.proof.rules import (
    AFTER,
    BATCH_FILE,
    HANDED,
    LEFT_OUT,
    LOCAL_FILE,
    MISSING,
    OWED,
    SHARE,
    SHARE_FILE,
    SIDE_FILE,
    STATE,
    STATE_FOLDER,
    STILL_WRITTEN,
    SUMS_FILE,
    drilled_rank,
    folder_name,
    number_of_drill,
)
from ddp_runner.kernel.group.group import Group, Membership
from ddp_runner.kernel.rank.runtime import SupervisedRuntime
from ddp_runner.kernel.rules.faults import FaultError
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.system.disk import Disk
from ddp_runner.kernel.system.run_files import replace_file
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.messages import DrillAt, DrillPart, NotKept
from ddp_runner.system.launch_folder import at_launch
from ddp_runner.training.beside_steps import NOTHING, BesideSteps, Noting
from ddp_runner.training.exactness.first_step import report_lost_carried
from ddp_runner.training.exactness.own_share import ShareNotes
from ddp_runner.training.exactness.own_update import bytes_of_sums, hashes_after
from ddp_runner.training.local_state.by_value import handed_over
from ddp_runner.training.local_state.local_state import packed
from ddp_runner.training.rank_context import RankParts

if TYPE_CHECKING:
    from ddp_runner.training.step import Stepper

REASON = "drill"
LAST_WAIT_S = 10.0  # for a state that is still being written when the run ends
STATES_NEEDED = 3  # in memory: the copy, what is read from the file, and what it becomes
_ANOTHER = -1  # no rank's number: another rank is drilled, and which one does not matter here
MARGIN_BYTES = 256 << 20  # for everything else in a process
DEVICE_MARGIN_BYTES = 1 << 30  # a context on a GPU, with torch's kernels


class _Unsynced:
    """A disk on which nothing needs to survive a loss of power."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def sync_file(self, handle: int) -> None:
        """Do nothing: a drill's files need not survive a crash of the machine."""

    def sync_directory(self, directory: Path) -> None:
        """Do nothing: a drill's files need not survive a crash of the machine."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class Looked:
    """Holds what a rank adds to a drill of its share: entries of its record, and files, by name."""

    record: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)


class Drills(BesideSteps):
    """Does a rank's part in the drills of its run."""

    def __init__(self, parts: RankParts) -> None:
        settings, workload, runtime = parts.settings, parts.workload, parts.runtime
        is_wanted = runtime.is_watched and not changes_loss(
            settings.run.inject, world_size=runtime.rank_info.world_size
        )
        norms = getattr(workload, "norms", None)
        is_wanted &= norms is None or not norms.names  # a share of which needs the other ranks
        self._drill_at = settings.recovery.drill_at if is_wanted else None

        self._parts = parts
        self._folder = at_launch(settings.run.checkpoint_dir)
        self._total_steps = workload.length.total_steps
        self._device = workload.device
        self._state = parts.state
        self._saving = parts.saving
        self._memory = parts.memory
        self._loader = parts.loader
        self._runtime = runtime
        self._saver: BackgroundSaver | None = None  # of the state that is being written
        self._writing = (0, 0)  # the step of that, and the generation that has begun to write it
        self._formed = (0, 0)  # generation, and the step that it began with
        self._asked: DrillAt | None = None  # a step at random
        self._diagnoses = False  # this rank is diagnosed in the current step
        self._writes = False  # this rank writes the state of the current step's drill
        if isinstance(runtime, SupervisedRuntime):
            runtime.answer[DrillAt] = self._take_asked
            runtime.answer[NotKept] = self._take_not_kept
        self._not_kept = ""  # what a drill has found and the state does not list yet
        self._state.readers.append(self._release_state)

    def beside(
        self, stepper: Noting, group: Group, micro_batches: Sequence[MicroBatch]
    ) -> AbstractContextManager[None]:
        """Do this rank's part of a due drill while a step runs, if one is due with it.

        INVARIANT untouched: a drill changes no bit of the run: its input is copied and noted, and
        nothing returns from it. Broken if: the state, a batch or a generator is touched here.
        Guarded by: test_drills_change_no_bit_of_a_run.
        """
        if self._saver is not None:
            self._collect(self._saver)
        if self._not_kept:
            self._note_not_kept()
        step, membership = self._state.committed_step, group.membership
        if self._formed[0] != membership.generation:
            self._formed = (membership.generation, step)
            self._asked = None  # of the generation before: not all ranks know of it
        drilled = self._drilled_at(step, group)
        if drilled is None:
            return NOTHING
        if self._writes:
            self._begin_writing(step)
        if group.rank != drilled:
            return NOTHING
        return self._drilled_step(step, stepper, group, micro_batches)

    @contextlib.contextmanager
    def _drilled_step(
        self, step: int, stepper: Noting, group: Group, micro_batches: Sequence[MicroBatch]
    ) -> Iterator[None]:
        """Note this rank's share of ``step`` while it is made, for the drill that computes it again."""
        self._is_drilled_next()
        more = self._looked_into(stepper, micro_batches) if self._diagnoses else Looked()
        problem = self._hold_own(step, more)
        with stepper.noted() as notes:
            notes.wants_sums = not self._lacks_memory(bytes_of_sums(self._state))
            yield
        if self._state.committed_step == step + 1:  # else its state was given up
            record = self._record(notes, group) | more.record
            with self._aside():
                self._add_update(notes, record, more)
                left_out = record.setdefault(LEFT_OUT, {})
                for name, content in more.files.items():
                    if why := self._write(step, name, content):
                        left_out[name] = why
                record[HANDED] = [name for name in more.files if name not in left_out]
                problem = problem or self._write_share(step, record)
            if LOCAL_FILE in more.files.keys() - {*record[HANDED]}:
                problem = problem or "what the rank has of its own could not be written"
            self._report_part(step, SHARE, problem)

    def _add_update(self, notes: ShareNotes, record: dict[str, Any], more: Looked) -> None:
        """Add the sums that the update began with and hashes of its result, unless they cannot be handed over."""
        if notes.sums is None or notes.sums.buffers is None:
            return
        try:
            record[AFTER] = hashes_after(self._state)
        except Exception as error:  # noqa: BLE001 - options and moments of the user's own types: the share is drilled alone
            record[LEFT_OUT] = record.get(LEFT_OUT, {}) | {SUMS_FILE: _words(error)}
            return
        more.files[SUMS_FILE] = notes.sums.to_record()

    def _is_drilled_next(self) -> None:
        """Take note that this rank's share of the step that begins now is drilled."""

    def _record(self, notes: ShareNotes, group: Group) -> dict[str, Any]:
        """Return what the drill needs to know about this share, as plain values."""
        return {
            "rank": group.rank,
            "world_size": group.world_size,
            "shares": list(getattr(self._loader, "shares", ())),
            "share": notes.share().to_record(),
            "quarantine": self._state.quarantine.to_record(),
        }

    def _drilled(self, number: int, membership: Membership) -> int | None:
        """Return the rank that drill ``number`` is for; None: there is no drill."""
        return drilled_rank(number, membership.world_size)

    def _drilled_at(self, step: int, group: Group) -> int | None:
        """Return the rank, as the group numbers it, that is drilled in the step that begins now; None: none is."""
        if not self._drill_at:
            return None
        asked, rank = self._asked, self._runtime.rank_info.rank
        self._diagnoses = False
        membership = group.membership
        first, is_first = group.rank - membership.local_rank, membership.local_rank == 0
        if asked is not None and asked.step <= step:
            if asked.step < step:  # not before: a step may begin twice
                self._asked = None
            if asked.step == step:  # all ranks were asked: one is drilled, and one writes the state
                each = self._runtime.rank_info.local_world_size
                self._writes = is_first and asked.rank // each == rank // each
                self._diagnoses = asked.diagnoses
                return group.rank if asked.rank == rank else _ANOTHER
        owed = membership.owes_drill
        number = number_of_drill(
            step,
            begun_step=self._state.begun_step,
            total_steps=self._total_steps,
            drill_at=self._drill_at,
            owed_from=self._formed[1] if owed >= 0 else None,
        )
        if number is None:
            return None
        drilled = owed if number == OWED else self._drilled(number, membership)
        if drilled is not None:
            # INVARIANT drilled-where-it-is: state and share of a drill are written on the machine of the drilled rank.
            # Broken if: rank 0 writes the state for a rank of another machine, whose drill then lacks it.
            # Guarded by: test_the_first_rank_of_its_machine_writes_the_state.
            self._writes = is_first and first <= drilled < first + membership.local_world_size
        return drilled

    def _looked_into(self, stepper: Noting, micro_batches: Sequence[MicroBatch]) -> Looked:
        """Compute the share of the step that begins now once more, and hold what it is computed from.

        Input that cannot be copied, or for which memory is short, is left out.
        """
        # INVARIANT looked-beside: what a diagnosis runs into in a rank ends the diagnosis, and not the rank.
        # Broken if: an error of the look passes, or a hang watch counts its time as that of the step's phase.
        # Guarded by: test_a_look_that_fails_is_no_fault_of_the_rank.
        with self._aside():
            try:
                found = self._files_of_look(micro_batches)
                others = copied([*micro_batches])
                again = cast("Stepper", stepper).share_again(others)
            except FaultError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is: the step itself comes to it again, or it does not matter
                self._state.drop_unfinished_step()  # as a whole: else it is the rank's fault
                return Looked({LEFT_OUT: {"the share computed twice": _words(error)}})
            found.record["again"] = again.to_record()
            return found

    def _hold_own(self, step: int, more: Looked) -> str:
        """Add to ``more`` what the rank has of its own, where it must; why it cannot, else an empty text."""
        try:
            with self._aside():
                own = self._state.local.to_hand_over(step)
        except (OSError, MemoryError) as error:
            return (
                f"what the rank has of its own could not be read ({type(error).__name__}: {error})"
            )
        if own is not None:
            more.files[LOCAL_FILE] = own
        return ""

    def _files_of_look(self, micro_batches: Sequence[MicroBatch]) -> Looked:
        side, found = self._state.side, Looked({LEFT_OUT: {}})
        if side.hold_bytes() <= self._memory.room_bytes() / STATES_NEEDED:
            found.files[SIDE_FILE] = whole = side.whole_record()
            found.record[MISSING] = side.missing_in(whole)
        else:
            found.record[LEFT_OUT][SIDE_FILE] = "memory is short"
        try:
            found.files[BATCH_FILE] = packed(handed_over([one.batch for one in micro_batches]))
        except Exception as error:  # noqa: BLE001 - a batch of the user's own types may raise anything
            found.record[LEFT_OUT][BATCH_FILE] = _words(error)
        return found

    def _write(self, step: int, name: str, content: object) -> str:
        """Write what a diagnosis can do without; return why it cannot be written, or an empty text."""
        folder = self._folder / folder_name(step)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(content, folder / name)
        except Exception as error:  # noqa: BLE001 - a state of the user's own types may raise anything
            return _words(error)
        return ""

    def _take_asked(self, message: DrillAt) -> None:
        """Called by the thread that listens to the supervisor."""
        self._asked = message

    def _take_not_kept(self, message: NotKept) -> None:
        """Called by the thread that listens to the supervisor."""
        self._not_kept = message.what

    def _note_not_kept(self) -> None:
        what, self._not_kept = self._not_kept, ""
        self._state.note_carried([what])
        report_lost_carried(self._parts)

    def conclude(self, group: Group) -> None:
        """After the last step, wait for a state that is still being written, if a repair may need it as its proof."""
        is_owed = group.membership.owes_drill >= 0  # by the launch before this one
        if self._saver is None or (group.membership.generation == 1 and not is_owed):
            return
        self._runtime.slot.stamp(Phase.CHECKPOINT, time.monotonic_ns())
        self._collect(self._saver, timeout_s=LAST_WAIT_S)

    def _begin_writing(self, step: int) -> None:
        if self._saver is not None and self._writing == (step, self._formed[0]):
            return  # the step begins once more: this is its state
        if self._saver is not None:
            # INVARIANT no-silent-drill: a drill that a rank leaves out is reported, so that another one is asked for.
            # Broken if: the supervisor waits for its state, and asks for no drill meanwhile.
            # Guarded by: test_a_drill_is_skipped_while_an_earlier_state_is_written.
            self._report_part(step, STATE, STILL_WRITTEN)
            return
        state = self._saving.captured()
        problem = self._lacks_memory(size_in_memory(state))
        if not problem:
            folder = self._folder / folder_name(step) / STATE_FOLDER
            disk = cast("Disk", _Unsynced(self._runtime.disk))
            store = CheckpointStore(folder, keep_last=1, disk=disk)
            facts = self._saving.facts(state, REASON)
            write = partial(self._write_state, store, step, facts)
            saver = BackgroundSaver()
            try:
                saver.begin(state, steady=self._state.steady_tensors(), write=write).prove()
            except (RuntimeError, MemoryError) as error:
                problem = f"its state cannot be copied ({error})"
            else:
                self._saver, self._writing = saver, (step, self._formed[0])
        if problem:
            self._report_part(step, STATE, problem)

    def _write_state(
        self, store: CheckpointStore, step: int, facts: CheckpointFacts, content: dict[str, Any]
    ) -> Saved:
        """Thread of the save: write, and report it at once, because the next step may be long in coming."""
        saved = store.save(content, facts=facts)
        self._report_part(step, STATE, "")
        return saved

    def _lacks_memory(self, state_bytes: int) -> str:
        """Return why there is no room for a second process with this state; an empty text if there is."""
        needed_bytes = STATES_NEEDED * state_bytes + MARGIN_BYTES
        room_bytes, where = self._memory.room_bytes(), "memory"
        if room_bytes >= needed_bytes and self._device.type == "cuda":
            needed_bytes = (STATES_NEEDED - 1) * state_bytes + DEVICE_MARGIN_BYTES
            room_bytes, where = torch.cuda.mem_get_info(self._device)[0], "the GPU's memory"
        if room_bytes >= needed_bytes:
            return ""
        return f"{where} is short ({needed_bytes / 1e9:.1f} GB wanted, {room_bytes / 1e9:.1f} free)"

    def _write_share(self, step: int, record: dict[str, Any]) -> str:
        """Write the share; return why that failed, or an empty text."""
        path = self._folder / folder_name(step) / SHARE_FILE
        try:
            self._runtime.disk.make_directory(path.parent)
            replace_file(path, json.dumps(record).encode())
        except OSError as error:
            return f"{path} could not be written ({error.strerror or error})"
        return ""

    def _collect(self, saver: BackgroundSaver, timeout_s: float = 0.0) -> None:
        """Take the save once it has ended, and report a failure of it."""
        ended = saver.take_ended(timeout_s)
        if ended is None:
            return
        self._saver = None
        try:
            ended.result()
        except FaultError as error:
            problem = error.fault.cause
        except Exception as error:  # noqa: BLE001 - top of the thread that wrote: no drill is worth a run
            problem = f"its state could not be written ({type(error).__name__}: {error})"
        else:
            return
        self._report_part(self._writing[0], STATE, problem)

    def _report_part(self, step: int, part: str, problem: str) -> None:
        rank = self._runtime.rank_info.rank
        self._runtime.report(DrillPart(rank=rank, step=step, part=part, problem=problem))

    def _release_state(self) -> None:
        """Called before anything changes what a copy may still be reading."""
        if self._saver is None or not self._saver.reads_state:
            return
        with self._aside():
            self._saver.release_state()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Show and count the time that the training thread spends within as that of a save."""
        began_ns, slot = time.monotonic_ns(), self._runtime.slot
        phase = slot.read().phase
        slot.stamp(Phase.CHECKPOINT, began_ns)
        try:
            yield
        finally:
            ended_ns = time.monotonic_ns()
            slot.add(Cell.CHECKPOINT_NS, ended_ns - began_ns)
            slot.stamp(phase, ended_ns)
