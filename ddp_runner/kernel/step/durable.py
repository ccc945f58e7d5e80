"""The port between training and whatever keeps its state: what a session, a guard and an engine ask of it.

Names no file, no thread and no policy. ``saving.py`` implements it with checkpoints.
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
    """Keeps a rank's state beside training, and gives it back. All calls come from the training thread.

    Every rank has one and calls it at the same places, unless a method says otherwise; that of the
    group's rank 0, which leads, keeps the state, and that of the first rank of each other machine keeps copies there.
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
        """``step`` counts, and took so long; all ranks know by it whether a file ``is_wanted``, by this rank's vote or another's."""
        ...

    def keep(self, how: Keep) -> None:
        """Keep the state as it is. Before it changes, :meth:`judge` must be called."""
        ...

    def judge(self, trust: Trust, *, compare_s: float | None = None) -> None:
        """Say what is known of the state that is being kept, if one is; ``compare_s``: training waited so long to know."""
        ...

    def copies_of(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what will be written of these tensors; themselves, where nothing waits for a verdict. For any thread."""
        ...

    def newest_step(self) -> int:
        """Return the step that :meth:`give_back` goes back to, on the leader; EMPTY_STEP where it cannot."""
        ...

    def forget(self) -> None:
        """The course of the run is left: nothing of it that is in memory may be gone back to."""
        ...

    def give_back(self) -> None:
        """Put the newest state that was kept in the place of the present one, on the leader. Raises FaultError."""
        ...

    def end(
        self, reason: StopReason | None, *, compare_s: float = 0.0, has_news: bool = False
    ) -> Fault | None:
        """Have the state as it is on disk, on the rank that leads; nothing is kept after it.

        Returns the fault for which this process ends; None where the state is where it should be.
        ``reason`` is None where the run is given up: then any rank may be asked, alone, and there is always
        a fault. ``has_news``: a file of this very step is made again. Raises FaultError as well.
        """
        ...
