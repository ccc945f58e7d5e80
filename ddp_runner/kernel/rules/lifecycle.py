"""State tables of the run and of a rank. Everything that may change a state stands here.

``advance`` is the only way from one state to the next; a pair that is not in the table raises with
the recent history, and an event that is ignored on purpose has a row that leads back to its state.

A rank has two tables, because two things change that do not depend on each other: what its process
does (:class:`RankState`, moved by what the process says and how it ends), and whether the world counts
on it (:class:`Membership`, moved by what the supervisor decides). A dropped rank may still have a
process that ends, or one that starts beside the world; a rank that hangs may still answer an abort. One
table for both would have a state for each pair. What is true of a process from some moment until it
ends, and stands in nobody's way (it was a spare, it has a log file), is a fact and no state: it is
noted on the handle (``kernel/processes/rank_process.py``), and a new process begins without.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar


class RunState(Enum):
    """``state`` in status.json."""

    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    STOPPING = "stopping"
    SAVING = "saving"  # it is to end, and the newest state that is left is written first
    DONE = "done"
    FAILED = "failed"


class RunEvent(Enum):
    """The events of a run as a whole."""

    WORLD_FORMED = "world_formed"
    INCIDENT_BEGAN = "incident_began"
    STOP_ASKED = "stop_asked"
    ALL_FINISHED = "all_finished"
    LAST_SAVE_BEGAN = "last_save_began"
    GAVE_UP = "gave_up"


class RankState(Enum):
    """The states of a rank's process; ``ranks[].state`` in status.json.

    KILLING and ENDED appear there as ``aborting`` and ``finished``.
    """

    STARTING = "starting"
    READY = "ready"
    FORMING = "forming"
    TRAINING = "training"
    ABORTING = "aborting"
    LEAVING = "leaving"  # has heard of the abort, and commits nothing more
    KILLING = "killing"  # SIGKILL was sent, and it has not been reaped: what it still says is old
    FINISHED = "finished"  # has reported its end, and ends by itself
    ENDED = "ended"  # had finished, and was reaped
    DEAD = "dead"  # there is none: it was reaped before it had finished, or never asked for


NO_PROCESS_LEFT = (RankState.ENDED, RankState.DEAD)
IN_GENERATION = (
    RankState.FORMING,
    RankState.TRAINING,
    RankState.ABORTING,
    RankState.LEAVING,
)


class RankEvent(Enum):
    """The events of one rank."""

    SPAWNED = "spawned"
    GOT_READY = "got_ready"
    FORM_SENT = "form_sent"
    GOT_FORMED = "got_formed"
    ABORT_SENT = "abort_sent"
    ABORT_HEARD = "abort_heard"
    GOT_FINISHED = "got_finished"
    KILL_SENT = "kill_sent"
    EXITED = "exited"


class Membership(Enum):
    """The role of a rank in the world: counted on, being replaced, or left out. Not shown to users."""

    MEMBER = "member"
    HUNG = "hung"  # is killed once it has written where it hangs; how it ends belongs to the fault
    REPLACING = "replacing"  # is forked once its process, if there is one, was killed and reaped
    DROPPED = "dropped"  # the others go on without it
    REJOINING = "rejoining"  # was dropped, and a new process of it starts beside the world


IN_WORLD = (Membership.MEMBER, Membership.HUNG, Membership.REPLACING)


class MembershipEvent(Enum):
    """The supervisor's decisions and findings about one rank."""

    FOUND_HUNG = "found_hung"
    TO_REPLACE = "to_replace"
    REPLACED = "replaced"
    DROPPED = "dropped"
    TRIED_AGAIN = "tried_again"
    RETURN_FAILED = "return_failed"
    TAKEN_BACK = "taken_back"


