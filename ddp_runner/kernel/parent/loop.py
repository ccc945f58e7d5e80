"""The supervisor's loop: signals, sockets and ticks in, one :class:`Agent` at work, an ending out."""

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
_QUIT = "SIGQUIT"  # a shell has its background jobs ignore it; a run ends of it all the same


class Agent(Protocol):
    """What decides in a run. The loop hands it each event, and asks it at each turn to do what is due.

    A :class:`Supervisor` repairs a training in place; of an opaque program, an agent of a feature's does what can be done.
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
        """How the run has ended; None while it has not. Nothing else is asked of it then but what to say."""

    def on_packet(self, packet: bytes, rank: int | None) -> None:
        """A packet came in; ``rank`` is that of the process that sent it, None for one that is no rank."""

    def on_ended(self, ended: Ended) -> None:
        """A child process was reaped."""

    def ask_stop(self, reason: StopReason, *, by: StopSignal = StopSignal.OTHER) -> None:
        """Have the run end in order, or at once if the same is asked again."""

    def ask_save(self) -> None:
        """Have a checkpoint made, and go on."""

    def advance(self) -> None:
        """Do whatever the facts allow now; it waits for nothing."""

    def end_at_once(self, line: str) -> None:
        """End a run that has no ending as it is, as a failed one."""

    def fail(self, detail: str) -> None:
        """End the run because the agent is at fault itself; one that has ended stays so."""

    def closing_words(self) -> str:
        """Return what there is to say after how the run has ended; empty where that is all."""


class Sideshow(Protocol):
    """Something that has processes next to a run: programs, or what is shown of it."""

    def took(self, ended: Ended) -> bool:
        """Return whether a child that was reaped was its own."""

    def look_first(self) -> None:
        """Get a turn before the supervisor has its own."""

    def look(self, now_s: float) -> None:
        """Get a turn after the supervisor has had its own."""


class Traffic(Protocol):
    """Sockets that are neither a rank's nor a helper's; they are registered with ``source`` as the first of their data."""

    @property
    def source(self) -> object:
        """By what its sockets are recognized."""

    def hear(self, link: object) -> None:
        """Read from a socket that is ready."""

    def look(self, now_s: float) -> None:
        """Get a turn before the supervisor has its own."""


class Loop:
    """Feeds events to an :class:`Agent` until it has an ending. ``limit``: when it is asked to stop."""

    def __init__(
        self,
        supervisor: Agent,
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
        self._began_s = self._turned_s = clock.monotonic()  # the latter: the newest turn for all
        self._supervisor = supervisor
        self._node: Node = supervisor.node
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
        while self._supervisor.ending is None:
            try:
                self._turn()
            except Exception:  # noqa: BLE001, PERF203 - the supervisor's boundary: still ends everything
                self._supervisor.fail(traceback.format_exc())
        return self._supervisor.ending

    def _start_guardian(self) -> None:
        """Start it while torch is imported. A run can do without: only a SIGKILL of this process needs one."""
        try:
            self._node.start_guardian()
        except OSError as error:
            reason = error.strerror or str(error)
            self._supervisor.recorder.say(
                f"no guardian could be started ({reason}): if this process is killed, "
                "processes that the task has started keep running",
                level="WARNING",
            )

    def _turn(self) -> None:
        # Figures are no fact to act on: short steps would have the whole run looked at for each of their lines.
        if self._hear() and self._clock.monotonic() < self._turned_s + TICK_S:
            return
        self._turned_s = self._clock.monotonic()
        for ended in self._node.reap():
            if not any(one.took(ended) for one in self._sideshows):
                self._supervisor.on_ended(ended)
        for one in self._sideshows:
            one.look_first()
        now_s = self._clock.monotonic()
        if self._traffic is not None:
            self._traffic.look(now_s)
        self._look_at_clock(now_s)
        self._supervisor.advance()
        for one in self._sideshows:
            one.look(self._clock.monotonic())

    def _hear(self) -> bool:
        """Take in whatever comes within a tick; return whether that is figures of ranks, and nothing else."""
        ready, are_figures = self._selector.select(TICK_S), True
        for key, _ in ready:
            received = None
            if key.data is None:
                self._take_signals()
            elif self._traffic is not None and key.data[0] is self._traffic.source:
                self._traffic.hear(key.data[1])
            elif (received := self._node.receive(*key.data)) is not None:
                self._supervisor.on_packet(*received)
            are_figures &= received is not None and name_of(received[0]) == Metrics.__name__
        return bool(ready) and are_figures

    def _look_at_clock(self, now_s: float) -> None:
        """Ask for the end once, where the time of this launch is over."""
        limit = self._limit
        if limit is None or now_s < self._began_s + limit.seconds:
            return
        self._limit = None
        self._supervisor.recorder.say(limit.why)
        self._supervisor.ask_stop(StopReason.PREEMPTED)

    def _take_signals(self) -> None:
        for number in self._signals.take():
            reason = STOP_SIGNALS.get(signal.Signals(number))
            if reason is not None:
                by = INSISTENT.get(signal.Signals(number), StopSignal.OTHER)
                self._supervisor.ask_stop(reason, by=by)
            elif number == signal.SIGQUIT and self._supervisor.ending is None:
                self._supervisor.end_at_once(f"{_QUIT}: ended at once")
            elif number == SAVE_SIGNAL:
                self._supervisor.ask_save()
