"""Machines of a run as their coordinator has them: over real links, with their ends in the test's hands."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_runner.core.launch_plan import DevicePlan, NodeOptions
from ddp_runner.features.machines.letters import ask
from ddp_runner.features.machines.node_link import QUEUE_BYTES_MAX, NodeLink
from ddp_runner.features.machines.parent import other_nodes
from ddp_runner.features.machines.parent.admission import Meeting
from ddp_runner.features.machines.parent.coordinator import CoordinatorSupervisor
from ddp_runner.features.machines.parent.majority_keeper import KEPT_EVERY_S
from ddp_runner.features.machines.parent.other_nodes import (
    SHUT_S,
    STRANGERS_MAX,
    STRANGERS_OF_ADDRESS_MAX,
    Door,
    NodeGone,
    NodeSaid,
    OtherNodes,
)
from ddp_runner.features.machines.parent.remote_node import OtherMachines, RemoteNode
from ddp_runner.features.machines.rules.node_messages import (
    FROM_COORDINATOR,
    FROM_FOLLOWER,
    Answer,
    FenceRank,
    Folders,
    Hello,
    OverNoted,
    Parked,
    Question,
    RankGone,
    RunOver,
    Said,
)
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.processes.resources import StorePlace
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.exits import RunStatus, StopReason
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.rules.lifecycle import RankEvent
from ddp_runner.kernel.rules.recovery import GiveUp
from ddp_runner.kernel.system.folder_owner import FolderOwner, Owner, new_term
from ddp_runner.kernel.wire import packets as wire
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import RunEnds
from ddp_runner.kernel.wire.messages import Ready
from ddp_runner.supervisor.assembly import assembled
from ddp_runner.supervisor.node_plans import node_plan
from tests.supervisor import simulated

TOKEN = b"0123456789abcdef"
OPTIONS = NodeOptions(least=1, most=2, host="node0", port=29400)


class Coordinator:
    """One that has ranks 0 and 1, and a machine with ranks 2 and 3 at the other end of a link."""

    def __init__(self, folder, **recovery):
        self.simulation = simulated.Simulation(ranks=1, **recovery)
        self.clock = self.simulation.clock
        cpu = DevicePlan(device="cpu", name="CPU", visible_index=None)
        old = self.simulation.run.plan
        plan = replace(old, devices=(cpu,) * 4, world_size=4, nodes=OPTIONS)
        self.selector = simulated.InstantSelector()
        self.home = Node(
            node_plan(plan),
            self.selector,
            system=simulated.System(self.simulation, self.simulation.home),
            clock=self.clock,
            ranks=range(2),
            store=StorePlace.on_this_machine(0),
        )
        slots = {rank: self.home.slot(rank) for rank in range(4)}
        self.other = RemoteNode(1, ranks=(2, 3), slots=slots, clock=self.clock)
        run = assembled(
            plan,
            self.home,
            outputs=self.simulation.outputs,
            directories=None,
            published=simulated.Directory(self.simulation),
            clock=self.clock,
            others=[self.other],
        )
        self.supervisor = CoordinatorSupervisor(
            run.run,
            run.parts,
            plan=plan,
            recorder=run.recorder,
            machines=OtherMachines(
                nodes=(self.other,), owner=FolderOwner(folder, new_term()), probes=()
            ),
        )
        self.door = socket.create_server(("127.0.0.1", 0))
        self.links = OtherNodes(
            plan,
            Door(
                meeting=Meeting(
                    options=OPTIONS, ranks=2, meaning={}, versions={}, token=TOKEN, silent_s=3.0
                ),
                listening=self.door,
                store=("node0", 1),
                term="a",
            ),
            nodes=[self.other],
            selector=self.selector,
            coordinator=self.supervisor,
            clock=self.clock,
        )
        ours, theirs = socket.socketpair()
        self.theirs = NodeLink(theirs, token=TOKEN, listens=False)
        link = NodeLink(ours, token=TOKEN, listens=True)
        for _ in range(2):
            link.flush()
            self.theirs.flush()
            link.receive()
            self.theirs.receive()
        self.selector.register(link, selectors.EVENT_READ, (self.links, link))
        hello = Hello(
            host="node1",
            node_rank=None,
            ranks=2,
            run_id="none",
            meaning={},
            versions={},
            supervisor="a",
        )
        self.other.joined(link, hello)

    @property
    def ranks(self):
        return self.supervisor.world.ranks

    def heard(self):
        """What the machine has heard since the last time."""
        contents = self.theirs.receive()
        return [wire.decode(content, FROM_COORDINATOR) for content in contents]

    def hears(self, message):
        """The machine says something; what follows."""
        self.theirs.send(wire.encode(message))
        return list(self.links.read(self.other.link))

    def ready(self, wait_s):
        """What of the door and the links is ready to be read."""
        found = selectors.DefaultSelector.select(self.selector, wait_s)
        return [(key, mask) for key, mask in found if key.data and key.data[0] is self.links]

    def have_all(self, *events):
        for handle in self.ranks:
            for event in events:
                handle.machine.advance(event)

    def close(self):
        self.theirs.close()
        self.links.end(RunEnds(status="completed", exit_code=0))
        self.home.close()
        self.simulation.close()


@pytest.fixture
def coordinator(tmp_path):
    made = Coordinator(tmp_path, node_patience_s=0)
    yield made
    made.close()


TO_TRAINING = (
    RankEvent.SPAWNED,
    RankEvent.GOT_READY,
    RankEvent.FORM_SENT,
    RankEvent.GOT_FORMED,
)


def test_a_machine_that_reads_nothing_is_lost_at_once(coordinator):
    """What is ordered of it would be missing, so that nobody may count on it."""
    order = RunEnds(status="completed", exit_code=0, line="x" * 200_000)
    for _ in range(2 * QUEUE_BYTES_MAX // len(order.line)):
        coordinator.other.order(order)
    (gone,) = coordinator.links.look(coordinator.clock.monotonic())
    assert isinstance(gone, NodeGone)
    assert "has not read 4 MB" in gone.why
    assert not coordinator.other.is_there


def test_ranks_beside_the_one_that_saves_last_are_fenced_on_their_machine(coordinator):
    """Before it is asked, over the same link; here the board says so at once."""
    world = coordinator.supervisor.world
    for handle in coordinator.ranks:
        world.fence(handle, is_fenced=handle.rank != 2)
    assert coordinator.heard() == [
        FenceRank(rank=2, is_fenced=False),
        FenceRank(rank=3, is_fenced=True),
    ]
    assert [handle.slot.get(Cell.FENCED) for handle in coordinator.ranks] == [1, 1, 0, 1]
    assert FenceRank not in FROM_FOLLOWER


def gone(*, killed_for_memory, rank=2):
    return RankGone(
        rank=rank,
        process=0,
        exit_code=None,
        signal_number=9,
        age_s=0.0,
        killed_for_memory=killed_for_memory,
        last="",
        when_asked="",
        before_log="",
        now_ns=1,
        cells=[],
    )


def test_only_the_newest_end_there_is_taken_for_the_kernels(coordinator):
    """One that was reported and that nobody asked about is not kept for a later one."""
    now_s = coordinator.clock.monotonic()
    coordinator.hears(gone(killed_for_memory=True))
    assert coordinator.other.claim_kernel_kill(now_s)
    assert not coordinator.other.claim_kernel_kill(now_s)
    coordinator.hears(gone(killed_for_memory=True))
    coordinator.hears(gone(killed_for_memory=False, rank=3))
    assert not coordinator.other.claim_kernel_kill(now_s)


def test_a_machine_whose_ranks_have_finished_is_not_missed(coordinator):
    """The run has all its ranks, however early their machine goes."""
    supervisor = coordinator.supervisor
    supervisor.facts.ever_formed = True
    coordinator.have_all(*TO_TRAINING)
    for rank in (2, 3):
        coordinator.ranks[rank].machine.advance(RankEvent.GOT_FINISHED)
    supervisor.machines.on_event(coordinator.links.lose(coordinator.other, "it has closed"))
    supervisor._look_at_missing(coordinator.clock.monotonic() + 100.0)
    assert len(supervisor.world.present) == 4
    assert supervisor.facts.inexact_reasons == []


def test_a_machine_that_is_lost_costs_one_reason(coordinator):
    """Control, and a word for all of its ranks; what follows later has another."""
    supervisor = coordinator.supervisor
    supervisor.facts.ever_formed = True
    coordinator.have_all(*TO_TRAINING)
    supervisor.machines.on_event(coordinator.links.lose(coordinator.other, "it has closed"))
    supervisor._look_at_missing(coordinator.clock.monotonic() + 100.0)
    assert supervisor.facts.inexact_reasons == ["2 of 4 ranks from step 0"]
    supervisor.facts.committed_step = 7
    supervisor._repair.returning.drop(coordinator.ranks[1], coordinator.clock.monotonic())
    assert supervisor.facts.inexact_reasons == [
        "2 of 4 ranks from step 0",
        "1 of 4 ranks from step 7",
    ]


@pytest.mark.parametrize(
    ("rank", "shares_logs", "where"),
    [
        (1, True, "{folder}/rank_1.log"),
        (1, False, "{folder}/rank_1.log"),
        (3, True, "node 1: {folder}/rank_3.log"),
        (3, False, "rank_3.log on node 1"),
    ],
)
def test_the_last_line_says_on_which_machine_the_log_is(coordinator, rank, shares_logs, where):
    """A path alone would be looked for on the coordinator's, and it is that of its folder."""
    supervisor = coordinator.supervisor
    folders = Folders(shares_checkpoints=True, shares_logs=shares_logs)
    supervisor.machines.on_event(NodeSaid(node=coordinator.other, message=folders))
    coordinator.simulation.outputs.may_write = True
    fault = Fault(kind=FaultKind.RANK_RAISED, rank=rank, step=3, cause="no", at_ns=0)
    known = SimpleNamespace(incident=SimpleNamespace(attribution=SimpleNamespace(causes=())))
    supervisor.recorder.accounting.faults.append(known)
    supervisor.run_end.give_up(GiveUp(fault=fault, reason="it does", status=RunStatus.GAVE_UP))
    folder = supervisor.run.log_dir
    where = where.format(folder=folder)
    assert supervisor.ending.reason.endswith(f"the last: rank {rank}: no at step 3; see {where}")


