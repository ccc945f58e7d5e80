"""Counts the ranks in each state: updated with each change, so that no turn has to check all of them."""

from __future__ import annotations

from collections import Counter

from ddp_runner.kernel.rules.lifecycle import IN_WORLD, NO_PROCESS_LEFT, Membership, RankState

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