RUN_TABLE: dict[tuple[RunState, RunEvent], RunState] = {
    (RunState.STARTING, RunEvent.WORLD_FORMED): RunState.RUNNING,
    (RunState.STARTING, RunEvent.INCIDENT_BEGAN): RunState.RECOVERING,
    (RunState.STARTING, RunEvent.STOP_ASKED): RunState.STOPPING,
    # A resumed run that was complete finishes without training a step.
    (RunState.STARTING, RunEvent.ALL_FINISHED): RunState.DONE,
    (RunState.STARTING, RunEvent.LAST_SAVE_BEGAN): RunState.SAVING,
    (RunState.STARTING, RunEvent.GAVE_UP): RunState.FAILED,
    # A generation that re-formed before its predecessor was noticed to be well.
    (RunState.RUNNING, RunEvent.WORLD_FORMED): RunState.RUNNING,
    (RunState.RUNNING, RunEvent.INCIDENT_BEGAN): RunState.RECOVERING,
    (RunState.RUNNING, RunEvent.STOP_ASKED): RunState.STOPPING,
    (RunState.RUNNING, RunEvent.ALL_FINISHED): RunState.DONE,
    (RunState.RUNNING, RunEvent.LAST_SAVE_BEGAN): RunState.SAVING,
    (RunState.RUNNING, RunEvent.GAVE_UP): RunState.FAILED,
    # A second fault while repairing belongs to the same recovery.
    (RunState.RECOVERING, RunEvent.INCIDENT_BEGAN): RunState.RECOVERING,
    (RunState.RECOVERING, RunEvent.WORLD_FORMED): RunState.RUNNING,
    (RunState.RECOVERING, RunEvent.STOP_ASKED): RunState.STOPPING,
    (RunState.RECOVERING, RunEvent.ALL_FINISHED): RunState.DONE,
    (RunState.RECOVERING, RunEvent.LAST_SAVE_BEGAN): RunState.SAVING,
    (RunState.RECOVERING, RunEvent.GAVE_UP): RunState.FAILED,
    # A fault while stopping is repaired, because the save is still owed.
    (RunState.STOPPING, RunEvent.INCIDENT_BEGAN): RunState.STOPPING,
    (RunState.STOPPING, RunEvent.WORLD_FORMED): RunState.STOPPING,
    # Ignored: asked twice by two sources; a second *signal* ends the run by GAVE_UP instead.
    (RunState.STOPPING, RunEvent.STOP_ASKED): RunState.STOPPING,
    (RunState.STOPPING, RunEvent.ALL_FINISHED): RunState.DONE,
    (RunState.STOPPING, RunEvent.LAST_SAVE_BEGAN): RunState.SAVING,
    (RunState.STOPPING, RunEvent.GAVE_UP): RunState.FAILED,
    # Nothing forms any more. Ignored: who dies now, or asks for a stop, changes the end no more.
    (RunState.SAVING, RunEvent.INCIDENT_BEGAN): RunState.SAVING,
    (RunState.SAVING, RunEvent.STOP_ASKED): RunState.SAVING,
    (RunState.SAVING, RunEvent.GAVE_UP): RunState.FAILED,
    # Ignored: signals and late deaths after the end change nothing.
    (RunState.DONE, RunEvent.STOP_ASKED): RunState.DONE,
    (RunState.DONE, RunEvent.INCIDENT_BEGAN): RunState.DONE,
    (RunState.FAILED, RunEvent.STOP_ASKED): RunState.FAILED,
    (RunState.FAILED, RunEvent.INCIDENT_BEGAN): RunState.FAILED,
    (RunState.FAILED, RunEvent.GAVE_UP): RunState.FAILED,
}

