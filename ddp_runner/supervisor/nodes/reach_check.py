"""Asks all nodes whom they reach, where ranks could not form a world: all reach the coordinator as it is."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_runner.core.node_messages import TryNodes
from ddp_runner.core.nodes import who_is_out_of_reach
from ddp_runner.supervisor.nodes.remote_node import RemoteNode
from ddp_runner.system.clock import Clock
from ddp_runner.system.reach import Bell, Trial

CHECK_EVERY_S = 20.0
CHECK_TIME_S = 10.0  # for all answers; who gives none is found by its silence


class ReachCheck:
    """Owned by the coordinator, which is node ``home``. One check at a time."""

    def __init__(self, home: int, bell: Bell, nodes: Sequence[RemoteNode], *, clock: Clock) -> None:
        self._home = home
        self._bell = bell
        self._nodes = tuple(nodes)
        self._clock = clock
        self._began_s: float | None = None
        self._trial: Trial | None = None
        self._reached: dict[int, frozenset[int]] = {}

    def begin(self) -> None:
        """Have each node try all others, unless that was just done."""
        now_s = self._clock.monotonic()
        if self._began_s is not None and now_s < self._began_s + CHECK_EVERY_S:
            return
        self._began_s = now_s
        self._bell.forget()
        where = {
            node.number: (str(node.hello.bell[0]), int(node.hello.bell[1]))
            for node in self._nodes
            if node.is_there and node.hello is not None and node.hello.bell is not None
        }
        there = [node for node in self._nodes if node.number in where]
        where[self._home] = self._bell.address, self._bell.port
        for node in there:
            others = {str(n): [*place] for n, place in where.items() if n != node.number}
            node.order(TryNodes(where=others))
        mine = {number: place for number, place in where.items() if number != self._home}
        self._reached, self._trial = {}, Trial(mine)

    def heard(self, node: RemoteNode, reached: Sequence[int]) -> None:
        """The answer of one node."""
        self._reached[node.number] = frozenset(reached)

    def found(self) -> tuple[RemoteNode, str] | None:
        """The node that the others are to do without, and why, once all have answered."""
        if self._trial is None or self._began_s is None:
            return None
        mine = self._trial.reached
        if mine is None:
            return None
        there = [node for node in self._nodes if node.is_there]
        missing = [node for node in there if node.number not in self._reached]
        if missing:
            if self._clock.monotonic() > self._began_s + CHECK_TIME_S:
                self._trial = None
            return None
        asked = {self._home, *(node.number for node in there)}
        reached = {number: self._reached.get(number, mine) for number in asked}
        self._trial = None
        number = who_is_out_of_reach(reached, home=self._home)
        if number is None:
            return None
        node = next(node for node in there if node.number == number)
        others = [
            other
            for other in sorted(asked - {number})
            if other not in reached[number] or number not in reached[other]
        ]
        named = ", ".join(map(str, others))
        return node, f"it and node {named} cannot reach each other: let TCP through between them"
