"""Keeps since when each machine of a run is missing, and who is waited for. The rule is ``features/machines/rules/nodes.py``'s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddp_runner.features.machines.rules.node_options import NodeOptions
from ddp_runner.features.machines.rules.nodes import NodesFacts, NodesPlan, what_about_missing
from ddp_runner.features.machines.parent.remote_node import RemoteNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``gives_up``: why the run ends, in words; empty: it does not. ``without``: those it goes on without."""

    gives_up: str = ""
    without: tuple[RemoteNode, ...] = ()


class MissingNodes:
    """Owned by whoever coordinates. ``has_left``: whether a machine has done all that it had to, and may be away."""

    def __init__(
        self,
        others: Sequence[RemoteNode],
        options: NodeOptions,
        *,
        patience_s: float,
        has_left: Callable[[RemoteNode], bool],
        now_s: float,
    ) -> None:
        self._others = tuple(others)
        self._options = options
        self._patience_s = patience_s
        self._has_left = has_left
        self._begun_s = now_s
        self._enough_since_s: float | None = None
        # Node -> its first loss since it last trained: one that is lost while it starts gets no new patience.
        self._lost_since_s: dict[int, float] = {}

    def lost(self, node: RemoteNode, now_s: float) -> None:
        """Note that it is lost."""
        self._lost_since_s.setdefault(node.number, now_s)

    def trains(self, node: RemoteNode) -> None:
        """Note that all its ranks train."""
        self._lost_since_s.pop(node.number, None)

    def look(self, now_s: float, *, has_trained: bool) -> Verdict:
        """Return what is done about those that are missing now."""
        there = 1 + sum(node.is_there or self._has_left(node) for node in self._others)
        if there < self._options.least:
            self._enough_since_s = None
        elif self._enough_since_s is None:
            self._enough_since_s = now_s
        plans = {
            node: self._about(node, there=there, has_trained=has_trained, now_s=now_s)
            for node in self._others
            if not (node.is_there or self._has_left(node))
        }
        least = self._options.least
        if plans and all(plan is NodesPlan.GIVE_UP for plan in plans.values()):
            line = f"{there} of at least {least} nodes are there, and no other has come"
            return Verdict(gives_up=line)
        without = (
            node
            for node, plan in plans.items()
            if plan is NodesPlan.GO_ON
            or ((node.is_leaving or now_s < node.left_out_until_s) and there >= least)
        )
        return Verdict(without=tuple(without))

    def _about(self, node: RemoteNode, *, there: int, has_trained: bool, now_s: float) -> NodesPlan:
        """Return the plan for a missing node."""
        return what_about_missing(
            NodesFacts(
                there=there,
                least=self._options.least,
                most=self._options.most,
                has_trained=has_trained,
                missing_s=now_s - self._lost_since_s.get(node.number, self._begun_s),
                enough_s=0.0 if self._enough_since_s is None else now_s - self._enough_since_s,
            ),
            patience_s=self._patience_s,
            last_call_s=self._options.last_call_s,
            join_timeout_s=self._options.join_timeout_s,
        )
