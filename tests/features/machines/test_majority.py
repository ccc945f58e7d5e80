"""A majority decides who coordinates: the rules, driven in simulated time by whatever can happen to machines."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import pytest

from ddp_runner.features.machines.rules.majority import (
    NEVER,
    Peer,
    Record,
    confirmed,
    ended,
    forming,
    has_majority,
    is_newest,
    is_over,
    known_by_all,
    may_form,
    may_obey,
    may_vote,
    newest,
    promising,
)

TICK_S = 0.05
STEP_S = 0.1
SILENT_S = 1.0
DELAY_S = 0.3  # of a frame, at the most
VOTES_S = 1.0  # for the answers to one ballot
PATIENCE_S = 1.5
STEPS = itertools.count(1)
NAMES = itertools.count(1)
SCHEDULES, SCHEDULES_ALL = 400, 10_000


@dataclass(eq=False)
class Machine:
    """One supervisor with its disk and its ranks, of which there is one for all."""

    number: int
    record: Record
    saved: int = 0  # the newest step on its disk
    is_alive: bool = True
    life: int = 0
    memory: int = 0  # the newest step that its rank has; 0: none
    memory_of: tuple = ()  # the generation that the memory is of
    obeys: Machine | None = None
    heard_s: float = 0.0
    parked_s: float = 0.0
    wait_s: float = 0.0  # from then to its own ballot
    ballot: tuple = NEVER  # its own: as a candidate, or as the coordinator
    votes: set = field(default_factory=set)
    heard: int = 0  # the greatest number of a ballot that it was asked to vote in
    leads: bool = False
    has_formed: bool = False
    generation: int = 0
    members: tuple = ()  # of the generation that it forms, or trains
    has_group: bool = False
    lost_s: dict = field(default_factory=dict)
    is_ending: bool = False
    step_at_s: float = 0.0

    def end(self):
        """Its supervisor ends, and its rank with it; its disk stays."""
        self.is_alive, self.obeys, self.leads, self.members = False, None, False, ()
        self.memory, self.memory_of, self.has_group, self.has_formed = 0, (), False, False
        self.is_ending = False

    def counts(self, other):
        """Whether the record of another machine is of the run that goes on here."""
        return not (self.memory or self.has_formed) or other.record.run == self.record.run

    def start(self):
        """Another supervisor, with nothing in memory."""
        self.is_alive, self.life, self.ballot, self.votes = True, self.life + 1, NEVER, set()
        self.generation, self.lost_s = 0, {}


class World:
    """Machines and the links between them; ``newest`` is the last step that was committed, ``last`` by whom."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.count = 3 + seed % 3
        self.least = self.count // 2 + 1 + (self.count > 3 and self.random.random() < 0.3)
        self.patience_s = self.random.choice((0.0, PATIENCE_S))
        self.cut = set()
        self.posts = []  # frames under way: when, from, to, their lives, what then
        self.machines = [Machine(n, self.fresh()) for n in range(self.count)]
        self.newest, self.last, self.last_members = 0, (), ()
        self.met, self.trained = set(), set()  # generations whose ranks have met, or made a step
        self.over = set()  # those of which enough machines know that they were the last
        self.machines[0].leads = True
        self.commits = self.elections = self.ends = self.launches = 0

    @staticmethod
    def fresh():
        return Record(machine=f"m{next(NAMES)}")

    def hear(self, one, other):
        pair = frozenset((one.number, other.number))
        return one.is_alive and other.is_alive and pair not in self.cut

    def post(self, sender, receiver, then):
        due_s = self.now_s + self.random.uniform(0.0, DELAY_S)
        self.posts.append((due_s, sender, receiver, sender.life, receiver.life, then))

    def turn(self):
        self.now_s += TICK_S
        due = [one for one in self.posts if one[0] <= self.now_s]
        self.posts = [one for one in self.posts if one[0] > self.now_s]
        for _, sender, receiver, life, other, then in self.random.sample(due, len(due)):
            lives = (sender.life, receiver.life) == (life, other)
            if lives and (sender is receiver or self.hear(sender, receiver)):
                then()
        for one in self.random.sample(self.machines, len(self.machines)):
            if not one.is_alive or self.random.random() < 0.1:  # which comes late
                continue
            if one.leads and not one.is_ending:
                self._coordinate(one)
            elif not one.leads:
                self._follow(one)
        for one in self.machines:
            if one.is_alive and one.leads:
                self._train(one)

    # A machine that does not coordinate.

    def _follow(self, one):
        boss = one.obeys
        if boss is not None:
            if self.hear(one, boss) and boss.leads and one not in boss.lost_s:
                one.heard_s = self.now_s
            elif self.now_s > one.heard_s + SILENT_S * 0.8 or not boss.is_alive:
                self._park(one)
            return
        self._look_for_coordinator(one)
        if one.obeys is None and one.memory:
            self._stand(one)

    def _park(self, one):
        one.obeys, one.parked_s = None, self.now_s
        one.wait_s = self.random.uniform(0.1, 1.0)

    def _stand(self, one):
        """Ask the others for their votes, each time after another while."""
        if self.now_s < one.parked_s + one.wait_s:
            return
        one.parked_s, one.wait_s = self.now_s, VOTES_S + self.random.uniform(0.1, 1.0)
        one.ballot = (max(one.record.promised, one.heard) + 1, f"t{next(NAMES)}")
        one.record = promising(one.record, one.ballot)
        one.votes = {one.record.machine}
        ballot, formed = one.ballot, one.record.formed
        known = {peer.machine for peer in (*one.record.members, *one.record.before)}
        for other in self.machines:
            if other is not one and other.record.machine in known:
                self.post(one, other, lambda o=other: self._asked(one, o, ballot, formed))

    def _asked(self, one, other, ballot, formed):
        other.heard = max(other.heard, ballot[0])
        # Who obeys a coordinator that is there votes for nobody.
        if other.leads or other.obeys is not None or not may_vote(other.record, ballot, formed):
            return
        other.record = promising(other.record, ballot)
        name = other.record.machine
        self.post(other, one, lambda: self._voted(one, ballot, name))

    def _voted(self, one, ballot, name):
        if one.ballot != ballot or one.leads or one.obeys is not None or not one.memory:
            return
        if one.record.has_promised != ballot:  # it has voted for another one since
            return
        one.votes.add(name)
        if has_majority(one.record, one.votes):
            one.leads, one.has_formed, one.members, one.has_group = True, False, (), False
            one.generation, self.elections = one.record.generation, self.elections + 1
            one.lost_s = dict.fromkeys((m for m in self.machines if m is not one), self.now_s)

    def _look_for_coordinator(self, one):
        bosses = [m for m in self.machines if m is not one and m.leads and self.hear(one, m)]
        if bosses:
            boss = self.random.choice(bosses)
            self._join(one, boss)

    def _join(self, one, boss):
        if boss.is_ending:
            return
        if one.record.has_promised > boss.ballot:
            is_ours = boss.memory and boss.counts(one)
            if is_ours and one.record.formed > boss.record.formed:
                boss.end()  # others have trained without it
                return
            boss.ballot = (one.record.promised + 1, boss.ballot[1])
        known = newest(self._records(boss, self._there(boss)))
        if not self._keeps(one, known):
            one.memory, one.memory_of = 0, ()
        one.obeys, one.heard_s = boss, self.now_s
        boss.members, boss.has_group = (), False  # the generation is over, if it was in that
        boss.lost_s.pop(one, None)

    def _keeps(self, one, known):
        """Whether its memory is the newest; that of a generation which has made no step is never thrown away."""
        is_kept = not one.memory or is_newest(one.record, one.memory_of, known)
        since = {formed for formed in self.met if one.memory_of < formed <= known.formed}
        if is_kept and one.memory:
            assert not since & self.trained, f"{one.number} keeps {one.memory_of}, before {since}"
        members = {peer.machine for peer in known.members}
        assert is_kept or since or one.record.machine not in members
        return is_kept

    # A machine that coordinates.

    def _there(self, boss):
        return [m for m in self.machines if m is boss or (m.obeys is boss and self.hear(boss, m))]

    @staticmethod
    def _records(boss, there):
        others = [m for m in there if m is not boss]
        return [
            boss.record,
            *(m.record if boss.counts(m) else Record(machine=m.record.machine) for m in others),
        ]

    def _say_who_leads(self, one):
        for other in self.machines:
            is_older = not other.memory or other.ballot < one.ballot
            if one.memory and is_older and other.leads and self.hear(one, other):
                other.end()  # which yields

    def _coordinate(self, one):
        self._say_who_leads(one)
        there = self._there(one)
        missing = [m for m in self.machines if m not in there]
        for other in missing:
            one.lost_s.setdefault(other, self.now_s)
        if one.members:
            if all(m in there for m in one.members) and set(there) == set(one.members):
                return
            one.members, one.has_group = (), False
        late = [m for m in missing if self.now_s > one.lost_s[m] + self.patience_s]
        if len(there) < self.least or len(late) < len(missing):
            return
        records = self._records(one, there)
        if not may_form(records):
            return
        known = newest(records)
        for other in there:  # which has been away while others have gone on
            if not self._keeps(other, known):
                if other is one:
                    one.end()
                    return
                other.memory, other.memory_of = 0, ()
        self._form(one, there, known, before=() if is_over(records) else known_by_all(known))

    def _form(self, one, there, known, before):
        if not one.ballot[1]:
            one.ballot = (max(m.record.promised for m in there) + 1, f"t{next(NAMES)}")
        number = max(one.ballot[0], *(m.record.promised for m in there))
        if any(m.record.has_promised > one.ballot for m in there):
            number += 1
        one.ballot = (number, one.ballot[1])
        one.generation += 1
        one.members = tuple(there)
        first = sorted(there, key=lambda m: m is not one)  # the coordinator's machine
        peers = [Peer(machine=m.record.machine, number=m.number, host="", port=1) for m in first]
        asked = set()
        ballot, generation, members = one.ballot, one.generation, one.members
        how = {"ballot": ballot, "generation": generation, "members": peers}
        how |= {"before": before, "run": known.run or ballot[1]}

        def take(other):
            if not other.leads and other.obeys is not one:
                return
            if not may_obey(other.record, ballot) or one.members is not members:
                return
            other.record = forming(other.record, **how)
            asked.add(other)
            if len(asked) == len(there):
                self._formed(one, members, known)

        for other in there:
            self.post(one, other, lambda o=other: take(o))

    def _formed(self, one, members, known):
        """All ranks have met: they take the newest state of all, in memory or on a disk."""
        if one.members is not members or any(m is not one and m.obeys is not one for m in members):
            return
        held = [m.memory for m in members if m.memory]
        state = max(held, default=0) or max(m.saved for m in members)
        for other in members:
            other.memory, other.memory_of = state or -1, other.record.formed
            formed = other.record.formed
            self.post(other, other, lambda o=other, f=formed: self._confirm(o, f))
        one.has_group = one.has_formed = True
        self.met.add(one.record.formed)

    @staticmethod
    def _confirm(one, formed):
        if one.record.formed == formed:
            one.record = confirmed(one.record)

    def _train(self, one):
        """A step, of which all of the generation are needed."""
        if not one.has_group or self.now_s < one.step_at_s + STEP_S:
            return
        others = [m for m in one.members if m is not one]
        if any(m.obeys is not one or not self.hear(one, m) for m in others):
            return
        one.step_at_s = self.now_s
        (held,) = {m.memory for m in one.members}
        formed = one.record.formed
        # Once a run is over, machines that know nothing may begin another one, with ballots of its own.
        is_next = formed >= self.last or self.last in self.over
        assert is_next, f"{one.number} commits in {formed}, after {self.last}"
        if max(held, 0) != self.newest:
            left = [m.number for m in self.last_members if m.memory == self.newest]
            assert 2 * len(left) <= len(self.last_members), (
                f"a step of {one.number} without {self.newest}, which {left} have"
            )
        self.newest, self.last, self.last_members = next(STEPS), formed, one.members
        self.trained.add(formed)
        self.commits += 1
        for other in one.members:
            other.memory = self.newest
            if self.random.random() < 0.05:
                other.saved = self.newest

    def finish(self):
        """Each coordinator whose run trains ends it in order."""
        for boss in self.machines:
            if boss.leads and boss.has_group and boss.record.formed in self.trained:
                self._finish(boss, boss.members, boss.record.formed)
                self.ends += 1

    def _finish(self, boss, members, formed):
        """Its disk has the newest step, and all are asked to note the end."""
        boss.is_ending, boss.has_group, boss.saved = True, False, boss.memory
        boss.record = ended(boss.record, {boss.record.machine})
        names = boss.record.over
        for one in members:
            self.post(boss, one, lambda o=one: self._note(o, boss, formed, names))
        self._later(boss, lambda: self._end(boss, members, formed))

    def _later(self, one, then):
        """Have it do that once all that was sent has come."""
        self.posts.append((self.now_s + 2 * DELAY_S, one, one, one.life, one.life, then))

    def _note(self, one, boss, formed, names):
        """It writes that down, and says so."""
        if one.record.formed != formed or (one is not boss and one.obeys is not boss):
            return
        name = one.record.machine
        one.record = ended(one.record, {*names, name})
        noted = [m.record for m in self.machines if m.record.formed == formed]
        if is_over(noted):
            self.over.add(formed)

        def heard():
            if boss.record.formed == formed:
                boss.record = ended(boss.record, {name})

        self.post(one, boss, heard)

    def _end(self, boss, members, formed):
        """Each hears who knows of the end, and ends."""
        names = boss.record.over

        def hear(one):
            if one.record.formed == formed:
                one.record = ended(one.record, names)
            if one.obeys is boss:
                one.end()

        for one in members:
            if one is not boss:
                self.post(boss, one, lambda o=one: hear(o))
        self._later(boss, boss.end)

    # What happens to machines.

    def harm(self):
        leaders = [one for one in self.machines if one.leads]
        one = self.random.choice(leaders or self.machines)
        if self.random.random() < 0.5:
            one = self.random.choice(self.machines)
        getattr(self, f"_{self.random.choice(HARMS)}")(one)

    def _kill(self, one):
        one.end()

    def _wipe(self, one):
        one.end()
        self._lose_disk(one)

    def _start(self, one):
        del one
        self.restart()

    def _move(self, one):
        self._heal(one)
        self._split(self.random.randint(1, 2))
        self._lose_disks()
        self.restart()

    def _cut(self, one):
        self.cut |= {frozenset((one.number, m.number)) for m in self.machines if m is not one}

    def _halves(self, one):
        del one
        self._split(self.count // 2)

    def _link(self, one):
        del one
        self.cut.add(frozenset(self.random.sample(range(self.count), 2)))

    def _heal(self, one):
        del one
        self.cut.clear()

    def _stop(self, one):
        self.finish()
        if self.random.random() < 0.5:  # while some do not hear of it
            self._cut(one)

    def _stop_and_move(self, one):
        """The next launch comes while others may have elected a coordinator, on other disks."""
        self._stop(one)
        self.run(self.random.uniform(0.2, 4.0))
        self._move(one)

    def _other(self, one):
        one.end()
        self._lose_disk(one, then=self._of_another_run())

    def _of_another_run(self):
        """The record of a machine that was in another run, with machines that are gone."""
        name, ballot = f"m{next(NAMES)}", self.random.randint(1, 60)
        peers = [Peer(machine=one, number=0, host="", port=1) for one in (name, "x", "y")]
        how = {"generation": 5, "members": peers, "before": (), "run": "old"}
        return forming(Record(machine=name), ballot=(ballot, "old"), **how)

    def _split(self, size):
        """So many machines do not hear the others."""
        side = set(self.random.sample(range(self.count), size))
        rest = set(range(self.count)) - side
        self.cut |= {frozenset((a, b)) for a in side for b in rest}

    def _lose_disks(self):
        """Some of those that have ended come back with nothing on their disks."""
        for other in self.machines:
            if not other.is_alive and self.random.random() < 0.5:
                self._lose_disk(other)

    def _lose_disk(self, one, then=None):
        """Unless half of the newest generation would be gone: whoever is left then may know nothing of it, but that it is over."""
        ours = [m.record for m in self.machines if m.record.run != "old"]
        if not ours:
            return
        known = newest(ours)
        left = {m.record.machine for m in self.machines if m is not one}
        groups = [{peer.machine for peer in group} for group in (known.members, known.before)]
        still = [m.record for m in self.machines if m is not one and m.record.run != "old"]
        is_known = still and newest(still).formed == known.formed and is_over(still)
        if is_known or all(2 * len(group & left) > len(group) for group in groups if group):
            one.record, one.saved = then or self.fresh(), 0

    def restart(self):
        """Start who has ended; machine 0 coordinates unless another one that it knows and reaches does."""
        for one in self.machines:
            if one.is_alive:
                continue
            one.start()
            known = {peer.machine for peer in one.record.members}
            found = [
                m
                for m in self.machines
                if m.leads and m.record.machine in known and self.hear(one, m)
            ]
            one.leads = one.number == 0 and not found

    def run(self, seconds):
        for _ in range(round(seconds / TICK_S)):
            self.turn()


HARMS = (
    *("kill", "kill", "wipe", "wipe", "start", "start", "move", "move", "move"),
    *("cut", "halves", "link", "heal", "stop", "stop", "stop_and_move", "other"),
)


def schedule(seed):
    """A few harms at random times; then all is well but for who has ended."""
    world = World(seed)
    world.run(world.random.uniform(0.1, 3.0))
    for _ in range(world.random.randint(1, 12)):
        world.harm()
        world.run(world.random.choice((0.2, 0.8, 1.6, 4.0)) * world.random.random())
    world.cut.clear()
    if seed % 2:
        world.run(4.0)
        world.restart()
    world.run(12.0)
    have = {m.record.machine for m in world.machines if m.memory and m.memory == world.newest}
    known = newest([m.record for m in world.machines])
    has_ended = [m for m in world.machines if m.record.over and m.record.formed == known.formed]
    able = known.members and has_majority(known, have) and not has_ended
    if able and sum(m.is_alive for m in world.machines) >= world.least:
        before = world.commits
        world.run(6.0)
        assert world.commits > before, "a majority has the newest step, and nobody trains"
    for one in has_ended:
        if is_over([one.record]):
            launch(world, one)
            break
    return world


def launch(world, one):
    """The next launch, with one machine that knows of the end, and others that know nothing."""
    for other in world.machines:
        other.end()
        if other is not one:
            other.record, other.saved = world.fresh(), 0
    world.restart()
    before = world.commits
    world.run(6.0)
    assert world.commits > before, "the run has ended, and the next launch waits for somebody"
    world.launches += 1


def test_a_majority_never_lets_two_machines_commit():
    """Deaths, lost disks, delays and partitions: each step follows the newest one, and a coordinator comes."""
    worlds = [schedule(seed) for seed in range(SCHEDULES)]
    assert sum(one.elections > 0 for one in worlds) > SCHEDULES / 10


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SCHEDULES, SCHEDULES_ALL, SCHEDULES))
def test_a_majority_never_lets_two_commit_in_ten_thousand_schedules(first):
    """The same, with the others of ten thousand."""
    for seed in range(first, first + SCHEDULES):
        schedule(seed)


