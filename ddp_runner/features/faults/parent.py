"""Keeps the books of ``--inject``: what is still to come, and when a random plan injects its next fault."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

from ddp_runner.core.injection import (
    EVERY_RANK,
    Injection,
    InjectKind,
    RandomInjection,
    RandomPlan,
    draw_injection,
    parse_injection,
)
from ddp_runner.kernel.parent.ports import Observer, Turn
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.rules.lifecycle import RankState, RunState
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.messages import Inject
from ddp_runner.supervisor.around import OfRun

_SIGNALS = {InjectKind.KILL: signal.SIGKILL, InjectKind.STOP: signal.SIGSTOP}
_ENDS_PROCESS = frozenset({InjectKind.KILL, InjectKind.EXIT})


def beside_run(around: OfRun) -> FaultInjector | None:
    """Return who injects the faults that a training was asked for; None without any."""
    return FaultInjector(around) if around.plan.settings.run.inject else None


class FaultInjector(Observer):
    """Owned by the supervisor's loop. Injections at a step happen in the rank; it says so first."""

    def __init__(self, around: OfRun) -> None:
        plan = around.plan
        self._world = around.world
        self._machine = around.machine
        self._recorder = around.recorder
        self._texts = plan.settings.run.inject
        self._specs = specs = [
            parse_injection(text, world_size=plan.world_size) for text in self._texts
        ]
        self._caused: set[int] = set()  # numbers of those that have happened in this launch
        self._left = {
            (number, rank): spec.times
            for number, spec in enumerate(specs)
            if isinstance(spec, Injection)
            for rank in range(plan.world_size)
            if spec.rank in (rank, EVERY_RANK)
        }
        self._random = [spec for spec in specs if isinstance(spec, RandomPlan)]
        self._drawn = [0] * len(self._random)
        self._due_s: list[float | None] = [None] * len(self._random)
        self._ending: tuple[int, int] | None = (
            None  # rank and number of the process that an injection ends
        )

    def injections_left(self, rank: int) -> dict[int, int]:
        """Number -> times, of what is still to happen to ``rank``."""
        return {
            number: times
            for (number, its_rank), times in self._left.items()
            if times and its_rank == rank
        }

    def hears(self) -> Mapping[type[object], Callable[..., None]]:
        """Hear of what happens in a rank."""
        return {events.Injected: self._happened}

    def _happened(self, message: events.Injected, handle: RankHandle) -> None:
        """An injection happens now: it must not happen again to the process that comes after."""
        del handle  # the message says in which rank
        assert message.number is not None
        self._caused.add(message.number)
        place = (message.number, message.rank)
        self._left[place] = max(0, self._left[place] - 1)
        self._recorder.record(message)

    def objections(self, step: int) -> tuple[str, ...]:
        """Return the ``--inject`` specs, as written, that asked for a step or phase that did not come.

        A random plan names none. A bad sample lies in the data: it comes with its step, unannounced.
        """
        missed = [
            text
            for number, (text, spec) in enumerate(zip(self._texts, self._specs, strict=True))
            if isinstance(spec, Injection)
            and number not in self._caused
            and not (spec.kind is InjectKind.BAD_SAMPLE and spec.step < step)
        ]
        return (f"never caused: {'; '.join(missed)}",) if missed else ()

    def look_after_repair(self, turn: Turn) -> None:
        """Let random plans inject what is due while the run trains.

        A process may take a while to die, and what is injected meanwhile would be lost.
        """
        if self._machine.state is not RunState.RUNNING:
            return
        now_s = turn.now_s
        if self._ending is not None:
            rank, process = self._ending
            handle = self._world.ranks[rank]
            if handle.is_alive and handle.processes == process:
                return
            self._ending = None
        for index, plan in enumerate(self._random):
            injection = draw_injection(plan, self._drawn[index], world_size=len(self._world.ranks))
            due_s = self._due_s[index]
            if due_s is None:
                self._due_s[index] = now_s + injection.wait_s
            elif now_s >= due_s and not (plan.times and self._drawn[index] >= plan.times):
                self._drawn[index] += 1
                self._due_s[index] = None
                self._inject(injection, self._drawn[index])

    def _inject(self, injection: RandomInjection, drawn: int) -> None:
        if injection.kind is InjectKind.BAD_SAMPLE:
            return  # in the data from the start: its turn comes at a step, not at a moment
        handle = self._world.ranks[injection.rank]
        if handle.state is not RankState.TRAINING or handle.pid is None:
            return
        reading = handle.slot.read()
        self._recorder.record(
            events.Injected(
                kind=injection.kind.value,
                rank=injection.rank,
                step=reading.step,
                phase=reading.phase.label,
            )
        )
        if injection.kind in _ENDS_PROCESS:
            self._ending = handle.rank, handle.processes
        number = _SIGNALS.get(injection.kind)
        if number is not None:
            self._world.signal_rank(handle, number)
        else:
            self._world.send(handle, Inject(kind=injection.kind.value, number=drawn))
