"""Keeps one warm process at hand in fault-free times, and takes back what was no use as a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ddp_runner.features.spare.rules import (
    LOST_BUILDING_MAX,
    SPARE,
    builds_ahead,
    must_give_back,
    wants_spare,
)
from ddp_runner.kernel.parent.ports import Observer, Turn
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.helper_process import Helper
from ddp_runner.kernel.processes.keeper import Keeper
from ddp_runner.kernel.rules.lifecycle import RankState
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.fork_specs import SpareKind, SpareSpec
from ddp_runner.kernel.wire.messages import NO_PROCESS, Forked
from ddp_runner.supervisor.around import OfMachine

# For it to be ready, of one that starts CUDA: seconds, and on a machine with many GPUs that nobody has used since its boot more.
CUDA_WARM_TIMEOUT_S = 60.0
BUILD_FACTOR = 20  # how much longer than a rank's own a spare's building may take, beside all ranks


def beside_machine(around: OfMachine) -> SpareKeeper:
    """Return who keeps a spare on this machine of a run."""
    return SpareKeeper(around)


class SpareKeeper(Observer):
    """An observer: ``look`` at each turn, ``ended`` when one was reaped unused."""

    role = SPARE

    def __init__(self, around: OfMachine) -> None:
        plan, node = around.plan, around.node
        self._settings = plan.settings.recovery
        self._is_on_cpu = plan.devices[0].device == "cpu"
        self._facts = around.recorder.facts
        self._shown: dict[str, object] = {}  # what the one that waits holds, for people
        self._node = node
        self._world = around.world
        self._recorder = around.recorder
        self._repair = around.repair
        self._generation = 0
        self._formed_at_step = 0
        self._build_s = 0.0  # the longest that a rank took to build what it trains
        self._keeper = Keeper(SPARE, node, stopped_max_s=plan.settings.recovery.stopped_max_s)
        self._kind = SpareKind.CPU  # of the newest
        # Lost of those that build ahead, since one of them was ready; one that said why counts as many.
        self._lost_building = 0
        self._newest: Helper | None = None  # also once it is gone, until it has begun as a rank
        self._dismissed: Helper | None = None  # ended for what it held: it was no use, and no loss

    def shown(self) -> Mapping[str, Mapping[str, object]]:
        """Return what the one that waits holds."""
        return {"spare": self._shown} if self._shown else {}

    def said(self) -> Mapping[type[object], Callable[..., None]]:
        """Hear when one is ready."""
        return {events.SpareReady: self._is_ready}

    def zygote_ended(self, now_s: float) -> None:
        """Count one that is still owed as lost: perhaps the fork of it was the cause."""
        spare = self._node.helper(SPARE)
        if spare is not None and spare.pid is None:
            self.lost(now_s)

    def look_after_repair(self, turn: Turn) -> None:
        """Fork one ahead where none is; end one that is stopped; replace what never became a rank."""
        now_s, fault_free = turn.now_s, turn.is_fault_free
        self._give_back(now_s)
        self._note_used()
        if self._keeper.process is None:
            self._shown = {}
        if not self._settings.warm_spare:
            return
        if self._facts.generation != self._generation:
            self._generation = self._facts.generation
            self._formed_at_step = self._facts.committed_step
        spare = self._keeper.process
        if spare is not None and not self._may_go_on(spare, fault_free=fault_free):
            self._dismissed = spare
            self._keeper.kill()
        self._keeper.look(now_s)
        stepped = self._facts.committed_step > self._formed_at_step
        if self._keeper.is_due(now_s) and wants_spare(fault_free=fault_free, stepped=stepped):
            self._start(now_s)

    def _start(self, now_s: float) -> None:
        self._kind = self._wanted_kind()
        self._keeper.role = replace(SPARE, ready_s=self._warm_timeout_s(self._kind))
        around = self._node.surroundings(self._node.ranks[0])
        self._newest = self._keeper.start(now_s, SpareSpec(**around, kind=self._kind))

    def _wanted_kind(self) -> SpareKind:
        """Return the wanted kind; on the CPU one that builds ahead, if that is wanted and memory suffices."""
        if not self._is_on_cpu:
            return SpareKind.LIBRARIES
        # Of other machines as well: they build the same.
        took_ns = max(handle.slot.get(Cell.BUILD_NS) for handle in self._world.present)
        self._build_s = max(self._build_s, took_ns / 1e9)
        here = [handle for handle in self._world.present if self._world.is_here(handle)]
        is_built = builds_ahead(
            self._settings.warm_spare,
            build_s=self._build_s,
            rank_bytes=max((self._node.resident_bytes(one.rank) for one in here), default=0),
            free_bytes=self._node.system.free_bytes(),
            lost_in_a_row=self._lost_building,
        )
        return SpareKind.MODEL if is_built else SpareKind.CPU

    def _may_go_on(self, spare: Helper, *, fault_free: bool) -> bool:
        """Return True if it builds for this run's stage, and takes no time from a repair."""
        if self._kind is not SpareKind.MODEL:
            return True
        return self._node.fits(spare) and (spare.is_ready or fault_free)

    def _warm_timeout_s(self, kind: SpareKind) -> float:
        if kind is SpareKind.MODEL:
            return CUDA_WARM_TIMEOUT_S + BUILD_FACTOR * self._build_s
        return SPARE.ready_s if kind is SpareKind.CPU else CUDA_WARM_TIMEOUT_S

    def _give_back(self, now_s: float) -> None:
        """A spare may be stopped, or killed, in the very moment in which it is made a rank."""
        if not self._world.counts.present_in(RankState.STARTING):
            return
        for handle in self._world.present:
            if handle.state is not RankState.STARTING or not handle.was_spare:
                continue
            if must_give_back(
                has_begun=handle.has_begun,
                is_stopped=self._world.is_stopped(handle),
                since_s=now_s - handle.spawned_at_s,
            ):
                self._repair.schedule_respawn(handle)
                self._world.kill_rank(handle, now_s)

    def _note_used(self) -> None:
        """One that has begun as a rank shows that spares are worth having."""
        newest = self._newest
        if newest is None or newest is self._keeper.process:
            return
        for handle in self._world.present:
            is_it = handle.was_spare and handle.pid == newest.pid and self._world.is_here(handle)
            if is_it and handle.has_begun:
                self._newest = None
                self._keeper.tries.was_of_use()

    def _is_ready(self, message: events.SpareReady, now_s: float) -> None:
        """It waits to be made a rank."""
        del now_s
        self._node.helper_is_ready(SPARE, message)
        spare = self._keeper.process
        if spare is None:
            return
        self._shown = {
            "kind": self._kind.value,
            "built_bytes": message.built_bytes,
            "build_s": message.build_s,
        }
        if self._kind is SpareKind.MODEL:
            self._lost_building = 0
        if spare.pid is not None:
            self._report_ready(spare.pid, message)

    def _report_ready(self, pid: int, ready: events.SpareReady) -> None:
        self._recorder.record(replace(ready, pid=pid, kind=self._kind.value))

    def was_forked(self, forked: Forked, now_s: float) -> None:
        """The zygote has answered; it may be held up until the spare is ready, and that is reported now."""
        spare = self._newest
        if forked.pid == NO_PROCESS:
            self.lost(now_s)
        elif spare is not None and isinstance(spare.ready, events.SpareReady):
            self._report_ready(forked.pid, spare.ready)

    def ended(self, ended: Ended, output: str, now_s: float) -> None:
        """It was reaped before it was needed; no fault of the run."""
        self.lost(now_s, ended, output=output)

    def lost(self, now_s: float, ended: Ended | None = None, *, output: str = "") -> None:
        """It ended before it was needed, or (None) was not forked; no fault of the run."""
        if self._newest is None or self._newest is not self._dismissed:
            self._count_lost(self._newest, ended, now_s)
        self._recorder.record(
            events.SpareEnded(
                exit_code=ended.exit_code if ended is not None else None,
                signal=ended.signal_number if ended is not None else None,
                said=output.splitlines()[-1] if output else "",
            )
        )

    def _count_lost(self, newest: Helper | None, ended: Ended | None, now_s: float) -> None:
        was_building = newest is not None and self._kind is SpareKind.MODEL and not newest.is_ready
        if was_building and ended is not None:
            said_why = bool(ended.exit_code)
            self._lost_building += LOST_BUILDING_MAX if said_why else 1
            if said_why:  # the next one builds nothing, and is no worse for it
                return
        self._keeper.ended(now_s)
