"""A supervisor whose processes and clock are simulated; its decisions, sockets and board are real.

Ranks follow the protocol of ``kernel/rank/runtime.py`` and ``training/trainer.py``: they answer over their
control channels and stamp the board. Time passes from event to event, so an hour costs a second.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import selectors
import signal
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddp_runner.checkpoint.unreported import Published
from ddp_runner.core.launch_plan import DevicePlan, LaunchPlan
from ddp_runner.core.run_stages import StagePlace
from ddp_runner.core.settings import CheckpointSettings, RecoverySettings, RunSettings, Settings
from ddp_runner.kernel.parent.loop import Loop
from ddp_runner.kernel.parent.supervisor import Supervisor
from ddp_runner.kernel.processes.children import Ended, make_output_file
from ddp_runner.kernel.processes.memory_limits import KernelKills
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.system.control_channel import Channel, ChannelClosedError
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import (
    CheckpointSaved,
    Cut,
    Faulted,
    RankFormed,
    SpareReady,
    ZygoteReady,
)
from ddp_runner.kernel.wire.fork_specs import ForkKind
from ddp_runner.kernel.wire.messages import (
    NO_PROCESS,
    Abort,
    AbortHeard,
    Checkpoint,
    DrillAt,
    Finished,
    Fork,
    Forked,
    Form,
    NotSaved,
    OtherStage,
    Ready,
    SaveAlone,
    SaverReady,
    Stop,
    StoreReady,
)
from ddp_runner.start import STACKS_SIGNAL
from ddp_runner.supervisor.assembly import assembled
from ddp_runner.supervisor.node_plans import node_plan
from ddp_runner.supervisor.reporting.run_screen import run_summary

TICK_S = 0.1
STEP_S = 0.05
SAVE_EVERY = 10
IMPORT_S, FORK_S, STARTUP_S, FORM_S, EXIT_S = 1.0, 0.01, 0.05, 0.03, 0.005
ITS_STACKS = b'Current thread 0x0001 (most recent call first):\n  File "task.py", line 3 in loss\n'
WARM_S = 0.04  # until a spare is ready
SPARE, STANDBY, DRILL, SAVER = -3, -4, -5, -6  # as processes
_KIND = {
    ForkKind.SPARE: SPARE,
    ForkKind.STANDBY: STANDBY,
    ForkKind.DRILL: DRILL,
    ForkKind.SAVER: SAVER,
}

_REFUSED = {
    ForkKind.SPARE: "spares_refused",
    ForkKind.DRILL: "drills_refused",
    ForkKind.SAVER: "savers_refused",
    ForkKind.STANDBY: "standbys_refused",
}


class _Unclaimed:
    """Directories that are nobody's: nothing is written to a disk."""

    def claim(self):
        pass


class Clock:
    """What the supervisor takes for the time: it passes when a test says so."""

    def __init__(self):
        self.now_s = 1000.0
        self.suspended_s = 0.0  # in which the machine did not run at all

    def monotonic(self):
        return self.now_s

    def monotonic_ns(self):
        return int(self.now_s * 1e9)

    def boottime_ns(self):
        return int((self.now_s + self.suspended_s) * 1e9)


class Outputs:
    """Keeps what would be written and shown."""

    hidden = ()

    def __init__(self):
        self.alarms = OrderedDict()
        self.written = []
        self.said = []
        self.may_write = False

    def open(self, *, shown_bytes=0):
        self.may_write = True

    def keep_points(self):
        pass

    def show_line(self, line):
        self.said.append((line.level, line.text))

    def write(self, event, *, cause=None):
        self.written.append({"event": event.name, "cause": cause, **event.written()})
        return len(self.written)

    def say(self, text, *, level="INFO"):
        self.said.append((level, text))

    def keep(self, text):
        pass

    def metrics(self, step, rank, values, *, stage=""):
        pass

    def announce(self, text):
        self.said.append(("INFO", text))

    def keep_words(self, rank, text):
        pass

    def follow(self, paths, *, shown, marks_lines=False):
        pass


class InstantSelector(selectors.DefaultSelector):
    """Says what can be read now."""

    def select(self, timeout=None):
        del timeout
        return super().select(0)


