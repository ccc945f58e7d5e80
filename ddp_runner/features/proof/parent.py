"""Runs fire drills in the background, and reports their results. ``rules.py`` decides when."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from ddp_runner.features.proof.local_drills import (
    DrillRunner,
    LocalDrills,
    how_it_ended,
    remove_drill,
    remove_drills,
)
from ddp_runner.features.proof.rules import (
    COST_GUESS_S,
    DRILLED,
    END_WAIT_S,
    PART_S,
    SHARE,
    STATE,
    STILL_WRITTEN,
    UNHEARD_S,
    UNSEEN_STATE,
    Cause,
    RepairLedger,
    differs_words,
    failed_reason,
    may_begin,
    must_end,
    off_line,
    pause_s,
    step_to_drill,
    unproved_reason,
    update_reason,
    wait_line,
)
from ddp_runner.features.proof.suspects import Suspects
from ddp_runner.kernel.parent.ports import Found, Turn
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.board import Cell
from ddp_runner.kernel.wire.messages import DrillAt, DrillPart, NotKept
from ddp_runner.supervisor.around import OfMachine, OfRun


def beside_machine(around: OfMachine) -> DrillKeeper | LocalDrills:
    """Return the keeper of a training's drills; on a machine that only follows, who runs those of its ranks."""
    return DrillKeeper(around) if isinstance(around, OfRun) else LocalDrills(around)


