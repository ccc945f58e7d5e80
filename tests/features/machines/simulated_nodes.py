"""Several machines in simulated time: the real supervisors, links and frames; the network is simulated.

The coordinator's loop is turned as in :mod:`.simulated`. The loop of each other machine runs as it is, in a
thread that has the turn only while it is given it, so that one thing happens at a time.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from collections import deque
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from ddp_runner.core.launch_plan import NodeOptions
from ddp_runner.features.machines.node_link import NodeLink
from ddp_runner.features.machines.parent import follower_loop
from ddp_runner.features.machines.parent.admission import Meeting
from ddp_runner.features.machines.parent.coordinator import CoordinatorSupervisor
from ddp_runner.features.machines.parent.machines import NodeTraffic, missing_nodes
from ddp_runner.features.machines.parent.other_nodes import Door, OtherNodes
from ddp_runner.features.machines.parent.remote_node import OtherMachines, RemoteNode
from ddp_runner.kernel.parent.loop import Loop
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.processes.resources import StorePlace
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.system.folder_owner import FolderOwner, new_term
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.supervisor.assembly import assembled
from ddp_runner.supervisor.node_plans import node_plan
from tests.supervisor.simulated import (
    FORM_S,
    Directory,
    InstantSelector,
    Machine,
    Outputs,
    Silence,
    Simulation,
    System,
    _Unclaimed,
)

TOKEN = b"of these machines alone"
DELAY_S = 0.0005  # one way
SAVE_S = 6.0  # that a save may take, at the most


class _EndsNow(BaseException):
    """In the thread of a supervisor that was killed."""


class _Turns(threading.local):
    machine = None  # whose supervisor runs in this thread


_TURNS = _Turns()


class _SteppedSelector(selectors.DefaultSelector):
    """To wait is to give the turn back."""

    def select(self, timeout=None):
        del timeout
        _TURNS.machine.give_back()
        return super().select(0)


class _Plain(socket.socket):
    """One end of a connection that has no options of TCP's."""

    def setsockopt(self, *options):
        del options

    @classmethod
    def pair(cls):
        """Two ends."""
        return [cls(fileno=one.detach()) for one in socket.socketpair()]


class _Door:
    """Where the coordinator listens."""

    def __init__(self):
        self._reader, self._writer = os.pipe()
        self._waiting = deque()

    def knock(self, connection):
        self._waiting.append(connection)
        os.write(self._writer, b"!")

    def accept(self):
        os.read(self._reader, 1)
        return self._waiting.popleft(), ("10.0.0.1", 0)

    def fileno(self):
        return self._reader

    def setblocking(self, flag):
        pass

    def close(self):
        os.close(self._reader)
        os.close(self._writer)


class _Wire:
    """A connection between two machines. What cannot pass waits, as TCP's does."""

    def __init__(self, simulation, ends, numbers):
        self._simulation = simulation
        self._ends = ends  # the network's, of each machine
        self._numbers = numbers
        self._under_way = (
            deque(),
            deque(),
        )  # by where it comes from: when it arrives, and what; b"": the end
        self._is_done = [False, False]
        for end in ends:
            end.setblocking(False)

    def pump(self):
        """Take what was sent, and deliver what is due and can pass."""
        for side in (0, 1):
            self._take(side)
            self._deliver(side)

    def break_off(self):
        """Both sides find the connection reset."""
        for end in self._ends:
            end.close()
        self._is_done = [True, True]

    def _take(self, side):
        while not self._is_done[side]:
            try:
                data = self._ends[side].recv(1 << 20)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            self._is_done[side] = not data
            due_s = self._simulation.clock.now_s + self._simulation.delay_s
            self._under_way[side].append((due_s, data))
            self._simulation.later(self._simulation.delay_s, lambda: None)  # a turn is due then

    def _deliver(self, side):
        waiting, other = self._under_way[side], self._ends[1 - side]
        there, back = self._numbers[side], self._numbers[1 - side]
        while waiting and waiting[0][0] <= self._simulation.clock.now_s + 1e-9:
            if not self._simulation.passes(there, back):
                return
            _, data = waiting.popleft()
            with contextlib.suppress(OSError):
                if data:
                    other.sendall(data)
                else:
                    other.shutdown(socket.SHUT_WR)


class _Skewed:
    """The clock of another machine: it runs as fast, and shows something else."""

    def __init__(self, clock, ahead_s):
        self._clock, self._ahead_s = clock, ahead_s

    def monotonic(self):
        return self._clock.monotonic() + self._ahead_s

    def monotonic_ns(self):
        return int(self.monotonic() * 1e9)

    def boottime_ns(self):
        return self._clock.boottime_ns() + int(self._ahead_s * 1e9)


