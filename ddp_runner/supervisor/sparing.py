"""Keeps one warm process at hand in times of peace, and takes back what was no use as a rank."""

from __future__ import annotations

from ddp_runner.core.launch import LaunchPlan
from ddp_runner.core.lifecycle import RankState
from ddp_runner.core.messages import Forked
from ddp_runner.core.spare import SpareFacts, lost_after, must_give_back, wants_spare
from ddp_runner.supervisor import stopped
from ddp_runner.supervisor.children import Ended
from ddp_runner.supervisor.facts import RunFacts
from ddp_runner.supervisor.records import Records
from ddp_runner.supervisor.repair import Repair
from ddp_runner.supervisor.stopped import StoppedWatch
from ddp_runner.supervisor.world import World

WARM_TIMEOUT_S = 20.0  # from the fork of a spare to its being ready; it takes a tenth of a second


class SpareKeeper:
    """Driven by :class:`Supervisor`: ``look`` at each turn, ``lost`` when one has ended unused."""

    def __init__(
        self, plan: LaunchPlan, facts: RunFacts, *, world: World, records: Records, repair: Repair
    ) -> None:
        self._settings = plan.settings.recovery
        # A device is opened by whoever knows which one is its own.
        self._is_kept = self._settings.warm_spare and all(
            device.device == "cpu" for device in plan.devices
        )
        self._facts = facts
        self._world = world
        self._records = records
        self._repair = repair
        self._stopped = StoppedWatch()
        self._generation = 0
        self._formed_at_step = 0
        self._lost_in_a_row = 0
        self._lost_at_s = 0.0
        self._asked_at_s = 0.0

    def look(self, now_s: float, *, in_peace: bool) -> None:
        """Fork one ahead where none is; end one that is stopped; replace what never became a rank."""
        self._give_back(now_s)
        if not self._is_kept:
            return
        if self._facts.generation != self._generation:
            self._generation = self._facts.generation
            self._formed_at_step = self._facts.committed_step
        spare = self._world.spare
        if spare is not None and (
            self._stopped.stopped_s(spare.pid, now_s) > self._settings.hang_min_s
            or (not spare.is_ready and now_s > spare.since_s + WARM_TIMEOUT_S)
        ):
            self._world.kill_spare()
        facts = SpareFacts(
            in_peace=in_peace,
            stepped=self._facts.committed_step > self._formed_at_step,
            exists=spare is not None,
            lost_in_a_row=self._lost_in_a_row,
            since_lost_s=now_s - self._lost_at_s,
        )
        if self._world.can_fork and wants_spare(facts):
            self._asked_at_s = now_s
            self._world.start_spare()

    def _give_back(self, now_s: float) -> None:
        """A spare may be stopped, or killed, in the very moment in which it is made a rank."""
        for handle in self._world.present:
            if handle.state is not RankState.STARTING or not handle.was_spare:
                continue
            if must_give_back(
                has_begun=handle.has_begun,
                is_stopped=stopped.is_stopped(handle.pid),
                since_s=now_s - handle.spawned_at_s,
            ):
                self._repair.owe(handle)
                self._world.kill_rank(handle)

    def is_ready(self) -> None:
        """It waits to be made a rank."""
        spare = self._world.spare
        if spare is not None:
            spare.is_ready = True
            if spare.pid is not None:
                self._records.event("spare_ready", pid=spare.pid)

    def was_forked(self, forked: Forked) -> None:
        """The zygote has answered; it may be held up until the spare is ready, and that is told now."""
        spare = self._world.spare
        if spare is not None and spare.token == forked.token and spare.is_ready:
            self._records.event("spare_ready", pid=spare.pid)

    def lost(self, now_s: float, ended: Ended | None = None, *, output: str = "") -> None:
        """It ended before it was needed, or (None) was not forked; no fault of the run."""
        lived_s = now_s - self._asked_at_s
        self._lost_in_a_row = lost_after(self._lost_in_a_row, lived_s=lived_s)
        self._lost_at_s = now_s
        self._records.event(
            "spare_ended",
            exit_code=ended.exit_code if ended is not None else None,
            signal=ended.signal_number if ended is not None else None,
            said=output.splitlines()[-1] if output else "",
        )