@pytest.mark.parametrize(("rank", "where"), [(1, ""), (3, "node 1: ")])
def test_bad_input_on_another_machine_is_said_to_be_there(coordinator, rank, where):
    """Such as a file that only that one lacks."""
    cause = "--data=corpus.txt: does not exist"
    fault = Fault(kind=FaultKind.BAD_INPUT, rank=rank, step=0, cause=cause, at_ns=0)
    supervisor = coordinator.supervisor
    supervisor.run_end.give_up(GiveUp(fault=fault, reason="", status=RunStatus.FAILED))
    assert supervisor.ending.error_line == f"{where}{cause}"


@pytest.mark.parametrize(
    ("term", "newest", "is_kept", "taken"),
    [
        ("before", EMPTY_STEP, True, "copy of the state in memory, of step 30"),
        ("before", 30, True, "checkpoint, of step 30"),
        ("other", 20, False, "checkpoint, of step 20"),
    ],
    ids=["nothing is newer", "its own file is newer", "of a course that was left"],
)
def test_a_copy_on_another_machine_is_taken_where_it_is_the_newest(
    coordinator, term, newest, is_kept, taken
):
    """It has outlived its ranks and the coordinator before: it is asked for, by the rule for ranks that wait."""
    supervisor, node = coordinator.supervisor, coordinator.other
    supervisor._owner_before = Owner(term="before", without=())
    hello = replace(
        node.hello,
        copied=Parked(node=1, term=term, generation=3, run_id="r", inexact_reasons=["why"]),
        copied_step=30,
        newest_step=newest,
    )
    supervisor.machines.on_event(coordinator.links._take_in(node, node.link, hello))
    (welcome,) = coordinator.heard()
    assert (welcome.keeps_copied, welcome.keeps_parked) == (is_kept, False)
    assert supervisor.facts.inexact_reasons == (["why"] if is_kept else [])
    assert supervisor._repair.loaders_elsewhere == {2}
    said = [line for _, line in coordinator.simulation.outputs.said if "has a newer" in line]
    assert said == [f"node 1 has a newer {taken}: it loads it"]


