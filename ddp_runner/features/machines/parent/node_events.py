"""What whoever coordinates hears of other machines, of a training as of a program of the user's: news, and who is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ddp_runner.core.launch_plan import NodeOptions
from ddp_runner.features.machines.parent.other_nodes import (
    NodeEvent,
    NodeGone,
    NodeJoined,
    NodeNews,
    NodeRefused,
    NodeSaid,
    RankSaid,
)
from ddp_runner.features.machines.parent.remote_node import SPARE, RemoteNode
from ddp_runner.features.machines.rules.node_messages import (
    EndWanted,
    Folders,
    RankGone,
    RankStarted,
    Said,
    SaveWanted,
    StopWanted,
)
from ddp_runner.features.machines.rules.nodes import NodesFacts, NodesPlan, what_about_missing
from ddp_runner.kernel.parent.ports import RunRecord
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.parent.run_facts import Ending
from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.rank_process import WhatItWrote
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.stopping import StopSignal
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.wire.messages import Message


class TakesNodes(Protocol):
    """Who coordinates a run on several machines, and hears by :class:`NodeEvents` what becomes of the others."""

    world: World

    @property
    def recorder(self) -> RunRecord:
        """The record of the run."""

    @property
    def ending(self) -> Ending | None:
        """How the run has ended; None while it has not."""

    def on_message(self, message: Message, rank: int | None) -> None:
        """Hear a message of a rank."""

    def ask_save(self) -> None:
        """Have a checkpoint made, and go on."""

    def ask_stop(self, reason: StopReason, *, by: StopSignal = StopSignal.OTHER) -> None:
        """Have the run end in order."""

    def end_at_once(self, line: str) -> None:
        """End the run as it is, as a failed one."""

    def node_joined(self, joined: NodeJoined) -> None:
        """Take a machine in; before it is said that it is there."""

    def node_lost(self, node: RemoteNode, why: str) -> None:
        """Take note that all ranks of a machine are gone with it."""

    def let_go(self, node: RemoteNode) -> bool:
        """Let a machine leave that was asked to, as others are enough. False: the run is to end instead."""

    def rank_ended(self, handle: RankHandle, ended: Ended, wrote: WhatItWrote) -> None:
        """Take note of how a rank there has ended."""

    def rank_not_started(self, handle: RankHandle) -> None:
        """Take note that no process comes of what was asked for."""


class NodeEvents:
    """Owned by who coordinates. ``keeps_checkpoints``: the run has a folder of them, which machines may share."""

    def __init__(
        self,
        agent: TakesNodes,
        others: Sequence[RemoteNode],
        *,
        least: int,
        clock: Clock,
        keeps_checkpoints: bool = True,
    ) -> None:
        self._agent = agent
        self._others = tuple(others)
        self._least = least
        self._clock = clock
        self._keeps_checkpoints = keeps_checkpoints
        self._spares = 0  # machines that wait for a place

    def on_event(self, event: NodeEvent) -> None:
        """Something has come from another node, or of it."""
        agent = self._agent
        if agent.ending is not None:
            return
        match event:
            case RankSaid(message=message, rank=rank):
                agent.on_message(message, rank)
            case NodeJoined(node=node, waits_for=waits_for) if node.number == SPARE:
                self._spares += 1
                agent.recorder.say(f"{node.name} is there, and waits: {waits_for}")
            case NodeGone(node=node, why=why) if node.number == SPARE:
                self._spares -= 1
                agent.recorder.say(f"{node.name} is lost: {why}")
            case NodeJoined(node=node, keeps_parked=keeps_parked, was_spare=was_spare) as joined:
                self._spares -= was_spare
                agent.node_joined(joined)
                there = sum(one.is_there for one in self._others) + 1
                kept = "; its ranks have kept their memory" if keeps_parked else ""
                agent.recorder.say(
                    f"{node.name} is there: {there} of {len(self._others) + 1}{kept}"
                )
            case NodeGone(node=node, why=why):
                agent.recorder.say(f"{node.name} is lost: {why}", level="WARNING")
                agent.node_lost(node, why)
            case NodeRefused(host=host, why=why):
                agent.recorder.say(f"a machine was refused ({host}): {why}", level="WARNING")
            case NodeSaid(node=node, message=message) if node.ranks:
                self._on_node_message(node, message)

    def _on_node_message(self, node: RemoteNode, message: NodeNews) -> None:
        agent = self._agent
        match message:
            case Folders():
                self._note_folders(node, message)
            case SaveWanted():
                agent.ask_save()
            case EndWanted():
                agent.end_at_once(f"SIGQUIT on {node.name}: ended at once")
            case RankStarted(rank=rank, pid=pid, was_spare=was_spare):
                agent.world.ranks[rank].pid = pid
                agent.world.ranks[rank].was_spare = was_spare
            case RankGone():
                self._rank_gone(node, message)
            case Said(text=text, level=level):
                agent.recorder.say(f"node {node.number}: {text}", level=level)
            case StopWanted(reason=reason, is_leaving=is_leaving):
                agent.recorder.say(f"{node.name} was asked to stop")
                staying = [
                    one
                    for one in self._others
                    if one.is_there and one is not node and not one.is_leaving
                ]
                is_enough = 1 + len(staying) + self._spares >= self._least
                if not (is_leaving and is_enough and agent.let_go(node)):
                    agent.ask_stop(StopReason(reason))

    def _note_folders(self, node: RemoteNode, folders: Folders) -> None:
        node.shares_logs = folders.shares_logs
        node.shares_checkpoints |= folders.shares_checkpoints
        own = [
            name
            for name, is_shared in (
                ("checkpoints", folders.shares_checkpoints or not self._keeps_checkpoints),
                ("logs", folders.shares_logs),
            )
            if not is_shared
        ]
        if own:
            self._agent.recorder.say(f"{node.name} has {' and '.join(own)} of its own")

    def _rank_gone(self, node: RemoteNode, gone: RankGone) -> None:
        handle = self._agent.world.ranks[gone.rank]
        if not handle.is_alive:
            return
        if gone.exit_code is None and gone.signal_number is None:
            node.cannot_start()
            self._agent.world.forget_start(handle)
            self._agent.rank_not_started(handle)
            return
        ended = Ended(
            pid=handle.pid or 0,
            exit_code=gone.exit_code,
            signal_number=gone.signal_number,
            at_ns=self._clock.monotonic_ns() - int(gone.age_s * 1e9),
        )
        wrote = WhatItWrote(last=gone.last, when_asked=gone.when_asked, before_log=gone.before_log)
        self._agent.rank_ended(handle, ended, wrote)


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
