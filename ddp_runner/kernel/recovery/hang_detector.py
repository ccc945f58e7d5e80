"""Finds ranks that hang wherever they stand in their lives, and says so as faults. Ends nobody."""

from __future__ import annotations

from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.parent.run_context import RunContext
from ddp_runner.kernel.recovery.progress_watch import ProgressWatch
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.faults import Fault, FaultKind, Origin
from ddp_runner.kernel.rules.hang_detection import HangVerdict
from ddp_runner.kernel.rules.lifecycle import Membership, RankState
from ddp_runner.kernel.rules.phases import Phase, Stage
from ddp_runner.kernel.wire.board import Cell

# Of a rank that is asked to leave: more than a tick, for the whole job may be waking up just now.
STOPPED_AT_ONCE_S = 0.15
# Where the system's word is all that can be had: the board shows training ranks only.
_IN_DATASET = (Phase.DATA, Phase.DATA_BEGIN, Phase.EVALUATE)
_NOT_TRAINING = (RankState.STARTING, RankState.READY, RankState.FORMING)


class HangFinder:
    """Driven by ``Repair``, once a tick while no incident is open."""

    def __init__(self, run: RunContext) -> None:
        self.progress_watch = ProgressWatch(
            run.settings, loading_s=run.loading_s, world=run.world, clock=run.clock
        )
        self._settings = run.settings
        self._facts = run.facts
        self._world = run.world
        self._recorder = run.record
        self._clock = run.clock

    def find(self, now_s: float) -> list[Fault]:
        """Ranks that hang, or the collective that does; who is being replaced is left out."""
        if self._world.counts.present_in(*_NOT_TRAINING):
            found = self._find_not_training(now_s)
            if found:
                return found
        verdict = self.progress_watch.look(self._world.present)
        return [] if verdict is None else self._faults_of(verdict)

    def _find_not_training(self, now_s: float) -> list[Fault]:
        if any(map(self._is_getting_on, self._world.present)):
            self._facts.formed_at_s = now_s  # loader and phases have deadlines of their own
        for handle in self._world.present:
            if handle.membership is Membership.REPLACING:
                continue
            started_by_s = _starts_since_s(handle) + self._settings.startup_timeout_s
            formed_by_s = self._facts.formed_at_s + self._settings.form_timeout_s
            if handle.state is RankState.STARTING and now_s > started_by_s:
                return [self.hung(handle, "still starting")]
            if handle.state in _NOT_TRAINING and self.is_stopped(handle, now_s):
                if not self._holds_the_only_state(handle):
                    return [self.hung(handle, f"stopped for {self._settings.stopped_max_s:g} s")]
                self._say_woken(handle)
            if handle.state is RankState.FORMING and now_s > formed_by_s:
                # Nobody knows who is late. Perhaps it is the store, which is cheap to replace.
                self._world.renew_store()
                cause = f"the ranks did not form within {self._settings.form_timeout_s:g} s"
                if machines := self._world.machines():
                    cause += f": perhaps {machines} cannot reach each other: let TCP through between them"
                return [self._stuck(cause, Phase.FORMING)]
        return []

    def find_stopped(self, now_s: float) -> list[Fault]:
        """Ranks that the system holds stopped while an incident is open; the last state is woken.

        One that is asked to leave its generation is waited for by all: it is found at once.
        """
        stopped = [
            handle
            for handle in self._world.present
            if handle.membership is Membership.MEMBER and self._stands_too_long(handle, now_s)
        ]
        if not stopped:
            return []
        holders = self.holders_of_state()
        if all(handle in stopped for handle in holders):
            spared = max(
                (handle for handle in holders),
                key=lambda handle: (not handle.slot.get(Cell.DIRTY), handle.committed_step),
                default=None,
            )
            stopped = [handle for handle in stopped if handle is not spared]
            if spared is not None:
                self._say_woken(spared)
        return [self.hung(handle, "stopped by a signal") for handle in stopped]

    def holders_of_state(self) -> list[RankHandle]:
        """The living ranks whose processes have a state, as far as is known, and are to live on."""
        return [
            handle
            for handle in self._world.present
            if handle.membership is Membership.MEMBER and handle.is_alive and handle.has_state
        ]

    def _stands_too_long(self, handle: RankHandle, now_s: float) -> bool:
        limit_s = self._settings.stopped_max_s
        if handle.state in (RankState.ABORTING, RankState.LEAVING):
            limit_s = min(limit_s, STOPPED_AT_ONCE_S)
        return self._world.stopped_s(handle, now_s) > limit_s

    def _say_woken(self, handle: RankHandle) -> None:
        self._recorder.say(f"rank {handle.rank} was stopped; resuming it", level="WARNING")
        self._world.wake(self._world.ranks)

    def is_stopped(self, handle: RankHandle, now_s: float) -> bool:
        """Return True if the system has held the process stopped for too long."""
        return self._world.stopped_s(handle, now_s) > self._settings.stopped_max_s

    def _is_getting_on(self, handle: RankHandle) -> bool:
        return handle.state is RankState.FORMING and self.progress_watch.is_getting_on(
            handle, generation=self._facts.generation
        )

    def _holds_the_only_state(self, handle: RankHandle) -> bool:
        return handle.progress.committed_step > EMPTY_STEP and not any(
            other.is_alive and other.progress.committed_step > EMPTY_STEP
            for other in self._world.present
            if other is not handle and other.membership is not Membership.REPLACING
        )

    def _faults_of(self, verdict: HangVerdict) -> list[Fault]:
        if verdict.ranks:
            what = f"no sign of life for {verdict.waited_s:.1f} s"
            if verdict.by_device:
                what = (
                    f"its device has not reached the sum over ranks; all have waited for"
                    f" {verdict.waited_s:.1f} s"
                )
            return [self.hung(self._world.ranks[rank], what) for rank in verdict.ranks]
        waited = f"{verdict.waited_s:.1f} s"
        # The board shows all in the reduction; the system knows who cannot come to it.
        held = [one for one in self._world.present if self._world.is_stopped(one)]
        if 0 < len(held) < len(self._world.present):
            return [
                self.hung(one, f"stopped by a signal; all have waited for {waited}") for one in held
            ]
        return [self._stuck(f"every rank has waited in a collective for {waited}", Phase.REDUCE)]

    def _stuck(self, cause: str, phase: Phase) -> Fault:
        return Fault(
            kind=FaultKind.COLLECTIVE_STUCK,
            rank=-1,
            step=self._facts.committed_step,
            phase=phase.label,
            cause=cause,
            at_ns=self._clock.monotonic_ns(),
        )

    def hung(self, handle: RankHandle, what: str) -> Fault:
        """Return the fault that a rank hangs, with its place by the board."""
        reading, sample = handle.slot.read(), handle.slot.get(Cell.SAMPLE)
        preloads = handle.slot.get(Cell.STAGE) == Stage.PRELOAD
        if sample and (preloads or reading.phase in _IN_DATASET):
            what += f", loading {'validation ' if sample < 0 else ''}sample {abs(sample) - 1}"
        return Fault(
            kind=FaultKind.RANK_HUNG,
            rank=handle.rank,
            step=reading.step,
            phase=reading.phase.label,
            cause=f"rank {handle.rank} hung: {what}",
            at_ns=self._clock.monotonic_ns(),
            origin=Origin.OUTSIDE if self._world.is_stopped(handle) else Origin.OWN,
        )


def _starts_since_s(handle: RankHandle) -> float:
    """Since when a rank starts, or has got on with reading samples, however many there are."""
    reading = handle.slot.read()
    stamped_s = reading.phase_since_ns / 1e9 if reading.phase is Phase.STARTUP else 0.0
    return max(handle.spawned_at_s, stamped_s)
