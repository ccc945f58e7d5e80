"""Where nobody can be late, most ranks are not looked at: that decides as looking at all of them does."""

from __future__ import annotations

import random
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_runner.core.settings import RecoverySettings
from ddp_runner.kernel.parent.rank_handle import HeadCount, RankHandle
from ddp_runner.kernel.recovery.hang_detector import ProgressWatch
from ddp_runner.kernel.rules.lifecycle import (
    IN_WORLD,
    MEMBERSHIP_TABLE,
    RANK_TABLE,
    Membership,
    MembershipEvent,
    RankEvent,
    RankState,
)
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.wire.board import SLOT_BYTES, Board, Cell
from ddp_runner.kernel.wire.messages import LoaderWorkers, Metrics
from tests.supervisor.simulated import TICK_S, Clock, Simulation

PHASES = [
    *(Phase.DATA, Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.REDUCE),
    *(Phase.OPTIMIZER, Phase.CHECKPOINT, Phase.EVALUATE, Phase.COMPARE, Phase.COMPILE),
]


class _AtAll(ProgressWatch):
    """Looks at every rank at each tick."""

    def _who_needs_a_look(self, handles):
        return None


class _AtFew(ProgressWatch):
    """As it is; counts how often it left somebody out."""

    left_out = 0

    def _who_needs_a_look(self, handles):
        few = super()._who_needs_a_look(handles)
        self.left_out += few is not None and len(few) < len(handles)
        return few