def record_of(number=1, *, promised=0, generation=0, members="", before=""):
    """A record of machines that have one letter each."""
    groups = [
        tuple(Peer(machine=one, number=0, host="", port=1) for one in group)
        for group in (members, before)
    ]
    return Record(
        machine=str(number),
        promised=promised,
        promised_term="t",
        ballot=promised,
        generation=generation,
        members=groups[0],
        before=groups[1],
    )


def test_a_machine_votes_once_and_for_no_older_memory():
    """A ballot with a greater number, of a candidate whose newest generation is not older."""
    record = record_of(promised=2, generation=5)
    assert may_vote(record, (3, "a"), record.formed)
    assert not may_vote(record, (2, "t"), record.formed)
    assert not may_vote(record, (3, "a"), (2, "", 4))
    assert not may_obey(promising(record, (4, "b")), (3, "a"))


@pytest.mark.parametrize(
    ("before", "machines", "expected"),
    [("", "ab", True), ("", "ad", False), ("cde", "ab", False), ("cde", "abcd", True)],
)
def test_a_generation_has_a_majority_of_those_before(before, machines, expected):
    """Of the newest one, and of the one that all machines know."""
    known = record_of("a", promised=1, generation=2, members="abc", before=before)
    there = [known, *(record_of(one) for one in machines if one != "a")]
    assert may_form(there) is expected


