"""One rank as the supervisor sees it: its states and newest reports. Knows no process to act upon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from ddp_runner.kernel.rules.election import EMPTY_STEP, ReplicaProgress
from ddp_runner.kernel.rules.faults import PARKED_BY_RANK
from ddp_runner.kernel.rules.lifecycle import (
    IN_WORLD,
    MEMBERSHIP_TABLE,
    NO_PROCESS_LEFT,
    RANK_TABLE,
    Machine,
    Membership,
    MembershipEvent,
    RankEvent,
    RankState,
)
from ddp_runner.kernel.rules.recovery import Incident, WorldFacts
from ddp_runner.kernel.wire.board import Cell, Slot
from ddp_runner.kernel.wire.messages import Finished, Ready

Standing = tuple[Membership, RankState]


class HeadCount:
    """The counts of one world. ``world_changes`` grows whenever a rank leaves the world, or comes back to it."""

    # INVARIANT counted-as-they-move: a count is what looking at every rank would give. Broken if: a state
    # changes and its rank does not say so here.
    # Guarded by: test_the_counts_are_what_looking_at_each_rank_gives.

    def __init__(self) -> None:
        self._ranks: Counter[Standing] = Counter()
        self._members: Counter[Membership] = Counter()
        self.world_changes = 0

    def add(self, standing: Standing) -> None:
        """One more rank, which stands there."""
        self._ranks[standing] += 1
        self._members[standing[0]] += 1
        self.world_changes += 1

    def moved(self, before: Standing, after: Standing) -> None:
        """A rank has gone from one to the other."""
        self._ranks[before] -= 1
        self._ranks[after] += 1
        self._members[before[0]] -= 1
        self._members[after[0]] += 1
        if (before[0] in IN_WORLD) != (after[0] in IN_WORLD):
            self.world_changes += 1

    def present_in(self, *states: RankState) -> int:
        """Return the number of ranks of the world in one of these states."""
        return sum(self._ranks[member, state] for member in IN_WORLD for state in states)

    def members(self, *memberships: Membership) -> int:
        """Return the number of ranks with one of these memberships."""
        return sum(self._members[member] for member in memberships)

    def are_all_present(self, state: RankState) -> bool:
        """Return True if every rank of the world is in this state."""
        return self.present_in(state) == self.members(*IN_WORLD)

    @property
    def is_any_missing(self) -> bool:
        """True if a rank needs another process (:attr:`RankHandle.needs_process`)."""
        lost = sum(self._ranks[Membership.REJOINING, state] for state in NO_PROCESS_LEFT)
        return bool(lost or self.members(Membership.REPLACING))


# For a killed process to end; freeing much memory takes seconds, a file system that does not answer for ever.
REAP_TIMEOUT_S = 60.0


class RankHandle:
    """Owned by the supervisor's loop, for the whole run; the processes of the rank come and go.

    Where it stands is in the two tables of ``kernel/rules/lifecycle.py``. All else is a fact, and is asked for
    its value, never for where the rank stands.
    """

    def __init__(self, rank: int, *, slot: Slot, counts: HeadCount | None = None) -> None:
        # Of the rank, as long as the run lasts.

        # Its number at launch, and its index in World.ranks. While ranks are dropped the numbers that a
        # generation is formed with are others.
        self.rank = rank
        # Its cells on the board. Written by its process, but for FENCED; they outlive the process.
        self.slot = slot
        # What its process does. Moved where a message arrives, a process ends, or one is acted upon.
        self.machine: Machine[RankState, RankEvent] = Machine(
            RANK_TABLE, RankState.DEAD, moved=self._state_moved
        )
        # Whether the world counts on it. Moved by the repair alone. At launch all are missing.
        self.member: Machine[Membership, MembershipEvent] = Machine(
            MEMBERSHIP_TABLE, Membership.REPLACING, moved=self._membership_moved
        )
        # Of the world: each change of the two is noted there.
        self._counts = counts or HeadCount()
        self._counts.add((self.membership, self.state))
        # When it was dropped, or its newest return failed. Means nothing while it is in the world.
        self.dropped_at_s = 0.0
        # Free on its device when the first process of the rank came, by its first Ready; 0 before that.
        self.device_free_bytes = 0

        # Processes that were asked for so far: which one is meant, where one follows another.
        self.processes = 0

        # Of its process: each begins again with the next one, in begin().

        # For people: its node acts upon the process by the rank's number. None while the zygote has not
        # answered, and once it was reaped. A rank may have sent Ready before that.
        self.pid: int | None = None
        # When the process was asked for; what the board has from before is its predecessor's.
        self.spawned_at_s = 0.0
        # Whether it is to read the checkpoint, because no other rank has a state to give it.
        self.loads = False
        # Steps that were done in this slot by the processes before this one.
        self.steps_before = 0
        # Its newest Ready: the step it holds. None: it has not built what it trains.
        self.ready: Ready | None = None
        # Its report at the end; there exactly while the state is FINISHED or ENDED.
        self.finished: Finished | None = None
        # Whether the process waited as a spare before it became this rank, and was not forked for it.
        self.was_spare = False
        # Whether it was asked to join a generation: it writes to its log file from then on.
        self.has_log = False
        # Whether it has been in a generation that trained: it holds a state.
        self.has_formed = False
        # When it was first sent SIGKILL; None before, and in KILLING until its pid is known.
        self.killed_at_s: float | None = None
        # Its loader workers, by its newest report.
        self.loader_pids: tuple[int, ...] = ()
        # Its newest Metrics, by name.
        self.metrics: dict[str, float] = {}
        # Resident memory, measured once a second. The kernel kills the largest first.
        self.rss_bytes = 0

    def _state_moved(self, before: RankState, after: RankState) -> None:
        self._counts.moved((self.membership, before), (self.membership, after))

    def _membership_moved(self, before: Membership, after: Membership) -> None:
        self._counts.moved((before, self.state), (after, self.state))

    @property
    def state(self) -> RankState:
        """The state of its process."""
        return self.machine.state

    @property
    def membership(self) -> Membership:
        """Its place in the world: whether the world counts on it."""
        return self.member.state

    @property
    def is_alive(self) -> bool:
        """True if a process was asked for and has not been reaped."""
        return self.state not in NO_PROCESS_LEFT

    @property
    def has_finished(self) -> bool:
        """True if its process has done everything that it had to; it may have been reaped since."""
        return self.state in (RankState.FINISHED, RankState.ENDED)

    @property
    def needs_process(self) -> bool:
        """True if another process must be forked for it, at once or after this one was reaped."""
        if self.membership is Membership.REJOINING:
            return not self.is_alive  # its fork was lost
        return self.membership is Membership.REPLACING

    @property
    def own_step_s(self) -> float | None:
        """A step's mean time outside collectives, over all processes of this rank; None: no step yet."""
        steps = self.slot.get(Cell.OWN_STEPS)
        return self.slot.get(Cell.OWN_NS) / 1e9 / steps if steps else None

    def does_not_end(self, now_s: float) -> bool:
        """Return True if it was killed and has not been reaped for too long: it waits inside the kernel."""
        killed_at_s = self.killed_at_s
        return self.is_alive and killed_at_s is not None and now_s > killed_at_s + REAP_TIMEOUT_S

    @property
    def has_begun(self) -> bool:
        """True if the process has written to the board since it was asked for."""
        return self.slot.get(Cell.PHASE_SINCE_NS) >= int(self.spawned_at_s * 1e9)

    @property
    def is_filled(self) -> bool:
        """True if the process has a state to give, or will have one once it is ready."""
        if self.state is RankState.STARTING:
            return self.loads
        return self.state is RankState.READY and self.progress.committed_step > EMPTY_STEP

    @property
    def has_state(self) -> bool:
        """True if its process holds a state that could be given to others."""
        return self.has_formed or self.progress.committed_step > EMPTY_STEP

    @property
    def committed_step(self) -> int:
        """The committed step on the board."""
        return self.slot.get(Cell.COMMITTED_STEP)

    @property
    def progress(self) -> ReplicaProgress:
        """The state that the process could give, by its newest report."""
        step = EMPTY_STEP if self.ready is None else self.ready.committed_step
        return ReplicaProgress(rank=self.rank, committed_step=step)

    def begin(self, *, now_s: float, loads: bool) -> None:
        """A process is asked for: what is known of the one before is over."""
        self.slot.set(Cell.FENCED, 0)  # its predecessor was
        self.processes += 1
        self.pid, self.spawned_at_s, self.killed_at_s, self.loads = None, now_s, None, loads
        self.ready, self.finished, self.has_log = None, None, False
        self.has_formed, self.was_spare = False, False
        self.steps_before = self.slot.get(Cell.OWN_STEPS)
        self.loader_pids, self.metrics = (), {}
        self.machine.advance(RankEvent.SPAWNED)

    def released(self) -> None:
        """Its process was reaped, and nothing is left of it."""
        self.pid, self.loader_pids, self.rss_bytes = None, (), 0


