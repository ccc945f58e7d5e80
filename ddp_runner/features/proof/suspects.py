"""Requests a diagnosis of each failed drill, and decides what follows if a rank is proved wrong. Never forks or kills."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.features.proof.rules import (
    Case,
    Cause,
    cause_of,
    diagnosis_line,
    doubt_line,
    where_to_go_back,
)
from ddp_runner.kernel.parent.ports import Found
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.wire import events
from ddp_runner.supervisor.around import OfRun

TRIES_MAX = 3  # of one drill that is wanted, before it is given up
TRY_AGAIN_S = 10.0  # from the first of them to the second; twice as long to the third
TO_SEE = "a test of its device: nothing is proved of it"  # the action, in summary.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A drill that is wanted of ``rank``. ``diagnoses``: it is to say more; ``redone``: of that step, or a later one."""

    rank: int
    diagnoses: bool = False
    redone: int = 0


@dataclass(slots=True, kw_only=True)
class _Left:
    """A case that all ranks go back for, to ``back_at``. ``is_back``: they have begun again there."""

    case: Case
    back_at: int
    is_back: bool = False


@dataclass(slots=True)
class _Standing:
    """Holds what this launch knows of one rank."""

    trusted: int | None = (
        None  # the step that follows its newest passed drill, or less after a roll-back
    )
    passed_at: int = -1  # the step of that drill
    times_wrong: int = 0  # how often it was proved wrong
    # Its cause is known and is no wrong gradient, or cannot be known.
    is_settled: bool = False
    was_replaced: bool = False  # for a diagnosis
    reason: str = ""  # why the run is not exact
    stays: bool = False  # that reason, as the error is in the weights
    left: _Left | None = None


@dataclass(slots=True)
class _Tries:
    """Counts the requests for one drill that is wanted."""

    count: int = 0
    not_before_s: float = 0.0
    diagnosed_step: int | None = None  # which the newest request wants diagnosed

    def are_used_up(self, now_s: float) -> bool:
        """Return True once no further request follows."""
        return self.count >= TRIES_MAX and now_s >= self.not_before_s