class DrillKeeper(DrillRunner):
    """Observes a run: ``part`` and ``drilled`` take messages, ``look`` acts at each turn."""

    def __init__(self, around: OfRun) -> None:
        super().__init__(around)
        self._plan = plan = around.plan
        recovery = plan.settings.recovery
        self._world = around.world
        # A drill of a loop's rank 0 would repeat the work that only rank 0 does.
        self._first_rank = 0 if plan.loop is None else 1
        here = [one.rank for one in self._world.ranks if self._is_drilled_here(one)]
        self._repairs = RepairLedger(ranks=here)
        self._processes: list[int] | None = None  # of each rank, when the newest generation formed
        self._formed_step = 0  # with which that was
        # Drills at random steps.
        self._share = recovery.proof_share if recovery.drill_at else 0.0
        self._draw = random.random
        self._cost_s = COST_GUESS_S
        self._due_s: float | None = None
        self._asked: DrillAt | None = None
        self._heard_by_s = 0.0
        self._parts_since_s: float | None = None  # as far as that delays such a drill
        self._elsewhere: dict[
            tuple[int, int], float
        ] = {}  # of other machines -> when it is given up
        self._now_s = 0.0  # of the newest turn
        self._kept: tuple[int, int] | None = (
            None  # that a repair, or a signal, has cut short: its files are there
        )
        self._killed: tuple[int, int] | None = None  # the newest that was killed and kept for that
        self._problem: tuple[int, str] | None = (
            None  # of the newest drill without a result, if none had one since
        )
        self._said_short = False
        self._is_off_said = False  # that nothing is proved, as nothing was to be
        self._said = {STILL_WRITTEN}  # why drills could not be done; that one needs no line
        self._has_taken_over = False  # a run whose coordinator was lost, once it has formed
        self._is_possible = False  # ranks have written the parts of a drill, or have tried to
        self._waits_since_s: float | None = None  # once all ranks have finished
        self._refused: int | None = None  # the newest step with a part that could not be written
        self.is_owed = False  # a repair has cut a drill short, and none has completed since
        self._suspects = Suspects(around)
        self._is_lack_said = False  # the log says that the update uses what is not kept

    def hears(self) -> Mapping[type[object], Callable[..., None]]:
        """Hear of the parts that ranks write, and from other machines the results of their drills."""
        return {
            DrillPart: self.part,
            events.Drill: self.drilled_elsewhere,
            events.DrillSkipped: self.drilled_elsewhere,
            events.Diagnosed: self.drilled_elsewhere,
        }

    def said(self) -> Mapping[type[object], Callable[..., None]]:
        """Hear the results of drills."""
        return {
            events.Drill: self.drilled,
            events.DrillSkipped: self.drilled,
            events.Diagnosed: self.diagnosed,
        }

    def found(self) -> Found | None:
        """Return a rank that drills have proved wrong, or whose process must be replaced to decide that."""
        return self._suspects.take_found()

    def objections(self, step: int) -> tuple[str, ...]:
        """Return the wrong gradient for which this run must end, where all ranks had finished before it was found."""
        del step
        return self._suspects.objections

    def begins(self) -> None:
        """Remove files that a killed supervisor has left."""
        self.tidies_up()

    def forms(self, first: RankHandle) -> None:
        """Note which ranks were replaced since the generation before."""
        if self._is_lack_said:  # a new process does not know it
            self._report_lacking()
        processes = [handle.processes for handle in self._world.ranks]
        self._suspects.forms(processes, self._pending_steps())
        held = [one.ready.committed_step for one in self._world.present if one.ready is not None]
        self._formed_step = step = max(held, default=0)
        before, self._processes = self._processes, processes
        facts = self._recorder.facts
        if (facts.took_over or facts.owes_proof) and not self._has_taken_over:
            # INVARIANT taken-over-is-repaired: a coordinator that takes over counts that as a repair to be proved, as it
            # does not know what its predecessor has proved; so does a launch after one with repairs that are not proved.
            # Broken if: a run is called exact although no drill has proved its last repair.
            # Guarded by: test_a_run_that_was_taken_over_is_to_be_proved.
            self._has_taken_over = True
            replaced = self._without_memory()
        elif before is None or before == processes or not facts.ever_formed:
            return
        else:
            replaced = [rank for rank, one in enumerate(processes) if one != before[rank]]
        total = first.slot.get(Cell.TOTAL_STEPS)
        if total and step >= total:  # no step is left
            if facts.owes_proof and before is None:
                self._repairs.repaired(replaced, step=step)
                self._problem = step, "the run was resumed after its last step"
                self._record_repairs()
            return
        if self._kept is not None:  # what it has cut short is done once no step is left
            step = min(step, self._kept[0])
        self._repairs.repaired(replaced, step=step)
        self._record_repairs()

    def _without_memory(self) -> list[int]:
        """Return the ranks that join without the state of the run that is taken over: others send it to them."""
        present = self._world.present
        held = {one.rank: one.progress.committed_step for one in present}
        newest = max(held.values(), default=0)
        return [one.rank for one in present if one.loads or held[one.rank] < newest]

    def owes(self) -> RankHandle | None:
        """Return the rank to drill next, if a repair is not proved or has cut a drill short; else None."""
        here = self._drilled_here()
        if not here or not (self.is_owed or self.lacks_proof):
            return None
        return self._world.ranks[self._next_to_prove(here)]

    def _next_to_prove(self, here: list[int]) -> int:
        """Return the rank that all have gone back for, else the one that has lived through most of the repairs."""
        suspect = self._suspects.to_clear(here)
        return self._repairs.witness(here) if suspect is None else suspect

    def open_reasons(self) -> set[str]:
        """Return reasons that are withdrawn where all ranks go back, and the one that was wrong is seen right."""
        return self._suspects.open_reasons

    def went_back(self, step: int) -> None:
        """Take note that all ranks have gone back to an older state in their processes."""
        self._suspects.went_back(step, self._pending_steps())

    def _pending_steps(self) -> set[int]:
        drills = (self._running, self._waiting, self._kept, *self._elsewhere)
        return {drill[0] for drill in drills if drill is not None} | set(self._parts)

    def last_words(self) -> str:
        """Return which steps are in doubt, and what is saved from before them."""
        return self._suspects.last_words()

    @property
    def lacks_proof(self) -> bool:
        """Return True if a rank was replaced, or all have gone back, and no drill has proved that repair yet."""
        return self._has_open_repair or self._suspects.clears

    @property
    def _has_open_repair(self) -> bool:
        return self._repairs.proved < self._repairs.count

    def part(self, message: DrillPart, handle: RankHandle | None = None) -> None:
        """Take in that a rank has written its part, or could not."""
        del handle  # the message says of which rank it is
        if message.step == self._refused:  # the other part of one that cannot be
            self._remove(message.step)
            return
        self._is_possible |= self._is_here(message.rank)
        if self._kept is not None and self._kept[0] == message.step:
            self._kept = None  # the same step again, after all have gone back: its files are others
        if message.step not in self._parts:
            self._suspects.begins(message.step)
        parts = self._parts.setdefault(message.step, {})
        if self._asked is not None and message.step >= self._asked.step:
            self._asked = self._due_s = None
        if message.problem:
            self._refused = message.step
            self._parts.pop(message.step)
            self._remove(message.step)
            self._skipped(message.rank, message.step, message.problem)
            return
        parts[message.part] = message.rank
        if parts.keys() >= {STATE, SHARE}:
            self._parts.pop(message.step)
            if not self._is_here(parts[SHARE]):
                by_s = (
                    self._now_s + 2 * self._limit_s + UNHEARD_S
                )  # it may have to wait for another
                self._elsewhere[message.step, parts[SHARE]] = by_s
                return
            if self._waiting is not None:  # the newer one shows more
                self._remove(self._waiting[0])
            self._waiting = message.step, parts[SHARE]

    @property
    def pending(self) -> int | None:
        """The step of the drill that runs or is ready to run; None if there is none."""
        drill = self._running or self._waiting or self._kept
        return None if drill is None else drill[0]

    def look(self, turn: Turn) -> None:
        """Begin the waiting drill, or end the running one, as the facts require.

        At the end no step follows that could make up for one that was cut short, so that one begins again.
        """
        now_s = self._now_s = turn.now_s
        # Ranks that finish have one more chance to prove what is not proved yet.
        fault_free = turn.is_fault_free or (turn.ends_undisturbed and self.lacks_proof)
        if fault_free and turn.at_end and self._running is None and self._waiting is None:
            self._waiting, self._kept = self._kept, None
        is_running, stuck = self._keeper.process is not None, self._keeper.look(now_s)
        if not is_running:  # where its zygote never had it
            self._cut_short("its process could not be forked")
        facts = self._facts(stuck, fault_free=fault_free, is_running=is_running)
        if why := must_end(facts):
            self._keeper.kill()
            self._is_given_up = True
            if fault_free and self._running is not None:
                self._report_skipped(why)
            self.is_owed = self.is_owed or self._running is not None
            self._cut_short(why, keeps=True)
        for drill in [one for one, by_s in self._elsewhere.items() if now_s > by_s]:
            self._give_up_elsewhere(drill, "its machine has reported no result")
        if not fault_free:
            self.drop()
        elif turn.is_fault_free and not is_running:
            self._ask(now_s)
        if may_begin(facts) and self._waiting is not None:
            self._begin(self._waiting, now_s)

    def drilled(self, message: events.Drill | events.DrillSkipped, now_s: float) -> None:
        """Take in the result of a drill."""
        if self._running != (message.step, message.rank):
            return
        seconds = now_s - self._keeper.began_s
        if isinstance(message, events.DrillSkipped):
            self._cost_s = max(self._cost_s, seconds)  # a drill that cannot be done is tried rarely
            self._report_skipped(message.text)
            return
        self._has_come_to_its_end(message.step)
        self._has_result(message, seconds)

    def _has_result(self, message: events.Drill, seconds: float) -> None:
        rank, step = message.rank, message.step
        handle = self._world.ranks[rank]
        on_cpu = self._plan.devices[rank].device == "cpu"
        # A drill takes what is left of one core. Of a GPU nothing is known to be left.
        self._cost_s = seconds / (len(os.sched_getaffinity(0)) if on_cpu else 1)
        if message.differs and message.updated:
            self._has_other_update(message, seconds)
            return
        finding, is_first = "", False
        if message.differs:
            found = failed_reason(rank=rank, step=step, differs=message.differs, on_cpu=on_cpu)
            finding = f"{self._world.machine_of(handle)}{found}"
            # INVARIANT a-reason-each: each rank that differs is a reason of its own, which only what is known of it withdraws.
            # Broken if: it has none beside that of another rank, and the run is exact once that one is withdrawn.
            # Guarded by: test_each_rank_that_differs_is_a_reason.
            known = self._recorder.facts.inexact_reasons
            is_first = not any(differs_words(rank) in each for each in known)
        reason = finding if is_first else ""
        host = self._world.host_of(rank)
        drill = replace(
            message,
            seconds=round(seconds, 3),
            finding=finding,
            inexact_reason=reason,
            host=host,
        )
        self._recorder.record(drill)
        self._suspects.drilled(drill)
        if not message.differs:
            self._has_passed(rank, step)
        elif self._plan.loop is None:  # a loop's rank cannot recompute its share
            self._suspects.failed(drill)

    def _has_other_update(self, message: events.Drill, seconds: float) -> None:
        """Take in a drill whose update differs: the rank's own update is the same as that of the other ranks."""
        # INVARIANT lacked-is-not-wrong: an update that differs in a drill blames no rank, because all replicas have made the
        # same one; the run becomes inexact once another process makes updates.
        # Broken if: it counts as a wrong gradient, or no rank hears what its state lacks.
        # Guarded by: test_an_update_that_differs_blames_no_rank.
        rank, step = message.rank, message.step
        found = update_reason(rank=rank, step=step, differs=message.differs)
        self._problem = step, found  # what it was to prove is not proved
        finding = (
            "" if self._is_lack_said else self._world.machine_of(self._world.ranks[rank]) + found
        )
        host = self._world.host_of(rank)
        self._recorder.record(
            replace(message, seconds=round(seconds, 3), finding=finding, host=host)
        )
        self._is_lack_said = True
        self._suspects.passed(rank, step=step)
        self._report_lacking()

    def _report_lacking(self) -> None:
        for handle in self._world.present:
            self._world.send(handle, NotKept(what=UNSEEN_STATE))

    def diagnosed(self, message: events.Diagnosed, now_s: float) -> None:
        """Take in the diagnosis of a rank whose drill has failed."""
        if self._running != (message.step, message.rank):
            return
        self._has_come_to_its_end(message.step)
        self._has_cause(message, now_s)

    def _has_cause(self, message: events.Diagnosed, now_s: float) -> None:
        cause = self._suspects.diagnosed(message, now_s)
        if cause in (Cause.ONCE, Cause.PROCESS, Cause.RECURS):  # a replacement has come to the same
            self._has_passed(message.rank, message.step)

    def drilled_elsewhere(
        self,
        message: events.Drill | events.DrillSkipped | events.Diagnosed,
        handle: RankHandle,
    ) -> None:
        """Take in the result of a drill of ``handle`` on its machine. What this run has given up is of no use."""
        drill = message.step, handle.rank
        if drill not in self._elsewhere:
            return
        if isinstance(message, events.DrillSkipped):
            self._give_up_elsewhere(drill, message.text)
            return
        del self._elsewhere[drill]
        self._due_s = None
        self._remove(message.step)
        if isinstance(message, events.Diagnosed):
            self._has_cause(message, self._now_s)
        else:
            self._has_result(message, message.seconds)

    def _give_up_elsewhere(self, drill: tuple[int, int], why: str) -> None:
        del self._elsewhere[drill]
        step, rank = drill
        self._remove(step)
        self._skipped(rank, step, why)

    def _has_come_to_its_end(self, step: int) -> None:
        self._running = self._problem = self._due_s = None
        self.is_owed = False
        self._remove(step)
        self._keep(None)

    def _has_passed(self, rank: int, step: int) -> None:
        self._recorder.record(events.Proved(rank=rank, step=step, what=DRILLED))
        self._suspects.passed(rank, step=step)
        self._repairs.passed(rank, step=step)
        self._record_repairs()

    def ended(self, ended: Ended, output: str, now_s: float) -> None:
        """Take in that the drill's process was reaped. One that has reported has nothing to add."""
        del now_s
        if self._running is None:
            return
        why = how_it_ended(ended, output)
        if ended.signal_number is None or not self.lacks_proof or self._running == self._killed:
            self._report_skipped(why)
            return
        self._killed = self._running  # what has killed it may be gone at the end of the run
        self._cut_short(why, keeps=True)

    def drop(self) -> None:
        """Give up drills that have not begun: the ranks repeat their steps, or end."""
        self._asked = self._due_s = None
        given_up = {step: max(parts.values(), default=0) for step, parts in self._parts.items()}
        self._parts.clear()
        if self._waiting is not None:
            given_up[self._waiting[0]] = self._waiting[1]
            self._keep(self._waiting)
            self._waiting = None
        given_up |= dict([*self._elsewhere])
        self._elsewhere.clear()
        for step, rank in given_up.items():
            # INVARIANT drilled-in-the-end: a repaired run makes up for each drill that the repair has cut short.
            # Broken if: a drill is given up, or cut short, and no generation is asked to make up for it.
            # Guarded by: test_a_drill_that_a_repair_cuts_short_is_made_up_for.
            self.is_owed = True
            if self._kept is None or step != self._kept[0]:
                self._remove(step)
            self._came_to_nothing(rank, step, "something is being repaired, or the run ends")

    def restarts(self) -> None:
        """Give up drills of this stage: a process would build the task of the next one for them."""
        self._processes = None  # that all are replaced is no repair
        self._suspects.restarts()
        if self._running is not None and self._keeper.process is not None:
            self._keeper.kill()
            self._is_given_up = True
            self._cut_short("another stage begins")
        self.drop()
        self._keep(None)

    def holds_the_end(self, now_s: float, *, is_stopped: bool) -> bool:
        """Return True while the end waits for a drill. If a required drill never passes, the run is not exact."""
        # INVARIANT proved-or-said: a run in which a rank was replaced is not called exact while its drill is open.
        # Broken if: it ends as exact, or without a wait, while a drill runs or is ready to run.
        # Guarded by: test_the_end_waits_for_a_drill_where_a_rank_was_replaced.
        if not self.lacks_proof:
            return False
        if not self._plan.settings.recovery.drill_at:
            if self._has_open_repair and not self._is_off_said:
                self._is_off_said = True
                self._recorder.say(off_line(self._repairs.count))
            return False
        why = ""
        if self.pending is not None:
            if self._waits_since_s is None:
                self._waits_since_s = now_s
                self._recorder.say(wait_line(self.pending))
            if is_stopped:
                why = "the run was asked to stop, or its program failed, before it had ended"
            elif now_s > self._waits_since_s + END_WAIT_S:
                why = f"it had not ended {END_WAIT_S:g} s after training"
            else:
                return True
        self.unproved(why)
        return False

    def unproved(self, why: str = "") -> None:
        """Report that a complete run lacks a passed drill. ``why``: the reason to wait no longer for one."""
        if why and self.pending is not None:
            self._problem = self.pending, why
        if not self._has_open_repair:
            return  # all have gone back for what was found: that reason stays
        known = self._recorder.facts.inexact_reasons
        if any(UNSEEN_STATE in each for each in known):
            return  # the ranks have said it
        has_differed = any(differs_words() in each for each in known)
        if self._problem is None and self._is_possible and not has_differed:
            self._problem = self._recorder.facts.committed_step, "none has come to its end since"
        if self._problem is not None:
            step, text = self._problem
            reason = unproved_reason(step=step, why=text)
            self._recorder.record(events.NotProved(step=step, text=text, inexact_reason=reason))

    def tidies_up(self) -> None:
        """Remove leftover files, while no drill writes any."""
        self._suspects.tidies_up()
        remove_drills(self._folder)

    def _ask(self, now_s: float) -> None:
        """Have the ranks drill a step at random, or one that is wanted, if one is due: not while one is on its way."""
        if self._asked is not None:
            if now_s > self._heard_by_s:
                self._asked = self._due_s = None
            return
        if self._waiting is not None or self._elsewhere or self._are_parts_awaited(now_s):
            return
        committed, here = self._recorder.facts.committed_step, self._drillable()
        wish = self._suspects.wish(now_s, here)
        if committed <= self._formed_step:
            return  # a rank that begins its first step forgets what it was asked before
        step = self._step_to_drill(committed, redone=0 if wish is None else wish.redone)
        if wish is not None and step is None:  # not yet, or never
            wish, step = None, self._step_to_drill(committed)
        if step is None or not here or (wish is None and not self._is_due(now_s)):
            return
        if wish is not None:
            rank = wish.rank
            self._suspects.asked(wish, step, now_s)
        else:
            drawn = here[int(self._draw() * len(here))]
            proving = self._drilled_here() if self.lacks_proof else []
            rank = self._next_to_prove(proving) if proving else drawn
        self._asked = DrillAt(rank=rank, step=step, diagnoses=wish is not None and wish.diagnoses)
        self._heard_by_s = now_s + UNHEARD_S + 2 * (step - committed) * self._step_s
        for handle in self._world.present:  # so that nobody takes it for a step of drill_at
            self._world.send(handle, self._asked)

    @property
    def _step_s(self) -> float:
        return self._world.present[0].slot.get(Cell.STEP_NS) / 1e9

    def _step_to_drill(self, committed: int, *, redone: int = 0) -> int | None:
        total = self._world.present[0].slot.get(Cell.TOTAL_STEPS)
        return step_to_drill(committed, step_s=self._step_s, total_steps=total, redone=redone)

    def _is_due(self, now_s: float) -> bool:
        if not self._share:
            return False
        if self._due_s is None:
            self._due_s = now_s + pause_s(self._cost_s, share=self._share, drawn=self._draw())
        return now_s >= self._due_s

    def _are_parts_awaited(self, now_s: float) -> bool:
        """Return True while a drill lacks one of its parts; give up one that has lacked it for too long."""
        if not self._parts:
            self._parts_since_s = None
        elif self._parts_since_s is None:
            self._parts_since_s = now_s
        elif now_s > self._parts_since_s + PART_S:
            for step in self._parts:
                self._remove(step)
            self._parts.clear()
        return bool(self._parts)

    def _drillable(self) -> list[int]:
        """Return the ranks that train, or soon will, and may be drilled."""
        return [one.rank for one in self._world.present if one.rank >= self._first_rank]

    def _drilled_here(self) -> list[int]:
        """Return those of them on this machine: only a drill of one of them proves a repair."""
        return [one.rank for one in self._world.present if self._is_drilled_here(one)]

    def _is_drilled_here(self, handle: RankHandle) -> bool:
        return handle.rank >= self._first_rank and self._is_here(handle.rank)

    def _is_here(self, rank: int) -> bool:
        return self._world.is_here(self._world.ranks[rank])

    def _record_repairs(self) -> None:
        proved, count = self._repairs.proved, self._repairs.count
        if count and self._repairs.ranks and self._plan.settings.recovery.drill_at:
            self._recorder.record(events.RepairsProved(proved=proved, repairs=count))

    def _report_skipped(self, why: str) -> None:
        assert self._running is not None
        step, rank = self._running
        self._running = None
        self._remove(step)
        self._skipped(rank, step, why)

    def _skipped(self, rank: int, step: int, why: str) -> None:
        is_short = "memory is short" in why
        is_said = why not in self._said and not (is_short and self._said_short)
        self._said_short |= is_short
        self._said.add(why)
        self._came_to_nothing(rank, step, why, is_said=is_said)

    def _cut_short(self, why: str, *, keeps: bool = False) -> None:
        """Give up the running drill without a log line. ``keeps``: keep its files for the end of the run."""
        if self._running is None:
            return
        step, rank = self._running
        if keeps:
            self._keep(self._running)
        else:
            self._remove(step)
        self._running = None
        self._came_to_nothing(rank, step, why)

    def _came_to_nothing(self, rank: int, step: int, why: str, *, is_said: bool = False) -> None:
        if self._is_here(rank):
            self._problem = step, why
        host = self._world.host_of(rank)
        self._recorder.record(
            events.DrillSkipped(rank=rank, step=step, text=why, is_said=is_said, host=host)
        )

    def _keep(self, drill: tuple[int, int] | None) -> None:
        """Keep the files of this drill, instead of those of the drill kept so far."""
        if self._kept is not None and (drill is None or drill[0] != self._kept[0]):
            self._remove(self._kept[0])
        self._kept = drill

    def _remove(self, step: int) -> None:
        remove_drill(self._folder, step)
