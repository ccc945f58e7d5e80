"""A run of a script whose processes and clock are simulated; the agent that starts it again is the real one.

Its ranks follow ``features/script/child.py``: each counts its own steps, ends by itself, and hears SIGTERM.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from ddp_runner.core.launch_plan import OpaqueProgram
from ddp_runner.features.machines.parent.remote_node import OtherMachines
from ddp_runner.features.machines.parent.script_coordinator import ScriptCoordinator
from ddp_runner.features.script.parent import ScriptAgent
from ddp_runner.features.script.rules import RANK, ScriptPlan
from ddp_runner.kernel.parent.loop import Loop
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import RankFormed
from ddp_runner.kernel.wire.fork_specs import ForkKind, ProgramSpec
from ddp_runner.kernel.wire.messages import Form, Leaving
from ddp_runner.supervisor.node_plans import node_plan
from tests.features.machines.simulated_nodes import NodesSimulation
from tests.supervisor.simulated import (
    FORM_S,
    STARTUP_S,
    STEP_S,
    Silence,
    Simulation,
    System,
    _Unclaimed,
)


class ScriptRanks:
    """The processes of a simulated run of a script, which resumes where its newest step was."""

    def __init__(self, *, steps=40, is_deaf=False, script=None, **named):
        self.started = []  # attempt and rank of each process that was asked for
        self.forms = {}  # generation -> rank -> its message
        self.stores = 0
        self.is_deaf = is_deaf  # to SIGTERM
        self.is_endless = False
        self.more_steps = {}  # by rank: what its program does beyond those of all
        given = {"path": "/train.py", "module": "", "arguments": (), "restarts": True}
        self.script = ScriptPlan(**{**given, **(script or {})})
        super().__init__(steps=steps, **named)

    def _opaque(self, plan):
        return replace(plan, opaque=OpaqueProgram(name=self.script.name, module=RANK))

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

    def _ready(self, process):
        return replace(super()._ready(process), ends_in_silence=True)

    def _join(self, process, form):
        process.seen.append(form.generation)
        self.forms.setdefault(form.generation, {})[process.rank] = form
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
        Simulation._commit(self, process)  # each its own, whatever others do
        self.slot(process).set(Cell.SCRIPT_LOADS, 1)
        steps = self.steps + self.more_steps.get(process.rank, 0)
        if process.committed < steps or self.is_endless:
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


class ScriptSimulation(ScriptRanks, Simulation):
    """One run of a script on this machine; driven as :class:`Simulation` is."""

    def __init__(self, folder, **named):
        super().__init__(run_options={"log_dir": str(folder)}, **named)

    def _set_up(self, plan, selector):
        plan = self._opaque(plan)
        self.node = Node(
            node_plan(plan), selector, system=System(self, self.home), clock=self.clock
        )
        self.supervisor = ScriptAgent(
            plan,
            self.node,
            script=self.script,
            outputs=self.outputs,
            directories=_Unclaimed(),
            clock=self.clock,
        )
        self.loop = Loop(self.supervisor, signals=Silence(), selector=selector, clock=self.clock)


class _OnMachines(NodesSimulation):
    """The machines of a simulated run of a script."""

    def _set_up(self, plan, selector):
        super()._set_up(self._opaque(plan), selector)

    def _coordinator(self, plan, others, owner):
        return ScriptCoordinator(
            plan,
            self.node,
            script=self.script,
            outputs=self.outputs,
            directories=_Unclaimed(),
            clock=self.clock,
            machines=OtherMachines(nodes=tuple(others), owner=owner, probes=()),
        )


class ScriptNodesSimulation(ScriptRanks, _OnMachines):
    """One run of a script on several machines, with a folder of logs that all share."""

    def __init__(self, folder, **named):
        for name in ("logs", "kept"):
            (folder / name).mkdir(exist_ok=True)
        super().__init__(folder=folder, **named)
