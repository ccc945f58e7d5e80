"""Decides about a node that wants to join a run: refused for good, given a number, or a spare."""

from __future__ import annotations

import socket
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddp_runner.core.launch_plan import NodeOptions
from ddp_runner.features.machines.parent.remote_node import RemoteNode
from ddp_runner.features.machines.rules.node_messages import Hello, Refused
from ddp_runner.kernel.rules.secrets import HIDDEN
from ddp_runner.observe.format import counted

# A machine that was lost so often within LOSSES_WINDOW_S is left out for LEFT_OUT_S, where the run has enough others.
LOSSES_MAX = 3
LOSSES_WINDOW_S = 300.0
LEFT_OUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The terms on which nodes meet: what a node shares with the coordinator, and what it learns from it."""

    options: NodeOptions
    ranks: int
    meaning: Mapping[str, object]
    versions: Mapping[str, str]
    token: bytes
    silent_s: float
    code: Mapping[str, str] = field(default_factory=dict)  # digests of files by name, and versions
    allows_different_code: bool = False
    shared: Mapping[str, object] = field(
        default_factory=dict
    )  # settings that hold for all machines
    asked: Mapping[str, object] = field(default_factory=dict)  # of those, what was asked for here


def why_not(hello: Hello, mine: Meeting) -> Refused | None:
    """Why this machine can have no part in the run; None where it can."""
    if hello.run_id != mine.options.run_id:
        return Refused(
            name="--rdzv-id",
            value=hello.run_id,
            expected=f"the coordinator's run is {mine.options.run_id}",
        )
    for name in sorted({*mine.versions, *hello.versions}):
        theirs, ours = hello.versions.get(name, "none"), mine.versions.get(name, "none")
        if theirs != ours:
            return Refused(
                name=name,
                value=theirs,
                expected=f"the coordinator has {ours}: install the same",
            )
    if hello.ranks != mine.ranks:
        return Refused(
            name="-n",
            value=str(hello.ranks),
            expected=f"the coordinator has {counted(mine.ranks, 'rank')}: all nodes need the same number",
        )
    theirs_of_all, ours_of_all = {**hello.asked, **hello.meaning}, {**mine.shared, **mine.meaning}
    for key in sorted({*mine.meaning, *theirs_of_all}):
        their_value, our_value = theirs_of_all.get(key), ours_of_all.get(key)
        if their_value != our_value:
            return Refused(
                name=key,
                value=_shown(their_value),
                expected=f"the coordinator has {_shown(our_value, other='another')}: give all nodes "
                "the same settings",
            )
    if not mine.allows_different_code and (line := other_code(hello, mine)):
        name, _, rest = line.partition(": ")
        return Refused(
            name=name,
            value="",
            expected=f"{rest}: run the same code on all, or give the coordinator --allow-different-code",
        )
    return None


def other_code(hello: Hello, mine: Meeting) -> str:
    """Name the first file or package in which a machine's code differs from the coordinator's, with both hosts."""
    different = [
        name
        for name in sorted({*mine.code, *hello.code}, key=lambda name: (_is_own(name), name))
        if hello.code.get(name) != mine.code.get(name)
    ]
    if not different:
        return ""
    name = different[0]
    theirs, ours = (code.get(name, "missing") for code in (hello.code, mine.code))
    more = f", and {len(different) - 1} more differ" if different[1:] else ""
    here = socket.gethostname()
    return f"{name}: is {theirs} on {hello.host}, and {ours} on {here}, the coordinator's{more}"


def _is_own(name: str) -> bool:
    """Return whether a file belongs to this package; the user's own files are named first."""
    return name.startswith("ddp_runner/")


def _shown(value: object, *, other: str = HIDDEN) -> str:
    """``value`` as text, or ``other`` for an HMAC in the place of a secret."""
    text = str(value)
    return other if text.startswith(HIDDEN) else text


def number_is_taken(hello: Hello) -> Refused:
    """It asks for a number that another one has, or that the run does not have."""
    number = str(hello.node_rank)
    return Refused(
        name="--node-rank",
        value=number,
        expected=f"node {number} is there already, or is no number of this run",
    )


def place_for(hello: Hello, nodes: Sequence[RemoteNode]) -> RemoteNode | None:
    """Return the node whose place a machine takes; None if no place is free."""
    free = [node for node in nodes if not node.is_there]
    if hello.node_rank is not None:
        return next((node for node in free if node.number == hello.node_rank), None)
    # One that was there before gets its number again; else the first that nobody ever had.
    same = [node for node in free if node.supervisor == hello.supervisor]
    kept = hello.parked or hello.copied
    was = [node for node in free if kept and node.number == kept.node]
    known = [node for node in free if node.host == hello.host]
    new = [node for node in free if not node.host]
    return next(iter((*same, *was, *known, *new, *free)), None)


class LossCount:
    """Counts the losses of each machine, and leaves a machine out for some time if it is lost too often."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._newest_s: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=LOSSES_MAX)
        )

    def lost(self, machine: str, now_s: float) -> None:
        """It was lost again."""
        self._totals[machine] += 1
        self._newest_s[machine].append(now_s)

    def total(self, machine: str) -> int:
        """Return how often the machine was lost in all."""
        return self._totals[machine]

    def left_out_until_s(self, machine: str) -> float:
        """Return the time until which other machines are preferred; 0 if the machine is as good as another."""
        newest = self._newest_s.get(machine, deque[float]())
        is_often = len(newest) == LOSSES_MAX and newest[-1] - newest[0] < LOSSES_WINDOW_S
        return newest[-1] + LEFT_OUT_S if is_often else 0.0

    def best(self, spares: Sequence[RemoteNode], now_s: float) -> RemoteNode:
        """Return the spare that takes a place: the first to come, of those that are not left out."""
        return min(spares, key=lambda spare: self.left_out_until_s(spare.machine) > now_s)