def test_nothing_is_newer_than_what_ranks_here_have_kept(coordinator):
    """The ranks of a machine have ended, and left a copy and a file: those here, in their generation, are further."""
    supervisor, node = coordinator.supervisor, coordinator.other
    supervisor._owner_before = Owner(term="before", without=())
    supervisor.world.ranks[0].ready = Ready(
        rank=0,
        committed_step=31,
        run_id="r",
        total_steps=99,
        steps_per_epoch=9,
        train_samples=9,
        parameters=1,
        device="cpu",
    )
    copied = Parked(node=1, term="before", generation=3, run_id="r", inexact_reasons=[])
    hello = replace(node.hello, copied=copied, copied_step=30, newest_step=30)
    supervisor.machines.on_event(coordinator.links._take_in(node, node.link, hello))
    assert supervisor._repair.loaders_elsewhere == set()
    assert not any("has a newer" in line for _, line in coordinator.simulation.outputs.said)


@pytest.mark.parametrize(
    ("addresses", "kept"), [(["127.0.0.1"], STRANGERS_OF_ADDRESS_MAX), (None, STRANGERS_MAX)]
)
def test_silent_strangers_keep_no_machine_out(coordinator, addresses, kept):
    """The oldest one goes, of one address or of many; who proves itself is heard among them."""
    where, links = coordinator.door.getsockname(), coordinator.links
    addresses = addresses or [f"127.0.0.{number}" for number in range(1, STRANGERS_MAX + 1)]
    silent = []
    with contextlib.ExitStack() as stack:
        for number in range(2 * STRANGERS_MAX):
            source = (addresses[number % len(addresses)], 0)
            one = socket.create_connection(where, source_address=source)
            silent.append(stack.enter_context(one))
            assert not list(links.read(None))
        assert [_is_open(one) for one in silent].count(True) == kept
        assert all(map(_is_open, silent[-kept:]))
        asking = stack.enter_context(ThreadPoolExecutor(1)).submit(
            ask, socket.create_connection(where), token=TOKEN, limit_s=5.0
        )
        while not asking.done():
            for key, _ in coordinator.ready(0.01):
                assert not list(key.data[0].read(key.data[1]))
        assert asking.result().run_id == "none"


