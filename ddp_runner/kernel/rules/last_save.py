"""Chooses the rank that saves before a run ends early, and words the outcome. Decides nothing else.

No collective takes part: of the remaining ranks, one that waits outside a generation writes its
committed state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_runner.kernel.rules.election import EMPTY_STEP, ReplicaProgress, elect_source
from ddp_runner.kernel.rules.faults import Fault, FaultKind

_RESUMES_NEWEST = ("auto", "last")  # words of --resume for which the same command goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A rank that has not left its generation yet. ``saves``: it is at the disk, which takes its time."""

    progress: ReplicaProgress
    saves: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitForRanks:
    """Wait, since a rank with a newer state may still come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskToSave:
    """Have this rank write the state of ``step``; no other process may write meanwhile."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingToSave:
    """Save nothing: the newest state is on disk, or no rank with a newer one is left."""


Move = WaitForRanks | AskToSave | NothingToSave


def next_saver(
    parked: Sequence[ReplicaProgress],
    leaving: Sequence[Leaving],
    *,
    saved_step: int,
    may_wait: bool,
) -> Move:
    """Return the next move towards a last save.

    ``parked`` ranks wait outside a generation; ``saved_step`` is the step of the newest checkpoint.
    ``may_wait``: ranks that were asked to leave still have time to do so. A rank that saves may use all of it.
    """
    filled = [one for one in parked if one.committed_step > EMPTY_STEP]
    newer = [one for one in leaving if one.progress.committed_step > saved_step]
    if newer and (may_wait or not filled or any(one.saves for one in newer)):
        return WaitForRanks()
    if not filled:
        return NothingToSave()
    elected = elect_source(filled)
    if elected.committed_step <= max(saved_step, 0):
        return NothingToSave()
    return AskToSave(rank=elected.source, step=elected.committed_step)


def why_not_saved(causes: Sequence[Fault]) -> str:
    """Why the state that is left is not to be saved, in words; empty where it is."""
    if any(one.kind is FaultKind.REPLICA_DIVERGED and not one.may_retry for one in causes):
        return "the ranks' states differ, and none is known to be right"
    if any(one.kind is FaultKind.STORAGE_FAILED for one in causes):
        return "the disk refuses it"  # for as long as a last save is tried
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOutcome:
    """The outcome of the last save: a file at ``path``, a failure with its ``cause``, or neither."""

    step: int = EMPTY_STEP
    path: str = ""
    is_rescued: bool = False  # elsewhere than where the next launch looks
    cause: str = ""

    @property
    def is_saved(self) -> bool:
        """True if the state is in a file."""
        return bool(self.path)


def closing_words(
    outcome: SaveOutcome, *, newest: tuple[int, str] | None, committed_step: int, resume: str
) -> str:
    """Word the last line of a run that ends early: the step on disk, and how to resume.

    ``newest`` is the step and path of the newest checkpoint, ``resume`` the word of this command.
    """
    option = "" if resume in _RESUMES_NEWEST else " with --resume auto"
    go_on = f"run the same command again{option} to resume"
    if outcome.is_rescued:
        return (
            f"step {outcome.step} is saved, but not with the other checkpoints: "
            f"resume from it with --resume {outcome.path}"
        )
    if outcome.is_saved and (newest is None or newest[0] < outcome.step):
        return f"step {outcome.step} is saved in {outcome.path} on another machine: {go_on}"
    lost = ""
    if outcome.cause:
        lost = f"step {outcome.step} could not be saved: {outcome.cause}; "
    if newest is None:
        return f"{lost}there is no checkpoint: the same command starts at step 0"
    step, path = newest
    if step >= committed_step:
        return f"step {step} is saved in {path}: {go_on}"
    return f"{lost}newest checkpoint: step {step} of {committed_step} in {path}: {go_on}"