class Machine:
    """One machine: its clock, its processes, and the node that has them, once there is one."""

    def __init__(self, simulation, number=0, *, clock):
        self._simulation = simulation
        self.number = number
        self.clock = clock
        self.node = None
        self.started = None  # the newest zygote that had to import
        self.reaped = []

    @property
    def zygote(self):
        """The process that forks the others here; the one before while there is none."""
        pid = None if self.node is None else self.node.zygote_pid
        return self._simulation.processes.get(pid, self.started)


@dataclass
class Process:
    """A simulated process; ``rank`` -1 is the store host, -2 the zygote, -3 a spare, -4 who stands by,
    -5 a drill, -6 who writes checkpoints; these do nothing by themselves."""

    pid: int
    rank: int
    channel: Channel
    machine: Machine
    committed: int = -1
    generation: int = 0  # in which it is; 0: in none
    trains: bool = False
    stopped: bool = False
    asleep: bool = False  # stopped in its own code: the system knows of nothing
    dead: bool = False
    unending: bool = False  # waits in the kernel: SIGKILL ends it only once that is over
    heard: int = 0  # the newest generation that it was told to leave
    is_deaf: bool = False  # its threads get no turn: it reads nothing
    stop: StopReason | None = None
    wants_save: bool = False
    stage: int = 0  # that it was started to train
    first_generation: int = 1  # of that stage, as it was given it
    seen: list = field(default_factory=list)  # generations that it was asked to form


def _gpu(index):
    return DevicePlan(device=f"cuda:{index}", name="GPU", visible_index=index)