def test_a_machine_that_knows_the_token_outlasts_silent_strangers(coordinator):
    """It has proved itself, and has not said yet who it is."""
    where, links = coordinator.door.getsockname(), coordinator.links
    with contextlib.ExitStack() as stack:
        known = NodeLink(socket.create_connection(where), token=TOKEN, listens=False)
        stack.callback(known.close)
        while not (known.is_proved and any(one.is_proved for one in links._strangers)):
            known.flush()
            for key, _ in coordinator.ready(0.01):
                assert not list(key.data[0].read(key.data[1]))
            known.receive()
        for _ in range(2 * STRANGERS_MAX):
            stack.enter_context(socket.create_connection(where))
            assert not list(links.read(None))
        known.send(wire.encode(Question()))
        heard = []
        while not heard:
            for key, _ in coordinator.ready(0.01):
                assert not list(key.data[0].read(key.data[1]))
            heard = known.receive()
        assert isinstance(wire.decode(heard[0], FROM_COORDINATOR), Answer)


def test_no_descriptor_left_shuts_the_door_for_a_moment(coordinator, monkeypatch):
    """Who knocks would have the loop turn without a pause; once there is one, it is heard."""
    links, where = coordinator.links, coordinator.door.getsockname()

    class Full:
        def __getattr__(self, name):
            return getattr(coordinator.door, name)

        def accept(self):
            raise OSError(errno.EMFILE, "Too many open files")

    with socket.create_connection(where):
        (_,) = coordinator.ready(1.0)
        with monkeypatch.context() as patched:
            patched.setattr(links, "_listening", Full())
            assert not list(links.read(None))
            assert not coordinator.ready(0.0)
        assert not list(links.look(coordinator.clock.monotonic()))
        assert not coordinator.ready(0.0)
        assert not list(links.look(coordinator.clock.monotonic() + SHUT_S))
        (_,) = coordinator.ready(1.0)
        assert not list(links.read(None))
        assert len(links._strangers) == 1


def _is_open(connection):
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while part := connection.recv(1 << 10):
            assert part
        return False
    return True


