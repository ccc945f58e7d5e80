"""Runs the supervisor's loop: hands signals, messages and ended processes to an :class:`Agent` until it has an ending."""

from __future__ import annotations

import selectors
import signal
import traceback
from collections.abc import Sequence
from typing import Protocol

from ddp_runner.kernel.parent.ports import RunRecord
from ddp_runner.kernel.parent.run_facts import Ending, RunFacts
from ddp_runner.kernel.parent.signal_box import INSISTENT, SAVE_SIGNAL, STOP_SIGNALS, SignalBox
from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.lifecycle import Machine, RunEvent, RunState
from ddp_runner.kernel.rules.stopping import StopSignal, TimeLimit
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.wire.messages import Metrics
from ddp_runner.kernel.wire.packets import name_of

TICK_S = 0.1
_QUIT = "SIGQUIT"  # shells let background jobs ignore it; a run ends all the same


class Agent(Protocol):
    """Decides in a run. The loop hands it each event, and calls :meth:`advance` at each turn.

    A :class:`Supervisor` repairs a training in place. Features have other agents, for scripts and several machines.
    """

    node: Node
    world: World
    facts: RunFacts
    machine: Machine[RunState, RunEvent]

    @property
    def recorder(self) -> RunRecord:
        """The record of the run, which says lines for people too."""

    @property
    def ending(self) -> Ending | None:
        """How the run has ended; None while it has not. After that only :meth:`closing_words` is called."""

    def on_packet(self, packet: bytes, rank: int | None) -> None:
        """Hear a packet of the process of ``rank``; None for a process that is no rank."""

    def on_ended(self, ended: Ended) -> None:
        """Note that a child process has ended and was reaped."""

    def ask_stop(self, reason: StopReason, *, by: StopSignal = StopSignal.OTHER) -> None:
        """Save and end the run; at once if this is asked again."""

    def ask_save(self) -> None:
        """Save a checkpoint and continue."""

    def advance(self) -> None:
        """Do everything that the facts allow now, without waiting."""

    def end_at_once(self, line: str) -> None:
        """End the run as failed, without a save, unless it has ended."""

    def fail(self, detail: str) -> None:
        """End the run because of a bug in the agent itself, unless it has ended."""

    def closing_words(self) -> str:
        """Return a text for people to follow the line about the ending; it may be empty."""


class Sideshow(Protocol):
    """Works next to a run and needs turns of the loop: the run's screen, and programs such as trackers."""

    def took(self, ended: Ended) -> bool:
        """Return whether a child that was reaped was its own."""

    def look_first(self) -> None:
        """Get a turn before the supervisor has its own."""

    def look(self, now_s: float) -> None:
        """Get a turn after the supervisor has had its own."""


class Traffic(Protocol):
    """Reads sockets that belong to no rank or helper, such as those to other machines.

    Each is registered in the selector with data that begins with ``source``.
    """

    @property
    def source(self) -> object:
        """Return the object by which the loop recognizes its sockets."""

    def hear(self, link: object) -> None:
        """Read from a socket that is ready."""

    def look(self, now_s: float) -> None:
        """Get a turn before the supervisor has its own."""


class Loop:
    """Feeds events to an :class:`Agent` until it has an ending. ``limit``: when it is asked to stop."""

    def __init__(
        self,
        agent: Agent,
        *,
        signals: SignalBox,
        selector: selectors.BaseSelector,
        clock: Clock,
        limit: TimeLimit | None = None,
        sideshows: Sequence[Sideshow] = (),
        traffic: Traffic | None = None,
    ) -> None:
        self._clock = clock
        self._traffic = traffic
        self._began_s = clock.monotonic()
        self._turned_s = self._began_s  # when all last had a turn
        self._agent = agent
        self._node: Node = agent.node
        self._limit = limit
        self._sideshows = tuple(sideshows)
        self._signals = signals
        self._selector = selector
        selector.register(signals, selectors.EVENT_READ, None)

    def run(self) -> Ending:
        """Loop to the ending, and return it. Processes may still be there."""
        if self._node.zygote_pid is None:  # a node that another one has led before has both
            self._node.start_zygote()
        if self._node.guardian.pid is None:
            self._start_guardian()
        while self._agent.ending is None:
            try:
                self._turn()
            except Exception:  # noqa: BLE001, PERF203 - the supervisor's boundary: still ends everything
                self._agent.fail(traceback.format_exc())
        return self._agent.ending

    def _start_guardian(self) -> None:
        """Start it while torch is imported. A run can do without: only a SIGKILL of this process needs one."""
        try:
            self._node.start_guardian()
        except OSError as error:
            reason = error.strerror or str(error)
            self._agent.recorder.say(
                f"no guardian could be started ({reason}): if this process is killed, "
                "processes that the task has started keep running",
                level="WARNING",
            )

    def _turn(self) -> None:
        # Nothing follows from metrics. With short steps, a whole turn for each line of them would be expensive.
        if self._hear() and self._clock.monotonic() < self._turned_s + TICK_S:
            return
        self._turned_s = self._clock.monotonic()
        for ended in self._node.reap():
            if not any(one.took(ended) for one in self._sideshows):
                self._agent.on_ended(ended)
        for one in self._sideshows:
            one.look_first()
        now_s = self._clock.monotonic()
        if self._traffic is not None:
            self._traffic.look(now_s)
        self._look_at_clock(now_s)
        self._agent.advance()
        for one in self._sideshows:
            one.look(self._clock.monotonic())

    def _hear(self) -> bool:
        """Handle all that arrives within a tick; return True if it was metrics of ranks and nothing else."""
        ready, is_metrics = self._selector.select(TICK_S), True
        for key, _ in ready:
            received = None
            if key.data is None:
                self._take_signals()
            elif self._traffic is not None and key.data[0] is self._traffic.source:
                self._traffic.hear(key.data[1])
            elif (received := self._node.receive(*key.data)) is not None:
                self._agent.on_packet(*received)
            is_metrics &= received is not None and name_of(received[0]) == Metrics.__name__
        return bool(ready) and is_metrics

    def _look_at_clock(self, now_s: float) -> None:
        """Ask for the end, once, when the time limit of this launch is over."""
        limit = self._limit
        if limit is None or now_s < self._began_s + limit.seconds:
            return
        self._limit = None
        self._agent.recorder.say(limit.why)
        self._agent.ask_stop(StopReason.PREEMPTED)

    def _take_signals(self) -> None:
        for number in self._signals.take():
            reason = STOP_SIGNALS.get(signal.Signals(number))
            if reason is not None:
                by = INSISTENT.get(signal.Signals(number), StopSignal.OTHER)
                self._agent.ask_stop(reason, by=by)
            elif number == signal.SIGQUIT and self._agent.ending is None:
                self._agent.end_at_once(f"{_QUIT}: ended at once")
            elif number == SAVE_SIGNAL:
                self._agent.ask_save()