class Simulation:
    """One run: ``run_until``, harm, ``run_to_end``."""

    notes = ()  # of what ranks build: in the first stage the first one, and so on

    def __init__(
        self,
        *,
        ranks=3,
        steps=100,
        seed=0,
        import_s=IMPORT_S,
        run_options=None,
        memory_every="auto",
        silent=False,
        devices=None,
        stage_ends=(),
        **recovery,
    ):
        self.clock = Clock()
        self.formed = {}  # generation -> its processes
        self.home = Machine(self, clock=self.clock)  # of the supervisor that decides
        self.secrets = {}  # generation -> those that were handed out for it
        self.outputs = Outputs()
        self.silent = silent  # collectives end in silence, and an abort takes two phases
        self.random = random.Random(seed)
        self.steps = stage_ends[-1] if stage_ends else steps
        self.stage_ends = stage_ends  # steps at which they end, the last one's with the run
        self.readable_max = self.steps  # later checkpoints are damaged once they are written
        self.checkpoint = 0
        self.best = 0  # the newest step that any rank has ever committed
        self.processes = {}
        self.unreaped_kills = set()
        self._unborn = []  # channels of forks that a zygote still owes
        self._broken = 0  # the newest generation that a peer has left
        self.step_s = STEP_S
        self.data_s = 0.0  # of every step, for the data of rank 0
        self.preload_s = 0.0  # of each start of a rank, which stamps the board so often as it says
        self.preload_stamps = 0
        self.last_save_s = 0.0  # for which all wait for rank 0
        self.alone_save_s = 0.3  # of a rank that saves before the run ends
        self.alone_refusal = None  # why it cannot, and whether that is its own fault
        self.saved_alone = []  # by which rank, of which step
        self.is_held = False  # no generation comes to be while it is
        self.zygotes = 0
        self.resumed = []  # what was sent to each rank that has loaded
        self.answers_s = 0.0  # after which the zygote says whom it has forked
        # Forks for which there is no room.
        # Step and rank of each drill; each order to drill a step, and the rank that got it.
        self.drills_asked, self.drills_at = [], []
        self.spares_refused = self.drills_refused = self.savers_refused = self.standbys_refused = 0
        self.savers_start = True  # and say so
        self.spares_asked = []  # what the ranks were doing when one was asked for
        self.spare_fails_on = set()  # kinds that none can be
        self.free_bytes = 2**40
        self.spare_kinds = []  # what each of them was to be
        self.import_s = import_s
        self._heap = []
        self._numbers = itertools.count()
        self._pids = itertools.count(100)
        # Of pids, as far as a test says so: CPU time, resident bytes, who waits for a disk.
        self.ticks, self.resident, self.waiting_for_disk = {}, {}, set()
        self.kills = KernelKills(Path("/no/machine"))  # of this one nothing is counted
        self.settings = settings = Settings(
            run=RunSettings(task="synthetic", **(run_options or {})),
            recovery=RecoverySettings(**recovery),
            checkpoint=CheckpointSettings(memory_every=memory_every),
        )
        cpu = DevicePlan(device="cpu", name="CPU", visible_index=None)
        plan = LaunchPlan(
            settings=settings,
            origins={},
            devices=tuple(_gpu(index) for index in devices) if devices else (cpu,) * ranks,
            world_size=ranks,
            threads_per_rank=1,
            resume_key={},
            settings_digest="0",
            command=("test",),
            notes=(),
            stages=self._stages(settings),
        )
        if stage_ends:
            plan = plan.in_stage(0, first_step=0, first_generation=1)
        self._set_up(plan, InstantSelector())
        self.world = self.supervisor.world
        self.home.node = self.node
        self.node.start_zygote()

    def _stages(self, settings):
        names = tuple(f"stage{number}" for number in range(len(self.stage_ends)))
        places = [StagePlace(names=names, number=number) for number in range(len(names))]
        return tuple(replace(settings, stage=place) for place in places)

    def _end_of(self, process):
        """The step at which its stage ends, or the run."""
        return self.stage_ends[process.stage] if self.stage_ends else self.steps

    def _set_up(self, plan, selector):
        """The supervisor that decides, its node and its loop."""
        self.node = Node(
            node_plan(plan), selector, system=System(self, self.home), clock=self.clock
        )
        self.run = assembled(
            plan,
            self.node,
            outputs=self.outputs,
            directories=_Unclaimed(),
            published=Directory(self),
            clock=self.clock,
        )
        self.supervisor = Supervisor(self.run.run, self.run.parts)
        self.loop = Loop(self.supervisor, signals=Silence(), selector=selector, clock=self.clock)

    def summary(self, ending):
        """What summary.json would hold."""
        return run_summary(self.supervisor, self.run.recorder, ending, self.clock.monotonic())

    # What a test does.

    def run_until(self, check, *, within_s=600.0):
        """Let time pass until ``check`` holds."""
        deadline_s = self.clock.now_s + within_s
        while not check():
            assert self.ending is None, f"ended: {self.ending}"
            assert self.clock.now_s < deadline_s, self.where()
            self._turn()

    def run_to_end(self, *, within_s=600.0):
        """Let time pass until the run has ended; returns its Ending."""
        deadline_s = self.clock.now_s + within_s
        while self.ending is None:
            assert self.clock.now_s < deadline_s, f"not ended after {within_s:g} s: {self.where()}"
            self._turn()
        return self.ending

    def pass_time(self, seconds):
        """Let so much time pass."""
        until_s = self.clock.now_s + seconds
        while self.ending is None and self.clock.now_s < until_s:
            self._turn()

    def to_step(self, step):
        self.run_until(lambda: self.best >= step)

    @property
    def zygote(self):
        """As :attr:`Machine.zygote`, where the supervisor is that decides."""
        return self.home.zygote

    def rank(self, number):
        """The newest living process of a rank; -1 is the store host, and so on, as for :meth:`kill`."""
        if number == -2:
            return None if self.zygote.dead else self.zygote
        alive = [p for p in self.processes.values() if p.rank == number and not p.dead]
        alive = [one for one in alive if one is not one.machine.zygote]  # who stood by
        return max(alive, key=lambda process: process.pid, default=None)

    def helper(self, role):
        """What the supervisor holds of the process of a role; None where there is none."""
        return self.node.helper(role)

    def kill(self, *ranks):
        """SIGKILL ranks; -1 is the store host, -2 the zygote, -3 the spare."""
        for number in ranks:
            process = self.zygote if number == -2 else self.rank(number)
            if process is not None:
                self.signal(process.pid)

    def freeze(self, rank):
        """SIGSTOP a rank, in the middle of its forward."""
        process = self.rank(rank)
        if process is not None:
            process.stopped = True
            if process.trains:
                self.stamp(process, Phase.FORWARD)

    def sleep(self, *ranks):
        """Ranks get stuck in their own code, in the middle of a forward."""
        for rank in ranks:
            self.freeze(rank)
            self.rank(rank).asleep = True

    def wake(self):
        """Whoever is stopped, or stuck, goes on."""
        for process in self.processes.values():
            process.stopped = process.asleep = False

    def rouse(self, rank):
        """One of those that are stuck goes on, and waits for the others."""
        process = self.rank(rank)
        process.stopped = process.asleep = False
        self.stamp(process, Phase.REDUCE)

    def leave(self, rank, code=0):
        """``os._exit`` in a rank."""
        process = self.rank(rank)
        if process is not None:
            self._end(process, exit_code=code)

    def fail(self, rank, cause="ValueError: no", *, kind=FaultKind.RANK_RAISED):
        """An exception in a rank's step: it says so and waits for what becomes of it."""
        process = self.rank(rank)
        if process is None or process.stopped or not process.generation:
            return
        fault = self.fault(process, kind, cause)
        self.send(process, Faulted(generation=process.seen[-1], fault=fault))
        generation, process.generation, process.trains = process.generation, 0, False
        self.later(0.001, lambda: self.send(process, self._ready(process)))
        self._break(generation)

    def fail_to_start(self, rank, cause="ValueError: no", *, kind=FaultKind.RANK_RAISED):
        """An exception before a rank is ready: it says so and ends."""
        process = self.rank(rank)
        fault = self.fault(process, kind, cause)
        self.send(process, Faulted(generation=0, fault=fault))
        self._end(process, exit_code=1)

    def signal(self, pid, number=signal.SIGKILL):
        """``os.kill`` for simulated processes."""
        process = self.processes.get(pid)
        if process is None or process.dead:
            return
        if number == signal.SIGKILL and process.unending:
            process.stopped = process.asleep = True
        elif number == signal.SIGINT:  # while it imports
            self._end(process, exit_code=130)
        elif number in {
            *(signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT),
            signal.SIGHUP,
            signal.SIGQUIT,
        }:
            self._end(process, signal_number=int(number))
        elif number == STACKS_SIGNAL and process.rank >= 0:
            os.write(process.machine.node.processes[process.rank].output, ITS_STACKS)
        elif number == signal.SIGCONT:
            process.stopped = process.asleep

    @property
    def ending(self):
        return self.supervisor.ending

    def events(self, name):
        return [record for record in self.outputs.written if record["event"] == name]

    def where(self):
        """For an assertion that fails."""
        ranks = [(h.rank, h.state.name, h.pid, h.membership.name) for h in self.world.ranks]
        alive = [p for p in self.processes.values() if not p.dead]
        facts = self.supervisor.facts
        return f"{facts}\n{ranks}\nalive {alive}\n{self.outputs.written[-12:]}"

    # How the processes behave.

    def fork(self, machine, request, descriptors):
        """The zygote's answer to a request."""
        if request.kind is ForkKind.SPARE:
            self.spares_asked.append([handle.state.name for handle in self.world.ranks])
            self.spare_kinds.append(request.spec.kind.value)
        channel = Channel.from_descriptor(os.dup(descriptors[0]))
        self._unborn.append(channel)
        zygote = machine.zygote

        def born():
            if zygote.dead:
                channel.close()
                return
            if zygote.stopped:
                self.later(0.01, born)
                return
            self._unborn.remove(channel)
            refused = _REFUSED.get(request.kind, "")
            if refused and getattr(self, refused):
                setattr(self, refused, getattr(self, refused) - 1)
                channel.close()
                self.send(zygote, Forked(token=request.token, pid=NO_PROCESS))
                return
            process = self._new(_KIND.get(request.kind, request.rank), channel, machine)
            answer = Forked(token=request.token, pid=process.pid)
            if self.answers_s:
                self.later(self.answers_s, lambda: self.send(zygote, answer))
            else:
                self.send(zygote, answer)
            if request.kind is ForkKind.DRILL:
                self.drills_asked.append((request.spec.step, request.spec.rank))
            self._begin(process, request)

        self.later(FORK_S, born)

    def _begin(self, process, request):
        """What it does first."""
        match request.kind:
            case ForkKind.STANDBY | ForkKind.DRILL:
                pass
            case ForkKind.SAVER:
                if self.savers_start:
                    self.later(0.0, lambda: self.send(process, SaverReady()))
            case ForkKind.SPARE:
                self.later(WARM_S, lambda: self._warm(process))
            case ForkKind.STORE:
                self.later(STARTUP_S, lambda: self.send(process, StoreReady(port=1)))
            case _:
                self._start(process, request)

    def _start(self, process, request):
        self.stamp(process, Phase.STARTUP)
        if place := request.spec.settings.get("stage"):
            process.stage = place["number"]
            process.first_generation = place["first_generation"]
            assert place["first_step"] == [0, *self.stage_ends][process.stage]
        loads = request.spec.loads
        self.resumed += [request.spec.resume] if loads else []
        if request.spec.not_after >= 0:
            self.checkpoint = min(self.checkpoint, request.spec.not_after)
        for number in range(self.preload_stamps):
            self.later(
                self.preload_s * number / self.preload_stamps,
                lambda: self.stamp(process, Phase.STARTUP),
            )
        takes_s = self.preload_s + STARTUP_S * self.random.uniform(1, 3)
        self.later(takes_s, lambda: self._built(process, loads))

    def _warm(self, process):
        if self.spare_kinds[-1] in self.spare_fails_on:
            self._end(process, exit_code=1)
        else:
            self.send(process, SpareReady())

    def _become(self, process, request, descriptors):
        """A spare is made a rank."""
        process.channel.close()
        process.rank, process.channel = request.rank, Channel.from_descriptor(descriptors[0])
        process.channel.set_blocking(blocking=False)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        self._start(process, request)

    def start_zygote(self, channel, machine):
        self.zygotes += 1
        machine.started = zygote = self._new(-2, channel, machine)
        message = ZygoteReady(torch="0", import_s=IMPORT_S)
        self.later(self.import_s, lambda: self.send(zygote, message))
        return zygote.pid

    def stamp(self, process, phase):
        slot = self.slot(process)
        slot.set(Cell.STEP, max(0, process.committed))
        slot.stamp(phase, process.machine.clock.monotonic_ns())

    def slot(self, process):
        """Its cells on the board of its machine."""
        return process.machine.node.slot(process.rank)

    def send(self, process, message):
        """A process says something, unless it cannot."""
        if process.dead:
            return
        if process.stopped:
            self.later(0.01, lambda: self.send(process, message))
            return
        try:
            process.channel.send(message)
        except ChannelClosedError:
            self._end(process, exit_code=1)

    def fault(self, process, kind, cause):
        reading = self.slot(process).read()
        return Fault(
            kind=kind,
            rank=process.rank,
            step=max(0, process.committed),
            phase=reading.phase.label,
            cause=cause,
            at_ns=process.machine.clock.monotonic_ns(),
        )

    def later(self, seconds, action):
        heapq.heappush(self._heap, (self.clock.now_s + seconds, next(self._numbers), action))

    def _built(self, process, loads):
        if loads and process.committed < 0:
            process.committed = min(self.checkpoint, self.readable_max)
            first_step = [0, *self.stage_ends][process.stage]
            if process.committed < first_step:  # it waits for its end
                number = sum(end <= process.committed for end in self.stage_ends)
                begins = [0, *self.stage_ends][number]
                message = OtherStage(rank=process.rank, number=number, first_step=begins)
                self.send(process, message)
                return
        self.send(process, self._ready(process))

    def _ready(self, process):
        self.slot(process).set(Cell.TOTAL_STEPS, self.steps)
        return Ready(
            rank=process.rank,
            committed_step=process.committed,
            run_id="",
            total_steps=self._end_of(process),
            steps_per_epoch=10,
            train_samples=80,
            parameters=7,
            device="cpu",
            notes=self.notes[: process.stage + 1],
            ends_in_silence=self.silent,
        )

    def _listen(self, process):  # noqa: C901, PLR0912 - one row a message
        while not process.dead and not process.stopped and not process.is_deaf:
            try:
                message, descriptors = process.channel.receive()
            except BlockingIOError:
                return
            except ChannelClosedError:
                self._end(process, exit_code=1)
                return
            match message:
                case Fork() if process.rank == STANDBY:
                    self.fork(process.machine, message, descriptors)
                    for descriptor in descriptors:
                        os.close(descriptor)
                case Fork():
                    self._become(process, message, descriptors)
                case Form():
                    self._join(process, message)
                case Abort() if self.silent:
                    self._finish_committed(process, message)
                    process.heard = message.generation
                    answer = AbortHeard(rank=process.rank, generation=message.generation)
                    self.send(process, answer)
                case Abort() | Cut():
                    if 0 < process.generation <= message.generation:
                        self._check_that_all_have_heard(message)
                        self._finish_committed(process, message)
                        self._leave_generation(process, "aborted")
                case Stop():
                    process.stop = message.reason
                case Checkpoint():
                    process.wants_save = True
                case DrillAt():
                    self.drills_at.append((message, process.rank))
                case SaveAlone():
                    self.later(self.alone_save_s, lambda: self._save_alone(process))

    def _finish_committed(self, process, message):
        """What another rank has committed is whole: an abort that says so leaves it time to end here."""
        if isinstance(message, Abort) and process.trains:
            assert message.newest_step <= process.committed + 1
            if message.newest_step > process.committed >= 0:
                self._commit(process)

    def _check_that_all_have_heard(self, message):
        if isinstance(message, Cut):
            deaf = [p for p in self._members(message.generation) if p.heard < message.generation]
            assert all(p.dead or p.unending for p in deaf), (
                "who has not heard may commit what an abort leaves"
            )

    def _join(self, process, form):
        assert not process.seen or form.generation > process.seen[-1]
        process.seen.append(form.generation)
        self.secrets.setdefault(form.generation, set()).add(form.secret)
        process.generation, process.trains = form.generation, False
        self.slot(process).set(Cell.GENERATION, form.generation)
        self.stamp(process, Phase.FORMING)
        self.later(FORM_S, lambda: self._try_to_form(form))

    def can_meet(self, members):
        """Whether these processes can reach each other, and the store."""
        del members
        return True

    def who_counts(self):
        """Living ranks whose committed steps nobody may lose."""
        return [p for p in self.processes.values() if p.rank >= 0 and not p.dead]

    def _members(self, generation):
        return [p for p in self.processes.values() if p.generation == generation]

    def _try_to_form(self, form):
        members = self._members(form.generation)
        if len(members) < form.world_size or any(p.trains for p in members):
            return
        if any(p.dead for p in members):
            self._break(form.generation)
            return
        store = self.rank(-1)
        is_held = self.is_held or any(p.stopped for p in members) or not self.can_meet(members)
        if store is None or store.stopped or is_held:
            self.later(FORM_S, lambda: self._try_to_form(form))
            return
        newest = max(process.committed for process in members)
        kept = [process.committed for process in self.who_counts()]
        assert newest >= max(kept), "a committed step is lost while a replica lives"
        assert newest >= 0, "nobody has a state"
        self.formed[form.generation] = members
        for process in members:
            process.committed, process.trains = newest, True
            self.slot(process).set(Cell.COMMITTED_STEP, newest)
            self.stamp(process, Phase.FORWARD)
            formed = RankFormed(
                rank=process.rank,
                generation=form.generation,
                committed_step=newest,
                source=0,
                group_s=0.0,
                transfer_s=0.0,
                rebuild_s=0.0,
            )
            self.send(process, formed)
        self.later(self.step_s, lambda: self._step(form.generation))

    def _step(self, generation):
        members = self._members(generation)
        if generation <= self._broken:
            return
        if not members or any(p.dead for p in members):
            self._break(generation)
            return
        if any(process.stopped for process in members):
            for process in members:
                if not process.stopped and self._phase(process) is not Phase.REDUCE:
                    self.stamp(process, Phase.REDUCE)
            self.later(self.step_s, lambda: self._step(generation))
            return
        reason = next((p.stop for p in members if p.stop), None)
        end = self._end_of(members[0])
        assert {process.stage for process in members} == {members[0].stage}
        if members[0].committed < end:
            for process in members:
                self._commit(process)
        if members[0].committed % SAVE_EVERY == 0 or self._is_save_asked(members):
            self._save(members[0])
        if members[0].committed < end and reason is None:
            self.later(self.step_s, lambda: self._step(generation))
            return
        self._finish_soon(members, generation, reason)

    def _is_save_asked(self, members):
        asked = [process for process in members if process.wants_save]
        for process in asked:
            process.wants_save = False
        return bool(asked)

    def _finish_soon(self, members, generation, reason):
        self._save(members[0])
        for process in members if self.last_save_s else ():
            saves = process is members[0]
            self.stamp(process, Phase.CHECKPOINT if saves else Phase.REDUCE)
        for process in members:
            finish = self.last_save_s + self.random.uniform(0.0, 0.02)
            self.later(finish, lambda each=process: self._finish(each, generation, reason))

    def _save(self, process):
        self.checkpoint = process.committed
        saved = CheckpointSaved(
            rank=process.rank,
            step=process.committed,
            path="p",
            blocked_s=0,
            size_bytes=1,
            sha256="",
        )
        self.send(process, saved)

    def _save_alone(self, process):
        if process.dead or process.stopped:
            return
        assert process.generation == 0, "it may be inside its optimizer"
        fenced = [h.rank for h in self.world.ranks if h.slot.get(Cell.FENCED)]
        assert fenced == [h.rank for h in self.world.ranks if h.rank != process.rank]
        if self.alone_refusal is None:
            self.saved_alone.append((process.rank, process.committed))
            self._save(process)
            return
        cause, is_its_own = self.alone_refusal
        message = NotSaved(
            rank=process.rank, step=process.committed, cause=cause, is_its_own=is_its_own
        )
        self.send(process, message)

    def _finish(self, process, generation, reason):
        """Say so and end, unless the generation has been broken by then."""
        if process.generation != generation or process.stopped:
            return
        process.generation = 0
        message = Finished(
            rank=process.rank, reason=reason or StopReason.COMPLETED, step=process.committed
        )
        self.send(process, message)
        self.later(EXIT_S, lambda: self._end(process, exit_code=0))

    def _phase(self, process):
        return self.slot(process).read().phase

    def _commit(self, process):
        slot = self.slot(process)
        process.committed += 1
        self.best = max(self.best, process.committed)
        slot.set(Cell.COMMITTED_STEP, process.committed)
        slot.add(Cell.OWN_STEPS, 1)
        slot.set(Cell.LAST_COMMIT_NS, process.machine.clock.monotonic_ns())
        slot.set(Cell.STEP_NS, int((self.step_s + self.data_s) * 1e9))
        slot.set(Cell.BUSY_NS, int(self.step_s * 1e9))
        # Rank 0 waits for the data of its step, and the others for rank 0.
        slot.set(Cell.REDUCE_NS, 0 if process.rank == 0 else int(self.data_s * 1e9))
        self.stamp(process, Phase.FORWARD)

    def _break(self, generation):
        """A peer is lost: the others notice, some of them just after they have committed."""
        self._broken = max(self._broken, generation)
        for process in self._members(generation):
            if not process.dead and not process.stopped:
                self._lose_peer(process)

    def _lose_peer(self, process):
        generation = process.generation
        if (
            process.trains
            and process.committed < self._end_of(process)
            and self.random.random() < 0.3
        ):
            self._commit(process)
        if self.silent:  # and waits for the dead one
            self.stamp(process, Phase.REDUCE)
            return
        delay_s = self.random.uniform(0.001, 0.02)
        self.later(delay_s, lambda: self._notice(process, generation))

    def _notice(self, process, generation):
        if process.generation == generation and not process.dead and not process.stopped:
            self._leave_generation(process, "connection closed by peer")

    def _leave_generation(self, process, cause):
        fault = self.fault(process, FaultKind.COLLECTIVE_FAILED, cause)
        self.send(process, Faulted(generation=process.generation, fault=fault))
        process.generation, process.trains = 0, False
        self.later(0.001, lambda: self.send(process, self._ready(process)))

    def _new(self, rank, channel, machine):
        process = Process(pid=next(self._pids), rank=rank, channel=channel, machine=machine)
        channel.set_blocking(blocking=False)
        self.processes[process.pid] = process
        return process

    def _end(self, process, *, exit_code=None, signal_number=None):
        if process.dead:
            return
        process.dead = True
        process.channel.close()
        generation = process.generation
        ended = Ended(
            pid=process.pid,
            exit_code=exit_code,
            signal_number=signal_number,
            at_ns=process.machine.clock.monotonic_ns(),
        )
        if signal_number == signal.SIGKILL:
            self.unreaped_kills.add(process.pid)
        reaped = process.machine.reaped
        self.later(self.random.uniform(0, EXIT_S), lambda: reaped.append(ended))
        if generation and process.trains:
            self.later(0.001, lambda: self._break(generation))

    def reap(self, machine):
        reaped = machine.reaped[:]
        machine.reaped.clear()
        for ended in reaped:
            self.unreaped_kills.discard(ended.pid)
            yield ended

    def is_stopped(self, pid):
        process = self.processes.get(pid)
        return process is not None and process.stopped and not process.asleep

    def _turn(self):
        next_s = self._heap[0][0] if self._heap else self.clock.now_s + TICK_S
        self.clock.now_s = max(self.clock.now_s, min(next_s, self.clock.now_s + TICK_S))
        while self._heap and self._heap[0][0] <= self.clock.now_s:
            heapq.heappop(self._heap)[2]()
        self._turn_supervisors()
        for process in list(self.processes.values()):
            if process.rank >= 0 or process.rank in (SPARE, STANDBY):
                self._listen(process)

    def _turn_supervisors(self):
        self.loop._turn()

    def close(self):
        for process in self.processes.values():
            process.channel.close()
        for channel in self._unborn:
            channel.close()
        self.node.close()