def who_is_left(
    handles: Sequence[RankHandle],
    incident: Incident,
    *,
    forked_ahead: Collection[int],
    now_s: float,
) -> WorldFacts:
    """Return what the ranks of a world have, once ``incident`` has been gathered.

    Ranks that are ``forked_ahead`` of it, or are being replaced, have no state to give.
    If all others only wait for one, the first of them counts as lost: another process of it loads.
    """
    unending = {h.rank: h.pid or 0 for h in handles if h.does_not_end(now_s)}
    raised = {fault.rank for fault in incident.attribution.causes if fault.kind in PARKED_BY_RANK}
    lost: list[int] = []
    parked: list[ReplicaProgress] = []
    others: list[RankHandle] = []
    for handle in handles:
        is_usable = handle.state in (RankState.READY, RankState.STARTING)
        has_none = handle.membership is Membership.REPLACING or handle.rank in forked_ahead
        if has_none or handle.rank in unending or not is_usable:
            lost.append(handle.rank)
        elif handle.rank in raised and handle.state is RankState.READY:
            parked.append(handle.progress)
        else:
            others.append(handle)
    filled = any(handle.is_filled for handle in others)
    # Who has been in a world and went back reads the checkpoint by itself, in the next one.
    went_back = any(handle.has_formed for handle in others)
    if others and not (lost or parked or filled or went_back):
        lost.append(others.pop(0).rank)
    return WorldFacts(
        lost=tuple(lost),
        filled=filled,
        newest_step=max((one.progress.committed_step for one in others), default=EMPTY_STEP),
        present=len(handles),
        parked=tuple(parked),
        unending=unending,
    )
