"""A run of a script whose processes and clock are simulated; the agent that starts it again is the real one.

Its ranks follow ``rank/script.py``: each counts its own steps, ends by itself, and hears SIGTERM.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from ddp_runner.core.board import Cell
from ddp_runner.core.events import RankFormed
from ddp_runner.core.fork_specs import ForkKind, ProgramSpec
from ddp_runner.core.launch_plan import OpaqueProgram
from ddp_runner.core.messages import Form, Leaving
from ddp_runner.core.phases import Phase
from ddp_runner.core.script import RANK, ScriptPlan
from ddp_runner.supervisor.loop import Loop
from ddp_runner.supervisor.processes.node import Node
from ddp_runner.supervisor.script.agent import ScriptAgent
from tests.supervisor.simulated import (
    FORM_S,
    STARTUP_S,
    STEP_S,
    Directory,
    Silence,
    Simulation,
    System,
    _Unclaimed,
)


class ScriptSimulation(Simulation):
    """One run of a script, which resumes where its newest step was; driven as :class:`Simulation` is."""

    def __init__(self, folder, *, steps=40, is_deaf=False, script=None, **named):
        self.started = []  # attempt and rank of each process that was asked for
        self.stores = 0
        self.is_deaf = is_deaf  # to SIGTERM
        self.script = ScriptPlan(
            path="/train.py", module="", arguments=(), restarts=True, **(script or {})
        )
        super().__init__(steps=steps, run_options={"log_dir": str(folder)}, **named)

    def _set_up(self, plan, selector):
        plan = replace(plan, opaque=OpaqueProgram(name=self.script.name, module=RANK))
        self.node = Node(plan, selector, system=System(self, self.home), clock=self.clock)
        self.supervisor = ScriptAgent(
            plan,
            self.node,
            script=self.script,
            outputs=self.outputs,
            directories=_Unclaimed(),
            published=Directory(self),
            clock=self.clock,
        )
        self.loop = Loop(self.supervisor, signals=Silence(), selector=selector, clock=self.clock)

    def fork(self, machine, request, descriptors):
        self.stores += request.kind is ForkKind.STORE
        super().fork(machine, request, descriptors)

    def _start(self, process, request):
        assert isinstance(request.spec, ProgramSpec)
        self.started.append((request.spec.call["attempt"], request.rank))
        self.slot(process).clear()
        self.stamp(process, Phase.STARTUP)
        takes_s = STARTUP_S * self.random.uniform(1, 3)
        process.committed = 0
        self.later(takes_s, lambda: self.send(process, self._ready(process)))

    def _listen(self, process):
        while not process.dead and not process.stopped:
            try:
                message, _ = process.channel.receive()
            except BlockingIOError:
                return
            if isinstance(message, Form):
                self._join(process, message)

    def _join(self, process, form):
        process.seen.append(form.generation)
        self.secrets.setdefault(form.generation, set()).add(form.secret)
        formed = RankFormed(
            rank=process.rank,
            generation=form.generation,
            committed_step=0,
            source=process.rank,
            group_s=0.0,
            transfer_s=0.0,
            rebuild_s=0.0,
        )
        process.trains = True
        self.later(FORM_S, lambda: self.send(process, formed))
        self.later(FORM_S + STEP_S, lambda: self._step(process))

    def _step(self, process):
        if process.dead:
            return
        if process.stopped:
            self.later(STEP_S, lambda: self._step(process))
            return
        self._commit(process)
        self.slot(process).set(Cell.SCRIPT_LOADS, 1)
        if process.committed < self.steps:
            self.later(STEP_S, lambda: self._step(process))
            return
        at_ns = self.clock.monotonic_ns()
        self.send(process, Leaving(rank=process.rank, exit_code=0, at_ns=at_ns))
        self.later(0.01, lambda: self._end(process, exit_code=0))

    def _break(self, generation):
        """Nobody here notices that a peer is lost; they wait, and are ended."""

    def signal(self, pid, number=signal.SIGKILL):
        process = self.processes.get(pid)
        is_asked = number == signal.SIGTERM and process is not None and not process.stopped
        if is_asked and not self.is_deaf:
            self._end(process, signal_number=int(number))
        else:
            super().signal(pid, number)

    @property
    def attempts(self):
        """What summary.json would say of each."""
        return self.supervisor.summary(self.ending).attempts
