"""Runs the second phase of an abort whose collectives end without an error: all ranks abort their communicators.

What a rank aborts before its peers have heard lets them end a collective with wrong numbers, and
commit those (see ``kernel/group/communicators.py``). So the supervisor waits for everybody's answer.
"""

from __future__ import annotations

from ddp_runner.kernel.parent.ports import EventRecorder
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.rules.lifecycle import RankState
from ddp_runner.kernel.wire import events

ANSWER_TIMEOUT_S = 3.0  # for a rank to hear of an abort: a thread of its own does
UNANSWERED = f"did not answer an abort within {ANSWER_TIMEOUT_S:g} s"  # of who is ended for that
LEAVE_TIMEOUT_S = 5.0  # for a survivor to leave its generation, if its phase does not excuse it
SILENT_LEAVE_TIMEOUT_S = 30.0  # from the second act: for a device to let go of its kernels
_HAS_NOT_HEARD = (RankState.FORMING, RankState.TRAINING, RankState.ABORTING)
_MAY_COMMIT = (*_HAS_NOT_HEARD, RankState.KILLING)  # until it has been reaped, nobody knows


class Cutting:
    """Driven by :class:`Supervisor`, once a tick and after every event."""

    def __init__(self, *, world: World, recorder: EventRecorder) -> None:
        self._world = world
        self._recorder = recorder
        self._cut = 0  # the newest generation that was cut
        self._cut_at_s = 0.0

    def look(self, now_s: float) -> None:
        """Have the ranks abort their communicators, if each has heard of the abort or is gone."""
        # INVARIANT agree-then-abort: no communicator is aborted before every living rank of its
        # generation commits nothing more. Broken if: Cut is sent while one has neither answered nor
        # been reaped. Guarded by: test_communicators_are_aborted_only_when_all_have_heard.
        generation, _ = self._world.aborted
        if generation <= self._cut or not self._takes_two_acts:
            return
        if any(h.state in _MAY_COMMIT and not h.does_not_end(now_s) for h in self._world.ranks):
            return
        self._cut, self._cut_at_s = generation, now_s
        self._recorder.record(events.Cut(generation=generation))
        self._world.cut(generation)

    def unanswered(self, now_s: float) -> list[RankHandle]:
        """Ranks that are to hear of an abort and have not in time: nobody may wait for them."""
        generation, at_s = self._world.aborted
        if generation <= self._cut or not self._takes_two_acts or now_s <= at_s + ANSWER_TIMEOUT_S:
            return []
        return [h for h in self._world.ranks if h.state in _HAS_NOT_HEARD]

    def leave_by_s(self, aborted_at_s: float) -> float:
        """When ranks that were told to leave at ``aborted_at_s`` ought to have left; may be moved back."""
        if not self._takes_two_acts:
            return aborted_at_s + LEAVE_TIMEOUT_S
        generation, _ = self._world.aborted
        if generation > self._cut:
            return float("inf")  # who does not answer is found by that
        return max(aborted_at_s, self._cut_at_s) + SILENT_LEAVE_TIMEOUT_S

    @property
    def _takes_two_acts(self) -> bool:
        return any(h.ready is not None and h.ready.ends_in_silence for h in self._world.ranks)
