"""Decides when a fire drill is due and for which rank, and words its result. Never forks.

In a drill, a background process acts like a replacement. It loads a state that was just written, computes one rank's
share of the step that begins with it, and compares the share with the rank's own result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ddp_runner.kernel.rules.helper_roles import Role
from ddp_runner.kernel.wire.events import Diagnosed
from ddp_runner.kernel.wire.fork_specs import ForkKind

# Followed by "could not be kept over a repair" in a rank's line.
UNSEEN_STATE = "state that an update uses (in a global, a closure, the environment, a file or C++)"

DRILL = Role(
    name="drill",
    module=f"{__package__}.child",
    fork=ForkKind.DRILL,
    runs_user_code=True,
)
FOLDER = ".drill"  # in the run's folder of checkpoints
# The parts of a drill: a file, and a folder of checkpoints. They are separate, as a save removes files that look left over.
SHARE_FILE, STATE_FOLDER = "share.json", "state"
SAMPLES = "the samples"  # what is compared first
SIDE_FILE, BATCH_FILE = "side.pt", "batch.pt"  # of a rank whose drill has failed
# Of the drilled rank: its per-rank state, where rank 0 may not have the newest; its summed gradients and buffers.
LOCAL_FILE, SUMS_FILE = "local.pt", "sums.pt"
# In the record of its share: the files that belong to it, and the names of what such a file lacks.
HANDED, MISSING = "handed", "missing"
AFTER = "after"  # only with that file: the hashes of the update's result
LEFT_OUT = "left_out"  # the files that could not be handed over, each with the reason
STILL_WRITTEN = "the state of an earlier drill is still being written"  # why a drill is skipped
STATE, SHARE = "state", "share"  # in messages
REPEATED, DRILLED = "repeated", "drilled"  # the kinds of proof
# How long a complete training waits for a drill, if a rank was replaced and no drill has passed since.
END_WAIT_S = 30.0
OWED = -1  # the drill that makes up for another one, or proves a repair
COST_GUESS_S = 10.0  # of a drill, until one has ended
LEAD_S, LEAD_STEPS = 0.5, 3  # from the order to the step: every rank must hear of it before
PART_S = 120.0  # for the second part of what a drill needs, once the first is there
PLACES_SHOWN = 3  # names of state in a line
UNHEARD_S = 10.0  # from that step to its files; after that no rank has written any


def number_of_drill(
    committed_step: int,
    *,
    begun_step: int,
    total_steps: int,
    drill_at: Sequence[int] | None,
    owed_from: int | None = None,
) -> int | None:
    """Return the number of the drill, from 0, that is due at the step that begins now; None if none is.

    ``owed_from``: the step at which a generation formed that must make up for a drill, with its last step if
    necessary. That drill's number is ``OWED``.
    """
    if not drill_at or committed_step >= total_steps:
        return None
    steps = sorted(set(drill_at))
    if owed_from is not None and committed_step == min(owed_from + steps[0], total_steps - 1):
        return OWED
    since = committed_step - begun_step
    return steps.index(since) if since in steps else None


def pause_s(cost_s: float, *, share: float, drawn: float) -> float:
    """Return the time to the next random drill, such that drills take ``share`` of the time on average.

    ``cost_s``: the cost of one drill. ``drawn``: a random number from 0 to 1.
    """
    return cost_s / share * (0.5 + drawn)


def step_to_drill(
    committed_step: int, *, step_s: float, total_steps: int, redone: int = 0
) -> int | None:
    """Return the step that ranks are asked to drill, so far ahead that all hear of it; None if the run ends before.

    ``redone``: not an earlier one than that; None while it is too far ahead. At the run's end it may be the last one.
    """
    ahead = LEAD_STEPS + (math.ceil(LEAD_S / step_s) if step_s > 0 else 0)
    step = max(committed_step + ahead, redone)
    if redone and committed_step + LEAD_STEPS < total_steps:
        step = min(step, total_steps - 1)
    if redone > committed_step + 2 * ahead:
        return None
    return step if step < total_steps else None


@dataclass(slots=True, kw_only=True)
class RepairLedger:
    """Records which repairs are proved: a drill of a rank that survived a repair proves that repair.

    ``ranks``: the ranks that may be drilled.
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
        """Take in a repair that has replaced these ranks; the others continued from ``step``.

        If that is an earlier step than before, the steps since then are done again, and their drills count for it, too.
        """
        self.count += 1
        self._open = {number: min(formed, step) for number, formed in self._open.items()}
        self._open[self.count] = step
        self._replaced_by |= dict.fromkeys(replaced, self.count)

    def passed(self, rank: int, *, step: int) -> None:
        """Take in that a drill of this rank has passed.

        A repair that no present rank has survived has no witness: any later drill proves it.
        """
        # INVARIANT witnessed-repairs: a repair is proved by a drill of a rank that survived it, if there is one.
        # Broken if: a drill of the replaced rank itself counts: like any new process, it lacks state that is not kept.
        # Guarded by: test_a_repair_is_proved_by_a_rank_that_has_lived_through_it.
        self._open = {
            number: formed
            for number, formed in self._open.items()
            if formed > step or rank not in (self._witnesses(number) or self.ranks)
        }

    def witness(self, ranks: Collection[int]) -> int:
        """Return the one of these ranks that has survived most repairs; the first of several."""
        return min(ranks, key=lambda rank: (self._replaced_by.get(rank, 0), rank))

    def _witnesses(self, number: int) -> list[int]:
        return [rank for rank in self.ranks if self._replaced_by.get(rank, 0) < number]


