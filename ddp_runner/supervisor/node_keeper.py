"""Looks after the processes of this machine that are no ranks: the zygote, and those of each role that it forks."""

from __future__ import annotations

import signal
from typing import Protocol

from ddp_runner.core import events
from ddp_runner.core.faults import Fault
from ddp_runner.core.helper_roles import DRILL, SAVER, SPARE, STANDBY, STORE
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.messages import CopyWritten, Forked, Message, SaverReady, StoreReady
from ddp_runner.supervisor.features.drills import DrillKeeper
from ddp_runner.supervisor.features.saver_keeper import SaverKeeper
from ddp_runner.supervisor.features.spare_keeper import SpareKeeper
from ddp_runner.supervisor.ports import Notes, Respawns, SeesImport
from ddp_runner.supervisor.processes.children import Ended
from ddp_runner.supervisor.processes.endings import store_died
from ddp_runner.supervisor.processes.helper_process import HelperEnded, ZygoteEnded
from ddp_runner.supervisor.processes.keeper import Keeper
from ddp_runner.supervisor.processes.node import Node
from ddp_runner.supervisor.recovery.zygote_keeper import NoZygote, ZygoteKeeper
from ddp_runner.supervisor.run_facts import RunFacts
from ddp_runner.supervisor.world import World
from ddp_runner.system.clock import Clock


class Policy(Protocol):
    """The policy of a role: it starts a process, and handles its end."""

    def was_forked(self, forked: Forked, now_s: float) -> None:
        """The zygote has answered: it is there, or cannot be."""

    def ended(self, ended: Ended, output: str, now_s: float) -> Fault | None:
        """It was reaped, having written that. Returns what is to be repaired, if anything."""


class StorePolicy:
    """Ranks meet in it: whoever is to form starts one, and a repair follows its end."""

    def __init__(self, facts: RunFacts, *, node: Node, stopped_max_s: float) -> None:
        self._facts = facts
        self._keeper = Keeper(STORE, node, stopped_max_s=stopped_max_s)

    def look(self, now_s: float) -> None:
        """End one that is stopped, or never gets ready."""
        self._keeper.look(now_s)

    def was_forked(self, forked: Forked, now_s: float) -> None:
        """It gets ready from here on."""

    def ended(self, ended: Ended, output: str, now_s: float) -> Fault:
        """No rank can form without another one."""
        del now_s
        return store_died(ended, output=output, step=self._facts.committed_step)


class NodeKeeper:
    """Driven by :class:`Supervisor`: what those processes say, and how they end."""

    def __init__(
        self,
        plan: LaunchPlan,
        facts: RunFacts,
        *,
        node: Node,
        world: World,
        recorder: Notes,
        repair: Respawns,
        start: SeesImport,
        clock: Clock,
    ) -> None:
        self._node = node
        self._world = world
        self._recorder = recorder
        self._start = start
        self._clock = clock
        settings = plan.settings.recovery
        self._stores = StorePolicy(facts, node=node, stopped_max_s=settings.stopped_max_s)
        self._zygotes = ZygoteKeeper(
            settings, facts, node=node, world=world, recorder=recorder, repair=repair
        )
        self.spares = SpareKeeper(
            plan, facts, node=node, world=world, recorder=recorder, repair=repair
        )
        self.drills = DrillKeeper(plan, node=node, recorder=recorder)
        self.savers = SaverKeeper(plan, node=node, recorder=recorder)
        self._policies: dict[str, Policy] = {
            STORE.name: self._stores,
            STANDBY.name: self._zygotes,
            SPARE.name: self.spares,
            DRILL.name: self.drills,
            SAVER.name: self.savers,
        }

    def look(self, now_s: float) -> None:
        """Check the processes without which no rank can be repaired, at each turn until the run ends."""
        self._zygotes.look(now_s)
        self._stores.look(now_s)

    def look_beside(self, now_s: float, *, may_drill: bool, at_end: bool) -> None:
        """Check the processes that work for the run and are no part of a repair, at each turn, also while it ends."""
        self.drills.look(now_s, fault_free=may_drill, at_end=at_end)
        self.savers.look(now_s)

    def on_message(self, message: Message) -> Ended | None:
        """One of them has something to say. Returns the end of a fork that was reaped before it had a name."""
        match message:
            case events.ZygoteReady():
                self._node.zygote_is_ready()
                self._start.imported(message.import_s)
                self._recorder.record(message)
            case Forked():
                return self._on_forked(message)
            case StoreReady():
                self._node.helper_is_ready(STORE, message)
            case events.SpareReady():
                self._node.helper_is_ready(SPARE, message)
                self.spares.is_ready(message)
            case SaverReady():
                self._node.helper_is_ready(SAVER, message)
            case CopyWritten():
                self.savers.written(message, self._clock.monotonic())
            case events.Drill() | events.DrillSkipped():
                self.drills.drilled(message, self._clock.monotonic())
            case _:
                raise TypeError(f"unexpected {type(message).__name__}")
        return None

    def _on_forked(self, forked: Forked) -> Ended | None:
        helper = self._node.forked_helper(forked)
        rank, ended = self._node.claim(forked)
        if rank is not None:
            self._world.ranks[rank].pid = forked.pid
        if helper is not None:
            self._policies[helper.role.name].was_forked(forked, self._clock.monotonic())
        return ended

    def ended(self, departure: HelperEnded | ZygoteEnded) -> NoZygote | Fault | None:
        """One of them was reaped. Returns what the run is to end of, or to be repaired."""
        ended, output, now_s = departure.ended, departure.output, self._clock.monotonic()
        if isinstance(departure, ZygoteEnded):
            spare = self._node.helper(SPARE)
            if spare is not None and spare.pid is None:
                self.spares.lost(now_s)  # perhaps the fork of it was the cause
            return self._zygotes.zygote_ended(ended, output)
        if ended.signal_number == signal.SIGKILL:
            # If the kernel has killed it for memory, no rank is taken for the one that it killed.
            self._node.kernel_kills.claim(now_s)
        if departure.was_unwanted:
            return None
        return self._policies[departure.role.name].ended(ended, output, now_s)
