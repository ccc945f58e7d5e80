"""Decides when a fire drill is due and for which rank, and words its result. Never forks.

In a drill a process like a replacement loads a state that was just written, computes one rank's share of
the step that begins with it, in the background, and compares that with the rank's own result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_runner.core.fork_specs import ForkKind
from ddp_runner.core.helper_roles import Role

DRILL = Role(
    name="drill",
    module=f"{__package__}.child",
    fork=ForkKind.DRILL,
    runs_user_code=True,
)
FOLDER = ".drill"  # in the run's folder of checkpoints
# What a drill needs: a file, and a folder of checkpoints. They are apart: who saves removes what looks left over.
SHARE_FILE, STATE_FOLDER = "share.json", "state"
STATE, SHARE = "state", "share"  # in messages
REPEATED, DRILLED = "repeated", "drilled"  # what is proved
# For a drill, once training is complete, where a rank was replaced and none has passed.
END_WAIT_S = 30.0


def number_of_drill(
    committed_step: int,
    *,
    begun_step: int,
    total_steps: int,
    drill_at: Sequence[int] | None,
    owed_from: int | None = None,
) -> int | None:
    """The how many-th drill, from 0, the step that begins now is for; None where it is for none.

    ``owed_from``: the step at which a generation formed that is to make up for one, if need be with its last step.
    """
    if not drill_at or committed_step >= total_steps:
        return None
    steps = sorted(set(drill_at))
    if owed_from is not None:
        made_up_after = max(1, min(steps[0], total_steps - 1 - owed_from))
        if committed_step - owed_from == made_up_after:
            return 0
    since = committed_step - begun_step
    return steps.index(since) if since in steps else None


def drilled_rank(number: int, ranks: int) -> int:
    """Return the rank to drill: each of the first ``ranks`` in turn, on the machine of rank 0."""
    return number % ranks


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


def unproved_reason(*, step: int, why: str) -> str:
    """Why a run is not exact in which a rank was replaced and no drill has passed."""
    return (
        "not proved: a rank was replaced, and no drill has shown that a replacement computes the same"
        f" bits (that of step {step:,}: {why})"
    )
