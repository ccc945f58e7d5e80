"""Keeps a zygote at hand: replaces one that ended, ends one that is stopped or never gets ready."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ddp_runner.core.lifecycle import RankEvent
from ddp_runner.core.settings import RecoverySettings
from ddp_runner.supervisor.children import Ended
from ddp_runner.supervisor.facts import RunFacts
from ddp_runner.supervisor.records import Records
from ddp_runner.supervisor.repair import Repair
from ddp_runner.supervisor.stopped import StoppedWatch
from ddp_runner.supervisor.world import World

ZYGOTES_MAX = 20
ZYGOTES_AT_START_MAX = 3
STACKS_TIME_S = 0.5  # for a zygote to say where its import hangs, before it is killed
_SENT_BY_OTHERS = (signal.SIGKILL, signal.SIGTERM)  # what ends a process that did nothing wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class NoZygote:
    """There will be none; ``detail`` is what the last one said."""

    reason: str
    detail: str


class ZygoteKeeper:
    """Driven by :class:`Supervisor`: ``look`` at each tick, ``ended`` when one was reaped."""

    def __init__(
        self,
        settings: RecoverySettings,
        facts: RunFacts,
        *,
        world: World,
        records: Records,
        repair: Repair,
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._world = world
        self._records = records
        self._repair = repair
        self._stopped = StoppedWatch()
        self._count = 1
        self._asked_at_s: float | None = None  # where its import hangs

    def look(self, now_s: float) -> None:
        """Kill a zygote that is stopped, or that imports for ever; its end follows."""
        pid = self._world.zygote_pid
        if self._stopped.stopped_s(pid, now_s) > self._settings.hang_min_s:
            self._world.kill_zygote()
        elif self._asked_at_s is not None:
            if now_s > self._asked_at_s + STACKS_TIME_S:
                self._world.kill_zygote()
        elif (
            pid is not None
            and not self._world.can_fork
            and now_s > self._world.zygote_since_s + self._settings.startup_timeout_s
        ):
            self._asked_at_s = now_s
            self._world.ask_zygote_for_stacks()

    def ended(self, ended: Ended, output: str) -> NoZygote | None:
        """Start another one, or say why there will be none."""
        self._records.event("zygote_ended", exit_code=ended.exit_code, signal=ended.signal_number)
        hung, self._asked_at_s = self._asked_at_s is not None, None
        self._count += 1
        if not self._may_start_another(ended, hung=hung):
            limit_s = self._settings.startup_timeout_s
            last = output.splitlines()[-1] if output else "it said nothing"
            reason = f"was not ready within {limit_s:g} s" if hung else f"died: {last}"
            return NoZygote(reason=f"the process that imports torch {reason}", detail=output)
        self._records.say("the zygote died; another one is being started", level="WARNING")
        # Forks that it still owed will never be answered.
        self._world.forget_owed_store()
        for handle in self._world.ranks:
            if handle.is_alive and handle.pid is None:
                handle.machine.advance(RankEvent.EXITED)
                self._world.bury(handle)
                self._repair.owe(handle)
        self._world.start_zygote()
        return None

    def _may_start_another(self, ended: Ended, *, hung: bool) -> bool:
        """An import that fails by itself would fail again; one that was killed deserves another."""
        if self._facts.generation:
            return self._count <= ZYGOTES_MAX
        killed = ended.signal_number in _SENT_BY_OTHERS and not hung
        return self._count <= ZYGOTES_AT_START_MAX and killed
