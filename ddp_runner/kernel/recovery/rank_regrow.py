"""Ranks that were dropped: tried again beside the running world, and taken back between two steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.parent.run_context import RunContext
from ddp_runner.kernel.processes.rank_start import RankStart
from ddp_runner.kernel.recovery.communicator_cut import UNANSWERED, Cutting
from ddp_runner.kernel.recovery.hang_detector import HangFinder
from ddp_runner.kernel.rules.faults import Fault
from ddp_runner.kernel.rules.lifecycle import IN_WORLD, Membership, MembershipEvent, RankState
from ddp_runner.kernel.rules.recovery import regrow_delay_s

RETURN_WAIT_S = 30.0  # of a rank whose machine is back, after a return of it that failed
_LEAVING = (RankState.ABORTING, RankState.LEAVING)


@dataclass(slots=True, kw_only=True)
class _Slot:
    """The record of a slot that was given up at least once."""

    step: int  # that the run had committed when it was given up, or its process was ready
    failed_returns: int = 0
    came_back_at_s: float = 0.0


class ReturningRanks:
    """Driven by ``Repair``. What goes wrong with a slot until it is taken back is no incident."""

    def __init__(
        self,
        run: RunContext,
        *,
        hangs: HangFinder,
        cutting: Cutting,
        injections_left: Callable[[int], Mapping[int, int]],
    ) -> None:
        self._settings = run.settings
        self._facts = run.facts
        self._world = run.world
        self._recorder = run.record
        self._injections_left = injections_left
        self._hangs = hangs
        self._cutting = cutting
        self._clock = run.clock
        self._slots: dict[int, _Slot] = {}
        self._of_lost_nodes: set[int] = set()
        # The step at which a rank was dropped last, and the reason that stands for it.
        self._fewer_at, self._newest_reason = -1, ""
        self.is_regrouping = False  # the ranks leave a healthy generation, on purpose
        self._regroup_since_s = 0.0

    def drop(self, handle: RankHandle, now_s: float) -> None:
        """Go on without this rank, until it is tried again."""
        step = self._facts.committed_step
        slot = self._slots.setdefault(handle.rank, _Slot(step=step))
        if slot.came_back_at_s:
            soon = now_s < slot.came_back_at_s + self._settings.restart_window_s
            slot.failed_returns = slot.failed_returns + 1 if soon else 0
        slot.step = step
        handle.member.advance(MembershipEvent.DROPPED)
        handle.dropped_at_s = now_s
        self._world.kill_rank(handle, now_s)
        reasons, reason = self._facts.inexact_reasons, self._fewer(step)
        if self._fewer_at != step or self._newest_reason not in reasons:
            reasons.append(reason)
        else:  # they go together: one line for all of them
            reasons[reasons.index(self._newest_reason)] = reason
        self._fewer_at, self._newest_reason = step, reason

    def _fewer(self, step: int) -> str:
        return f"{len(self._world.present)} of {len(self._world.ranks)} ranks from step {step}"

    def drop_of_lost_node(self, handles: Collection[RankHandle], now_s: float) -> None:
        """Go on without the ranks of a machine that is not there; they return when it is."""
        for handle in handles:
            self._of_lost_nodes.add(handle.rank)
            self.drop(handle, now_s)
            self._slots[handle.rank].failed_returns = 0  # it was not the rank's failure

    def try_again(self, now_s: float) -> None:
        """Fork dropped ranks again after their time; called only while the run is fault-free."""
        is_wanted = self._settings.regrow_after or self._of_lost_nodes
        if not is_wanted or len(self._world.present) == len(self._world.ranks):
            return
        for handle in self._world.ranks:
            if handle.membership in IN_WORLD:
                continue
            if handle.is_alive:
                is_late = now_s > handle.spawned_at_s + self._settings.startup_timeout_s
                starts = handle.state is RankState.STARTING
                if (starts and is_late) or self._hangs.is_stopped(handle, now_s):
                    self._world.kill_rank(handle, now_s)
                continue
            may_return = self._settings.regrow_after or handle.rank in self._of_lost_nodes
            if not may_return or not self._world.can_fork_rank(handle):
                continue
            slot = self._slots[handle.rank]
            delay_s = 0.0
            if self._settings.regrow_after:
                delay_s = regrow_delay_s(slot.failed_returns, self._settings)
            elif slot.failed_returns:
                delay_s = RETURN_WAIT_S
            is_early = now_s < handle.dropped_at_s + delay_s
            # It may take the whole world with it each time: a step is committed in between.
            if is_early or self._facts.committed_step <= slot.step:
                continue
            handle.member.advance(MembershipEvent.TRIED_AGAIN)
            self._recorder.say(f"trying rank {handle.rank} again")
            start = RankStart(
                resume="auto",
                injections_left=self._injections_left(handle.rank),
                device_free_bytes=handle.device_free_bytes,
            )
            self._world.spawn_rank(handle, start, now_s=now_s)

    def got_ready(self, handle: RankHandle) -> None:
        """It could join: at the next step that the others commit, so that none is cut short."""
        self._slots[handle.rank].step = self._facts.committed_step

    def ended(self, handle: RankHandle) -> None:
        """It was not worth it yet: wait again, for longer."""
        self._slots[handle.rank].failed_returns += 1
        handle.member.advance(MembershipEvent.RETURN_FAILED)
        handle.dropped_at_s = self._clock.monotonic()
        self._recorder.say(f"rank {handle.rank} is still not usable", level="WARNING")

    def take_back(self, now_s: float) -> None:
        """Have the others leave their generation for ranks that are ready, and form with them."""
        if not self._world.counts.members(Membership.REJOINING):
            return
        back = [
            handle
            for handle in self._world.ranks
            if handle.membership is Membership.REJOINING
            and handle.state is RankState.READY
            and self._slots[handle.rank].step != self._facts.committed_step
        ]
        if not back or self.is_regrouping:
            return
        for handle in back:
            handle.member.advance(MembershipEvent.TAKEN_BACK)
            self._slots[handle.rank].came_back_at_s = now_s
            self._recorder.say(
                f"rank {handle.rank} is back: {len(self._world.present)} ranks from here on"
            )
        self.is_regrouping = True
        self._regroup_since_s = now_s
        self._world.abort(self._facts.generation, now_s)

    def who_stays_too_long(self, now_s: float) -> list[Fault]:
        """Ranks that ought to have left their generation for a rank that came back."""
        if not self.is_regrouping:
            return []
        if deaf := self._cutting.unanswered(now_s):
            return [self._hangs.hung(one, UNANSWERED) for one in deaf]
        if now_s <= self._cutting.leave_by_s(self._regroup_since_s):
            return []
        return [
            self._hangs.hung(
                handle, f"did not make room within {now_s - self._regroup_since_s:.1f} s"
            )
            for handle in self._world.present
            if handle.state in _LEAVING and self._hangs.progress_watch.is_overdue(handle)
        ]