def drilled_rank(number: int, ranks: int) -> int:
    """Return the rank to drill: each of the ``ranks`` in turn."""
    return number % ranks


def drilled_rank_of_loop(number: int, ranks: int) -> int | None:
    """Return the rank of a user's own loop to drill: each but rank 0 in turn; None if there is no other rank.

    A drill as rank 0 would repeat work that a loop does on rank 0 alone: print, save, empty a folder.
    """
    # INVARIANT never-as-rank-0: no drill runs a user's program as rank 0.
    # Broken if: rank 0 of a loop is drilled. Guarded by: test_what_a_loop_does_on_rank_0_is_done_once.
    return None if ranks < 2 else 1 + drilled_rank(number, ranks - 1)


def folder_name(step: int) -> str:
    """Return the folder with a drill's state and share of the data, relative to the checkpoint folder."""
    return f"{FOLDER}/step_{step:08d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillFacts:
    """Holds the facts that decide about drills. ``waits``: a drill has all that it needs to begin."""

    fault_free: bool  # every rank trains, and no stop was requested
    can_fork: bool
    waits: bool
    is_running: bool
    is_wanted: bool  # it was not given up
    is_stopped: bool  # the process was stopped, by SIGSTOP for example
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
    """Return why the run is no longer exact. ``differs``: the first difference of the two computations."""
    suspects = "state in a global, a closure, a file or C++?"
    if differs == SAMPLES:
        suspects = "data that does not depend on the index alone?"
    elif not on_cpu:
        suspects = f"kernels that do not repeat, or {suspects}"
    return (
        f"a replacement of{differs_words(rank)} at step {step:,}: first in {differs} ({suspects})"
    )


def differs_words(rank: int | None = None) -> str:
    """Return what each such reason says, of this rank or of any."""
    whose = "" if rank is None else f" rank {rank}"
    return f"{whose} would not compute the same"