RANK_TABLE: dict[tuple[RankState, RankEvent], RankState] = {
    (RankState.STARTING, RankEvent.GOT_READY): RankState.READY,
    # Ignored: nothing to abort in a rank that has not joined; it will answer Ready all the same.
    (RankState.STARTING, RankEvent.ABORT_SENT): RankState.STARTING,
    (RankState.STARTING, RankEvent.KILL_SENT): RankState.KILLING,
    (RankState.STARTING, RankEvent.EXITED): RankState.DEAD,
    (RankState.READY, RankEvent.FORM_SENT): RankState.FORMING,
    (RankState.READY, RankEvent.ABORT_SENT): RankState.READY,
    # Ignored: it had left the generation by itself when it heard.
    (RankState.READY, RankEvent.ABORT_HEARD): RankState.READY,
    (RankState.READY, RankEvent.KILL_SENT): RankState.KILLING,
    (RankState.READY, RankEvent.EXITED): RankState.DEAD,
    (RankState.READY, RankEvent.GOT_FINISHED): RankState.FINISHED,
    (RankState.FORMING, RankEvent.GOT_FORMED): RankState.TRAINING,
    (RankState.FORMING, RankEvent.GOT_READY): RankState.READY,
    (RankState.FORMING, RankEvent.ABORT_SENT): RankState.ABORTING,
    (RankState.FORMING, RankEvent.KILL_SENT): RankState.KILLING,
    (RankState.FORMING, RankEvent.EXITED): RankState.DEAD,
    (RankState.TRAINING, RankEvent.ABORT_SENT): RankState.ABORTING,
    (RankState.TRAINING, RankEvent.GOT_READY): RankState.READY,
    (RankState.TRAINING, RankEvent.GOT_FINISHED): RankState.FINISHED,
    (RankState.TRAINING, RankEvent.KILL_SENT): RankState.KILLING,
    (RankState.TRAINING, RankEvent.EXITED): RankState.DEAD,
    (RankState.ABORTING, RankEvent.GOT_READY): RankState.READY,
    # Ignored: the rank had formed just before it heard the abort; Ready follows.
    (RankState.ABORTING, RankEvent.GOT_FORMED): RankState.ABORTING,
    # Ignored: asked again because another incident began.
    (RankState.ABORTING, RankEvent.ABORT_SENT): RankState.ABORTING,
    (RankState.ABORTING, RankEvent.GOT_FINISHED): RankState.FINISHED,
    (RankState.ABORTING, RankEvent.ABORT_HEARD): RankState.LEAVING,
    (RankState.ABORTING, RankEvent.KILL_SENT): RankState.KILLING,
    (RankState.ABORTING, RankEvent.EXITED): RankState.DEAD,
    (RankState.LEAVING, RankEvent.GOT_READY): RankState.READY,
    # Ignored, as in ABORTING; and one abort is heard once.
    (RankState.LEAVING, RankEvent.GOT_FORMED): RankState.LEAVING,
    (RankState.LEAVING, RankEvent.ABORT_SENT): RankState.LEAVING,
    (RankState.LEAVING, RankEvent.ABORT_HEARD): RankState.LEAVING,
    (RankState.LEAVING, RankEvent.GOT_FINISHED): RankState.FINISHED,
    (RankState.LEAVING, RankEvent.KILL_SENT): RankState.KILLING,
    (RankState.LEAVING, RankEvent.EXITED): RankState.DEAD,
    # Ignored: a rank that has finished has left every collective.
    (RankState.FINISHED, RankEvent.ABORT_SENT): RankState.FINISHED,
    (RankState.FINISHED, RankEvent.ABORT_HEARD): RankState.FINISHED,
    # Ignored: it had done all that it had to.
    (RankState.FINISHED, RankEvent.KILL_SENT): RankState.FINISHED,
    (RankState.FINISHED, RankEvent.EXITED): RankState.ENDED,
    # Ignored: it had sent this before it was killed.
    (RankState.KILLING, RankEvent.GOT_READY): RankState.KILLING,
    (RankState.KILLING, RankEvent.GOT_FORMED): RankState.KILLING,
    (RankState.KILLING, RankEvent.ABORT_HEARD): RankState.KILLING,
    (RankState.KILLING, RankEvent.ABORT_SENT): RankState.KILLING,
    # Ignored: killed again, perhaps because its pid has become known only now.
    (RankState.KILLING, RankEvent.KILL_SENT): RankState.KILLING,
    # It was killed too late: nothing of it is missing.
    (RankState.KILLING, RankEvent.GOT_FINISHED): RankState.FINISHED,
    (RankState.KILLING, RankEvent.EXITED): RankState.DEAD,
    (RankState.DEAD, RankEvent.SPAWNED): RankState.STARTING,
    # Ignored: who is not there hears nothing and dies once.
    (RankState.DEAD, RankEvent.ABORT_SENT): RankState.DEAD,
    (RankState.DEAD, RankEvent.KILL_SENT): RankState.DEAD,
    # The others form once more with a rank that is back, and need a successor of it.
    (RankState.ENDED, RankEvent.SPAWNED): RankState.STARTING,
    # Ignored, as in DEAD.
    (RankState.ENDED, RankEvent.ABORT_SENT): RankState.ENDED,
    (RankState.ENDED, RankEvent.KILL_SENT): RankState.ENDED,
}

