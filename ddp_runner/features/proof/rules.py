"""Decides when a fire drill is due and for which rank, and words its result. Never forks.

In a drill a process like a replacement loads a state that was just written, computes one rank's share of
the step that begins with it, in the background, and compares that with the rank's own result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ddp_runner.kernel.rules.helper_roles import Role
from ddp_runner.kernel.wire.events import Diagnosed
from ddp_runner.kernel.wire.fork_specs import ForkKind

DRILL = Role(
    name="drill",
    module=f"{__package__}.child",
    fork=ForkKind.DRILL,
    runs_user_code=True,
)
FOLDER = ".drill"  # in the run's folder of checkpoints
# What a drill needs: a file, and a folder of checkpoints. They are apart: who saves removes what looks left over.
SHARE_FILE, STATE_FOLDER = "share.json", "state"
SIDE_FILE, BATCH_FILE = "side.pt", "batch.pt"  # of a rank whose drill has failed
LOCAL_FILE = (
    "local.pt"  # what the drilled rank has of its own, where rank 0 may not have the newest of it
)
# In the record of its share: the files that belong to it, and the names of what such a file lacks.
HANDED, MISSING = "handed", "missing"
STATE, SHARE = "state", "share"  # in messages
REPEATED, DRILLED = "repeated", "drilled"  # what is proved
# For a drill, once training is complete, where a rank was replaced and none has passed.
END_WAIT_S = 30.0
OWED = -1  # the drill that makes up for another one, or proves a repair
COST_GUESS_S = 10.0  # of a drill, while none has ended
LEAD_S, LEAD_STEPS = 0.5, 3  # from the order to the step: every rank is to hear of it before
PART_S = 120.0  # for the second part of what a drill needs, once the first is there
PLACES_SHOWN = 3  # names of state in a line
UNHEARD_S = 10.0  # from that step to its files; after that nobody has written any


def number_of_drill(
    committed_step: int,
    *,
    begun_step: int,
    total_steps: int,
    drill_at: Sequence[int] | None,
    owed_from: int | None = None,
) -> int | None:
    """The how many-th drill, from 0, the step that begins now is for; None where it is for none.

    ``owed_from``: the step at which a generation formed that is to make up for one, if need be with its last step:
    that one is ``OWED``.
    """
    if not drill_at or committed_step >= total_steps:
        return None
    steps = sorted(set(drill_at))
    if owed_from is not None and committed_step == min(owed_from + steps[0], total_steps - 1):
        return OWED
    since = committed_step - begun_step
    return steps.index(since) if since in steps else None


def pause_s(cost_s: float, *, share: float, drawn: float) -> float:
    """Return the time to the next random drill: on average so long that drills take ``share`` of it.

    ``cost_s``: of one drill. ``drawn``: at random, from 0 to 1.
    """
    return cost_s / share * (0.5 + drawn)


def step_to_drill(committed_step: int, *, step_s: float, total_steps: int) -> int | None:
    """Return the step that ranks are asked to drill, so far ahead that all hear of it; None if the run ends before."""
    ahead = LEAD_STEPS + (math.ceil(LEAD_S / step_s) if step_s > 0 else 0)
    step = committed_step + ahead
    return step if step < total_steps else None


@dataclass(slots=True, kw_only=True)
class RepairLedger:
    """Keeps which repairs are proved: a rank that has lived through one computes what a new process does.

    ``ranks``: those that may be drilled.
    """

    ranks: Sequence[int]
    count: int = 0
    _open: dict[int, int] = field(default_factory=dict)  # repair -> the step with which it formed
    _replaced_by: dict[int, int] = field(default_factory=dict)  # rank -> its newest repair

    @property
    def proved(self) -> int:
        """The number of repairs that are proved."""
        return self.count - len(self._open)

    def repaired(self, replaced: Collection[int], *, step: int) -> None:
        """Take in a repair that has replaced these ranks; the others went on from ``step``."""
        self.count += 1
        self._open[self.count] = step
        self._replaced_by |= dict.fromkeys(replaced, self.count)

    def passed(self, rank: int, *, step: int) -> None:
        """Take in that a drill of this rank has passed.

        A repair through which no rank has lived, or none that is left, has no witness: any drill after it shows as
        much as there is to show.
        """
        # INVARIANT witnessed-repairs: a repair counts as proved by a rank that has lived through it, where one is left.
        # Broken if: a drill of the replaced rank itself counts, which has lost what nobody keeps, as every new process.
        # Guarded by: test_a_repair_is_proved_by_a_rank_that_has_lived_through_it.
        self._open = {
            number: formed
            for number, formed in self._open.items()
            if formed > step or rank not in (self._witnesses(number) or self.ranks)
        }

    def witness(self, ranks: Collection[int]) -> int:
        """Return the one of these ranks that has lived through most of the repairs; the first of several."""
        return min(ranks, key=lambda rank: (self._replaced_by.get(rank, 0), rank))

    def _witnesses(self, number: int) -> list[int]:
        return [rank for rank in self.ranks if self._replaced_by.get(rank, 0) < number]


def drilled_rank(number: int, ranks: int) -> int:
    """Return the rank to drill: each of the first ``ranks`` in turn, on the machine of rank 0."""
    return number % ranks


def drilled_rank_of_loop(number: int, ranks: int) -> int | None:
    """Return the rank of a user's own loop to drill: each but rank 0 in turn; None where there is no other one.

    Its program would do once more what a loop does on rank 0 alone: print, save, empty a folder.
    """
    # INVARIANT never-as-rank-0: no drill runs a user's program as rank 0.
    # Broken if: rank 0 of a loop is drilled. Guarded by: test_what_a_loop_does_on_rank_0_is_done_once.
    return None if ranks < 2 else 1 + drilled_rank(number, ranks - 1)


def folder_name(step: int) -> str:
    """Return the folder with a drill's state and share of the data, relative to the checkpoint folder."""
    return f"{FOLDER}/step_{step:08d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillFacts:
    """The facts that decide about drills. ``waits``: a drill has all that it needs to begin."""

    fault_free: bool  # every rank trains, and nobody is asked to stop
    can_fork: bool
    waits: bool
    is_running: bool
    is_wanted: bool  # nobody has given it up
    is_stopped: bool  # the process, by somebody
    is_late: (
        bool  # it has run for longer than ``limit_s``: as long as a replacement may take to start
    )
    limit_s: float


