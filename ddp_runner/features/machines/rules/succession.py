"""Decides which machine coordinates once the coordinator is lost: one that holds the lock of the shared checkpoint folder.

Where each machine has a folder of its own, :mod:`~.majority` decides.

Nothing is read here: each fact is what a machine has seen itself, at a time of its own clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_runner.kernel.system.folder_owner import Owner

# A word in the folder is acted upon once it has stood for this long: whoever has written another one at the same time
# has seen it by then. Longer than any process needs from reading that word to writing its own.
HOLD_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arbiter:
    """Describes what could decide between two machines that do not hear each other.

    ``shares_folder``: this machine has the coordinator's checkpoint folder. ``keeps_locks``: it has seen the coordinator's
    lock on it, so that a lock there holds between machines. ``folder``: its name in log lines. ``otherwise``: why this run
    cannot have a successor, whatever the folder. ``votes``: a majority of the machines decides; ``no_vote``: why none can
    where one was asked for.
    """

    shares_folder: bool
    keeps_locks: bool
    folder: str = "checkpoint folder"
    otherwise: str = ""
    votes: bool = False
    no_vote: str = ""


def why_no_successor(arbiter: Arbiter) -> str:
    """Return in words why this machine never takes the coordinator's place; empty if it may."""
    if arbiter.otherwise:
        return arbiter.otherwise
    if arbiter.votes:
        return ""
    if not arbiter.shares_folder:
        nor = f", and {arbiter.no_vote}" if arbiter.no_vote else ""
        return f"this machine does not share its {arbiter.folder}{nor}"
    if not arbiter.keeps_locks:
        return f"the file system of the {arbiter.folder} keeps no locks between machines"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The ranks that wait on machine ``number`` with the memory of their newest generation, formed in ``term``.

    ``have_left``: none of them is still inside that generation, and no other process of a rank is left there.
    """

    number: int
    term: str
    have_left: bool


def is_newest(kept: Kept, owner: Owner | None) -> bool:
    """Return whether no step can have been committed without this memory."""
    # INVARIANT newest-succeeds: only a machine that was in the newest generation takes the coordinator's place. Broken if:
    # one does that the run has continued without, or one of an older term.
    # Guarded by: test_no_two_machines_coordinate_whatever_is_lost.
    return (
        owner is not None
        and kept.term in (owner.term, owner.after)
        and kept.number not in owner.without
    )


class Stage(enum.Enum):
    """Names the stages of a machine that has lost its coordinator."""

    PARKED = "parked"  # its ranks wait, and it looks for a coordinator
    CLAIMED = "claimed"  # it holds the lock and has written its term; it waits until that has stood
    LEADS = "leads"  # it is the coordinator


class Act(enum.Enum):
    """The next move of such a machine."""

    WAIT = "wait"
    CLAIM = "claim"  # take the lock, and with it write the term
    WITHDRAW = "withdraw"  # let go of the lock: another one has written since
    LEAD = "lead"


class Claim:
    """One machine's way from its parked ranks to the coordinator's place."""

    def __init__(self) -> None:
        self.stage = Stage.PARKED
        self._since_s = 0.0

    def next(
        self, now_s: float, *, kept: Kept | None, arbiter: Arbiter, owner: Owner | None, ours: str
    ) -> Act:
        """Return what to do. ``owner``: as the folder says now; ``ours``: the term that this machine would have."""
        if self.stage is Stage.CLAIMED:
            if owner is None or owner.term != ours:
                return Act.WITHDRAW
            return Act.LEAD if now_s >= self._since_s + HOLD_S else Act.WAIT
        if self.stage is Stage.LEADS or kept is None or not kept.have_left:
            return Act.WAIT
        may_claim = not why_no_successor(arbiter) and is_newest(kept, owner)
        return Act.CLAIM if may_claim else Act.WAIT

    def claimed(self, now_s: float) -> None:
        """The lock is held, and the folder has this machine's term."""
        self.stage, self._since_s = Stage.CLAIMED, now_s

    def withdrew(self) -> None:
        """The lock is free again."""
        self.stage = Stage.PARKED

    def leads(self) -> None:
        """The place is this machine's from here on."""
        self.stage = Stage.LEADS


class GoingOn:
    """When a coordinator may continue without some machines: once the folder has said so for long enough.

    Not asked where no other machine could take the coordinator's place.
    """

    def __init__(self) -> None:
        self._without: tuple[int, ...] = ()
        self._since_s: float | None = None

    def noted(self, without: tuple[int, ...], now_s: float) -> None:
        """The folder names these machines."""
        if self._since_s is None or without != self._without:
            self._without, self._since_s = without, now_s

    def may(self, number: int, now_s: float, *, owner: Owner | None, ours: str) -> bool:
        """Return whether the run may continue without machine ``number``. ``owner``: as the folder says now."""
        # INVARIANT noted-before-going-on: a machine that the run continues without can read so before the first step that it
        # does not have. Broken if: a coordinator forms without a machine that may still take its place.
        # Guarded by: test_no_two_machines_coordinate_whatever_is_lost.
        if owner is None or owner.term != ours or number not in owner.without:
            return False
        has_stood = self._since_s is not None and now_s >= self._since_s + HOLD_S
        return has_stood and number in self._without
