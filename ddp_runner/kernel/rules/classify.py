"""Classifies failures: makes a Fault of the facts about one, and finds which of several faults came first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_runner.kernel.rules.crash_output import CrashOutput
from ddp_runner.kernel.rules.faults import Fault, FaultKind, Origin

VICTIM_KINDS = frozenset({FaultKind.COLLECTIVE_FAILED})

_SIGNAL_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS",
    8: "SIGFPE", 9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE",
    14: "SIGALRM", 15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ", 26: "SIGVTALRM", 27: "SIGPROF",
    29: "SIGIO", 31: "SIGSYS", 34: "SIGRTMIN",
}  # fmt: skip
_SENT_BY_OTHERS = frozenset(
    {"SIGHUP", "SIGINT", "SIGQUIT", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGTERM"}
)


def is_sent_by_others(number: int) -> bool:
    """Return whether a process gets this signal only from outside, unless it sends it to itself on purpose."""
    return signal_name(number) in _SENT_BY_OTHERS


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 64`` where there is no common name (Linux numbers)."""
    return _SIGNAL_NAMES.get(number, f"signal {number}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """The end of a rank's process, with an ``exit_code`` or a ``signal_number``; the other one is None.

    ``crash`` is the process's own report if it crashed, and ``place`` the line of code where it was then.
    ``words``: the text that its program gave to ``sys.exit``.
    """

    rank: int
    step: int
    phase: str
    at_ns: int
    exit_code: int | None
    signal_number: int | None
    killed_for_memory: bool = False  # by the kernel
    last_output: str = ""
    crash: CrashOutput | None = None
    place: str = ""
    words: str = ""


def classify_exit(end: RankExit) -> Fault:
    """Return the fault of a rank that ended before it had finished. Exit 0 is one too: its peers wait for it."""
    mismatch = None if end.crash is None else end.crash.mismatch
    if end.killed_for_memory:
        kind = FaultKind.OUT_OF_MEMORY
        cause = f"rank {end.rank} killed by the kernel: out of memory"
    elif mismatch is not None:
        # gloo ends whoever is sent more than it expects; who sent it may be as wrong.
        kind = FaultKind.COLLECTIVE_STUCK
        cause = (
            f"the ranks disagree on a collective: rank {end.rank} was sent {mismatch[0]} bytes "
            f"where it expected {mismatch[1]}"
        )
    elif end.signal_number is not None:
        # A destructor that meets the error of a lost device ends the process: nobody can catch it.
        kind = FaultKind.DEVICE_LOST if _says_device_lost(end.crash) else FaultKind.RANK_KILLED
        cause = f"rank {end.rank} killed ({_signal_in_words(end, end.signal_number)})"
    elif end.exit_code == 0:
        kind = FaultKind.RANK_EXITED
        cause = f"rank {end.rank} exited with code 0 before the end"
    else:
        kind = FaultKind.RANK_EXITED
        said = f": {end.words}" if end.words else ""
        cause = f"rank {end.rank} exited with code {end.exit_code}{said}"
    return Fault(
        kind=kind,
        rank=end.rank if mismatch is None else -1,
        step=end.step,
        cause=cause,
        phase=end.phase,
        detail=end.last_output or ("" if end.crash is None else end.crash.text),
        at_ns=end.at_ns,
        is_disagreement=mismatch is not None,
        origin=_origin(end) if kind is FaultKind.RANK_KILLED else Origin.OWN,
    )


def _says_device_lost(crash: CrashOutput | None) -> bool:
    reason = "" if crash is None else crash.reason
    kind = classify_error(type_name="RuntimeError", text=reason, aborted=False)
    return kind is FaultKind.DEVICE_LOST


def _origin(end: RankExit) -> Origin:
    """Return who may have sent the signal that ended a rank, kills for memory by the kernel excepted."""
    if end.signal_number is not None and is_sent_by_others(end.signal_number):
        return Origin.OUTSIDE
    # That it was in the user's code says nothing: a signal from outside finds it there as well.
    says_why = end.crash is not None and bool(end.crash.reason)
    return Origin.OWN if says_why else Origin.UNCLEAR


def _signal_in_words(end: RankExit, number: int) -> str:
    """``SIGKILL``, or ``SIGABRT in loss, task.py:31: free(): invalid pointer``."""
    if end.crash is None:
        return signal_name(number)
    where = f"{signal_name(number)} {end.place}".rstrip()
    return f"{where}: {end.crash.reason}" if end.crash.reason else where


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The first fault and the others. ``culprit`` began it; ``causes`` are all faults that no other caused, by time."""

    culprit: Fault
    causes: tuple[Fault, ...]
    victims: tuple[Fault, ...]


def attribute(faults: Sequence[Fault]) -> Attribution:
    """Separate the first cause from its consequences. Raises ValueError for no faults.

    A lost peer is never a culprit while any other cause exists; a rank that reported a cause and
    then died of it counts once, with what it reported. Where all wait in a collective and one rank
    does not leave it when it is told to, the others have waited for that one.
    """
    if not faults:
        raise ValueError("nothing to attribute")
    by_time = sorted(faults, key=lambda fault: fault.at_ns)
    if any(fault.kind is FaultKind.RANK_HUNG for fault in faults):
        by_time = [fault for fault in by_time if not _is_of_all_alike(fault)]
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


def _is_of_all_alike(fault: Fault) -> bool:
    return fault.kind is FaultKind.COLLECTIVE_STUCK and fault.rank < 0 and not fault.is_disagreement


_OUT_OF_MEMORY_TYPES = ("OutOfMemoryError", "MemoryError")  # numpy: _ArrayMemoryError
_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to allocate",
    "_status_alloc_failed",  # of cuBLAS, cuDNN, cuSOLVER
)
_UNFINISHED_TEXTS = (
    "expected to have finished reduction",
    "expected to mark a variable ready only once",
    "your training graph has changed in this iteration",
)
# What torch.compile raises, of its own steps and of those that it hands on to.
_COMPILER_TYPES = frozenset(
    {
        "BackendCompilerFailed",
        "FailOnRecompileLimitHit",
        "InductorError",
        "InternalTorchDynamoError",
        "InvalidCxxCompiler",
        "LoweringException",
        "TorchRuntimeError",
        "UncapturedHigherOrderOpError",
        "Unsupported",
        "UserError",
    }
)
_DEVICE_TEXTS = (
    *("cuda error", "cuda driver error", "device-side assert", "uncorrectable ecc"),
    # Of cuDNN and of Triton, whose errors do not begin as CUDA's own do.
    *("_status_execution_failed", "illegal memory access"),
)
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
    """Return the kind of an exception that left a step, by its type's name and its text.

    ``aborted``: whether this rank had been told to leave the generation; a communication error is
    then this runner's own doing. Texts are those of torch 2.6 to 2.15 and gloo.
    """
    lowered = text.lower()
    if type_name.endswith(_OUT_OF_MEMORY_TYPES):
        return FaultKind.OUT_OF_MEMORY
    if any(part in lowered for part in _OUT_OF_MEMORY_TEXTS):
        return FaultKind.OUT_OF_MEMORY
    if type_name in _COMPILER_TYPES:
        return FaultKind.COMPILATION_FAILED
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


def lacks_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, which says nothing about the data that was being loaded."""
    kind = classify_error(type_name=type(error).__name__, text=str(error), aborted=False)
    return kind is FaultKind.OUT_OF_MEMORY