class Suspects:
    """Tracks the ranks whose drills have failed: has each diagnosed once, and decides what follows if one is wrong."""

    def __init__(self, around: OfRun) -> None:
        self._plan = around.plan
        self._node = around.node
        self._recorder = around.recorder
        self._world = around.world
        recovery = around.plan.settings.recovery
        self._wanted = recovery.on_wrong_gradient
        self._rollbacks_left = recovery.rollbacks_max
        self._case: Case | None = None  # that is being diagnosed
        self._queue: list[Case] = []  # that are diagnosed after it
        self._standing: defaultdict[int, _Standing] = defaultdict(_Standing)  # by rank
        self._begun: int | None = None
        self._floor = 0  # what is trusted of a rank without a passed drill
        self._stale: set[int] = set()  # of drills of steps that all ranks have gone back from
        self._found: Found | None = None
        self._stops_for = ""  # why the run must end
        self._doubtful_from: int | None = None  # the first step in doubt that is in the weights
        self._tries = _Tries()

    @property
    def open_reasons(self) -> set[str]:
        """Reasons for which the run is not exact, and may be again."""
        open_ranks = {rank for rank, one in self._standing.items() if one.left is not None}
        if self._wanted == "rollback" and self._rollbacks_left:
            cases = [*self._queue] if self._case is None else [self._case, *self._queue]
            open_ranks |= {
                one.rank for one in cases if one.is_proved and self._is_certain(one.rank)
            }
        standings = [self._standing[rank] for rank in open_ranks]
        return {one.reason for one in standings if not one.stays}

    @property
    def objections(self) -> tuple[str, ...]:
        """Why a run that all ranks have finished has failed all the same; empty where it has not."""
        return (self._stops_for,) if self._stops_for else ()

    def to_clear(self, here: Collection[int]) -> int | None:
        """Return the rank that is to be seen right, as all have gone back because it was wrong; None: nobody."""
        return next((rank for rank, one in self._gone_back() if rank in here), None)

    @property
    def clears(self) -> bool:
        """Return True if all have gone back, and the rank that was wrong has not been seen right yet."""
        return bool(self._gone_back())

    def _gone_back(self) -> list[tuple[int, _Left]]:
        """Return the ranks for which all ranks have gone back, each with its case."""
        return [
            (rank, one.left)
            for rank, one in self._standing.items()
            if one.left is not None and one.left.is_back
        ]

    def wish(self, now_s: float, here: Collection[int]) -> Wish | None:
        """Return the drill that is wanted next, ``here`` being those that may be drilled; None: none, or not now.

        What was asked for too often, or cannot be asked for any more, is given up.
        """
        # INVARIANT three-tries: nothing is asked for without an end. Broken if: a diagnosis that never comes to a verdict is
        # asked for again and again. Guarded by: test_a_diagnosis_without_a_verdict_is_given_up.
        while (case := self._case) is not None and case.process >= 0:
            if not self._is_hopeless(case.rank, now_s, here):
                is_due = now_s >= self._tries.not_before_s
                return Wish(rank=case.rank, diagnoses=True) if is_due else None
            self._give_up(case)
        for wrong, left in self._gone_back():
            if self._is_hopeless(wrong, now_s, here):
                self._leave_for_good(wrong)
                self._tries = _Tries()
                self._recorder.say(
                    f"no drill of rank {wrong} has passed since all ranks went back to step {left.back_at:,}:"
                    " the run stays not exact",
                    level="WARNING",
                )
        if now_s < self._tries.not_before_s:
            return None
        wishes = [(rank, left.case.step) for rank, left in self._gone_back() if rank in here]
        return Wish(rank=wishes[0][0], redone=wishes[0][1]) if wishes else None

    def asked(self, wish: Wish, step: int, now_s: float) -> None:
        """Take note that the ranks are asked for it, at this step."""
        tries = self._tries
        tries.count += 1
        tries.not_before_s = now_s + TRY_AGAIN_S * tries.count
        tries.diagnosed_step = step if wish.diagnoses else None

    def _is_hopeless(self, rank: int, now_s: float, here: Collection[int]) -> bool:
        return rank not in here or self._tries.are_used_up(now_s)

    def take_found(self) -> Found | None:
        """Return the fault that the supervisor must repair, once."""
        found, self._found = self._found, None
        return found

    def forms(self, processes: Sequence[int], pending: Collection[int]) -> None:
        """Take note of the processes of a generation: what a process had, another one has no more.

        ``pending``: the steps of drills that have not come to their end.
        """
        held = max(
            (one.ready.committed_step for one in self._world.present if one.ready is not None),
            default=0,
        )
        if self._begun is None:
            self._begun = self._floor = held
        self.went_back(held, pending)
        for rank, one in self._standing.items():
            if (left := one.left) is None:
                continue
            if not left.is_back and held > left.back_at:  # they have never gone back
                self._leave_for_good(rank)
            left.is_back = True
        case = self._case
        if case is not None and case.process < 0 and processes[case.rank] != -case.process:
            self._case = replace(case, process=processes[case.rank])
        elif case is not None and processes[case.rank] != case.process:
            self._leave_for_good(case.rank)
            self._case = None
        for gone in [case for case in self._queue if processes[case.rank] != case.process]:
            self._leave_for_good(gone.rank)
            self._queue.remove(gone)
        self._tries = _Tries()
        self._begin_next()

    def went_back(self, step: int, pending: Collection[int]) -> None:
        """Take note that all ranks go on from this step: of what they have left, nothing is trusted."""
        # INVARIANT trusted-is-held: what a drill has shown of steps that all ranks have gone back from says nothing of the
        # steps that follow. Broken if: they go back to a checkpoint with a wrong step in it, as to a sound one.
        # Guarded by: test_what_was_gone_back_from_is_not_trusted.
        self._stale |= {one for one in pending if one >= step}
        for one in self._standing.values():
            if one.trusted is not None:
                one.trusted = min(one.trusted, step)
        self._floor = min(self._floor, step)
        if self._case is not None:
            self._case = replace(self._case, trusted=min(self._case.trusted, step))
        self._queue = [replace(case, trusted=min(case.trusted, step)) for case in self._queue]

    def restarts(self) -> None:
        """All ranks are replaced by some that train another stage: nobody has gone back for what was found."""
        for rank, one in self._standing.items():
            if one.left is not None:
                self._leave_for_good(rank)

    def begins(self, step: int) -> None:
        """Take note that what a drill of this step needs is being written."""
        self._stale.discard(step)

    def passed(self, rank: int, *, step: int) -> None:
        """A drill of this rank has passed: it has computed that step right."""
        if step in self._stale:
            return
        standing = self._standing[rank]
        if step + 1 >= (standing.trusted or 0):
            standing.trusted, standing.passed_at = step + 1, step
            self._spare()
        left = standing.left
        # INVARIANT seen-right: a run is exact again only once the rank that was wrong has been seen right behind the step
        # that it did wrong. Broken if: the reason is withdrawn as soon as all ranks have gone back.
        # Guarded by: test_a_reason_stays_until_the_suspect_was_seen_right.
        if left is not None and left.is_back and step >= left.case.step:
            standing.left = None
            self._tries = _Tries()
            withdrawn = "" if standing.stays else standing.reason
            standing.reason = standing.reason if standing.stays else ""
            self._recorder.record(
                events.Undone(
                    rank=rank, of_step=left.case.step, step=left.back_at, withdrawn=withdrawn
                )
            )

    def drilled(self, drill: events.Drill) -> None:
        """Take in a drill; where it was to say more, and could not, the case is closed."""
        case = self._case
        if case is not None and (drill.rank, drill.step) == (case.rank, self._tries.diagnosed_step):
            self._give_up(case)
        if drill.inexact_reason:
            self._standing[drill.rank].reason = drill.inexact_reason

    def failed(self, drill: events.Drill) -> None:
        """Take in a drill that has found a difference; those of several ranks are diagnosed one after the other."""
        rank, standing = drill.rank, self._standing[drill.rank]
        left = standing.left
        if drill.step in self._stale or (left is not None and not left.is_back):
            if left is None or drill.step < left.back_at:
                # Whether it was undone with what all have left is not known.
                standing.stays = True
            return
        standing.left = None  # it is wrong again
        if standing.is_settled:
            standing.stays = True
            return
        known = self._floor if standing.trusted is None else standing.trusted
        trusted = min(known, drill.step)
        case = Case(
            rank=rank,
            step=drill.step,
            differs=drill.differs,
            trusted=trusted,
            is_proved=trusted > self._floor,
            since=self._since(standing, trusted),
            repeats=drill.repeats,
            process=self._world.ranks[rank].processes,
            are_alike=any(one.trusted is not None for one in self._standing.values()),
        )
        if self._case is not None and self._case.rank == rank:
            self._case = replace(self._case, trusted=min(self._case.trusted, trusted))
        elif all(one.rank != rank for one in self._queue):
            self._queue.append(case)
        self._begin_next()

    def _since(self, standing: _Standing, trusted: int) -> str:
        if standing.trusted is not None and standing.passed_at + 1 == trusted:
            return f"its drill at step {standing.passed_at:,}, which passed"
        return "this launch began" if trusted == self._begun else f"step {trusted:,}"

    def _begin_next(self) -> None:
        if self._case is None and self._queue:
            self._case = self._queue.pop(0)
            self._tries = _Tries()

    def diagnosed(self, message: events.Diagnosed, now_s: float) -> Cause | None:
        """Report the cause of a difference and decide what follows; return the cause."""
        case = self._case
        if case is None or case.rank != message.rank or case.process < 0:
            return None
        self._case, rank = None, case.rank
        self._tries, standing = _Tries(), self._standing[rank]
        cause = cause_of(case, message)
        if cause is Cause.ONCE and self._is_on_cpu(rank) and self._has_differed_elsewhere(rank):
            # All ranks share the processor: it is not this one's alone that would be wrong twice.
            cause = Cause.RECURS
        # A kernel may do what looks like a wrong device.
        is_certain = self._is_certain(rank)
        is_wrong = is_certain and cause in (Cause.ONCE, Cause.DEVICE)
        self._recorder.record(
            replace(
                message,
                of_step=case.step,
                first_in=case.differs,
                source=cause.value,
                host=self._world.host_of(message.rank),
                line=diagnosis_line(case, message, cause),
                is_warning=is_wrong or cause is Cause.RECURS,
            )
        )
        if is_wrong:
            standing.times_wrong = 2 if cause is Cause.DEVICE else 1 + standing.times_wrong
            self._decide(case, now_s)
        elif is_certain and cause is Cause.LASTING and self._may_see_another(rank):
            # Only another process of the same rank shows whether it is the device or what this one has hidden.
            standing.was_replaced = True
            self._case = replace(case, is_another=True, process=-case.process)
            words = "other bits than any process with its state: replaced, to see if its device is wrong"
            self._found = Found(fault=self._fault(case, words, now_s), action=TO_SEE)
        else:
            self._settle(rank)
        self._begin_next()
        return cause

    def _has_differed_elsewhere(self, rank: int) -> bool:
        """Return whether another drill of this launch has failed, of this rank or of another one."""
        known = any(one.times_wrong or one.is_settled for one in self._standing.values())
        return known or any(one.rank != rank for one in self._queue)

    def _is_on_cpu(self, rank: int) -> bool:
        return self._plan.devices[rank].device == "cpu"

    def _is_certain(self, rank: int) -> bool:
        return self._is_on_cpu(rank) or self._plan.settings.run.deterministic

    def _may_see_another(self, rank: int) -> bool:
        """Return whether the process of a rank may be replaced, once, to find out: the others have its state."""
        is_first = not self._standing[rank].was_replaced
        return is_first and self._wanted != "continue" and len(self._world.present) > 1

    def _settle(self, rank: int) -> None:
        self._standing[rank].is_settled = True
        self._leave_for_good(rank)

    def _leave_for_good(self, rank: int) -> None:
        """Keep the reason of this rank: as far as is known, its error is in the weights."""
        self._standing[rank].left, self._standing[rank].stays = None, True

    def _give_up(self, case: Case) -> None:
        """No verdict has come, and none will."""
        self._case = None
        self._settle(case.rank)
        self._note_doubt(case)
        self._tries = _Tries()
        self._recorder.say(
            f"the difference of rank {case.rank} at step {case.step:,} could not be diagnosed: where it comes from is"
            " not known, and the run stays not exact",
            level="WARNING",
        )
        self._begin_next()

    def _decide(self, case: Case, now_s: float) -> None:
        last = max(self._recorder.facts.committed_step, case.step + 1)
        is_lost = self._standing[case.rank].times_wrong > 1
        cause = f"a wrong gradient, first in {case.differs}"
        fault = self._fault(case, cause, now_s, is_lost=is_lost)
        is_sound = False
        then = "recovery.on_wrong_gradient=continue: the run continues"
        if self._wanted == "stop":
            then = "recovery.on_wrong_gradient=stop"
            self._found = Found(fault=replace(fault, may_retry=False))
            self._stops_for = f"{fault.cause} ({then})"
        elif self._wanted == "rollback":
            first = self._first_step()
            back = where_to_go_back(
                [step for step in self._saved() if step >= first],
                trusted=case.trusted,
                failed=case.step,
                begun=max(self._begun or 0, first),
            )
            if not self._rollbacks_left:
                then = "recovery.rollbacks_max is used up: the run continues"
            elif not case.is_proved:
                then = "no drill of it has passed before, so no step is known to be right: the run continues, not exact"
            elif back is None:
                then = "no earlier checkpoint is left: the run continues"
            else:
                self._rollbacks_left -= 1
                is_sound = back.is_sound
                rest = "" if is_sound else ", the newest left from before the wrong step"
                then = f"all ranks roll back to step {back.step:,}{rest}"
                self._found = Found(fault=fault, not_after=back.step)
                if is_sound:
                    self._standing[case.rank].left = _Left(case=case, back_at=back.step)
        if not is_sound:
            self._leave_for_good(case.rank)
            self._note_doubt(case)
        if self._found is None and is_lost and self._wanted != "continue":
            self._found = Found(fault=fault)
        line = doubt_line(case, last=last, then=then)
        self._recorder.record(
            events.InDoubt(rank=case.rank, first=case.trusted + 1, last=last, line=line)
        )

    def _saved(self) -> list[int]:
        return [entry.step for entry in self._catalog().entries()]

    def _catalog(self) -> Catalog:
        return Catalog(Path(self._plan.settings.run.checkpoint_dir))

    def _spare(self) -> None:
        """Have the newest checkpoint kept that is from before the last passed drill of each rank that has one."""
        trusted = [one.trusted for one in self._standing.values() if one.trusted is not None]
        if trusted and self._wanted == "rollback" and self._rollbacks_left:
            self._catalog().spare(min(trusted))

    def tidies_up(self) -> None:
        """Have no checkpoint kept any more: a new launch trusts what it begins with."""
        self._catalog().spare_none()

    def _first_step(self) -> int:
        """Return the first step of the stage that is trained; 0 without stages."""
        stage = self._node.settings_record.get("stage")
        return int(stage["first_step"]) if isinstance(stage, Mapping) else 0

    def _note_doubt(self, case: Case) -> None:
        first = case.trusted + 1
        self._doubtful_from = min(first, self._doubtful_from or first)

    def last_words(self) -> str:
        """Return what there is to say of the checkpoints of a run that ends early; empty where they are sound."""
        first = self._doubtful_from
        if first is None:
            return ""
        sound = max((step for step in self._saved() if step < first), default=None)
        which = "there is no" if sound is None else f"step {sound:,} is the newest"
        return f"the steps from {first:,} on are in doubt: {which} checkpoint from before them"

    @staticmethod
    def _fault(case: Case, cause: str, now_s: float, *, is_lost: bool = False) -> Fault:
        kind = FaultKind.DEVICE_LOST if is_lost else FaultKind.WRONG_GRADIENT
        again = " again: its device counts as lost" if is_lost else ""
        return Fault(
            kind=kind,
            rank=case.rank,
            step=case.step,
            cause=f"rank {case.rank} has computed {cause}{again}",
            at_ns=int(now_s * 1e9),
        )
