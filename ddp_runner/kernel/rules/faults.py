"""Names and describes failures: logs, display, exit codes and recovery use these kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ddp_runner.kernel.rules.secrets import without_secrets

# Both travel in one packet, and stay in events.jsonl and the summary for each fault.
CAUSE_CHARACTERS_MAX = 1_000
DETAIL_CHARACTERS_MAX = 8_000


class FaultKind(Enum):
    """A kind exists only where recovery differs."""

    RANK_KILLED = "rank_killed"
    RANK_EXITED = "rank_exited"
    RANK_RAISED = "rank_raised"
    RANK_HUNG = "rank_hung"
    COLLECTIVE_FAILED = "collective_failed"  # lost a peer: a victim, never a culprit
    COLLECTIVE_STUCK = "collective_stuck"
    REDUCTION_UNFINISHED = "reduction_unfinished"
    COMPILATION_FAILED = "compilation_failed"
    OUT_OF_MEMORY = "out_of_memory"
    LOADER_WORKER_DIED = "loader_worker_died"
    LOADER_TIMEOUT = "loader_timeout"
    BAD_SAMPLE = "bad_sample"
    NON_FINITE = "non_finite"
    LOSS_EXPLODED = "loss_exploded"
    REPLICA_DIVERGED = "replica_diverged"
    CHECKPOINT_BAD = "checkpoint_bad"
    STORAGE_FAILED = "storage_failed"
    STORE_DIED = "store_died"
    STORE_TAMPERED = (
        "store_tampered"  # by another program: the generation forms again under new keys
    )
    NODE_LOST = "node_lost"  # all its ranks are gone with it
    DEVICE_LOST = "device_lost"
    WRONG_GRADIENT = "wrong_gradient"  # a share whose bits another process does not reproduce
    BAD_INPUT = "bad_input"  # the user's settings, data or files: never retried


class Origin(Enum):
    """The likely source of a fault; a retry is useless only if the run itself causes the fault each time."""

    OWN = "own"  # the run itself: an exception, an exit, a hang, a crash that says why
    OUTSIDE = "outside"  # somebody else: SIGKILL, SIGSTOP
    UNCLEAR = "unclear"  # a signal that others send, and that a process brings upon itself


# The rank where it happens repairs it itself and stays; the step is redone in a new generation.
REPAIRED_BY_RANK = frozenset(
    {
        FaultKind.COMPILATION_FAILED,
        FaultKind.OUT_OF_MEMORY,
        FaultKind.REDUCTION_UNFINISHED,
        FaultKind.REPLICA_DIVERGED,
    }
)

# The process where it happens may no longer be as it should, but it holds a committed state: it waits
# for the supervisor's word, and stays only where no other rank has a state.
PARKED_BY_RANK = frozenset({FaultKind.RANK_RAISED})

# The run ends for it, but where it happens there is a committed state: that process waits until it was
# asked to save it. Not where the state itself is in doubt, or cannot be read (a device that is lost).
SAVED_BEFORE_END = frozenset(
    {
        FaultKind.BAD_INPUT,
        FaultKind.BAD_SAMPLE,
        FaultKind.COMPILATION_FAILED,
        FaultKind.LOSS_EXPLODED,
        FaultKind.NON_FINITE,
        FaultKind.OUT_OF_MEMORY,
        FaultKind.REDUCTION_UNFINISHED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that went wrong, as a value.

    ``rank`` is -1 where no single rank is to blame. ``cause`` is one line for people; ``detail``
    may hold a traceback or stacks. ``at_ns`` is CLOCK_MONOTONIC nanoseconds on this machine.
    """

    kind: FaultKind
    rank: int
    step: int
    cause: str
    phase: str = ""
    detail: str = ""
    at_ns: int = 0
    may_retry: bool = True  # False: whoever could repair it has nothing left to change
    is_disagreement: bool = (
        False  # of a stuck collective: the ranks are known to do different things
    )
    origin: Origin = Origin.OWN
    host: str = ""  # of its rank, where there are several machines

    def bounded(self) -> Fault:
        """The same fault, what users' code may have made too long cut: the end of a traceback counts."""
        return replace(
            self,
            cause=self.cause[:CAUSE_CHARACTERS_MAX],
            detail=self.detail[-DETAIL_CHARACTERS_MAX:],
        )

    def without(self, secrets: Sequence[str]) -> Fault:
        """The same fault, where the texts of a user's exception may hold secrets."""
        return replace(
            self,
            cause=without_secrets(self.cause, secrets),
            detail=without_secrets(self.detail, secrets),
        )


class FaultError(Exception):
    """Carries a classified :class:`Fault` up to the nearest named boundary."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.cause)
        self.fault = fault


class ReportedFaultError(FaultError):
    """A fault that has been reported already: all that is left is to end."""


def fault_line(fault: Fault) -> str:
    """Return the fault for people: who, what and when."""
    who, rank = fault.cause, f"rank {fault.rank}"
    if fault.rank >= 0 and not who.startswith((f"{rank} ", f"{rank}'")):
        who = f"{rank}: {who}"
    if fault.host and fault.host not in who:  # of a lost machine it stands there
        who = who.replace(rank, f"{rank} on {fault.host}", 1)
    where = f" in {fault.phase}" if fault.phase else ""
    return f"{who} at step {fault.step}{where}"


def rank_list(ranks: tuple[int, ...] | list[int] | set[int]) -> str:
    """Return ``rank 1``, ``ranks 0-3`` or ``ranks 0-1,4``."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"
