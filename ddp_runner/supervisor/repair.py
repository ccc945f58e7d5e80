"""From the first sign of a fault to forked replacements.

Gathers what belongs together, asks core for a plan, and carries it out as ranks answer and die.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from ddp_runner.core.board import Cell
from ddp_runner.core.classify import VICTIM_KINDS, attribute
from ddp_runner.core.divergence import disagreement, inexact_by
from ddp_runner.core.faults import Fault, FaultKind
from ddp_runner.core.lifecycle import RankState
from ddp_runner.core.messages import CollectivesBegun
from ddp_runner.core.recovery import GiveUp, Incident, ReplaceRanks, plan_recovery
from ddp_runner.core.settings import Settings
from ddp_runner.observe.format import rank_list
from ddp_runner.supervisor.facts import RunFacts, fault_fields, told
from ddp_runner.supervisor.hangs import HangFinder, hung
from ddp_runner.supervisor.ledger import Ledger
from ddp_runner.supervisor.ranks import RankHandle, who_is_left
from ddp_runner.supervisor.records import Records
from ddp_runner.supervisor.striker import Striker
from ddp_runner.supervisor.world import World

PARK_TIMEOUT_S = 5.0  # for a survivor to answer an abort, if its phase does not excuse it
STACKS_TIME_S = 0.15  # for stacks to reach the log before the rank that hangs is killed
_IN_GENERATION = (RankState.FORMING, RankState.TRAINING, RankState.ABORTING)


@dataclass(slots=True, kw_only=True)
class _OpenIncident:
    """Faults that belong together, until every rank has answered or ended."""

    faults: list[Fault]
    began_s: float
    event_id: int
    kill_at_s: dict[int, float] = field(default_factory=dict)  # hung ranks
    collectives: dict[int, int] = field(default_factory=dict)  # begun by each rank that was asked

    def told_faults(self) -> list[Fault]:
        """The faults, with what is known only now: in which collective each rank has waited."""
        apart = disagreement(self.collectives)
        return [
            replace(fault, cause=f"{fault.cause}; {apart}")
            if apart and fault.kind is FaultKind.COLLECTIVE_STUCK
            else fault
            for fault in self.faults
        ]


class Repair:
    """Driven by :class:`Supervisor`: facts by ``report``, time by ``look``, ``settle``, ``respawn``."""

    def __init__(
        self,
        settings: Settings,
        facts: RunFacts,
        *,
        world: World,
        records: Records,
        ledger: Ledger,
        striker: Striker,
    ) -> None:
        self._settings = settings.recovery
        self._resume = settings.run.resume
        self._facts = facts
        self._world = world
        self._records = records
        self._ledger = ledger
        self._striker = striker
        self._hangs = HangFinder(settings.recovery, facts, world=world, records=records)
        self._incident: _OpenIncident | None = None
        # At launch every rank is missing, and the first one reads what is resumed.
        self._doomed = {handle.rank for handle in world.ranks}
        self._loader: int | None = 0
        self._remedies: list[str] = []
        self._short_of_memory: set[int] = set()  # ranks that end of it, until they are forked anew
        self.is_regrouping = False  # the ranks leave a healthy generation, on purpose
        self._regroup_by_s = 0.0
        self._respawn_at_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether an incident is being gathered or a rank still to be replaced: nothing may form."""
        return self._incident is not None or bool(self._doomed)

    def expects_end_of(self, handle: RankHandle) -> bool:
        """Whether the rank was killed on purpose, so that its end is no news."""
        return handle.rank in self._doomed or handle.given_up_at_s is not None

    def owe(self, handle: RankHandle) -> None:
        """Fork this rank again, if it is wanted; its fork was asked of a zygote that died."""
        if handle.given_up_at_s is None or handle.is_returning:
            self._doomed.add(handle.rank)

    def report(self, fault: Fault) -> bool:
        """Add a fault to the open incident, or open one and abort the generation; True if opened."""
        event_id = self._records.event(
            "fault",
            cause=self._incident.event_id if self._incident else None,
            **fault_fields(fault, generation=self._facts.generation),
        )
        if self._incident is not None:
            self._incident.faults.append(fault)
            return False
        self._incident = _OpenIncident(faults=[fault], began_s=time.monotonic(), event_id=event_id)
        self._world.abort(self._facts.generation)
        return True

    def note_remedy(self, remedy: str) -> None:
        """What a rank changes to mend its own fault, for the line that tells of it."""
        if remedy not in self._remedies:
            self._remedies.append(remedy)

    def note_collectives(self, answer: CollectivesBegun) -> None:
        """How far a rank of the broken generation has come; it says so before it leaves it."""
        if self._incident is not None:
            self._incident.collectives[answer.rank] = answer.count

    def drop(self) -> None:
        """Forget the open incident: every rank has finished in spite of it."""
        self._incident = None

    def name_stragglers(self) -> None:
        """Name ranks that are persistently slow, once each; nothing is done to them."""
        if self._incident is not None:
            return
        for rank, factor in self._hangs.watcher.stragglers(self._world.present).items():
            self._facts.stragglers[rank] = round(factor, 2)
            self._records.event("straggler", rank=rank, factor=round(factor, 2))
            self._records.say(
                f"rank {rank} takes {factor:.1f} times as long as the others for its own work",
                level="WARNING",
            )

    def look(self, now_s: float) -> list[Fault]:
        """Ranks that hang, as faults to report; everybody is asked where it is."""
        if self._incident is not None:
            return []
        found = self._hangs.find(now_s, leave_out=self._doomed) or self._who_stays_too_long(now_s)
        if found:
            self._world.ask_stacks()
        return found

    def _who_stays_too_long(self, now_s: float) -> list[Fault]:
        """Ranks that ought to have left their generation for a rank that came back."""
        if not self.is_regrouping or now_s <= self._regroup_by_s:
            return []
        return [
            hung(handle, f"did not make room within {PARK_TIMEOUT_S:g} s")
            for handle in self._world.present
            if handle.state is RankState.ABORTING and self._hangs.watcher.is_overdue(handle)
        ]

    def condemn(self, faults: list[Fault]) -> None:
        """Have those that hang dump their stacks, and then killed. Their incident is open."""
        if self._incident is None:
            return
        condemned = {fault.rank for fault in faults if fault.kind is FaultKind.RANK_HUNG}
        new = condemned - set(self._incident.kill_at_s)
        for rank in new:
            self._incident.kill_at_s[rank] = time.monotonic() + STACKS_TIME_S
        self._world.force_stacks(tuple(new))
        self._world.wake()

    def settle(self, now_s: float) -> GiveUp | None:
        """Close the incident once nobody is still inside it; a plan to give up is the caller's."""
        incident = self._incident
        if incident is None:
            return None
        for rank, at_s in incident.kill_at_s.items():
            if now_s >= at_s:
                self._world.kill_rank(self._world.ranks[rank])
        waiting = [h for h in self._world.present if self._is_awaited(h, incident)]
        if not waiting:
            self._incident = None
            return self._decide(incident, now_s)
        if now_s > incident.began_s + PARK_TIMEOUT_S:
            late = [
                hung(handle, f"did not leave its generation within {PARK_TIMEOUT_S:g} s")
                for handle in waiting
                if handle.rank not in incident.kill_at_s and self._hangs.watcher.is_overdue(handle)
            ]
            for fault in late:
                self.report(fault)
            if late:
                self.condemn(late)
        return None

    @staticmethod
    def _is_awaited(handle: RankHandle, incident: _OpenIncident) -> bool:
        """Whether the incident cannot be judged before this rank has answered or ended."""
        if handle.state in _IN_GENERATION:
            return True
        if handle.rank in incident.kill_at_s:
            return handle.is_alive
        guilty = any(
            fault.rank == handle.rank and fault.kind not in VICTIM_KINDS
            for fault in incident.faults
        )
        return guilty and handle.state is RankState.STARTING

    def _decide(self, opened: _OpenIncident, now_s: float) -> GiveUp | None:
        ranks = self._world.present
        incident = Incident(
            attribution=attribute(opened.told_faults()),
            at_s=now_s,
            committed_step=self._facts.committed_step,
            ever_formed=self._facts.ever_formed,
            generation=self._facts.generation,
        )
        plan = plan_recovery(
            incident,
            world=who_is_left(ranks, incident, doomed=self._doomed),
            history=self._ledger.history,
            settings=self._settings,
        )
        if isinstance(plan, ReplaceRanks):
            incident = replace(incident, kept=plan.kept)
        last_commit_ns = max(handle.slot.get(Cell.LAST_COMMIT_NS) for handle in ranks)
        self._ledger.incident(
            incident,
            began_s=opened.began_s,
            since_s=last_commit_ns / 1e9 if last_commit_ns else opened.began_s,
            detect_s=max(0.0, opened.began_s - self._last_sign_s(incident.culprit)),
            generation=self._facts.generation,
            event_id=opened.event_id,
            outcome=_outcome_in_words(plan, incident.culprit),
        )
        self._records.event(
            "plan",
            cause=opened.event_id,
            plan=type(plan).__name__,
            culprit=incident.culprit.rank,
            kind=incident.culprit.kind.value,
            replaced=list(plan.ranks) if isinstance(plan, ReplaceRanks) else [],
            dropped=list(plan.dropped) if isinstance(plan, ReplaceRanks) else [],
            kept=incident.kept,
            victims=[fault.rank for fault in incident.attribution.victims],
        )
        if isinstance(plan, GiveUp):
            return plan
        self._short_of_memory |= {
            fault.rank
            for fault in incident.attribution.causes
            if fault.kind is FaultKind.OUT_OF_MEMORY and fault.rank in plan.ranks
        }
        self._replace(plan, incident.culprit, now_s)
        return None

    def _last_sign_s(self, culprit: Fault) -> float:
        """When the culprit last changed its phase, as far as its slot still tells."""
        if culprit.rank < 0:
            return culprit.at_ns / 1e9
        return self._world.ranks[culprit.rank].slot.get(Cell.PHASE_SINCE_NS) / 1e9

    def _replace(self, plan: ReplaceRanks, culprit: Fault, now_s: float) -> None:
        """Kill what is left of the lost ranks; :meth:`respawn` forks them once they are reaped."""
        self._ledger.restarts += 1
        if culprit.kind is FaultKind.REPLICA_DIVERGED:
            self._facts.inexact_reasons.append(inexact_by(culprit))
        wait = f" in {plan.delay_s:g} s" if plan.delay_s else ""
        words = ", ".join([*self._remedies, *_repair_in_words(plan)]) or "forming the world again"
        self._remedies.clear()
        self._records.say(f"{told(culprit)}; {words}{wait}", level="WARNING")
        self._respawn_at_s = now_s + plan.delay_s
        self._loader = plan.loader
        for rank in plan.dropped:
            self._give_up(self._world.ranks[rank], now_s)
        self._doom([self._world.ranks[rank] for rank in plan.ranks])

    def _give_up(self, handle: RankHandle, now_s: float) -> None:
        """Go on without this rank, until it is tried again."""
        handle.given_up_at_s, handle.is_returning = now_s, False
        self._doomed.discard(handle.rank)
        if handle.is_alive:
            self._world.kill_rank(handle)
        present = len(self._world.present)
        reason = (
            f"{present} of {len(self._world.ranks)} ranks from step {self._facts.committed_step}"
        )
        self._facts.inexact_reasons.append(reason)

    def try_given_up_ranks(self, now_s: float) -> None:
        """Fork given-up ranks again after their time; called only while the run is in peace."""
        after_s = self._settings.regrow_after
        if not after_s or not self._world.can_fork:
            return
        for handle in self._world.ranks:
            since_s = handle.given_up_at_s
            if since_s is None:
                continue
            if handle.is_alive:
                late = now_s > handle.spawned_at_s + self._settings.startup_timeout_s
                if late or self._hangs.is_stopped(handle, now_s):
                    self._world.kill_rank(handle)
                continue
            if now_s < since_s + after_s:
                continue
            handle.is_returning = True
            self._records.say(f"trying rank {handle.rank} again")
            self._world.spawn_rank(
                handle,
                loads=False,
                resume=self._resume_word(),
                injections_left=self._striker.left_for(handle.rank),
            )

    def returning_rank_ended(self, handle: RankHandle) -> None:
        """It was not worth it yet: wait again."""
        handle.given_up_at_s, handle.is_returning = time.monotonic(), False
        self._records.say(f"rank {handle.rank} is still not usable", level="WARNING")

    def take_back(self, handle: RankHandle) -> None:
        """A given-up rank is ready: have the others leave their generation, and form with it."""
        handle.given_up_at_s, handle.is_returning = None, False
        self._records.say(
            f"rank {handle.rank} is back: {len(self._world.present)} ranks from here on"
        )
        self.is_regrouping = True
        self._regroup_by_s = time.monotonic() + PARK_TIMEOUT_S
        self._world.abort(self._facts.generation)

    def respawn(self, now_s: float) -> None:
        """Fork what is missing as soon as its predecessors are reaped."""
        if not self._world.can_fork:
            return
        if not self._world.has_store:
            self._world.spawn_store()
        self._doom_who_finished()
        doomed = [self._world.ranks[rank] for rank in sorted(self._doomed)]
        if now_s < self._respawn_at_s or any(handle.is_alive for handle in doomed):
            return
        for handle in doomed:
            loads = handle.rank == self._loader
            self._world.spawn_rank(
                handle,
                loads=loads,
                resume=self._resume_word(),
                injections_left=self._striker.left_for(handle.rank),
                spares_memory=handle.rank in self._short_of_memory,
            )
            self._short_of_memory.discard(handle.rank)
        self._doomed.clear()

    def _doom_who_finished(self) -> None:
        """A rank may finish in the very moment in which the others leave for one that is back.

        They wait for it to form with them; its successor does, and finishes again.
        """
        present = self._world.present
        gone = [handle for handle in present if handle.finished is not None]
        left = [handle for handle in present if handle.finished is None]
        if not (self.is_regrouping and gone) or self.is_open:
            return
        if all(handle.state is RankState.READY for handle in left):
            filled = any(handle.is_filled for handle in left)
            self._loader = None if filled else gone[0].rank
            self._doom(gone)

    def _doom(self, handles: list[RankHandle]) -> None:
        """Kill what is left of these ranks and have them forked again."""
        for handle in handles:
            self._doomed.add(handle.rank)
            if handle.is_alive:
                self._world.kill_rank(handle)

    def _resume_word(self) -> str:
        """What a loading rank resumes: the user's choice, until this launch has saved something."""
        # "none" has set the old files aside once; nothing of them may be set aside, or read, again.
        aside = self._resume == "none" and self._facts.ever_formed
        return "auto" if self._facts.saved_any or aside else self._resume


def _repair_in_words(plan: ReplaceRanks) -> list[str]:
    words = []
    if plan.ranks:
        source = "" if plan.loader is None else " from the newest checkpoint"
        words.append(f"replacing {rank_list(plan.ranks)}{source}")
    if plan.dropped:
        words.append(f"going on without {rank_list(plan.dropped)}")
    return words


def _outcome_in_words(plan: GiveUp | ReplaceRanks, culprit: Fault) -> str:
    if isinstance(plan, GiveUp):
        return ""
    if plan.dropped:
        return f"going on without {rank_list(plan.dropped)}"
    if plan.ranks == (culprit.rank,):
        return "respawned"
    return f"{rank_list(plan.ranks)} respawned" if plan.ranks else "formed again"
