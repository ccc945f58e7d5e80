"""Repairs a run, from the first sign of a fault to forked replacements.

Gathers the faults that belong together, asks ``kernel/rules/recovery.py`` for a plan, and carries it out as ranks
answer and end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ddp_runner.kernel.parent.ports import Found, Observer
from ddp_runner.kernel.parent.rank_handle import REAP_TIMEOUT_S, RankHandle, who_is_left
from ddp_runner.kernel.parent.run_context import RunContext
from ddp_runner.kernel.processes.rank_start import RankStart
from ddp_runner.kernel.recovery.communicator_cut import UNANSWERED, Cutting
from ddp_runner.kernel.recovery.hang_detector import HangFinder
from ddp_runner.kernel.recovery.incident import (
    STACKS_TIME_S,
    OpenIncident,
    action_in_words,
    outcome_in_words,
    reads_checkpoint,
    repair_line,
)
from ddp_runner.kernel.recovery.rank_regrow import ReturningRanks
from ddp_runner.kernel.rules.classify import VICTIM_KINDS, attribute
from ddp_runner.kernel.rules.divergence import inexact_by
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.rules.lifecycle import (
    IN_GENERATION,
    Membership,
    MembershipEvent,
    RankState,
    RunEvent,
)
from ddp_runner.kernel.rules.recovery import (
    GiveUp,
    Incident,
    ReplaceRanks,
    WorldFacts,
    is_short_for_steps,
    plan_recovery,
)
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.messages import CollectivesBegun

# For the ranks to leave their generation, which takes milliseconds; who takes longer is not waited for.
ANSWERS_TIME_S = 0.2


class Repair:
    """Driven by :class:`Supervisor`: facts by ``report``, time by ``advance``, once a turn."""

    def __init__(
        self,
        run: RunContext,
        *,
        cutting: Cutting,
        observers: Sequence[Observer] = (),
    ) -> None:
        """``observers``: some may have faults to inject into ranks."""
        self._settings = run.settings
        self._resume = run.resume
        self._published = run.published
        self._facts = run.facts
        self._machine = run.machine
        self._world = run.world
        self._recorder = run.record
        self._observers = observers
        self._cutting = cutting
        self._clock = run.clock
        self._hangs = HangFinder(run)
        self._incident: OpenIncident | None = None
        # The rank that reads a checkpoint, if one must; at launch the first.
        self._reader: int | None = 0
        # Ranks of other machines that have, until training begins, a newer checkpoint of their own.
        self.loaders_elsewhere: set[int] = set()
        self._actions: list[str] = []
        self._plain_retry = False  # one of them is to change nothing
        self._short_of_memory: dict[int, str] = {}  # ranks that end of it, and in which phase
        self.returning = ReturningRanks(
            run, hangs=self._hangs, cutting=cutting, injections_left=self._injections_left
        )
        self._respawn_at_s = 0.0
        # The step of the last roll-back of all ranks, and the generation that they left for it.
        self._not_after, self._went_back_in = -1, -1

    @property
    def is_open(self) -> bool:
        """True if an incident is being gathered or a rank still to be replaced: no generation may form."""
        return self._incident is not None or self._world.counts.is_any_missing

    def expects_end_of(self, handle: RankHandle) -> bool:
        """Return True if the rank was killed on purpose, so that its end is expected."""
        return handle.membership not in (Membership.MEMBER, Membership.HUNG)

    def schedule_respawn(self, handle: RankHandle) -> None:
        """Fork this rank again, if it is wanted, once its process is gone: a plan, or a lost fork, asks for it."""
        handle.member.advance(MembershipEvent.TO_REPLACE)
        if self._incident is not None:
            self._incident.pending_kills.pop(handle.rank, None)  # who comes now does not hang

    def report(self, fault: Fault) -> None:
        """Add a fault to the open incident, or open one and abort the generation."""
        fault = replace(self._recorder.shown(fault), host=self._world.host_of(fault.rank))
        event_id = self._recorder.record(
            events.Faulted(fault=fault),
            cause=self._incident.event_id if self._incident else None,
        )
        if self._incident is None:
            now_s = self._clock.monotonic()
            self._incident = OpenIncident(faults=[], began_s=now_s, event_id=event_id)
            self._world.abort(self._facts.generation, now_s)
            self._machine.advance(RunEvent.INCIDENT_BEGAN)
        self._incident.faults.append(fault)
        self._incident.forked_ahead.discard(fault.rank)  # or what was forked has a fault itself
        self._incident.last_sign_s.setdefault(fault.rank, self._last_sign_s(fault))

    def distrust(self, found: Found) -> None:
        """Report a fault of a rank that answers normally, and whose process must be replaced."""
        self.report(found.fault)
        assert self._incident is not None
        self._incident.distrusted.add(found.fault.rank)
        if found.not_after is not None:
            self._incident.not_after = found.not_after
            self._actions.append(f"going back to step {found.not_after:,}")
        if found.action:
            self._actions.append(found.action)

    def note_action(self, message: events.TuningChanged) -> None:
        """Note the change that a rank makes because of its own fault, which it reports next, or its predecessor's."""
        if message.fault_free:
            return
        self._plain_retry |= message.plain_retry
        if message.action and message.action not in self._actions:
            self._actions.append(message.action)

    def note_collectives(self, answer: CollectivesBegun) -> None:
        """Note the progress of a rank of the broken generation; it is sent before the rank leaves that."""
        if self._incident is not None:
            self._incident.collectives[answer.rank] = (answer.step, answer.count)

    def was_asked(self, handle: RankHandle) -> bool:
        """Return True if the rank was made to write its stacks."""
        return handle.membership is Membership.HUNG

    def larger_ones_killed(self, handle: RankHandle) -> int:
        """Return the number of larger ranks that were killed as well, not by us: the kernel begins with the largest."""
        return sum(
            rank.rss_bytes > handle.rss_bytes
            and self._world.are_neighbours(rank, handle)
            and self._world.is_killed(rank)
            and not self.expects_end_of(rank)
            for rank in self._world.present
        )

    def note_end(self, handle: RankHandle, fault: Fault) -> None:
        """Note how a rank of the broken generation ended, and its activity by its last output."""
        if self._incident is not None:
            # What was forked ahead may end too; why the first one did is what counts.
            self._incident.ended.setdefault(handle.rank, fault)

    def drop(self) -> None:
        """Forget the open incident: every rank has finished in spite of it."""
        self._close_incident()

    def _close_incident(self) -> None:
        self._incident = None
        self._world.forget_stacks()

    def look_while_running(self, now_s: float, *, may_take_back: bool) -> None:
        """Try dropped ranks again, take back who is ready, and name who is slow; only while the run trains."""
        self.returning.try_again(now_s)
        if may_take_back and not self.is_open:
            self.returning.take_back(now_s)
        self._name_stragglers()

    def _name_stragglers(self) -> None:
        """Name ranks that are persistently slow, once each; nothing is done to them."""
        if self._incident is not None:
            return
        for rank, factor in self._hangs.progress_watch.stragglers(self._world.present).items():
            self._recorder.record(events.Straggler(rank=rank, factor=round(factor, 2)))

    def advance(self, now_s: float) -> GiveUp | None:
        """Find ranks that hang, judge the incident once no answer is awaited, and fork missing ranks.

        Called once a turn, until the run ends. Never waits. Returns a plan to give up, which is the
        caller's to carry out; after that it is not called again.
        """
        if self._incident is None:
            found = (
                self._who_does_not_end(now_s)
                or self._hangs.find(now_s)
                or self.returning.who_stays_too_long(now_s)
            )
            if found:
                self._world.ask_stacks()
                self._take_in(found)
        if self._incident is not None:
            given_up = self._gather(self._incident, now_s)
            if given_up is not None:
                return given_up
        self._respawn(now_s)
        return None

    def _who_does_not_end(self, now_s: float) -> list[Fault]:
        """Return faults of ranks that a plan has killed, but that do not end; their successors wait for that."""
        if not self._world.counts.is_any_missing:
            return []
        return [
            self._hangs.hung(handle, f"not ended {REAP_TIMEOUT_S:g} s after SIGKILL")
            for handle in self._world.ranks
            if handle.needs_process and handle.does_not_end(now_s)
        ]

    def _take_in(self, faults: list[Fault]) -> None:
        """Add faults that were found here; those that hang dump their stacks, and are then killed."""
        for fault in faults:
            self.report(fault)
        if self._incident is None or not faults:
            return
        pending = self._incident.pending_kills
        new = {fault.rank for fault in faults if fault.kind is FaultKind.RANK_HUNG} - set(pending)
        for rank in new:
            self._world.ranks[rank].member.advance(MembershipEvent.FOUND_HUNG)
            pending[rank] = self._clock.monotonic()
        self._world.force_stacks(new)
        self._world.wake(self._world.ranks)

    def _gather(self, incident: OpenIncident, now_s: float) -> GiveUp | None:
        """Add what else is found, and close the incident once every rank has answered or ended."""
        # Nobody waits for a rank that the system holds stopped, whatever else goes on.
        self._take_in(self._hangs.find_stopped(now_s))
        # Nobody's communicators may be aborted while one of the ranks might still commit.
        unanswered = self._cutting.unanswered(now_s)
        self._take_in(
            [
                self._hangs.hung(one, UNANSWERED)
                for one in unanswered
                if one.membership is Membership.MEMBER
            ]
        )
        for rank, asked_s in incident.pending_kills.items():
            handle = self._world.ranks[rank]
            has_had_its_time = now_s >= asked_s + STACKS_TIME_S
            if handle.is_alive and (
                has_had_its_time or self._world.has_written_stacks(handle, now_s)
            ):
                self._world.kill_rank(handle, now_s)
        waiting = [
            handle
            for handle in self._world.present
            if self._is_awaited(handle, incident) and not handle.does_not_end(now_s)
        ]
        if not waiting:
            self._close_incident()
            return self._decide(incident, now_s)
        self._fork_ahead(incident, now_s)
        if now_s > self._cutting.leave_by_s(incident.began_s):
            waited_s = now_s - incident.began_s
            self._take_in(
                [
                    self._hangs.hung(
                        handle, f"did not leave its generation within {waited_s:.1f} s"
                    )
                    for handle in waiting
                    if handle.membership is Membership.MEMBER
                    and self._hangs.progress_watch.is_overdue(handle)
                ]
            )
        return None

    def _fork_ahead(self, incident: OpenIncident, now_s: float) -> None:
        """Have those who are certainly needed start while the last answers are still awaited."""
        if now_s < incident.began_s + ANSWERS_TIME_S or incident.not_after is not None:
            return
        # INVARIANT reaped-first: a number is given out again only when its process has been reaped.
        # Broken if: a rank is forked ahead while its predecessor still ends.
        # Guarded by: test_a_replacement_is_forked_while_the_last_answer_is_awaited.
        dead = [
            handle
            for handle in self._world.present
            if handle.state is RankState.DEAD
            and handle.membership is not Membership.REPLACING
            and incident.may_fork_ahead(handle.rank)
        ]
        if not dead or not self._hangs.holders_of_state():
            return
        ranks = tuple(handle.rank for handle in dead)
        plan = plan_recovery(
            self._as_incident(incident, now_s),
            world=WorldFacts(lost=ranks, filled=True, present=len(self._world.present)),
            history=self._recorder.history,
            settings=self._settings,
        )
        if not isinstance(plan, ReplaceRanks) or plan.ranks != ranks or plan.delay_s:
            return
        self._recorder.record(events.ForkedAhead(ranks=tuple(ranks)), cause=incident.event_id)
        if self._reader is not None and not self._world.ranks[self._reader].needs_process:
            self._reader = None  # of the plan before
        incident.fork_ahead(ranks)
        self._kill_and_respawn(dead, now_s)

    def start_again(self, now_s: float) -> None:
        """Replace all ranks for another stage; the first one reads the state with which that begins."""
        self._close_incident()
        present = self._world.present
        self._reader, self._resume = present[0].rank, "auto"
        self._respawn_at_s = now_s
        self._short_of_memory.clear()
        self._hangs.progress_watch.forget_pace()
        self._kill_and_respawn(present, now_s)
        for handle in self._world.ranks:
            if (
                handle.membership is Membership.REJOINING
            ):  # it has built what is not trained any more
                self._world.kill_rank(handle, now_s)

    @staticmethod
    def _is_awaited(handle: RankHandle, incident: OpenIncident) -> bool:
        """Return True if the incident cannot be judged before this rank has answered or ended."""
        if handle.state in IN_GENERATION:
            return True
        if handle.membership is Membership.HUNG:
            return handle.is_alive
        if handle.state is not RankState.STARTING or handle.rank in incident.forked_ahead:
            return False
        return any(
            fault.rank == handle.rank and fault.kind not in VICTIM_KINDS
            for fault in incident.faults
        )

    def _as_incident(self, opened: OpenIncident, now_s: float) -> Incident:
        step = self._facts.committed_step
        return Incident(
            attribution=attribute(opened.explained_faults()),
            at_s=now_s,
            committed_step=step,
            ever_formed=self._facts.ever_formed,
            generation=self._facts.generation,
            done_between=max(h.slot.done_between(step) for h in self._world.present),
            plain_retry=self._plain_retry,
        )

    def _decide(self, opened: OpenIncident, now_s: float) -> GiveUp | None:
        ranks = self._world.present
        incident = self._as_incident(opened, now_s)
        self._plain_retry = False
        world = who_is_left(ranks, incident, forked_ahead=opened.forked_ahead, now_s=now_s)
        plan = plan_recovery(
            incident,
            world=self._without_distrusted(world, opened),
            history=self._recorder.history,
            settings=self._settings,
        )
        if isinstance(plan, ReplaceRanks):
            incident = replace(incident, kept=plan.kept, dropped=plan.dropped)
        last_commit_ns = max(handle.slot.get(Cell.LAST_COMMIT_NS) for handle in ranks)
        culprit = incident.culprit
        has_diverged = culprit.kind is FaultKind.REPLICA_DIVERGED
        self._recorder.record(
            events.Plan(
                plan=type(plan).__name__,
                culprit=culprit.rank,
                kind=culprit.kind.value,
                replaced=plan.ranks if isinstance(plan, ReplaceRanks) else (),
                dropped=plan.dropped if isinstance(plan, ReplaceRanks) else (),
                kept=incident.kept,
                all_ranks_dead=incident.ever_formed and reads_checkpoint(plan),
                victims=tuple(fault.rank for fault in incident.attribution.victims),
                incident=incident,
                generation=self._facts.generation,
                began_s=opened.began_s,
                since_s=last_commit_ns / 1e9 if last_commit_ns else opened.began_s,
                detect_s=max(0.0, opened.began_s - opened.last_sign_s[culprit.rank]),
                outcome=outcome_in_words(plan, culprit),
                action=action_in_words(plan, culprit, actions=self._actions),
                line=repair_line(plan, incident, actions=self._actions, ranks=len(ranks)),
                inexact_reason=inexact_by(culprit) if has_diverged else "",
            ),
            cause=opened.event_id,
        )
        if isinstance(plan, GiveUp):
            return plan
        self._short_of_memory |= {
            fault.rank: fault.phase
            for fault in incident.attribution.causes
            if is_short_for_steps(fault) and fault.rank in plan.ranks
        }
        if opened.not_after is not None:
            self._not_after, self._went_back_in = opened.not_after, self._facts.generation
        self._replace(plan, now_s, forked_ahead=opened.forked_ahead)
        return None

    def _without_distrusted(self, world: WorldFacts, opened: OpenIncident) -> WorldFacts:
        """Return ``world`` with distrusted ranks as lost: they have no state. In a roll-back, all ranks are distrusted."""
        # INVARIANT back-for-all: after a roll-back of all ranks, no rank has a state from after its target.
        # Broken if: a rank keeps a state that is later than the one with which all ranks begin.
        # Guarded by: test_all_ranks_go_back_and_what_is_later_is_set_aside.
        goes_back = opened.not_after is not None
        distrusted = {h.rank for h in self._world.present} if goes_back else opened.distrusted
        if not distrusted:
            return world
        left = [h for h in self._world.present if h.rank not in {*world.lost, *distrusted}]
        # INVARIANT last-holder-stays: no process is replaced to see whether its device is wrong that alone has the state.
        # Broken if: committed steps are lost with a process that answers. Guarded by: test_the_last_holder_is_not_replaced_to_see.
        if not goes_back and not any(handle.is_filled for handle in left):
            return world
        return replace(
            world,
            lost=tuple(sorted({*world.lost, *distrusted})),
            filled=any(handle.is_filled for handle in left),
            parked=tuple(one for one in world.parked if one.rank not in distrusted),
            goes_back=goes_back,
        )

    def _last_sign_s(self, culprit: Fault) -> float:
        """When the culprit last changed its phase, as far as its slot still shows."""
        if culprit.rank < 0:
            return culprit.at_ns / 1e9
        return self._world.ranks[culprit.rank].slot.get(Cell.PHASE_SINCE_NS) / 1e9

    def _replace(self, plan: ReplaceRanks, now_s: float, *, forked_ahead: Collection[int]) -> None:
        """Kill what is left of the lost ranks; they are forked again once they are reaped."""
        self._actions.clear()
        self._respawn_at_s = now_s + plan.delay_s
        self._reader = plan.reader
        for rank in plan.dropped:
            self.returning.drop(self._world.ranks[rank], now_s)
        # Who was forked ahead has no state, which the one that is to load needs.
        there = {rank for rank in forked_ahead if self._world.ranks[rank].is_alive} - {plan.reader}
        lost = [self._world.ranks[rank] for rank in plan.ranks if rank not in there]
        self._kill_and_respawn(lost, now_s)

    def _respawn(self, now_s: float) -> None:
        """Fork what is missing as soon as its predecessors are reaped; the spare needs no zygote."""
        if self._world.can_fork:
            if not self._world.has_store:
                self._world.start_store()
            self._replace_who_finished(now_s)
        if not self._world.counts.is_any_missing:
            return
        missing = [handle for handle in self._world.ranks if handle.needs_process]
        if now_s < self._respawn_at_s or any(handle.is_alive for handle in missing):
            return
        for handle in missing:
            if not self._world.can_start(handle):
                continue  # the next zygote forks it
            self._spawn(handle, now_s)

    def _injections_left(self, rank: int) -> dict[int, int]:
        """Return what is still to be injected into a rank, by number."""
        return {n: left for one in self._observers for n, left in one.injections_left(rank).items()}

    def _spawn(self, handle: RankHandle, now_s: float) -> None:
        start = RankStart(
            loads=handle.rank == self._reader or self._loads_elsewhere(handle.rank),
            resume=self._resume_word(),
            injections_left=self._injections_left(handle.rank),
            short_of_memory_in=self._short_of_memory.get(handle.rank, ""),
            device_free_bytes=handle.device_free_bytes,
            may_take_spare=handle.membership is not Membership.REJOINING,
            not_after=self._not_after_now(),
        )
        if self._world.spawn_rank(handle, start, now_s=now_s):
            handle.member.advance(MembershipEvent.REPLACED)
            self._short_of_memory.pop(handle.rank, None)
        if handle.was_spare:
            self._recorder.record(events.SpareTaken(rank=handle.rank, pid=handle.pid))

    def _not_after_now(self) -> int:
        """Return the newest step with which a process may begin; below 0 for any, once all ranks have formed since."""
        return self._not_after if self._facts.generation == self._went_back_in else -1

    def _loads_elsewhere(self, rank: int) -> bool:
        return not self._facts.ever_formed and rank in self.loaders_elsewhere

    def _replace_who_finished(self, now_s: float) -> None:
        """A rank may finish in the very moment in which the others leave for one that is back.

        They wait for it to form with them; its successor does, and finishes again.
        """
        if not self.returning.is_regrouping:
            return
        present = self._world.present
        gone = [handle for handle in present if handle.has_finished]
        left = [handle for handle in present if not handle.has_finished]
        if not gone or self.is_open:
            return
        if all(handle.state is RankState.READY for handle in left):
            filled = any(handle.is_filled for handle in left)
            self._reader = None if filled else gone[0].rank
            self._kill_and_respawn(gone, now_s)

    def _kill_and_respawn(self, handles: list[RankHandle], now_s: float) -> None:
        """Kill what is left of these ranks and have them forked again."""
        for handle in handles:
            self.schedule_respawn(handle)
            self._world.kill_rank(handle, now_s)

    def _resume_word(self) -> str:
        """Return what a loading rank resumes: the user's choice, until this launch has saved something."""
        # "none" has set the old files aside once; nothing of them may be set aside, or read, again.
        aside = self._resume == "none" and self._facts.ever_formed
        # Ranks report a save at their next step; they may have died before that.
        saved = self._facts.saved_any or self._published.is_any_new
        return "auto" if saved or aside else self._resume
