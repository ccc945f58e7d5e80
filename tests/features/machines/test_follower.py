"""What the supervisor of another machine does by itself, over simulated processes."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, replace

import pytest

from ddp_runner.checkpoint.slot_header import SlotHeader
from ddp_runner.core.launch_plan import DevicePlan, NodeOptions, OpaqueProgram
from ddp_runner.features.machines.parent.follower import Follower
from ddp_runner.features.machines.rules.node_messages import (
    STACKS_BYTES_MAX,
    Beat,
    FenceRank,
    FromRank,
    Parked,
    StartRank,
)
from ddp_runner.kernel.processes.node import Node
from ddp_runner.kernel.processes.rank_start import RankStart
from ddp_runner.kernel.rank.fenced_disk import may_not_publish
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.rules.lifecycle import RankEvent
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.events import Faulted, RepairedInPlace
from ddp_runner.kernel.wire.messages import Metrics, Ready, decode, encode
from ddp_runner.supervisor.node_plans import node_plan
from tests.supervisor import simulated


class Machine:
    """Ranks 2 and 3 of four; what it says is in ``said``."""

    def __init__(self, opaque=None):
        self.simulation = simulated.Simulation(ranks=1)
        cpu = DevicePlan(device="cpu", name="CPU", visible_index=None)
        plan = replace(
            self.simulation.run.plan,
            devices=(cpu,) * 4,
            world_size=4,
            nodes=NodeOptions(least=1, most=2, host="node0", port=29400),
            opaque=opaque,
        )
        self.said = []
        self.clock = self.simulation.clock
        self.node = Node(
            node_plan(plan),
            simulated.InstantSelector(),
            system=simulated.System(self.simulation, self.simulation.home),
            clock=self.clock,
            ranks=(2, 3),
        )
        self.follower = Follower(
            plan,
            self.node,
            lease_s=2.4,
            report=self.said.append,
            show=lambda text, level: None,
            clock=self.clock,
        )

    def kernel_kills_one(self):
        self.node.kernel_kills._unclaimed.append(self.clock.monotonic())

    def close(self):
        self.node.close()
        self.simulation.close()


@pytest.fixture
def machine():
    made = Machine()
    yield made
    made.close()


def test_the_kernels_kill_of_a_loader_worker_is_nobody_elses(machine):
    """A rank there that somebody kills just after it was not killed for memory."""
    fault = Fault(kind=FaultKind.LOADER_WORKER_DIED, rank=3, step=1, cause="killed", at_ns=1)
    machine.kernel_kills_one()
    machine.kernel_kills_one()
    said = RepairedInPlace(rank=3, fault=fault, action="another loads", seconds=0.1, kernel_kills=1)
    machine.follower.on_packet(encode(said), 3)
    assert [type(one) for one in machine.said] == [FromRank]
    now_s = machine.clock.monotonic()
    assert machine.node.claim_kernel_kill(now_s)  # the other one
    assert not machine.node.claim_kernel_kill(now_s)


def test_what_only_the_coordinator_acts_on_is_passed_on_as_it_came(machine):
    """Byte for byte, and unread: this machine need not understand it."""
    packets = [encode(Metrics(rank=3, step=4, values={"loss": 1.5})), b'{"v": 1, "type": "Newer"}']
    for packet in packets:
        machine.follower.on_packet(packet, 3)
    assert [one.packet for one in machine.said] == packets


@pytest.mark.parametrize(("others_bytes", "expected"), [(2, 1), (1, 0), (0, 0)])
def test_the_kernel_begins_with_the_largest_there_too(machine, others_bytes, expected):
    """Of two that were killed the larger one is likelier to be its doing."""
    asked, other = machine.follower.handles
    for handle, size in ((asked, 1), (other, others_bytes)):
        handle.machine.advance(RankEvent.SPAWNED)
        handle.rss_bytes = size
    pid = 4242
    machine.node.processes[3].pid = pid
    machine.simulation.unreaped_kills.add(pid)
    assert machine.follower._larger_ones_killed(asked) == expected
    other.machine.advance(RankEvent.KILL_SENT)  # by this machine itself
    assert machine.follower._larger_ones_killed(asked) == 0


def test_a_fence_from_the_coordinator_is_on_the_board_of_the_ranks(machine):
    """That is where they look before they publish."""
    for is_fenced in (True, False):
        machine.follower.on_node_message(FenceRank(rank=3, is_fenced=is_fenced))
        assert machine.node.slot(3).get(Cell.FENCED) == is_fenced
        assert machine.node.slot(2).get(Cell.FENCED) == 0


def test_each_stack_of_a_look_is_cut_to_its_share(machine, monkeypatch):
    """A frame that is too long could not be sent."""
    for process in machine.node.processes.values():
        monkeypatch.setattr(process, "has_answered", lambda now_s: True)
        monkeypatch.setattr(process, "stack_when_asked", lambda: "\U0001f600" * 8_000)
    machine.follower.look(machine.clock.monotonic())
    stacks = [one.stack for one in machine.said[-1].ranks.values()]
    assert [len(json.dumps(stack)) for stack in stacks] == [STACKS_BYTES_MAX // 2 - 2] * 2


def test_words_of_a_rank_without_a_log_follow_no_link(machine, tmp_path):
    """Whoever may write in the folder has put one there. Control: without it they are appended."""
    machine.follower._log_dir = tmp_path
    elsewhere, log = tmp_path / "elsewhere", tmp_path / "rank_3.log"
    elsewhere.write_text("theirs")
    log.symlink_to(elsewhere)
    machine.follower._keep_words(3, "mine")
    assert elsewhere.read_text() == "theirs"
    log.unlink()
    for words in ("one", "two"):
        machine.follower._keep_words(3, words)
    assert log.read_text() == "one\ntwo\n"


def test_a_machine_that_was_suspended_has_no_lease_left(machine):
    """Others may have gone on meanwhile. What was answered before does not renew it, a look from then on does."""
    follower, clock = machine.follower, machine.clock

    def answer(number):
        beat = Beat(number=number, generation=1, committed_step=1, is_fault_free=True)
        follower.on_node_message(beat)

    def may_publish():
        return not may_not_publish(machine.node.slot(2), clock.boottime_ns())

    for _ in range(2):
        follower.look(clock.monotonic())
    answer(1)
    assert (may_publish(), follower.unanswered_s) == (True, 0.0)
    clock.suspended_s = 60.0
    answer(2)
    assert (may_publish(), follower.unanswered_s) == (False, 60.0)
    follower.look(clock.monotonic())
    answer(3)
    assert (may_publish(), follower.unanswered_s) == (True, 0.0)


def test_what_a_rank_taken_back_says_of_before_is_not_passed_on(machine):
    """Its supervisor stood still, and reads only now that the peers were lost: an incident of its own it is not."""
    follower, node = machine.follower, machine.node
    ready = Ready(
        rank=2,
        committed_step=3,
        run_id="r",
        total_steps=9,
        steps_per_epoch=9,
        train_samples=9,
        parameters=1,
        device="cpu",
    )
    lost_peer = Faulted(
        fault=Fault(kind=FaultKind.COLLECTIVE_FAILED, rank=2, step=4, cause="closed", at_ns=1)
    )
    for handle in follower.handles:
        handle.machine.advance(RankEvent.SPAWNED)
        handle.pid = node.processes[handle.rank].pid = 4240 + handle.rank
    follower.on_packet(encode(ready), 2)
    follower._world.ranks[2].machine.advance(RankEvent.FORM_SENT)
    follower.cut_off()
    assert follower.parked is not None
    machine.said.clear()
    follower.welcomed(keeps_parked=True, keeps_copied=True)
    follower.on_node_message(StartRank(rank=2, process=1, start=asdict(RankStart(loads=False))))
    for message in (Metrics(rank=2, step=3, values={}), lost_peer, ready, lost_peer):
        follower.on_packet(encode(message), 2)
    passed_on = [decode(one.packet) for one in machine.said if isinstance(one, FromRank)]
    assert passed_on == [replace(ready, run_id=""), lost_peer]
    assert {one.process for one in machine.said if isinstance(one, FromRank)} == {1}


def test_a_copy_in_memory_is_offered_and_cleared_where_refused(machine):
    """The newest of the two, by its header; nothing is offered by who was in no generation yet."""
    follower, slots = machine.follower, machine.node.shared.descriptors("memory_slots")
    for slot, (step, sealed) in zip(slots, ((40, 8), (30, 9)), strict=True):
        header = SlotHeader(
            step=step, sealed=sealed, payload_bytes=1, described_bytes=1, checksum="c"
        )
        os.pwrite(slot, header.to_bytes(), 0)
    assert (follower.copied, follower.copied_step) == (None, EMPTY_STEP)
    follower._term, follower._generation, follower._run_id = "t", 3, "r"
    for _ in range(2):
        assert follower.copied_step == 30
        assert follower.copied == Parked(node=1, term="t", generation=3, run_id="r")
        follower.welcomed(keeps_parked=False, keeps_copied=True)
    follower.welcomed(keeps_parked=False, keeps_copied=False)
    assert (follower.copied, follower.copied_step) == (None, EMPTY_STEP)


def test_a_scripts_generation_is_known_once_the_coordinator_says_so():
    """Its ranks begin without each other, so that one which trains says nothing about other machines."""
    with contextlib.closing(Machine(OpaqueProgram(name="train.py", module="m"))) as machine:
        follower = machine.follower
        for is_fault_free in (False, True):
            beat = Beat(
                number=1, generation=4, committed_step=0, is_fault_free=is_fault_free, restarts=0
            )
            follower.on_node_message(beat)
            assert follower.trains_in(4) == is_fault_free
            assert not follower.trains_in(5)