class Silence:
    """A signal box in which nothing ever is."""

    def __init__(self):
        self._reader, self._writer = os.pipe()

    def fileno(self):
        return self._reader

    def __del__(self):
        os.close(self._reader)
        os.close(self._writer)


class System:
    """The operating system as the node of one machine sees it: of simulated processes."""

    def __init__(self, simulation, machine):
        self._simulation = simulation
        self._machine = machine

    def start_zygote(self, *, wanted, environment):
        return Zygote(self._simulation, self._machine)

    def make_guardian(self):
        return Guardian()

    def kernel_kills(self):
        return self._simulation.kills

    def reap(self):
        return self._simulation.reap(self._machine)

    def signal(self, pid, number):
        self._simulation.signal(pid, number)

    def signal_main_thread(self, pid, number):
        self._simulation.signal(pid, number)

    def is_stopped(self, pid):
        return self._simulation.is_stopped(pid)

    def is_killed(self, pid):
        return pid in self._simulation.unreaped_kills

    def cpu_ticks(self, pid):
        return self._simulation.ticks.get(pid, 0)

    def waits_for_disk(self, pid):
        return pid in self._simulation.waiting_for_disk

    def resident_bytes(self, pid):
        return self._simulation.resident.get(pid, 0)

    def free_bytes(self):
        return self._simulation.free_bytes