@pytest.mark.parametrize(("machines", "expected"), [("a", True), ("b", False), ("ab", True)])
def test_of_two_halves_the_coordinators_is_the_majority(machines, expected):
    """Its machine is the first member; no other half has it too."""
    assert has_majority(record_of("a", members="ab"), machines) is expected


@pytest.mark.parametrize(
    ("over", "before", "expected"),
    [("", "", False), ("a", "", False), ("b", "", False), ("ab", "", True), ("ab", "bcd", False)],
)
def test_an_end_counts_once_no_majority_can_be_without_it(over, before, expected):
    """Of three machines two must have written it down, also for the generation that all know of."""
    known = replace(record_of("a", promised=1, members="abc", before=before), over=tuple(over))
    old = replace(record_of("c", members="abc"), over=("c",))
    assert is_over([known, old, record_of("d")]) is expected
    assert may_form([known, record_of("d"), record_of("e")]) is expected


def test_who_has_written_down_the_end_votes_for_no_memory_of_it():
    """Nor is it the end of a generation that the machine forms later."""
    record = ended(record_of("a", promised=1, members="abc"), {"a", "b"})
    assert not may_vote(record, (2, "x"), record.formed)
    assert may_vote(record, (2, "x"), (2, "x", 1))
    how = {"ballot": (2, "x"), "generation": 2, "members": record.members, "before": ()}
    assert forming(record, **how).over == ()
