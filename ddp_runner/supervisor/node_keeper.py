"""Looks after the processes of this machine that are no ranks: zygote, store, spare, saver, drill."""

from __future__ import annotations

import signal

from ddp_runner.core import events
from ddp_runner.core.faults import Fault
from ddp_runner.core.launch_plan import LaunchPlan
from ddp_runner.core.messages import (
    NO_PROCESS,
    CopyWritten,
    Drilled,
    Forked,
    Message,
    SaverReady,
    SpareReady,
    StoreReady,
    ZygoteReady,
)
from ddp_runner.supervisor.processes.children import Ended
from ddp_runner.supervisor.processes.departures import (
    DrillEnded,
    HelperDeparture,
    SaverEnded,
    SpareEnded,
    StandbyEnded,
    StoreEnded,
    ZygoteEnded,
)
from ddp_runner.supervisor.processes.endings import store_died
from ddp_runner.supervisor.processes.node import Node
from ddp_runner.supervisor.rank_host import Notes, Respawns, SeesImport
from ddp_runner.supervisor.recovery.drills import DrillKeeper
from ddp_runner.supervisor.recovery.saver_keeper import SaverKeeper
from ddp_runner.supervisor.recovery.spare_keeper import SpareKeeper
from ddp_runner.supervisor.recovery.zygote_keeper import NoZygote, ZygoteKeeper
from ddp_runner.supervisor.reporting.run_facts import RunFacts
from ddp_runner.supervisor.world import World
from ddp_runner.system.clock import Clock


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
        self._facts = facts
        self._node = node
        self._world = world
        self._recorder = recorder
        self._start = start
        self._clock = clock
        self.zygotes = ZygoteKeeper(
            plan.settings.recovery, facts, node=node, world=world, recorder=recorder, repair=repair
        )
        self.spares = SpareKeeper(
            plan, facts, node=node, world=world, recorder=recorder, repair=repair
        )
        self.drills = DrillKeeper(plan, node=node, recorder=recorder)
        self.savers = SaverKeeper(plan, node=node, recorder=recorder)

    def look_beside(self, now_s: float, *, may_drill: bool, at_end: bool) -> None:
        """At each turn of the run, also while it ends: those that work for it, and are no part of a repair."""
        self.drills.look(now_s, fault_free=may_drill, at_end=at_end)
        self.savers.look(now_s)

    def on_message(self, message: Message) -> Ended | None:
        """One of them has something to say. Returns the end of a fork that was reaped before it had a name."""
        match message:
            case ZygoteReady():
                self._node.zygote_is_ready()
                self._start.imported(message.import_s)
                self._recorder.record(
                    events.ZygoteReady(
                        torch=message.torch_version,
                        import_s=message.import_s,
                        warning=message.warning,
                    )
                )
            case Forked():
                return self._on_forked(message)
            case StoreReady():
                self._node.store_is_ready()
            case SpareReady():
                self.spares.is_ready(message)
            case SaverReady():
                self._node.saver_is_ready()
            case CopyWritten():
                self.savers.written(message, self._clock.monotonic())
            case Drilled():
                self.drills.drilled(message, self._clock.monotonic())
            case _:
                raise TypeError(f"unexpected {type(message).__name__}")
        return None

    def _on_forked(self, forked: Forked) -> Ended | None:
        is_standby = self.zygotes.is_standby(forked)
        is_drill = self._node.drill is not None and self._node.drill.token == forked.token
        is_saver = self.savers.is_saver(forked)
        rank, ended = self._node.claim(forked)
        if rank is not None:
            self._world.ranks[rank].pid = forked.pid
        if forked.pid == NO_PROCESS and is_standby:
            self.zygotes.standby_refused(self._clock.monotonic())
        elif forked.pid == NO_PROCESS and not (is_drill or is_saver):
            self.spares.lost(self._clock.monotonic())
        if is_saver:
            self.savers.was_forked(forked, self._clock.monotonic())
        self.spares.was_forked(forked)
        return ended

    def ended(self, departure: HelperDeparture) -> NoZygote | Fault | None:
        """One of them was reaped. Returns what the run is to end of, or to be repaired."""
        ended, output = departure.ended, departure.output
        match departure:
            case ZygoteEnded():
                if self._node.spare is not None and self._node.spare.pid is None:
                    # Perhaps the fork of it was the cause.
                    self.spares.lost(self._clock.monotonic())
                return self.zygotes.ended(ended, output)
            case SpareEnded():
                self._claim_kernel_kill(ended)
                self.spares.lost(self._clock.monotonic(), ended, output=output)
            case DrillEnded():
                self._claim_kernel_kill(ended)
                self.drills.ended(ended, output)
            case SaverEnded():
                self._claim_kernel_kill(ended)
                self.savers.ended(ended, output, self._clock.monotonic())
            case StandbyEnded():
                self.zygotes.standby_ended(ended)
            case StoreEnded():
                return store_died(ended, output=output, step=self._facts.committed_step)
        return None

    def _claim_kernel_kill(self, ended: Ended) -> None:
        """If the kernel has killed it for memory, no rank is taken for the one that it killed."""
        if ended.signal_number == signal.SIGKILL:
            self._node.kernel_kills.claim(self._clock.monotonic())
