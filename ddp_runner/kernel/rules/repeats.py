"""Finds incidents in a row that repeat the same cause without progress between them. Pure; decides nothing else.

A cause from outside (SIGKILL, SIGSTOP) says nothing about the run, however often it comes.
A cause in the run itself (an exception, an exit, a hang) is a failed try each time. A signal that a
process may cause itself or receive from others (SIGSEGV) counts only if it repeats on the same slot,
in the same phase and line of code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_runner.kernel.rules.faults import Fault, FaultKind, Origin

if TYPE_CHECKING:
    from ddp_runner.kernel.rules.recovery import Incident

INJECTED_ERROR = "InjectedError"  # its type's name

_FRAME = re.compile(r'^  File "(.+", line \d+), in ', re.MULTILINE)  # of a traceback


@dataclass(frozen=True, slots=True, kw_only=True)
class Tries:
    """``count`` tries without progress, the newest one included; ``first`` began them.

    ``repeats`` counts how often the newest incident's cause came without progress, also from outside.
    """

    count: int
    repeats: int
    first: Fault


def row_without_progress(incident: Incident, history: Sequence[Incident]) -> list[Incident]:
    """Return the incidents up to and including this one without progress between them, oldest first.

    Progress is a committed step, or work between two steps (:attr:`Incident.done_between`)
    that gets further than ever at that step: repeated work is none. A run that went back to a
    checkpoint is at a lower step than before: that is no lack of progress yet, but dying at the
    same step again is.
    """
    same_step = [incident]
    for earlier in reversed(history):
        if earlier.committed_step != incident.committed_step:
            break
        same_step.append(earlier)
    row: list[Incident] = []
    furthest = -1
    for one in reversed(same_step):
        if one.done_between > furthest:
            furthest = one.done_between
            row = []
        row.append(one)
    return row


def count_tries(row: Sequence[Incident]) -> Tries:
    """Count the tries of the same thing in a row that :func:`row_without_progress` has found."""
    own = [one for one in row if one.culprit.origin is Origin.OWN]
    count, first = _count_own(own), (own or row)[0].culprit
    for causes in _by_sign(row, (Origin.UNCLEAR,)):
        if len(causes) > count:
            count, first = len(causes), causes[0]
    now = {_sign(fault) for fault in row[-1].attribution.causes}
    repeats = max(len(causes) for causes in _by_sign(row, Origin) if _sign(causes[0]) in now)
    return Tries(count=count, repeats=max(count, repeats), first=first)


def same_error(fault: Fault, earlier: Fault) -> bool:
    """Return whether both are the same error at the same step."""
    return (fault.kind, fault.step, _what_was_raised(fault)) == (
        earlier.kind,
        earlier.step,
        _what_was_raised(earlier),
    )


def _count_own(row: Sequence[Incident]) -> int:
    """Different ranks that are lost one after the other in one generation are one try.

    The same rank again is another one: it may never come up.
    """
    generations = {one.generation for one in row if one.generation is not None}
    unknown = sum(one.generation is None for one in row)
    by_rank = Counter(one.culprit.rank for one in row)
    return max(len(generations) + unknown, *by_rank.values(), 0)


def _by_sign(row: Sequence[Incident], origins: Iterable[Origin]) -> list[list[Fault]]:
    """The causes of such origins, those that are alike together, each incident counted once."""
    found: dict[tuple[object, ...], list[Fault]] = {}
    for incident in row:
        causes = {_sign(one): one for one in incident.attribution.causes if one.origin in origins}
        for sign, fault in causes.items():
            found.setdefault(sign, []).append(fault)
    return list(found.values())


def _sign(fault: Fault) -> tuple[object, ...]:
    """Return the key of a cause: the same slot, error and phase make it the same cause again."""
    # How long a rank stood still, which its cause says, differs each time.
    error = () if fault.kind is FaultKind.RANK_HUNG else _what_was_raised(fault)
    return (fault.kind, fault.rank, fault.phase, error)


def _what_was_raised(fault: Fault) -> tuple[str, str]:
    """Type and raising line, where a traceback shows them: a message may hold an address, a pid, a time.

    Injected errors are all raised in one line, and are numbered.
    """
    frames = _FRAME.findall(fault.detail)
    name = fault.cause.partition(":")[0]
    return (name, frames[-1]) if frames and name != INJECTED_ERROR else (fault.cause, "")
