"""Declares the port through which a session, a guard and an engine keep the state, and get it back.

It names no file, no thread and no policy. ``training/saves/saving.py`` implements it with checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from torch import Tensor

from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import Fault


class Keep(Enum):
    """The ways to keep the state of a boundary."""

    FILE = auto()  # in the background, once it is judged
    COPY = auto()  # the same, in memory that outlives this process, without a file
    BEST = auto()  # at once; it is known to be sound
    LATER = auto()  # one that is due is made of a later step


class Trust(Enum):
    """The verdict on the state that is being kept."""

    SOUND = auto()
    WRONG = auto()  # it is never written
    UNKNOWN = auto()  # nor is this one: another is made of a later step


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepVotes:
    """The votes of a rank on what to keep after the next step."""

    file: bool
    copy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Owed:
    """The saves that are due but not kept yet, as one rank knows them.

    ``is_due``: the newest save that was due is nowhere. ``wanted_step``: the step at which a person asked for one;
    ``covered_step``: requests up to this step are answered.
    """

    is_due: bool
    wanted_step: int
    covered_step: int


class Durable(Protocol):
    """Keeps a rank's state in the background, and gives it back. Calls come from the training thread, but for :meth:`copies_of`.

    Every rank has one and calls it at the same places, unless a method says otherwise. The one of the
    group's rank 0, which leads, keeps the state; that of the first rank of each other machine keeps copies there.
    """

    def lead(self, *, is_leader: bool, is_first_here: bool) -> Owed:
        """Lead from here on, or no longer: take over what a former leader has begun, or end what this one has.

        ``is_first_here``: this rank is the first of its machine in the generation.
        """
        ...

    def vote(self, *, is_asked: bool) -> KeepVotes:
        """Vote on what to keep after the next step. ``is_asked``: a person asked for a file since the last vote."""
        ...

    def committed(self, step: int, *, step_s: float, is_wanted: bool, is_mine: bool) -> None:
        """Note that ``step`` was committed, and took ``step_s``.

        ``is_wanted``: a rank has voted for a file, as all ranks know now; ``is_mine``: this rank has.
        """
        ...

    def keep(self, how: Keep) -> None:
        """Keep the state as it is. Before it changes, :meth:`judge` must be called."""
        ...

    def judge(self, trust: Trust, *, compare_s: float | None = None) -> None:
        """Give the verdict on the state that is being kept, if one is. ``compare_s``: training waited so long for it."""
        ...

    def copies_of(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the copies of these tensors that will be written; the tensors if no save waits for a verdict."""
        ...

    def newest_step(self) -> int:
        """Return the step that :meth:`give_back` goes back to, on the leader; EMPTY_STEP where it cannot."""
        ...

    def forget(self) -> None:
        """Drop what is kept in memory: the run has rolled back, and must not return to it."""
        ...

    def give_back(self) -> None:
        """Replace the present state by the newest kept one, on the leader. Raises FaultError."""
        ...

    def end(
        self, reason: StopReason | None, *, compare_s: float = 0.0, has_news: bool = False
    ) -> Fault | None:
        """Save the state as it is, on the leader, as the last save.

        Returns the fault for which this process ends; None if the state is saved.
        ``reason`` is None if the run is given up: then any rank may be asked, alone, and there is always
        a fault. ``has_news``: a file of this very step is made again. Raises FaultError as well.
        """
        ...