class _Signals:
    """What a scheduler sends to a supervisor."""

    def __init__(self):
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)

    def send(self, number):
        os.write(self._writer, bytes([number]))

    def take(self):
        try:
            return list(os.read(self._reader, 64))
        except BlockingIOError:
            return []

    def fileno(self):
        return self._reader

    def __del__(self):
        os.close(self._reader)
        os.close(self._writer)


class _Display:
    def __init__(self):
        self.said = []

    def line(self, text, level="INFO"):
        self.said.append((level, text))


class _Loop(follower_loop._FollowerLoop):
    """The real loop, on the simulated network."""

    def _dial(self):
        return _TURNS.machine.dial()


class FollowerMachine(Machine):
    """A machine whose supervisor obeys: ``start``, harm."""

    def __init__(self, simulation, number, *, ahead_s):
        super().__init__(simulation, number, clock=_Skewed(simulation.clock, ahead_s))
        self.exit_code = None
        self.is_stopped = False
        self.is_running = False
        self.is_on = True
        self.wires = []
        self.loops = []

    def start(self, plan, meeting):
        """Its supervisor is started, by whoever places machines."""
        assert not self.is_running
        self.exit_code, self.is_running, self.is_on = None, True, True
        self.reaped.clear()
        self.signals, self.display = _Signals(), _Display()
        self.mine, self.theirs = threading.Semaphore(0), threading.Semaphore(0)
        self.ends_now, self.error = False, None
        self.thread = threading.Thread(target=self._run, args=(plan, meeting), daemon=True)
        self.thread.start()

    def _run(self, plan, meeting):
        _TURNS.machine = self
        self.mine.acquire()
        try:
            loop = _Loop(
                plan,
                meeting,
                signals=self.signals,
                selector=_SteppedSelector(),
                display=self.display,
                clock=self.clock,
            )
            self.loops.append(loop)
            self.exit_code = loop.run()
            if loop._link is not None:
                loop._link.close()
        except _EndsNow:
            pass
        except BaseException as error:  # noqa: BLE001 - raised where the turn was given
            self.error = error
        self.is_running = False
        self.theirs.release()

    def turn(self):
        """Let its supervisor do what it has to do now."""
        if self.is_running and not self.is_stopped:
            self._give_turn()
            if not self.is_running:
                self._end_processes()

    def _give_turn(self):
        self.mine.release()
        self.theirs.acquire()
        if self.error is not None:
            raise self.error

    def give_back(self):
        """In its thread: wait for the next turn."""
        self.theirs.release()
        self.mine.acquire()
        if self.ends_now:
            raise _EndsNow

    @property
    def node(self):
        return self.loops[-1]._node if self.loops else None

    @node.setter
    def node(self, node):
        assert node is None

    def dial(self):
        """A connection to the coordinator; None where nobody answers."""
        if not self._simulation.answers(self.number):
            return None
        ours, near = _Plain.pair()
        theirs, far = _Plain.pair()
        self._simulation.sockets += [ours, near, theirs, far]
        wire = _Wire(self._simulation, (near, far), (self.number, 0))
        self.wires.append(wire)
        self._simulation.door.knock(theirs)
        return NodeLink(ours, token=TOKEN, listens=False)

    def kill(self):
        """SIGKILL of its supervisor: all that it has started ends with it, and so does its connection."""
        if self.is_running:
            self.ends_now = True
            self._give_turn()
        self._end_processes()
        for wire in self.wires:
            wire.break_off()

    def lose_power(self):
        """As :meth:`kill`, and nobody hears of it."""
        self.is_on = False
        if self.is_running:
            self.ends_now = True
            self._give_turn()
        self._end_processes()

    def _end_processes(self):
        for process in list(self._simulation.processes.values()):
            if process.machine is self and not process.dead:
                self._simulation._end(process, signal_number=9)