MEMBERSHIP_TABLE: dict[tuple[Membership, MembershipEvent], Membership] = {
    (Membership.MEMBER, MembershipEvent.FOUND_HUNG): Membership.HUNG,
    (Membership.MEMBER, MembershipEvent.TO_REPLACE): Membership.REPLACING,
    (Membership.MEMBER, MembershipEvent.DROPPED): Membership.DROPPED,
    (Membership.HUNG, MembershipEvent.TO_REPLACE): Membership.REPLACING,
    (Membership.HUNG, MembershipEvent.DROPPED): Membership.DROPPED,
    # Ignored: it was killed and does not end; the plan about that follows.
    (Membership.REPLACING, MembershipEvent.FOUND_HUNG): Membership.REPLACING,
    # Ignored: another plan wants the same, before the first was carried out.
    (Membership.REPLACING, MembershipEvent.TO_REPLACE): Membership.REPLACING,
    (Membership.REPLACING, MembershipEvent.REPLACED): Membership.MEMBER,
    (Membership.REPLACING, MembershipEvent.DROPPED): Membership.DROPPED,
    # Ignored: its process was lost with a zygote, and nobody waits for it.
    (Membership.DROPPED, MembershipEvent.TO_REPLACE): Membership.DROPPED,
    (Membership.DROPPED, MembershipEvent.TRIED_AGAIN): Membership.REJOINING,
    # Ignored: its fork was lost with a zygote, and is asked for again; it is not back by that.
    (Membership.REJOINING, MembershipEvent.TO_REPLACE): Membership.REJOINING,
    (Membership.REJOINING, MembershipEvent.REPLACED): Membership.REJOINING,
    (Membership.REJOINING, MembershipEvent.RETURN_FAILED): Membership.DROPPED,
    (Membership.REJOINING, MembershipEvent.TAKEN_BACK): Membership.MEMBER,
}

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Machine(Generic[S, E]):
    """One state, moved only by its table; remembers the last transitions for error messages.

    ``moved`` is called with the states before and after each change.
    """

    def __init__(
        self,
        table: dict[tuple[S, E], S],
        state: S,
        *,
        moved: Callable[[S, S], None] | None = None,
    ) -> None:
        self._table = table
        self._moved = moved
        self._state = state
        self._recent: deque[str] = deque(maxlen=12)

    @property
    def state(self) -> S:
        """The state now."""
        return self._state

    def may(self, event: E) -> bool:
        """Return whether the table has a row for ``event`` in the current state."""
        return (self._state, event) in self._table

    def advance(self, event: E) -> S:
        """Take ``event``; returns the new state. Raises ValueError for a pair not in the table."""
        try:
            after = self._table[self._state, event]
        except KeyError:
            history = ", ".join(self._recent) or "none"
            raise ValueError(
                f"{event.value} is not possible in {self._state.value}; before: {history}"
            ) from None
        self._recent.append(f"{self._state.value} -{event.value}-> {after.value}")
        before, self._state = self._state, after
        if self._moved is not None and after is not before:
            self._moved(before, after)
        return after
