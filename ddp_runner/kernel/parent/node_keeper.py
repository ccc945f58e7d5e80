"""Looks after the processes of this machine that are no ranks: the zygote, and those of each role that it forks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence

from ddp_runner.kernel.parent.ports import (
    EventRecorder,
    HelperPolicy,
    RespawnScheduler,
    StartProgress,
)
from ddp_runner.kernel.parent.run_facts import RunFacts
from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.helper_process import HelperEnded, ZygoteEnded
from ddp_runner.kernel.processes.keeper import Keeper
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.processes.rank_process import store_died
from ddp_runner.kernel.recovery.zygote_keeper import NoZygote, ZygoteKeeper
from ddp_runner.kernel.rules.faults import Fault
from ddp_runner.kernel.rules.helper_roles import STORE, Role
from ddp_runner.kernel.rules.limits import RecoveryLimits
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.messages import Forked, Message, StoreReady


class StorePolicy:
    """Ranks meet in it: whoever is to form starts one, and a repair follows its end."""

    role = STORE

    def __init__(self, facts: RunFacts, *, node: Node, stopped_max_s: float) -> None:
        self._facts = facts
        self._node = node
        self._keeper = Keeper(STORE, node, stopped_max_s=stopped_max_s)

    def look(self, now_s: float) -> None:
        """End one that is stopped, or never gets ready."""
        self._keeper.look(now_s)

    def said(self) -> Mapping[type[object], Callable[..., None]]:
        """It says once that ranks can meet in it."""
        return {StoreReady: self._is_ready}

    def _is_ready(self, message: StoreReady, now_s: float) -> None:
        del now_s
        self._node.helper_is_ready(STORE, message)

    def was_forked(self, forked: Forked, now_s: float) -> None:
        """It gets ready from here on."""

    def ended(self, ended: Ended, output: str, now_s: float) -> Fault:
        """Return the fault: no rank can form without another one."""
        del now_s
        return store_died(ended, output=output, step=self._facts.committed_step)

    def zygote_ended(self, now_s: float) -> None:
        """Nothing follows here: whoever is to form asks for another one."""


class NodeKeeper:
    """Hears what those processes say and how they end, for a Supervisor or a ScriptAgent.

    ``policies``: of the roles that have processes here besides the store and the next zygote.
    """

    def __init__(
        self,
        settings: RecoveryLimits,
        policies: Sequence[HelperPolicy] = (),
        *,
        node: Node,
        world: World,
        recorder: EventRecorder,
        repair: RespawnScheduler,
        clock: Clock,
    ) -> None:
        self._zygotes = ZygoteKeeper(
            settings, node=node, world=world, recorder=recorder, repair=repair
        )
        max_s = settings.stopped_max_s
        self._stores = StorePolicy(recorder.facts, node=node, stopped_max_s=max_s)
        self._node = node
        self._world = world
        self._recorder = recorder
        self._clock = clock
        everyone: tuple[HelperPolicy, ...] = (self._stores, self._zygotes, *policies)
        self._policies = {one.role.name: one for one in everyone}
        self._said = {
            kind: heard for one in self._policies.values() for kind, heard in one.said().items()
        }

    def look(self, now_s: float) -> None:
        """Look after those without which nobody is repaired, at each turn until the run ends."""
        self._zygotes.look(now_s)
        self._stores.look(now_s)

    def on_message(self, message: Message, start: StartProgress) -> Ended | None:
        """Hear what one of them says. Returns the end of a fork that was reaped before it had a name."""
        if isinstance(message, Forked):
            return self._on_forked(message)
        if isinstance(message, events.ZygoteReady):
            self._node.zygote_is_ready()
            start.imported(self._clock.monotonic())
            self._recorder.record(message)
            return None
        heard = self._said.get(type(message))
        if heard is None:
            raise TypeError(f"unexpected {type(message).__name__}")
        heard(message, self._clock.monotonic())
        return None

    def _on_forked(self, forked: Forked) -> Ended | None:
        helper = self._node.forked_helper(forked)
        rank, ended = self._node.claim(forked)
        if rank is not None:
            self._world.ranks[rank].pid = forked.pid
        if helper is not None:
            self._policy(helper.role).was_forked(forked, self._clock.monotonic())
        return ended

    def _policy(self, role: Role) -> HelperPolicy:
        return self._policies[role.name]

    def ended(self, departure: HelperEnded | ZygoteEnded) -> NoZygote | Fault | None:
        """Take in that one of them was reaped. Returns what the run is to end of, or to be repaired."""
        ended, output, now_s = departure.ended, departure.output, self._clock.monotonic()
        if isinstance(departure, ZygoteEnded):
            for policy in self._policies.values():
                policy.zygote_ended(now_s)
            return self._zygotes.replace_zygote(ended, output)
        if ended.signal_number == signal.SIGKILL:
            # If the kernel has killed it for memory, no rank is taken for the one that it killed.
            self._node.kernel_kills.claim(now_s)
        if departure.was_unwanted:
            return None
        return self._policy(departure.role).ended(ended, output, now_s)