class _Ranks:
    """A world of ranks that train, two a machine, whose board a test writes."""

    def __init__(self, ranks):
        self.clock = Clock()
        self._board = Board(memoryview(bytearray(ranks * SLOT_BYTES)), ranks)
        self.counts = HeadCount()
        self.present = [
            RankHandle(rank, slot=self._board.slot(rank), counts=self.counts)
            for rank in range(ranks)
        ]
        for handle in self.present:
            handle.begin(now_s=self.clock.now_s, loads=False)
            handle.member.advance(MembershipEvent.REPLACED)
            for event in (RankEvent.GOT_READY, RankEvent.FORM_SENT, RankEvent.GOT_FORMED):
                handle.machine.advance(event)
        self.stopped = {}  # rank -> since when
        self.heard_s = {}  # machine -> its newest look; without one it is this machine

    def present_cells(self, cell):
        return self._board.slot(0).of_all(cell)

    def unheard_s(self, now_s):
        return max((now_s - heard_s for heard_s in self.heard_s.values()), default=0.0)

    def unheard_of_s(self, handle, now_s):
        return now_s - self.heard_s.get(handle.rank // 2, now_s)

    def known_ns(self, now_ns):
        now_s = now_ns / 1e9
        return [now_ns - int(self.unheard_of_s(one, now_s) * 1e9) for one in self.present]

    def is_here(self, handle):
        return handle.rank // 2 not in self.heard_s

    def is_stopped(self, handle):
        return handle.rank in self.stopped

    def stopped_s(self, handle, now_s):
        return now_s - self.stopped.get(handle.rank, now_s)


def _live(world, draw, *, pace_s):
    """What may happen to ranks within a tick."""
    pause_s = draw.choice([0.0] * 60 + [0.4, 3.0])
    world.clock.now_s += 0.1 + pause_s
    now_ns = world.clock.monotonic_ns()
    for machine in world.heard_s:
        if draw.random() < 0.4:
            world.heard_s[machine] = world.clock.now_s
    if draw.random() < 0.02:
        world.heard_s[draw.randrange(3)] = world.clock.now_s
    for handle in world.present:
        if handle.rank in world.stopped:
            if draw.random() < 0.1:
                del world.stopped[handle.rank]
            continue
        if draw.random() < 0.003:
            world.stopped[handle.rank] = world.clock.now_s
        _work(handle, draw, now_ns=now_ns, pace_s=pace_s)


def _work(handle, draw, *, now_ns, pace_s):
    slot = handle.slot
    if draw.random() < 0.003:  # it is replaced by another process
        handle.processes += 1
        handle.steps_before = slot.get(Cell.OWN_STEPS)
    if draw.random() < 0.1 / pace_s:
        slot.stamp(draw.choice(PHASES), now_ns - draw.randrange(10**8))
    if draw.random() < 0.3:
        slot.add(Cell.OWN_STEPS, 1)
        slot.add(Cell.COMMITTED_STEP, 1)
        slot.set(Cell.STEP, slot.get(Cell.COMMITTED_STEP))
        slot.set(Cell.BUSY_NS, draw.randrange(10**8))
        slot.set(Cell.REDUCE_NS, draw.randrange(10**7))
    if draw.random() < 0.01:
        slot.add(Cell.COMPARISON_NS, draw.randrange(2 * 10**8))


def _learnt(watch):
    """All that later verdicts depend on."""
    first, long, compared = watch._first_steps, watch._long_phases, watch._comparisons
    counted = {rank: ns for rank, ns in compared._counted_ns.items() if ns}
    return (
        (first.longest_s, first._now),
        (long._now, list(long._ended), long._paused, long._doubted, long._outlasted_s),
        (compared.longest_s, counted),
        (watch._pauses._together, watch._counted_since_ns, watch._awake_since_ns),
        (list(watch._step_s), watch._verdicts_in_a_row, watch._seen_step, watch._best_step),
    )


def test_looking_at_few_decides_as_looking_at_all():
    """The same verdict at each tick, and the same learnt from it, whatever the ranks do."""
    verdicts = left_out = 0
    for seed in range(40):
        draw = random.Random(seed)
        world = _Ranks(draw.choice([1, 2, 3, 6]))
        limits = RecoverySettings(
            hang_min_s=draw.choice([0.5, 2.0]),
            first_step_timeout_s=draw.choice([2.0, 20.0]),
            evaluation_timeout_s=draw.choice([1.0, 30.0]),
            checkpoint_timeout_s=draw.choice([1.0, 30.0]),
        )
        few = _AtFew(limits, loading_s=5.0, world=world, clock=world.clock)
        everybody = _AtAll(limits, loading_s=5.0, world=world, clock=world.clock)
        pace_s = draw.choice([0.12, 0.3, 1.0, 3.0])
        for _ in range(200):
            _live(world, draw, pace_s=pace_s)
            found = few.look(world.present)
            assert found == everybody.look(world.present)
            assert _learnt(few) == _learnt(everybody)
            verdicts += found is not None
        left_out += few.left_out
    assert verdicts > 100
    assert left_out > 1000


@settings(max_examples=200, deadline=None)
@given(acts=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 30)), max_size=60))
def test_the_counts_are_what_looking_at_each_rank_gives(acts):
    """After any sequence of events."""
    counts = HeadCount()
    slot = Board(memoryview(bytearray(SLOT_BYTES)), 1).slot(0)
    ranks = [RankHandle(rank, slot=slot, counts=counts) for rank in range(4)]
    for rank, of_process, number in acts:
        handle = ranks[rank]
        machine = handle.machine if of_process else handle.member
        table = RANK_TABLE if of_process else MEMBERSHIP_TABLE
        events = [event for state, event in table if state is machine.state]
        before = [one.rank for one in ranks if one.membership in IN_WORLD], counts.world_changes
        machine.advance(events[number % len(events)])
        present = [one for one in ranks if one.membership in IN_WORLD]
        for state in RankState:
            assert counts.present_in(state) == sum(one.state is state for one in present)
            is_all = all(one.state is state for one in present)
            assert counts.are_all_present(state) == is_all
        for membership in Membership:
            found = sum(one.membership is membership for one in ranks)
            assert counts.members(membership) == found
        assert counts.is_any_missing == any(one.needs_process for one in ranks)
        assert before[0] == [one.rank for one in present] or before[1] != counts.world_changes


def test_a_world_that_changes_is_seen_at_once():
    """The list of those that are present is kept only as long as nobody leaves or comes."""
    counts = HeadCount()
    slot = SimpleNamespace(set=lambda *_: None)
    handle = RankHandle(0, slot=slot, counts=counts)
    before = counts.world_changes
    handle.member.advance(MembershipEvent.REPLACED)
    assert counts.world_changes == before
    handle.member.advance(MembershipEvent.DROPPED)
    assert counts.world_changes > before


def test_figures_alone_are_no_reason_to_look_at_the_run(monkeypatch):
    """They are taken in at once; the run is looked at with the next tick, and at once for any other message."""
    simulation, turns = Simulation(ranks=2), []
    simulation.to_step(3)
    advance = simulation.supervisor.advance
    monkeypatch.setattr(simulation.supervisor, "advance", lambda: (turns.append(1), advance()))

    def say(message):
        simulation.send(simulation.rank(1), message)
        simulation.loop._turn()
        return len(turns)

    simulation.loop._turn()
    figures = Metrics(rank=1, step=3, values={"loss": 7.5, "epoch": 0.0})
    assert (say(figures), simulation.world.ranks[1].metrics["loss"]) == (1, 7.5)
    assert say(LoaderWorkers(rank=1, pids=(5,))) == 2
    assert say(figures) == 2
    simulation.clock.now_s += TICK_S
    assert say(figures) == 3
    simulation.close()
