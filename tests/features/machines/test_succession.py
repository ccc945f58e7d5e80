"""Who coordinates once the coordinator is lost: the rules, driven in simulated time by whatever can happen to machines."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import pytest

from ddp_runner.features.machines.rules.succession import (
    HOLD_S,
    Act,
    Arbiter,
    Claim,
    GoingOn,
    Kept,
    Stage,
    is_newest,
    why_no_successor,
)
from ddp_runner.kernel.system.folder_owner import Owner

TICK_S = 0.05
STEP_S = 0.1
SILENT_S = (
    1.0  # after which a machine that is cut off parks its ranks, and is lost to its coordinator
)
PATIENCE_S = 1.5
LOOK_S = 0.5  # from one look at the owner to the next
LEASE_S = 2.0  # after which the server of the folder gives up a lock of which it hears nothing
SLOW_S = 0.6 * HOLD_S  # from a word that is read to one that is written, at the most
TERMS = itertools.count(1)
STEPS = itertools.count(1)
SHARED = Arbiter(shares_folder=True, keeps_locks=True)
SCHEDULES, SCHEDULES_ALL = 400, 10_000


@dataclass
class Folder:
    """The shared folder on its server: what it says, and who holds its lock."""

    owner: Owner | None = None
    holder: Machine | None = None
    heard_s: float = 0.0  # of the holder

    def look(self, now_s):
        """The kernel of a machine lets go for a process that has ended; the server for a machine that is silent."""
        one = self.holder
        if one is None:
            return
        if one.reaches_folder:
            self.heard_s = now_s
            if not one.is_alive or one.lock_of != one.life:
                self.holder = None
        elif now_s > self.heard_s + LEASE_S:
            self.holder = None  # of which the machine hears nothing


@dataclass(eq=False)
class Machine:
    """One supervisor and its ranks, of which there is one for all."""

    number: int
    is_alive: bool = True
    has_power: bool = True
    reaches_folder: bool = True
    life: int = 0  # counts its supervisors
    lock_of: int = -1  # which of them has taken the lock
    memory: int = 0  # the newest step that its rank has; 0: none
    term: str = ""  # of its newest generation
    obeys: Machine | None = None
    heard_s: float = 0.0
    leads: bool = False
    ours: str = ""
    claim: Claim = field(default_factory=Claim)
    writes: tuple | None = None  # when, and what, a word that is under way
    # As coordinator.
    going_on: GoingOn = field(default_factory=GoingOn)
    members: frozenset = frozenset()  # of the generation; none while it forms none
    lost_s: dict = field(default_factory=dict)
    looked_s: float = 0.0
    step_at_s: float = 0.0
    is_first: bool = False  # it has formed no generation
    lost: int = 0  # the machine of its newest coordinator

    def end(self):
        """Its supervisor ends, and its rank with it."""
        self.is_alive, self.memory, self.obeys, self.leads = False, 0, None, False
        self.members, self.writes, self.term = frozenset(), None, ""

    def start(self):
        """Another supervisor, with nothing in memory."""
        self.is_alive, self.life, self.claim, self.going_on = (
            True,
            self.life + 1,
            Claim(),
            GoingOn(),
        )
        self.lost_s = {}


class World:
    """Machines, the links between them and a folder; ``newest`` is the last step that was committed."""

    def __init__(self, seed, *, count):
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.folder = Folder()
        self.machines = [Machine(number) for number in range(count)]
        self.cut = set()  # pairs that do not hear each other
        self.least = self.random.choice((1, 1, count - 1, count))
        self.patience_s = self.random.choice((0.0, PATIENCE_S))
        self.newest = next(STEPS)
        first = self.machines[0]
        first.leads, first.ours, first.lock_of = True, f"t{next(TERMS)}", 0
        first.claim.leads()
        self.folder.owner = Owner(term=first.ours, without=())
        self.folder.holder = first
        for one in self.machines:
            one.memory, one.term, one.obeys = self.newest, first.ours, first
        first.members = frozenset(self.machines)

    def hear(self, one, other):
        return (
            one.is_alive
            and other.is_alive
            and one.has_power
            and other.has_power
            and frozenset((one.number, other.number)) not in self.cut
        )

    def read(self, one):
        """What the folder says to this machine; None where it does not reach it."""
        return self.folder.owner if one.reaches_folder else None

    def turn(self):
        """A tick of everybody, in any order."""
        self.now_s += TICK_S
        self.folder.look(self.now_s)
        for one in self.random.sample(self.machines, len(self.machines)):
            if not one.is_alive or self.random.random() < 0.1:  # which comes late
                continue
            if one.writes is not None:
                self._write(one)
            elif one.leads:
                self._coordinate(one)
            else:
                self._follow(one)
        for one in self.machines:
            if one.leads and one.is_alive:
                self._train(one)

    def _write(self, one):
        due_s, word, then = one.writes
        if self.now_s < due_s:
            return
        one.writes = None
        if not one.reaches_folder:
            if not one.leads:
                self._let_go(one)
            return
        self.folder.owner = word
        then()

    def _begin_to_write(self, one, word, then):
        one.writes = (self.now_s + self.random.uniform(0.0, SLOW_S), word, then)

    def _follow(self, one):
        boss = one.obeys
        if boss is not None:
            if self.hear(one, boss) and boss.leads:
                one.heard_s = self.now_s
            elif self.now_s > one.heard_s + SILENT_S * 0.8 or not boss.is_alive:
                one.lost = boss.number
                one.obeys = None  # its ranks leave, and wait with their memory
            return
        kept = Kept(number=one.number, term=one.term, have_left=True) if one.memory else None
        act = one.claim.next(
            self.now_s, kept=kept, arbiter=SHARED, owner=self.read(one), ours=one.ours
        )
        if act is Act.CLAIM:
            self._claim(one)
        elif act is Act.WITHDRAW:
            self._let_go(one)
        elif act is Act.LEAD:
            one.leads, one.members, one.obeys, one.is_first = True, frozenset(), None, True
            one.lost_s = dict.fromkeys(range(len(self.machines)), self.now_s)
            one.claim.leads()
        elif one.claim.stage is Stage.PARKED:
            self._look_for_coordinator(one)

    def _claim(self, one):
        if self.folder.holder is not None or not one.reaches_folder:
            self._look_for_coordinator(one)
            return
        self.folder.holder, self.folder.heard_s, one.lock_of = one, self.now_s, one.life
        before, one.ours = self.folder.owner, f"t{next(TERMS)}"
        if not is_newest(Kept(number=one.number, term=one.term, have_left=True), before):
            self._let_go(one)
            return
        without = tuple(sorted({*before.without, one.lost}))
        word = Owner(term=one.ours, without=without, after=one.term)
        self._begin_to_write(one, word, lambda: self._claimed(one, word))

    def _claimed(self, one, word):
        one.claim.claimed(self.now_s)
        one.going_on.noted(word.without, self.now_s)

    def _let_go(self, one):
        one.lock_of = -1  # which the server hears once it hears of the machine
        one.claim.withdrew()

    def _look_for_coordinator(self, one):
        owner = self.read(one)
        for boss in self.machines:
            if owner and boss.leads and boss.ours == owner.term and self.hear(one, boss):
                one.obeys, one.heard_s = boss, self.now_s
                if not (one.term == boss.ours or self._keeps(one, owner)):
                    one.memory = 0
                boss.lost_s.pop(one.number, None)

    @staticmethod
    def _keeps(one, owner):
        return one.memory and one.term == owner.after and one.number not in owner.without

    def _coordinate(self, one):  # noqa: C901 - as the coordinator does
        owner = self.read(one)
        if self.now_s >= one.looked_s + LOOK_S:
            one.looked_s = self.now_s
            if owner is not None and owner.term != one.ours:
                one.end()
                return
        there = [
            other
            for other in self.machines
            if other is one or (other.obeys is one and self.hear(one, other))
        ]
        missing = [other for other in self.machines if other not in there]
        for other in missing:
            one.lost_s.setdefault(other.number, self.now_s)
        if one.members and all(other in there for other in one.members):
            for other in there:
                one.lost_s.pop(other.number, None)
            if frozenset(there) == one.members:
                return
        one.members = frozenset()  # the generation is over
        if len(there) < self.least:
            return
        late = [m for m in missing if self.now_s > one.lost_s[m.number] + self.patience_s]
        if len(late) < len(missing):
            return
        without = tuple(m.number for m in missing)
        if owner is not None and owner.term == one.ours and owner.without != without:
            after = owner.after
            self._begin_to_write(
                one,
                Owner(term=one.ours, without=without, after=after),
                lambda: one.going_on.noted(without, self.now_s),
            )
            return
        if all(one.going_on.may(n, self.now_s, owner=owner, ours=one.ours) for n in without):
            self._form(one, there, owner)

    def _form(self, one, there, owner):
        if one.is_first:  # which is written before anybody trains
            if owner is not None and owner.term == one.ours:
                word = Owner(term=one.ours, without=owner.without)
                self._begin_to_write(one, word, lambda: setattr(one, "is_first", False))
            return
        newest = max(other.memory for other in there)
        for other in there:
            other.memory, other.term = newest, one.ours
        one.members = frozenset(there)

    def _train(self, one):
        """A step, of which all of the generation are needed."""
        if not one.members or self.now_s < one.step_at_s + STEP_S:
            return
        if any(m is not one and (m.obeys is not one or not self.hear(one, m)) for m in one.members):
            return
        one.step_at_s = self.now_s
        held = {other.memory for other in one.members}
        assert len(held) == 1
        # Whoever trains has the newest step, unless everybody who had it has ended: so no two ever train at once.
        living = [other for other in self.machines if other.memory == self.newest]
        assert self.newest in held or not living, (
            f"a step of {one.number} without {self.newest}, which {[m.number for m in living]} have"
        )
        self.newest = next(STEPS)
        for other in one.members:
            other.memory = self.newest

    # What happens to machines.

    def harm(self):  # noqa: C901 - one row a harm
        leaders = [one for one in self.machines if one.leads]
        one = self.random.choice(leaders or self.machines)
        if self.random.random() < 0.4:
            one = self.random.choice(self.machines)
        what = self.random.choice(HARMS)
        if what == "kill":
            one.end()
        elif what == "power":
            one.end()
            one.has_power = one.reaches_folder = False
        elif what == "start" and not one.is_alive:
            one.has_power = one.reaches_folder = True
            one.start()
        elif what == "unlock":
            self.folder.holder = None  # as a server that was started again may do
        elif what == "folder":
            one.reaches_folder = not one.reaches_folder and one.has_power
        elif what in ("cut", "island"):
            if what == "island":
                one.reaches_folder = False
            self.cut |= {frozenset((one.number, m.number)) for m in self.machines if m is not one}
        elif what == "heal":
            self.cut.clear()
            for other in self.machines:
                other.reaches_folder = other.has_power

    def run(self, seconds):
        for _ in range(round(seconds / TICK_S)):
            self.turn()


HARMS = ("kill", "power", "start", "folder", "unlock", "unlock", "cut", "cut", "island", "heal")


def schedule(seed):
    """A few harms at random times; then all is well but for who has ended."""
    world = World(seed, count=2 + seed % 3)
    world.run(world.random.uniform(0.1, 1.0))
    for _ in range(world.random.randint(1, 6)):
        world.harm()
        world.run(world.random.choice((0.2, 0.8, 1.6, LEASE_S + 1.0)) * world.random.random())
    world.cut.clear()
    for one in world.machines:
        one.reaches_folder = one.has_power = True
    world.run(LEASE_S + SILENT_S + PATIENCE_S * 2 + 12 * HOLD_S)
    owner = world.folder.owner
    able = [
        one
        for one in world.machines
        if one.is_alive
        and one.memory
        and is_newest(Kept(number=one.number, term=one.term, have_left=True), owner)
    ]
    leaders = [one for one in world.machines if one.is_alive and one.leads]
    assert len(leaders) <= 1, leaders
    assert leaders or not able, "nobody has taken the place"
    if leaders and sum(one.is_alive for one in world.machines) >= world.least:
        before = world.newest
        world.run(6 * HOLD_S)
        assert world.newest > before or not leaders[0].is_alive, (
            "there is a coordinator, and nobody trains"
        )


def test_no_two_machines_coordinate_whatever_is_lost():
    """Deaths, delays and partitions: each step follows the newest one that anybody has, and a coordinator comes."""
    for seed in range(SCHEDULES):
        schedule(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SCHEDULES, SCHEDULES_ALL, SCHEDULES))
def test_no_two_machines_coordinate_in_ten_thousand_schedules(first):
    """The same, with the others of ten thousand."""
    for seed in range(first, first + SCHEDULES):
        schedule(seed)


@pytest.mark.parametrize(
    ("kept", "owner", "expected"),
    [
        ((1, "a"), Owner(term="a", without=()), True),
        ((1, "a"), Owner(term="a", without=(1,)), False),
        ((1, "a"), Owner(term="b", without=()), False),  # which has formed since
        ((1, "a"), Owner(term="b", without=(0,), after="a"), True),
        ((0, "a"), Owner(term="b", without=(0,), after="a"), False),
        ((1, "a"), None, False),
    ],
)
def test_the_newest_memory_is_known_by_term_and_number(kept, owner, expected):
    """One of an older term, or of a machine that the others went on without, is not the newest."""
    number, term = kept
    assert is_newest(Kept(number=number, term=term, have_left=True), owner) is expected


def test_why_a_machine_never_coordinates_is_said_in_words():
    """The first reason alone."""
    assert not why_no_successor(SHARED)
    own = Arbiter(shares_folder=False, keeps_locks=False)
    assert "does not share" in why_no_successor(own)
    assert why_no_successor(replace(own, no_vote="two machines")).endswith(", and two machines")
    assert "keeps no locks" in why_no_successor(Arbiter(shares_folder=True, keeps_locks=False))
    placed = Arbiter(shares_folder=True, keeps_locks=True, otherwise="the engine")
    assert why_no_successor(placed) == "the engine"


def test_a_claim_that_another_one_has_written_over_is_withdrawn():
    """A machine waits until its own word has stood, and leads only then."""
    claim, kept = Claim(), Kept(number=1, term="a", have_left=True)

    def act(now_s, term):
        owner = Owner(term=term, without=())
        return claim.next(now_s, kept=kept, arbiter=SHARED, owner=owner, ours="b")

    assert act(0.0, "a") is Act.CLAIM
    claim.claimed(0.0)
    assert act(HOLD_S / 2, "b") is Act.WAIT
    assert act(HOLD_S / 2, "c") is Act.WITHDRAW
    assert act(HOLD_S, "b") is Act.LEAD
    claim.withdrew()
    assert act(HOLD_S, "c") is Act.WAIT
