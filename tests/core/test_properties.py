"""The pure core under random sequences of events: what must hold whatever happens, in any order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_runner.core.settings import RecoverySettings
from ddp_runner.kernel.rules.classify import VICTIM_KINDS, attribute
from ddp_runner.kernel.rules.election import EMPTY_STEP, ReplicaProgress, elect_source
from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.rules.lifecycle import (
    IN_WORLD,
    MEMBERSHIP_TABLE,
    RANK_TABLE,
    Machine,
    Membership,
    MembershipEvent,
    RankEvent,
    RankState,
)
from ddp_runner.kernel.rules.recovery import (
    GiveUp,
    Incident,
    ReplaceRanks,
    WorldFacts,
    plan_recovery,
)

SETTINGS = RecoverySettings(max_restarts=8, no_progress_generations=3, min_ranks=2)
CAUSES = [FaultKind.RANK_KILLED, FaultKind.RANK_EXITED, FaultKind.RANK_RAISED, FaultKind.RANK_HUNG]
WORLD = 4


@dataclass
class Rank:
    """A rank as the model sees it: its own tables, and what it has committed."""

    machine: Machine = field(default_factory=lambda: Machine(RANK_TABLE, RankState.DEAD))
    member: Machine = field(default_factory=lambda: Machine(MEMBERSHIP_TABLE, Membership.REPLACING))
    committed: int = EMPTY_STEP

    @property
    def is_dropped(self):
        return self.member.state not in IN_WORLD


class Model:
    """A whole run on the pure core: no process, no clock; everything else as the supervisor does it."""

    def __init__(self):
        self.ranks = [Rank() for _ in range(WORLD)]
        self.generation = 0
        self.checkpoint = 0
        self.committed_max = 0
        self.history: list[Incident] = []
        self.now_s = 0.0
        self.ended: GiveUp | None = None
        for number, rank in enumerate(self.ranks):
            self.spawn(rank, loads=number == 0)
        self.form()

    def present(self):
        return [(number, rank) for number, rank in enumerate(self.ranks) if not rank.is_dropped]

    def spawn(self, rank, *, loads):
        rank.machine.advance(RankEvent.SPAWNED)
        rank.member.advance(MembershipEvent.REPLACED)
        rank.machine.advance(RankEvent.GOT_READY)
        rank.committed = self.checkpoint if loads else EMPTY_STEP

    def form(self):
        self.generation += 1
        survivors = max((rank.committed for _, rank in self.present()), default=EMPTY_STEP)
        election = elect_source(
            [ReplicaProgress(rank=n, committed_step=rank.committed) for n, rank in self.present()]
        )
        assert election.committed_step == survivors
        for number, rank in self.present():
            rank.machine.advance(RankEvent.FORM_SENT)
            rank.machine.advance(RankEvent.GOT_FORMED)
            assert (number in election.receivers) == (rank.committed < survivors)
            rank.committed = survivors

    def commit(self, only):
        """A step closes; a fault may leave it committed on ``only`` some ranks."""
        for number, rank in self.present():
            if not only or number in only:
                rank.committed += 1
        self.committed_max = max(self.committed_max, *(r.committed for _, r in self.present()))

    def save(self):
        self.checkpoint = min(rank.committed for _, rank in self.present())

    def regrow(self):
        """Every rank that was given up comes back, whether or not a step was committed meanwhile."""
        if not any(rank.is_dropped for rank in self.ranks):
            return
        for _, rank in self.present():
            rank.machine.advance(RankEvent.ABORT_SENT)
            rank.machine.advance(RankEvent.GOT_READY)
        for rank in self.ranks:
            if rank.is_dropped:
                rank.member.advance(MembershipEvent.TRIED_AGAIN)
                self.spawn(rank, loads=False)
                rank.member.advance(MembershipEvent.TAKEN_BACK)
        self.form()

    def inject(self, victims, kind):
        """Some ranks are lost at once, the others lose their peers."""
        present = [number for number, _ in self.present()]
        lost = sorted({present[index % len(present)] for index in victims})
        self.now_s += 1.0
        faults = [Fault(kind=kind, rank=number, step=self.committed_max, cause="x", at_ns=number)
                  for number in lost]  # fmt: skip
        parked = []
        best = max(
            (rank.committed for n, rank in self.present() if n not in lost), default=EMPTY_STEP
        )
        for number, rank in self.present():
            rank.machine.advance(RankEvent.ABORT_SENT)
            if number in lost and kind is FaultKind.RANK_RAISED:
                rank.machine.advance(RankEvent.GOT_READY)
                parked.append(ReplicaProgress(rank=number, committed_step=rank.committed))
            elif number in lost:
                rank.machine.advance(RankEvent.EXITED)
                rank.committed = EMPTY_STEP
            else:
                rank.machine.advance(RankEvent.GOT_READY)
                faults.append(Fault(kind=FaultKind.COLLECTIVE_FAILED, rank=number, step=0,
                                    cause="lost a peer", at_ns=-1))  # fmt: skip
        gone = () if parked else tuple(lost)
        self.decide(faults, lost=gone, parked=tuple(parked), best=best)

    def decide(self, faults, *, lost, parked, best):
        incident = Incident(
            attribution=attribute(faults),
            at_s=self.now_s,
            committed_step=self.committed_max,
            ever_formed=True,
            generation=self.generation,
        )
        assert incident.culprit.kind not in VICTIM_KINDS
        plan = plan_recovery(
            incident,
            world=WorldFacts(
                lost=lost,
                filled=best > EMPTY_STEP,
                newest_step=best,
                present=len(self.present()),
                parked=parked,
            ),
            history=self.history,
            settings=SETTINGS,
        )
        if isinstance(plan, GiveUp):
            self.ended = plan
            return
        self.history.append(replace(incident, kept=plan.kept, dropped=plan.dropped))
        assert isinstance(plan, ReplaceRanks)
        handled = set(plan.ranks) | set(plan.dropped)
        kept = [progress for progress in parked if progress.rank not in handled]
        assert len(kept) <= 1, "one is enough"
        for progress in kept:
            assert progress.rank == plan.kept
            assert progress.committed_step > best, "who raised is replaced, unless it is ahead"
            best = progress.committed_step
        kept_before = {earlier.kept for earlier in self.history[:-1]}
        for progress in parked:
            assert progress.committed_step <= best or progress.rank in kept_before, "a lost commit"
        expected = {*lost, *(progress.rank for progress in parked)}
        assert handled == expected - {progress.rank for progress in kept}, "nobody is forgotten"
        assert (plan.reader is None) == (best > EMPTY_STEP), "a checkpoint only with nobody left"
        for number in handled - set(lost):
            self.ranks[number].machine.advance(RankEvent.KILL_SENT)
            self.ranks[number].machine.advance(RankEvent.EXITED)
        for number in plan.dropped:
            self.ranks[number].member.advance(MembershipEvent.DROPPED)
        assert len(self.present()) >= (SETTINGS.min_ranks if plan.dropped else 1)
        for number in plan.ranks:
            self.ranks[number].member.advance(MembershipEvent.TO_REPLACE)
            self.spawn(self.ranks[number], loads=number == plan.reader)
        self.form()
        kept = best if best > EMPTY_STEP else self.checkpoint
        assert all(rank.committed == kept for _, rank in self.present()), "no commit is undone"


EVENTS = st.one_of(
    st.tuples(st.just("commit"), st.sets(st.integers(0, WORLD - 1), max_size=WORLD - 1)),
    st.tuples(st.just("save"), st.just(frozenset())),
    st.tuples(st.just("regrow"), st.just(frozenset())),
    st.tuples(st.just("inject"), st.sets(st.integers(0, WORLD - 1), min_size=1)),
)


@settings(max_examples=300)
@given(st.lists(st.tuples(EVENTS, st.sampled_from(CAUSES)), max_size=40))
def test_whatever_happens_the_invariants_hold(events):
    """The newest survivor's step is kept, nobody lost is forgotten, and every row of plans ends.

    That generations grow and are joined once is the supervisor's doing, and shown on it: tests/supervisor.
    """
    model = Model()
    since_progress = 0
    for (name, arguments), kind in events:
        if name == "commit":
            before = model.committed_max
            model.commit(arguments)
            if arguments:
                # Some ranks committed and the rest did not: only a fault leaves a world like that.
                model.inject({0}, kind)
            since_progress = 0 if model.committed_max > before else since_progress
        elif name == "save":
            model.save()
        elif name == "regrow":
            model.regrow()
        else:
            model.inject(arguments, kind)
            since_progress += 1
        if model.ended is not None:
            assert model.ended.status in (RunStatus.GAVE_UP, RunStatus.FAILED)
            return
        assert since_progress <= SETTINGS.no_progress_generations + WORLD, "a crash loop goes on"
    assert len(model.history) <= SETTINGS.max_restarts + WORLD


@settings(max_examples=100)
@given(st.sampled_from(CAUSES), st.integers(1, WORLD), st.booleans())
def test_a_crash_loop_always_ends(kind, count, comes_back):
    """Faults without progress end the run after a bounded number, whoever they hit and returns."""
    model = Model()
    for _ in range(SETTINGS.no_progress_generations + 2 * WORLD + SETTINGS.max_restarts):
        model.inject(set(range(count)), kind)
        if model.ended is not None:
            return
        if comes_back:
            model.regrow()
    raise AssertionError("it would go on for ever")