class Majority:
    """A keeper whose disk is full until it is said to be free; ``missing``: who must come first."""

    path = Path("kept/.votes")

    def __init__(self):
        self.is_full, self.lacks, self.formed = True, [], []

    def decides(self, there):
        return True

    def missing(self, there):
        return self.lacks

    def ends(self, there):
        self.lacks = []

    def forms(self, generation, there):
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.formed.append(generation)


def test_a_full_disk_lets_nobody_train_and_ends_no_run_at_once(coordinator):
    """One warning; tried again each second; in the end as a run ends whose machines do not come."""
    supervisor, majority = coordinator.supervisor, Majority()
    supervisor._quorum.keeper = majority
    assert not supervisor._may_form(1)
    coordinator.clock.now_s += KEPT_EVERY_S
    assert not supervisor._may_form(1)
    said = [line for level, line in coordinator.simulation.outputs.said if level == "WARNING"]
    assert said == ["nobody trains while kept/.votes cannot be written: No space left on device"]
    assert supervisor.ending is None
    majority.is_full = False
    coordinator.clock.now_s += KEPT_EVERY_S
    assert supervisor._may_form(1)
    assert majority.formed == [1]
    majority.is_full = True
    assert not supervisor._may_form(2)
    coordinator.clock.now_s += supervisor._quorum.wait_s + KEPT_EVERY_S
    assert not supervisor._may_form(2)
    assert supervisor.ending.status is RunStatus.PREEMPTED


def test_a_stop_while_a_majority_is_awaited_ends_the_run(coordinator):
    """All who are there are ready, so that nothing else would end it."""
    supervisor, majority = coordinator.supervisor, Majority()
    supervisor._quorum.keeper, majority.lacks = majority, [2]
    supervisor.facts.ever_formed = True
    assert not supervisor._may_form(1)
    assert supervisor.ending is None
    assert not supervisor.run_end.is_known
    supervisor._stop = StopReason.INTERRUPTED
    assert not supervisor._may_form(1)
    assert supervisor.run_end.is_known


def test_a_majority_gone_for_good_has_a_line_of_advice(coordinator):
    """On each machine: the newest record of all counts."""
    supervisor, majority = coordinator.supervisor, Majority()
    supervisor._quorum.keeper, majority.lacks = majority, [2, 3]
    assert not supervisor._may_form(1)
    coordinator.clock.now_s += supervisor._quorum.wait_s + 1.0
    assert not supervisor._may_form(1)
    assert "without node 2, node 3" in supervisor.ending.reason
    assert "remove .votes in the checkpoint folder on each machine" in supervisor.ending.reason


def test_a_machine_that_is_to_come_again_was_not_there(coordinator):
    """It is no machine that is lost, so that nothing counts against it."""
    links = coordinator.links
    coordinator.supervisor.machines.quorum.ballot_for = lambda hello: None
    ours, theirs = socket.socketpair()
    link = NodeLink(ours, token=TOKEN, listens=True)
    links._strangers[link] = None
    coordinator.selector.register(link, selectors.EVENT_READ, (links, link))
    hello = replace(coordinator.other.hello, supervisor="b", host="node2")
    assert list(links._meet(link, hello)) == []
    assert links._strangers == {}
    assert links.spares == []
    theirs.close()


def test_an_end_is_said_once_those_there_have_noted_it(coordinator, monkeypatch):
    """Those that hang up or say nothing are waited for no longer than for a hang-up."""
    monkeypatch.setattr(other_nodes, "LAST_WORDS_S", 0.5)
    said, links, other = [], coordinator.links, coordinator.other

    def note_end():
        said.append(other.has_noted_end)
        other.is_to_note_end = True
        other.order(RunOver(ballot=1, generation=1, machines=("a",)))

    coordinator.supervisor.note_end = note_end
    coordinator.theirs.send(wire.encode(Said(text="a", level="INFO")))
    coordinator.theirs.send(wire.encode(OverNoted()))
    links.announce_end(RunEnds(status=RunStatus.COMPLETED, exit_code=0, line=""))
    assert said == [False, True]
    assert [type(one) for one in coordinator.heard()] == [RunOver, RunOver, RunEnds]