class NodesSimulation(Simulation):
    """A run on several machines; the coordinator is number 0, and the others are ``followers``."""

    def __init__(self, folder, *, nodes=2, ranks=2, least=None, most=None, conf=None, **options):
        self.followers = []
        self.sockets = []
        self.delay_s = DELAY_S
        self.down = set()  # (from, to): what does not pass
        self.is_coordinator_gone = self.is_coordinator_stopped = False
        self.published = []  # generation and process of each checkpoint
        self.save_s = 0.0
        self._asked = NodeOptions(
            least=nodes if least is None else least,
            most=most or nodes,
            host="coordinator",
            port=1,
            node_rank=None,
            **(conf or {}),
        )
        self._per_node = ranks
        self._folder = folder
        self._late = set()  # who has lost a peer of a generation
        self._cut_in = set()  # generations that a cut has met
        run_options = {
            "log_dir": str(folder / "logs"),
            "checkpoint_dir": str(folder / "kept"),
            **options.pop("run_options", {}),
        }
        (folder / "kept").mkdir(exist_ok=True)
        super().__init__(ranks=ranks * self._asked.most, run_options=run_options, **options)
        for number in range(1, nodes):
            self.add_machine(number)

    def _set_up(self, plan, selector):
        self._plan = plan = replace(plan, nodes=self._asked)
        self.door = _Door()
        follower_loop.Linux = lambda: System(self, _TURNS.machine)
        follower_loop.selectors = SimpleNamespace(
            DefaultSelector=_SteppedSelector,
            EVENT_READ=selectors.EVENT_READ,
            EVENT_WRITE=selectors.EVENT_WRITE,
        )
        self.meeting = Meeting(
            options=self._asked,
            ranks=self._per_node,
            meaning={},
            versions={},
            token=TOKEN,
            silent_s=plan.settings.recovery.node_silent_s,
        )
        self.node = Node(
            node_plan(plan),
            selector,
            system=System(self, self.home),
            clock=self.clock,
            ranks=range(self._per_node),
            store=StorePlace.on_this_machine(0),
        )
        owner = FolderOwner(self._folder / "kept", new_term(), at=("coordinator", 1))
        self.node.term = owner.term
        others = [
            RemoteNode(
                number,
                ranks=range(number * self._per_node, (number + 1) * self._per_node),
                slots={rank: self.node.slot(rank) for rank in range(plan.world_size)},
                clock=self.clock,
            )
            for number in range(1, self._asked.most)
        ]
        self.supervisor = self._coordinator(plan, others, owner)
        store = ("", self.node.store_at.port)
        self.links = OtherNodes(
            plan,
            Door(meeting=self.meeting, listening=self.door, store=store, term=owner.term),
            nodes=others,
            selector=selector,
            coordinator=self.supervisor,
            clock=self.clock,
        )
        self.loop = Loop(
            self.supervisor,
            signals=Silence(),
            selector=selector,
            clock=self.clock,
            traffic=NodeTraffic(self.links, self.supervisor.machines, clock=self.clock),
        )

    def _coordinator(self, plan, others, owner):
        """Who decides."""
        self.run = assembled(
            plan,
            self.node,
            outputs=self.outputs,
            directories=_Unclaimed(),
            published=Directory(self),
            clock=self.clock,
            others=others,
            waits_for=partial(missing_nodes, others, plan.nodes),
        )
        return CoordinatorSupervisor(
            self.run.run,
            self.run.parts,
            plan=plan,
            recorder=self.run.recorder,
            machines=OtherMachines(nodes=tuple(others), owner=owner, probes=()),
        )

    # What a test does.

    def add_machine(self, number=None):
        """One more machine, which looks for the coordinator."""
        machine = FollowerMachine(
            self, number or len(self.followers) + 1, ahead_s=self.random.uniform(-500, 500)
        )
        self.followers.append(machine)
        self.start(machine)
        return machine

    def start(self, machine):
        """The supervisor of a machine, again."""
        machine.start(self._plan, self.meeting)

    def cut(self, number, *, out=True, back=True):
        """What a machine sends to all others, and what they send to it, does not come."""
        for other in self._all - {number}:
            self.down |= {(number, other)} if out else set()
            self.down |= {(other, number)} if back else set()

    def heal(self):
        """All cables are in again."""
        self.down.clear()

    def kill_coordinator(self, *, is_silent=False):
        """SIGKILL of the coordinator's supervisor, or its machine loses its power."""
        self.is_coordinator_gone = True
        if is_silent:
            self.down |= {(0, other) for other in self._all} | {(other, 0) for other in self._all}
        for process in list(self.processes.values()):
            if process.machine is self.home and not process.dead:
                self._end(process, signal_number=9)
        for machine in () if is_silent else self.followers:
            for wire in machine.wires:
                wire.break_off()

    def restart_coordinator(self):
        """The same command again on the machine of a coordinator that was killed."""
        self.node.close()
        self.home, self.outputs = Machine(self, clock=self.clock), Outputs()
        self.sockets.append(self.door)
        self._set_up(self._plan, InstantSelector())
        self.world, self.home.node = self.supervisor.world, self.node
        self.node.start_zygote()
        self.heal()
        self.is_coordinator_gone = False

    def exit_codes(self, *, within_s=200.0):
        """What the other supervisors end with, once the run has ended."""
        if self.ending is not None:
            self.links.announce_end(self.ending.event)
            self.is_coordinator_gone = True
        deadline_s = self.clock.now_s + within_s
        while any(machine.is_running for machine in self.followers):
            assert self.clock.now_s < deadline_s, [m.display.said[-3:] for m in self.followers]
            self._turn()
        return [machine.exit_code for machine in self.followers]

    def said(self, text):
        """Whether the coordinator has said so."""
        return any(text in line for _, line in self.outputs.said)

    def where(self):
        return f"{super().where()}\n{self.down}\n{[m.display.said[-4:] for m in self.followers]}"

    # How the network behaves.

    @property
    def _all(self):
        return {0} | {machine.number for machine in self.followers}

    def _is_on(self, number):
        return all(one.is_on for one in self.followers if one.number == number)

    def passes(self, there, back):
        """Whether a packet comes from one machine to another."""
        return (there, back) not in self.down and self._is_on(there) and self._is_on(back)

    def answers(self, number):
        """Whether the coordinator's machine takes a connection of another one's."""
        both = self.passes(number, 0) and self.passes(0, number)
        return both and not self.is_coordinator_gone

    def are_joined(self, one, other):
        """Whether two machines can talk to each other."""
        return one is other or (
            self.passes(one.number, other.number) and self.passes(other.number, one.number)
        )

    def can_meet(self, members):
        machines = {id(process.machine): process.machine for process in members}.values()
        return all(
            self.are_joined(one, other) for one in machines for other in (*machines, self.home)
        )

    def who_counts(self):
        """Those that the coordinator counts on, wherever they are."""
        known = {handle.pid for handle in self.world.ranks if handle.is_alive}
        return [process for process in super().who_counts() if process.pid in known]

    def _turn_supervisors(self):
        self._pump()
        if not (self.is_coordinator_gone or self.is_coordinator_stopped):
            super()._turn_supervisors()
        for machine in self.followers:
            machine.turn()
        self._pump()

    def _pump(self):
        for machine in self.followers:
            for wire in machine.wires:
                wire.pump()

    # How ranks behave on it.

    def _step(self, generation):
        members = [p for p in self.formed[generation] if not p.dead and p.generation == generation]
        if not members:
            return
        if len(members) < len(self.formed[generation]):
            self._break(generation)
        elif self.can_meet(members):
            newest = max(process.committed for process in members)
            for process in members:  # what the cut has held up comes now
                while process.committed < newest:
                    self._commit(process)
            super()._step(generation)
            return
        else:
            self._hold_up(generation, members)
        for process in members:
            if not process.stopped and self._phase(process) is not Phase.REDUCE:
                self.stamp(process, Phase.REDUCE)
        self.later(self.step_s, lambda: self._step(generation))

    def _hold_up(self, generation, members):
        """The link between them is cut; for some all messages of this step had come."""
        if generation in self._cut_in:
            return
        self._cut_in.add(generation)
        for process in members:
            if process.committed < self.steps and self.random.random() < 0.3:
                self._commit(process)

    def _break(self, generation):
        """Whoever is connected to one that has gone, or to one that finds that out, loses its peers."""
        of_it = self.formed.get(generation, self._members(generation))
        here = [p for p in of_it if not p.dead and p.generation == generation]
        heard = [p.machine for p in of_it if p not in here]
        before = -1
        while before != len(heard):
            before = len(heard)
            for process in here:
                if process.machine not in heard and any(
                    self.are_joined(process.machine, one) for one in heard
                ):
                    heard.append(process.machine)
        for process in here:
            is_late = (process.pid, generation) in self._late
            if process.machine in heard and not process.stopped and not is_late:
                self._late.add((process.pid, generation))
                self._lose_peer(process)

    def _lose_peer(self, process):
        if process.generation == max(self.formed, default=0):
            super()._lose_peer(process)
        else:  # its peers have left long ago
            self._notice(process, process.generation)

    def _commit(self, process):
        assert process.generation == max(self.formed), "two halves go on"
        super()._commit(process)

    def _save(self, process):
        generation = process.generation
        takes_s = self.random.uniform(0.0, self.save_s)
        if takes_s == 0.0:
            self._publish(process, generation)
        else:
            self.later(takes_s, lambda: self._publish(process, generation))

    def _publish(self, process, generation):
        if process.dead:
            return
        if process.stopped:
            self.later(FORM_S, lambda: self._publish(process, generation))
            return
        slot = self.slot(process)
        lease_ns = slot.get(Cell.LEASE_NS)
        if slot.get(Cell.FENCED) or 0 < lease_ns < process.machine.clock.boottime_ns():
            return
        if self.published:
            newest, by = self.published[-1]
            is_alone = generation == 0 and (by.dead or self.slot(by).get(Cell.FENCED))
            assert by is process or is_alone or generation > newest, "two ranks publish"
        self.published.append((generation, process))
        super()._save(process)

    def close(self):
        for machine in self.followers:
            machine.kill()
        super().close()
        for machine in self.followers:
            for loop in machine.loops:
                if loop._node is not None:
                    loop._node.close()
        for one in self.sockets:
            one.close()
        self.door.close()
        follower_loop.selectors = selectors
        follower_loop.Linux = _LINUX


_LINUX = follower_loop.Linux
