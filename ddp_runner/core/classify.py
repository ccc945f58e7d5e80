"""Facts about a failure -> a Fault, and which of several faults came first. Never looks anything up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_runner.core.faults import Fault, FaultKind

VICTIM_KINDS = frozenset({FaultKind.COLLECTIVE_FAILED})

_SIGNAL_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM",
    15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS",
}  # fmt: skip


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 64`` where there is no common name (Linux numbers)."""
    return _SIGNAL_NAMES.get(number, f"signal {number}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How a rank's process ended: ``exit_code`` or ``signal_number``, the other is None."""

    rank: int
    step: int
    phase: str
    at_ns: int
    exit_code: int | None
    signal_number: int | None
    killed_for_memory: bool = False  # by the kernel
    last_words: str = ""


def classify_exit(end: RankExit) -> Fault:
    """A rank that ended before it had finished. Exit 0 is a fault too: its peers wait for it."""
    if end.killed_for_memory:
        kind = FaultKind.OUT_OF_MEMORY
        cause = f"rank {end.rank} killed by the kernel: out of memory"
    elif end.signal_number is not None:
        kind = FaultKind.RANK_KILLED
        cause = f"rank {end.rank} killed ({signal_name(end.signal_number)})"
    elif end.exit_code == 0:
        kind = FaultKind.RANK_EXITED
        cause = f"rank {end.rank} exited with code 0 before the end"
    else:
        kind = FaultKind.RANK_EXITED
        cause = f"rank {end.rank} exited with code {end.exit_code}"
    return Fault(
        kind=kind,
        rank=end.rank,
        step=end.step,
        cause=cause,
        phase=end.phase,
        detail=end.last_words,
        at_ns=end.at_ns,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """``culprit`` began it; ``causes`` are all faults that are nobody's consequence, by time."""

    culprit: Fault
    causes: tuple[Fault, ...]
    victims: tuple[Fault, ...]


def attribute(faults: Sequence[Fault]) -> Attribution:
    """Separate the first cause from its consequences. Raises ValueError for no faults.

    A lost peer is never a culprit while any other cause exists; a rank that reported a cause and
    then died of it counts once, with what it reported.
    """
    if not faults:
        raise ValueError("nothing to attribute")
    by_time = sorted(faults, key=lambda fault: fault.at_ns)
    causes: list[Fault] = []
    for fault in by_time:
        if fault.kind in VICTIM_KINDS or any(seen.rank == fault.rank for seen in causes):
            continue
        causes.append(fault)
    named = {fault.rank for fault in causes}
    victims = tuple(
        fault for fault in by_time if fault.kind in VICTIM_KINDS and fault.rank not in named
    )
    if not causes:
        return Attribution(culprit=by_time[0], causes=(by_time[0],), victims=victims[1:])
    return Attribution(culprit=causes[0], causes=tuple(causes), victims=victims)


_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to allocate",
)
_UNFINISHED_TEXTS = (
    "expected to have finished reduction",
    "expected to mark a variable ready only once",
    "your training graph has changed in this iteration",
)
_DEVICE_TEXTS = ("cuda error", "cuda driver error", "device-side assert", "uncorrectable ecc")
_COLLECTIVE_TYPES = frozenset(
    {"DistBackendError", "DistNetworkError", "DistStoreError", "QueueEmptyError"}
)
_COLLECTIVE_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "socket closed",
    "socket timeout",
    "broken pipe",
    "timed out waiting",
    "pair closure",
    "gloo",
    "nccl",
    "process group",
    "wait timeout",
)


def classify_error(  # noqa: PLR0911 - a table in the order of precedence
    *, type_name: str, text: str, aborted: bool
) -> FaultKind:
    """The kind of an exception that left a step, by its type's name and its text.

    ``aborted``: whether this rank had been told to leave the generation; a communication error is
    then this runner's own doing. Texts are those of torch 2.6 to 2.13 and gloo.
    """
    lowered = text.lower()
    if type_name in ("OutOfMemoryError", "MemoryError"):
        return FaultKind.OUT_OF_MEMORY
    if any(part in lowered for part in _OUT_OF_MEMORY_TEXTS):
        return FaultKind.OUT_OF_MEMORY
    if any(part in lowered for part in _UNFINISHED_TEXTS):
        return FaultKind.REDUCTION_UNFINISHED
    if type_name in _COLLECTIVE_TYPES:
        return FaultKind.COLLECTIVE_FAILED
    if type_name == "RuntimeError" and any(part in lowered for part in _COLLECTIVE_TEXTS):
        return FaultKind.COLLECTIVE_FAILED
    if any(part in lowered for part in _DEVICE_TEXTS) or type_name == "AcceleratorError":
        return FaultKind.DEVICE_LOST
    if aborted and type_name in ("RuntimeError", "ConnectionError", "TimeoutError"):
        return FaultKind.COLLECTIVE_FAILED
    return FaultKind.RANK_RAISED