def must_end(facts: DrillFacts) -> str:
    """Return why the running drill must end, in words; empty if it continues."""
    if not facts.is_running:
        return ""
    if not facts.fault_free or not facts.is_wanted:
        return "something is being repaired, or the run ends"
    if facts.is_stopped:
        return "its process was stopped"
    if facts.is_late:
        return f"it took longer than {facts.limit_s:g} s"
    return ""


def may_begin(facts: DrillFacts) -> bool:
    """Return whether the waiting drill begins now."""
    # INVARIANT drill-without-faults: no drill runs while something is repaired, started or stopped.
    # Broken if: one is forked, or left running, while a rank is missing.
    # Guarded by: test_a_drill_is_ended_when_an_incident_opens.
    return facts.waits and facts.fault_free and facts.can_fork and not facts.is_running


def failed_reason(*, rank: int, step: int, differs: str, on_cpu: bool) -> str:
    """Why the run is not exact any more. ``differs``: where the two computations part first."""
    suspects = "state in a global, a closure, a file or C++?"
    if differs == "the samples":
        suspects = "data that does not depend on the index alone?"
    elif not on_cpu:
        suspects = f"kernels that do not repeat, or {suspects}"
    return (
        f"a replacement of rank {rank} would not compute the same at step {step:,}: first in"
        f" {differs} ({suspects})"
    )


def wait_line(step: int) -> str:
    """Return the log line that says why a run waits although its training is complete."""
    return (
        f"training is complete; the drill of step {step:,} is waited for, {END_WAIT_S:g} s at most:"
        " a rank was replaced, and no drill has passed"
    )


def off_line(repairs: int) -> str:
    """Return the log line of a complete run without drills in which ranks were replaced."""
    many = f"{repairs} repairs are" if repairs > 1 else "1 repair is"
    return f"{many} not proved to be exact: drills are off (recovery.drill_at=none, --no-proof)"


def unproved_reason(*, step: int, why: str) -> str:
    """Why a run is not exact in which a rank was replaced and no drill has passed."""
    return (
        "not proved: a rank was replaced, and no drill has shown that a replacement computes the same"
        f" bits (that of step {step:,}: {why})"
    )