def update_reason(*, rank: int, step: int, differs: str) -> str:
    """Return the finding of a drill in which only the update differs. ``differs``: the first difference."""
    return (
        f"a replacement of{differs_words(rank)} update at step {step:,}: first in {differs}. Some {UNSEEN_STATE}"
        " is not kept, so a run that is repaired or resumed is not exact"
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
    """Return why a run is not exact in which a rank was replaced and no drill has passed."""
    return (
        "not proved: a rank was replaced, and no drill has shown that a replacement computes the same"
        f" bits (that of step {step:,}: {why})"
    )


class Cause(Enum):
    """Names the cause of a difference, as a diagnosis has found it."""

    STATE = "state"  # state outside the model: with the rank's, a replacement computes the same
    DATA = "data"  # the batch: with the rank's own, a replacement computes the same
    UNSTEADY = "unsteady"  # the rank itself computes other bits the second time
    ONCE = "once"  # the difference has gone: the rank's first result was wrong
    LASTING = "lasting"  # neither state nor data, and the rank repeats its bits
    DEVICE = "device"  # the same, in another process of that rank
    PROCESS = "process"  # it is gone with the process
    RECURS = "recurs"  # it was gone, and has come again, on a processor that all ranks share
    UNKNOWN = "unknown"  # not all of it could be tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Describes a failed drill of ``rank`` at ``step``, with the first difference in ``differs``.

    ``trusted``: the newest step whose state no wrong step of this rank has gone into, as far as its drills show.
    ``is_proved``: one of them has passed; ``since``: what there was then, in words. ``repeats``: the drill has come to its
    bits twice. ``process``: the number of the rank's process that is diagnosed. ``is_another``: that is
    not the one of the drill; until it is there, ``process`` is minus the number of that one. ``are_alike``: a drill of some rank has passed in this launch.
    """

    rank: int
    step: int
    differs: str
    trusted: int
    is_proved: bool
    since: str
    repeats: bool
    process: int
    is_another: bool = False
    are_alike: bool = True


def cause_of(case: Case, found: Diagnosed) -> Cause:
    """Return what the difference comes from."""
    # INVARIANT no-device-for-samples: samples are compared before anything is computed from them: no device is to blame.
    # Broken if: a dataset that draws other samples now and then has a rank rolled back or replaced.
    # Guarded by: test_other_samples_are_never_a_wrong_gradient.
    of_samples = SAMPLES in (case.differs, found.plain)
    if found.itself:
        return Cause.UNSTEADY
    if not found.plain:
        if case.is_another:
            return Cause.PROCESS
        return Cause.ONCE if case.repeats and not of_samples else Cause.UNSTEADY
    if not found.with_state:
        return Cause.STATE
    if not found.with_data or of_samples:
        return Cause.DATA
    return _by_elimination(case, found)


def _by_elimination(case: Case, found: Diagnosed) -> Cause:
    """Return what is left where neither state nor data makes a difference."""
    # INVARIANT no-blame-without-evidence: no process is ended, and no device given up, for what could not be tried.
    # Broken if: a batch that is not handed over, or processes that never compute alike, leave the device as the rest.
    # Guarded by: test_what_could_not_be_tried_blames_nobody,
    # test_processes_that_never_compute_alike_show_no_device.
    if not (found.had_state and found.had_data and found.agrees and case.are_alike):
        return Cause.UNKNOWN
    return Cause.DEVICE if case.is_another else Cause.LASTING


def diagnosis_line(case: Case, found: Diagnosed, cause: Cause) -> str:
    """Return the log line about a diagnosis."""
    at = f"step {found.step:,}"
    unsteady = (
        f"at {at} the same rank computes other bits twice: the device, or a kernel that is not"
        " deterministic, or state that cannot be looked into and that each step changes"
    )
    if case.differs == SAMPLES and not found.itself:
        unsteady = (
            f"at {at} they are the same: data that now and then does not depend on the index alone"
        )
    places = ", ".join(found.places[:PLACES_SHOWN])
    what = {
        Cause.STATE: f"state outside the model: {places}. With the rank's, a replacement computes the same bits at {at}",
        Cause.DATA: f"the data: with the rank's own batch a replacement computes the same bits at {at}, and with samples"
        " that are loaded again it does not",
        Cause.UNSTEADY: unsteady,
        Cause.ONCE: f"at {at} the same rank computes the same bits as a replacement, twice: that once its result was"
        " wrong: the device, or state that acts only now and then",
        Cause.RECURS: f"at {at} the same rank computes the same bits as a replacement, as after the difference before that:"
        " state that acts now and then and that cannot be looked into, or the machine. The run continues, not exact",
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
    """Names the step to roll back to. ``is_sound``: its state contains no step that is in doubt."""

    step: int
    is_sound: bool


def where_to_go_back(
    saved: Collection[int], *, trusted: int, failed: int, begun: int
) -> GoBack | None:
    """Return the newest of the ``saved`` steps up to ``trusted``, else up to the wrong step, ``failed``; None if there is none.

    A run that has begun at step 0 (``begun``) can begin there again where it has saved nothing, or trusts nothing else.
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
    return (
        f"rank {case.rank} has computed a wrong gradient: the {count:,} steps since {case.since}"
        f" ({first:,} to {last:,}) are in doubt; {then}"
    )
