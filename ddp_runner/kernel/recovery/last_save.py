"""The save before an end: has the newest rank that is left write its state, alone. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.parent.run_context import RunContext
from ddp_runner.kernel.recovery.communicator_cut import LEAVE_TIMEOUT_S, Cutting
from ddp_runner.kernel.rules.election import EMPTY_STEP, ReplicaProgress
from ddp_runner.kernel.rules.faults import Fault
from ddp_runner.kernel.rules.last_save import (
    AskToSave,
    Leaving,
    NothingToSave,
    SaveOutcome,
    next_saver,
    why_not_saved,
)
from ddp_runner.kernel.rules.lifecycle import IN_GENERATION, RankState
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.messages import NotSaved, SaveAlone


class LastSave:
    """Driven by :class:`Supervisor` from when a run is to end until ``outcome`` is known."""

    def __init__(self, run: RunContext, *, cutting: Cutting) -> None:
        self._cutting = cutting
        self._clock = run.clock
        self._settings = run.settings
        self._facts = run.facts
        self._world = run.world
        self._recorder = run.record
        self._published = run.published
        self._began_s = 0.0
        self._by_s = 0.0
        self._asked: AskToSave | None = None
        self._refused: set[int] = set()  # ranks that cannot save theirs
        self._cause = ""  # why the newest try came to nothing
        self.outcome: SaveOutcome | None = None

    def begin(self, causes: Sequence[Fault], now_s: float) -> None:
        """Have every rank leave its generation; those that wait outside are the ones to choose from."""
        if self.outcome is not None:  # the rank that had to save has done so elsewhere
            return
        self._began_s = now_s
        patience_s = LEAVE_TIMEOUT_S + self._settings.checkpoint_timeout_s
        self._by_s = now_s + patience_s
        self._world.abort(self._facts.generation, now_s)
        self._world.wake(self._world.present)
        if cause := why_not_saved(causes):
            self._conclude(SaveOutcome(step=self._facts.committed_step, cause=cause))

    def saved(self, message: events.CheckpointSaved) -> None:
        """A rank has written a checkpoint: the one that was asked, or one that it had begun before."""
        asked = self._asked
        if message.is_rescued or (asked is not None and message.step >= asked.step):
            self._conclude(
                SaveOutcome(step=message.step, path=message.path, is_rescued=message.is_rescued)
            )

    def not_saved(self, message: NotSaved) -> None:
        """The rank that was asked cannot; where that is its own fault, another one may."""
        self._cause = message.cause
        self._refused.add(message.rank)
        if message.is_its_own:
            self._asked = None
        else:
            self._conclude(SaveOutcome(step=message.step, cause=message.cause))

    def ended(self, handle: RankHandle) -> None:
        """A rank's process is gone; if it was to save, the next one is asked."""
        if self._asked is not None and self._asked.rank == handle.rank:
            self._cause = f"rank {handle.rank} ended before it had saved"
            self._asked = None

    def look(self, now_s: float, *, is_owed: bool) -> None:
        """Ask, wait, or conclude. ``is_owed``: the saver still has something to write: no rank writes meanwhile."""
        if self.outcome is not None:
            return
        if now_s > self._by_s:
            late = self._cause or f"not within {self._settings.checkpoint_timeout_s:g} s"
            self._conclude(SaveOutcome(step=self._facts.committed_step, cause=late))
            return
        self._wake_stopped(now_s)
        if any(handle.state is RankState.LEAVING for handle in self._world.present):
            for handle in self._cutting.unanswered(now_s):  # which hold those that could save
                self._world.kill_rank(handle, now_s)
        if self._asked is not None or is_owed:
            return
        newest = self._published.newest()
        able = self._able()
        move = next_saver(
            [handle.progress for handle in able if self._is_parked(handle)],
            [self._leaving(handle) for handle in able if self._is_in(handle)],
            saved_step=-1 if newest is None else newest[0],
            may_wait=now_s <= min(self._cutting.leave_by_s(self._began_s), self._by_s),
        )
        match move:
            case AskToSave():
                self._ask(move, now_s)
            case NothingToSave():
                self._conclude(SaveOutcome(step=self._facts.committed_step, cause=self._cause))
            case _:
                pass

    def _able(self) -> Sequence[RankHandle]:
        """Return the ranks to choose from: those here, or all ranks if one elsewhere has a newer state.

        A rank on another machine may save to that machine's own disk.
        """
        # INVARIANT newest-is-saved: a run that ends early saves the newest state that a rank has. Broken if: ranks here
        # save an older one, and later steps are lost with the other ranks.
        # Guarded by: test_a_newer_state_on_another_machine_is_saved.
        present = [one for one in self._world.present if one.is_alive]
        here = [one for one in present if self._world.is_here(one)]
        newest = max((self._step_of(one) for one in here), default=EMPTY_STEP)
        is_newer = any(self._step_of(one) > newest for one in present)
        return present if is_newer else here

    def _step_of(self, handle: RankHandle) -> int:
        """Return the step that a rank could save now; EMPTY_STEP if it has none."""
        if handle.rank in self._refused:
            return EMPTY_STEP
        if self._is_in(handle):
            return handle.committed_step
        return handle.progress.committed_step if handle.state is RankState.READY else EMPTY_STEP

    def _wake_stopped(self, now_s: float) -> None:
        """A rank that is stopped while all wait for its save would cost the whole of their time."""
        limit_s = self._settings.stopped_max_s
        for handle in self._world.present:
            if self._world.stopped_s(handle, now_s) > limit_s:
                self._recorder.say(f"rank {handle.rank} was stopped; resuming it", level="WARNING")
                self._world.wake([handle])

    def _is_parked(self, handle: RankHandle) -> bool:
        return handle.state is RankState.READY and handle.rank not in self._refused

    @staticmethod
    def _is_in(handle: RankHandle) -> bool:
        return handle.state in IN_GENERATION

    @staticmethod
    def _leaving(handle: RankHandle) -> Leaving:
        slot = handle.slot
        progress = ReplicaProgress(rank=handle.rank, committed_step=slot.get(Cell.COMMITTED_STEP))
        saves = slot.read().phase is Phase.CHECKPOINT
        return Leaving(progress=progress, saves=saves)

    def _ask(self, move: AskToSave, now_s: float) -> None:
        # INVARIANT one-writer: while a rank saves alone no other one publishes or deletes a file. A save
        # that another has begun beside training would set the newer checkpoint aside as another branch.
        # Broken if: a rank is asked before the others are fenced out of the disk.
        # Guarded by: test_only_the_rank_that_saves_before_the_end_may_write.
        for handle in self._world.ranks:
            self._world.fence(handle, is_fenced=handle.rank != move.rank)
        self._asked = move
        self._by_s = now_s + self._settings.checkpoint_timeout_s
        self._recorder.record(events.LastSaveAsked(rank=move.rank, step=move.step))
        self._world.send(self._world.ranks[move.rank], SaveAlone(run_id=self._facts.run_id))

    def _conclude(self, outcome: SaveOutcome) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome
        self._recorder.record(
            events.LastSave(
                step=outcome.step,
                path=outcome.path,
                failed=outcome.cause,
                seconds=round(self._clock.monotonic() - self._began_s, 3),
            )
        )