class Cause(Enum):
    """What a diagnosis has found a difference to come from."""

    STATE = "state"  # outside the model: with the rank's, a replacement computes the same
    DATA = "data"  # with the rank's own batch it does
    UNSTEADY = "unsteady"  # the rank itself computes other bits the second time
    ONCE = "once"  # it is gone: that once, the rank's result was wrong
    LASTING = "lasting"  # neither state nor data, and the rank repeats its bits
    DEVICE = "device"  # the same, in another process of that rank
    PROCESS = "process"  # it is gone with the process
    UNKNOWN = "unknown"  # not all of it could be tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A drill that has failed: of ``rank`` at ``step``, first in ``differs``.

    ``trusted``: the newest step whose state no wrong step of this rank has gone into, as far as its drills show.
    ``is_proved``: one of them has passed. ``repeats``: the drill has come to its bits twice. ``process``: the how many-th of the rank is to be diagnosed;
    ``is_another``: it is another one than that of the drill. ``reason``: why the run is not exact for it.
    ``are_alike``: a drill has passed in this launch, of whichever rank: its processes do compute alike.
    """

    rank: int
    step: int
    differs: str
    trusted: int
    is_proved: bool
    repeats: bool
    process: int
    reason: str
    is_another: bool = False
    are_alike: bool = True


def cause_of(case: Case, found: Diagnosed) -> Cause:
    """Return what the difference comes from."""
    if found.itself:
        return Cause.UNSTEADY
    if not found.plain:
        if case.is_another:
            return Cause.PROCESS
        return Cause.ONCE if case.repeats else Cause.UNSTEADY
    if not found.with_state:
        return Cause.STATE
    if not found.with_data:
        return Cause.DATA
    return _by_elimination(case, found)


def _by_elimination(case: Case, found: Diagnosed) -> Cause:
    """Return what is left where neither state nor data makes a difference."""
    # INVARIANT no-blame-without-evidence: no process is ended, and no device given up, for what could not be tried.
    # Broken if: a batch that is not handed over, or processes that never compute alike, leave the device as the rest.
    # Guarded by: test_what_could_not_be_tried_blames_nobody.
    if not (found.had_state and found.had_data and found.agrees and case.are_alike):
        return Cause.UNKNOWN
    return Cause.DEVICE if case.is_another else Cause.LASTING


def diagnosis_line(case: Case, found: Diagnosed, cause: Cause) -> str:
    """Return the log line about a diagnosis."""
    at = f"step {found.step:,}"
    places = ", ".join(found.places[:PLACES_SHOWN])
    what = {
        Cause.STATE: f"state outside the model: {places}. With the rank's, a replacement computes the same bits at {at}",
        Cause.DATA: f"the data: with the rank's own batch a replacement computes the same bits at {at}, and with samples"
        " that are loaded again it does not",
        Cause.UNSTEADY: f"at {at} the same rank computes other bits twice: the device, or a kernel that is not"
        " deterministic, or state that cannot be looked into and that each step changes",
        Cause.ONCE: f"at {at} the same rank computes the same bits as a replacement, twice: that once its result was"
        " wrong: the device",
        Cause.LASTING: f"at {at} the rank repeats its bits, and another process with its state and its data does not come"
        " to them: the device, or state that cannot be looked into (C++, a file)",
        Cause.DEVICE: f"at {at} another process of the rank computes wrong bits, too: the device",
        Cause.PROCESS: f"at {at} another process of the rank computes the same bits as a replacement: it was state of the"
        " former process that cannot be looked into (C++, a file)",
        Cause.UNKNOWN: f"at {at} it could not be looked into: {_not_tried(found)}; no rank is repaired for it",
    }[cause]
    return (
        f"the difference of rank {case.rank} at step {case.step:,}, first in {case.differs}: {what}"
    )


def _not_tried(found: Diagnosed) -> str:
    if not found.had_state:
        return "the rank's state outside the model could not be handed over to another process as a whole"
    if not found.had_data:
        return "the rank's batch could not be handed over to another process"
    if not found.agrees:
        return "the other process does not repeat its own bits"
    return "no drill of this launch has passed, so that each process may compute something else"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoBack:
    """The step of the state to go back to. ``is_sound``: no step that is in doubt has gone into it."""

    step: int
    is_sound: bool


def where_to_go_back(
    saved: Collection[int], *, trusted: int, failed: int, begun: int
) -> GoBack | None:
    """Return the newest of the ``saved`` steps up to ``trusted``, else up to the wrong one, ``failed``; None: there is none.

    A run that has begun at step 0 can begin there again where it has saved nothing, or nothing of its own is proved.
    """
    sound = [step for step in saved if step <= trusted]
    if sound:
        return GoBack(step=max(sound), is_sound=True)
    if begun == 0 and (trusted == 0 or not saved):
        return GoBack(step=0, is_sound=True)
    earlier = [step for step in saved if step <= failed]
    return GoBack(step=max(earlier), is_sound=False) if earlier else None


def doubt_line(case: Case, *, last: int, then: str) -> str:
    """Return the log line that names the steps in doubt. ``last``: the newest committed one; ``then``: what follows."""
    first, count = case.trusted + 1, last - case.trusted
    since = "this launch began"
    if case.is_proved:
        since = f"its drill at step {case.trusted - 1:,}, which passed"
    return (
        f"rank {case.rank} has computed a wrong gradient: the {count:,} steps since {since}"
        f" ({first:,} to {last:,}) are in doubt; {then}"
    )
