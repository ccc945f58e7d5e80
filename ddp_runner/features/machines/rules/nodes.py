"""Decides what a run on several machines does about missing ones; the coordinator performs it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_runner.checkpoint.catalog import NewestCheckpoint


def loads_own(
    theirs: NewestCheckpoint | None, ours: NewestCheckpoint | None, *, resume: str
) -> bool:
    """Return whether a machine loads its own newest checkpoint, while the coordinator loads ours.

    The ranks agree on the newest state of all when they form. A checkpoint of another run is not a newer
    state of this one. This happens only if nothing else was requested: ``resume`` is auto.
    """
    if resume != "auto" or theirs is None:
        return False
    return ours is None or (theirs.run_id == ours.run_id and theirs.step > ours.step)


class NodesPlan(enum.Enum):
    """The next move about missing machines."""

    WAIT = "wait"  # all are there, or the missing ones still have time
    GO_ON = "go on"  # without those that are missing
    GIVE_UP = "give up"  # fewer than the run needs are left, and nobody has come


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesFacts:
    """``there``: nodes that are connected, the coordinator included. ``least`` and ``most``: of --nnodes.

    ``missing_s``: how long one that is missing has been so, from its first loss since it last trained, or
    the run has waited for its first nodes; ``enough_s``: how long at least ``least`` have been there without
    a break.
    """

    there: int
    least: int
    most: int
    has_trained: bool
    missing_s: float
    enough_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnFacts:
    """The facts about a node that returns with parked ranks. ``term``: of the coordinator that last formed them.

    ``generation``: the newest that they were asked to form. ``is_same_node``: it gets the number that it
    had; ``is_same_run``: the newest checkpoint here is of their run, or there is none; ``are_members``: the run has not
    continued without its ranks. ``ours``: the term of this coordinator; ``formed_in``: the newest generation that has formed here. ``may_resume``: nothing has
    trained here yet, and earlier training is to be resumed. ``before``: the term that had the checkpoint
    folder before, and the numbers of the nodes that it continued without; None: unknown.
    """

    term: str
    generation: int
    is_same_node: bool
    is_same_run: bool
    are_members: bool
    ours: str
    formed_in: int
    may_resume: bool
    before: tuple[str, tuple[int, ...]] | None
    number: int


def keeps_memory(facts: ReturnFacts) -> bool:
    """Return whether the state in memory on a returning node still belongs to this run."""
    # INVARIANT one-course: a memory is taken back only where no step was committed without it. Broken
    # if: a node returns with a step that others have done differently since.
    # Guarded by: test_a_memory_is_kept_only_where_nobody_went_on_without_it.
    if not (facts.is_same_node and facts.are_members):
        return False
    if facts.term == facts.ours:
        return facts.formed_in <= facts.generation
    if not facts.may_resume:
        return False
    if (
        facts.before is None
    ):  # a folder that no coordinator had, such as an empty one, proves no term
        return facts.is_same_run
    term, without = facts.before
    return term == facts.term and facts.number not in without


def what_about_missing(
    facts: NodesFacts, *, patience_s: float, last_call_s: float, join_timeout_s: float
) -> NodesPlan:
    """About one that is missing: before the first step it has ``last_call_s`` to come, later ``patience_s``."""
    if facts.there >= facts.most:
        return NodesPlan.WAIT
    if facts.there >= facts.least:
        waited_s = facts.missing_s if facts.has_trained else facts.enough_s
        limit_s = patience_s if facts.has_trained else last_call_s
        return NodesPlan.GO_ON if waited_s >= limit_s else NodesPlan.WAIT
    limit_s = join_timeout_s + (patience_s if facts.has_trained else 0.0)
    return NodesPlan.GIVE_UP if facts.missing_s >= limit_s else NodesPlan.WAIT
