"""What a run on several machines does about those that are missing. Decides; the coordinator performs."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class NodesPlan(enum.Enum):
    """What to do now."""

    WAIT = "wait"  # all are there, or the missing ones still have time
    GO_ON = "go on"  # without those that are missing
    GIVE_UP = "give up"  # fewer than the run needs are left, and nobody has come


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesFacts:
    """``there``: nodes that are connected, the coordinator included. ``least`` and ``most``: of --nnodes.

    ``missing_s``: how long the newest of the missing ones has been gone, or the run has waited for its
    first nodes; ``enough_s``: how long at least ``least`` have been there without a break.
    """

    there: int
    least: int
    most: int
    has_trained: bool
    missing_s: float
    enough_s: float


def what_about_missing(
    facts: NodesFacts, *, patience_s: float, last_call_s: float, join_timeout_s: float
) -> NodesPlan:
    """Before the first step others have ``last_call_s`` to come; later a lost one has ``patience_s``."""
    if facts.there >= facts.most:
        return NodesPlan.WAIT
    if facts.there >= facts.least:
        waited_s = facts.missing_s if facts.has_trained else facts.enough_s
        limit_s = patience_s if facts.has_trained else last_call_s
        return NodesPlan.GO_ON if waited_s >= limit_s else NodesPlan.WAIT
    limit_s = join_timeout_s + (patience_s if facts.has_trained else 0.0)
    return NodesPlan.GIVE_UP if facts.missing_s >= limit_s else NodesPlan.WAIT
