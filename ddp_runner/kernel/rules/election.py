"""Elects the rank that sends its state to the others when a generation forms: the newest clean replica wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EMPTY_STEP = -1  # a fresh process that has loaded nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaProgress:
    """The state that one rank could offer: its last committed step, or :data:`EMPTY_STEP`."""

    rank: int
    committed_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Election:
    """``source`` sends its state to each of ``receivers``; everybody else keeps its own."""

    source: int
    committed_step: int
    receivers: tuple[int, ...]


def elect_source(replicas: Sequence[ReplicaProgress]) -> Election:
    """The newest replica is the source; ties go to the lowest rank. Raises ValueError if all are empty.

    A rank that failed inside its optimizer takes no part: an empty one replaces it, because half-updated
    weights must not spread.
    """
    filled = [replica for replica in replicas if replica.committed_step > EMPTY_STEP]
    if not filled:
        raise ValueError("no rank has a state to start from")
    newest = max(replica.committed_step for replica in filled)
    source = min(replica.rank for replica in filled if replica.committed_step == newest)
    behind = (replica.rank for replica in replicas if replica.committed_step < newest)
    return Election(source=source, committed_step=newest, receivers=tuple(sorted(behind)))