class Directory(Published):
    """The checkpoints that the simulated ranks have written."""

    def __init__(self, simulation):
        super().__init__(Path(simulation.settings.run.checkpoint_dir))
        self._simulation = simulation

    def newest(self):
        step = self._simulation.checkpoint
        return (step, "p") if step else None


class Guardian:
    """Looks at no process of this machine; ``watched`` and ``ended`` are the pids that it was given."""

    def __init__(self):
        self.watched, self.ended = [], []

    def start(self):
        pass

    def marked(self, environment):
        return dict(environment)

    def watch(self, rank_pid):
        self.watched.append(rank_pid)

    def rank_ended(self, rank_pid, *, known):
        del known
        self.ended.append(rank_pid)
        return []

    def close(self):
        pass


class Zygote:
    """What the supervisor holds of its zygote."""

    def __init__(self, simulation, machine):
        self._simulation = simulation
        self._machine = machine
        self.channel, theirs = Channel.pair()
        self.channel.set_blocking(blocking=False)
        self.output = make_output_file("zygote")
        self.ready = False
        self.pid = simulation.start_zygote(Channel(theirs), machine)

    def fork(self, request, descriptors):
        if self._simulation.processes[self.pid].dead:
            raise ChannelClosedError
        self._simulation.fork(self._machine, request, descriptors)

    def mark_reaped(self, exit_code):
        pass

    def close(self):
        self.channel.close()
        os.close(self.output)
