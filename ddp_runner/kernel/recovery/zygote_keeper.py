"""Keeps a zygote at hand: ends one that is stopped or never does its work, starts another.

Once a zygote was lost, the next one is kept ready: a fork of it, which need not import anything. While
there is no zygote nobody who dies is replaced, and whoever kills one may kill others.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ddp_runner.kernel.parent.ports import EventRecorder, RespawnScheduler
from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.keeper import Awake, Keeper
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.rules.classify import is_sent_by_others, signal_name
from ddp_runner.kernel.rules.helper_roles import STANDBY
from ddp_runner.kernel.rules.limits import RecoveryLimits
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.fork_specs import NothingMore
from ddp_runner.kernel.wire.messages import NO_PROCESS, Forked

ZYGOTES_LOST_MAX = 20  # within the restart window, or as many as ranks may be replaced in it
ZYGOTES_AT_START_MAX = 3
STACKS_TIME_S = 0.5  # for a zygote to say where its import hangs, before it is killed
FORK_TIMEOUT_S = 20.0  # for the zygote to answer; it takes milliseconds
_INTERRUPTED = 128 + signal.SIGINT  # the exit code of a zygote that gets SIGINT while it imports


@dataclass(frozen=True, slots=True, kw_only=True)
class NoZygote:
    """There will be none; ``detail`` is what the last one said."""

    reason: str
    detail: str


class ZygoteKeeper:
    """Driven by :class:`Supervisor`: ``look`` at each tick, ``replace_zygote`` when one was reaped, ``ended`` for who stood by."""

    role = STANDBY

    def __init__(
        self,
        settings: RecoveryLimits,
        *,
        node: Node,
        world: World,
        recorder: EventRecorder,
        repair: RespawnScheduler,
    ) -> None:
        self._settings = settings
        self._stopped_max_s = settings.stopped_max_s
        self._facts = recorder.facts
        self._node = node
        self._world = world
        self._recorder = recorder
        self._repair = repair
        self._lost = 0
        self._lost_at_s: list[float] = []  # within the restart window
        self._asked_at_s: float | None = None  # where it hangs
        self._hangs = ""  # in what, in words
        self._awake = Awake()
        self._standby = Keeper(STANDBY, node, stopped_max_s=self._stopped_max_s)
        self._was_ready = False  # one has imported everything
        self._has_formed = False  # ranks that came of one have been asked to form

    def look(self, now_s: float) -> None:
        """Kill a zygote that is stopped, or does not do its work; its end follows. Have the next one stand by."""
        self._awake.look(now_s)
        self._was_ready |= self._node.can_fork
        self._has_formed |= self._facts.generation > 0
        self._look_at_zygote(now_s)
        self._standby.look(now_s)
        is_wanted = self._lost and self._settings.warm_spare
        if is_wanted and self._node.fork_owed_since_s is None and self._standby.is_due(now_s):
            self._standby.start(now_s, NothingMore())

    def said(self) -> Mapping[type[object], Callable[..., None]]:
        """It says nothing until it forks for others."""
        return {}

    def was_forked(self, forked: Forked, now_s: float) -> None:
        """Take the zygote's answer for who is to stand by; the run can do without."""
        if forked.pid == NO_PROCESS:
            self._standby.refused(now_s)

    def ended(self, ended: Ended, output: str, now_s: float) -> None:
        """Note the end of the process that stood by: another one follows."""
        del output
        self._recorder.record(
            events.StandbyEnded(exit_code=ended.exit_code, signal=ended.signal_number)
        )
        self._standby.ended(now_s)

    def zygote_ended(self, now_s: float) -> None:
        """Nothing follows here: a fork that was owed is forgotten, and the next one is due in its turn."""

    def _look_at_zygote(self, now_s: float) -> None:
        if self._node.zygote_stopped_s(now_s) > self._stopped_max_s:
            self._node.kill_zygote()
        elif self._asked_at_s is not None:
            if now_s > self._asked_at_s + STACKS_TIME_S:
                self._node.kill_zygote()
        elif (
            self._node.zygote_pid is not None
            and not self._node.can_fork
            and now_s > self._node.zygote_since_s + self._settings.startup_timeout_s
        ):
            limit_s = self._settings.startup_timeout_s
            self._ask_where_it_hangs(now_s, f"was not ready within {limit_s:g} s")
        elif self._is_fork_overdue(now_s):
            self._ask_where_it_hangs(now_s, f"did not fork within {FORK_TIMEOUT_S:g} s")

    def _is_fork_overdue(self, now_s: float) -> bool:
        since_s = self._node.fork_owed_since_s
        return since_s is not None and self._awake.has_passed(FORK_TIMEOUT_S, since_s, now_s)

    def _ask_where_it_hangs(self, now_s: float, hangs: str) -> None:
        self._asked_at_s, self._hangs = now_s, hangs
        self._node.ask_zygote_for_stacks()

    def replace_zygote(self, ended: Ended, output: str) -> NoZygote | None:
        """Start another one, or say why there will be none."""
        self._recorder.record(
            events.ZygoteEnded(exit_code=ended.exit_code, signal=ended.signal_number)
        )
        hung, self._asked_at_s, self._hangs = self._hangs, None, ""
        self._lost += 1
        died = f"ended with exit code {ended.exit_code}"
        if ended.signal_number is not None:
            died = f"died of {signal_name(ended.signal_number)}"
        # Forks that it still owed will never be answered.
        self._node.forget_owed()
        for rank in self._node.processes:
            handle = self._world.ranks[rank]
            if handle.is_alive and handle.pid is None:
                self._world.forget_start(handle)
                self._repair.schedule_respawn(handle)
        if not self._may_start_another(ended, hung=bool(hung)):
            last = (
                output.splitlines()[-1]
                if output
                else "it wrote nothing; look at what your code does when it is imported"
            )
            reason = hung or f"{died}: {last}"
            return NoZygote(reason=f"the process that imports torch {reason}", detail=output)
        if self._node.promote_standby():
            self._recorder.record(events.ZygoteReplaced(pid=self._node.zygote_pid))
        else:
            self._recorder.say(f"the zygote {died}; starting another one", level="WARNING")
            self._node.start_zygote()
        return None

    def _may_start_another(self, ended: Ended, *, hung: bool) -> bool:
        """An import that fails by itself would fail again; one that was killed deserves another."""
        now_s, window_s = ended.at_ns / 1e9, self._settings.restart_window_s
        self._lost_at_s = [at_s for at_s in self._lost_at_s if at_s >= now_s - window_s] + [now_s]
        if self._has_formed or self._facts.generation:  # whoever kills it may be done at last
            return len(self._lost_at_s) <= max(ZYGOTES_LOST_MAX, self._settings.max_restarts)
        number = signal.SIGINT if ended.exit_code == _INTERRUPTED else ended.signal_number
        killed = number is not None and (self._was_ready or is_sent_by_others(number))
        return self._lost < ZYGOTES_AT_START_MAX and killed and not hung
