"""Describes broken loading to people: faults of workers and of samples. Never repairs."""

from __future__ import annotations

import signal
import time
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import psutil

from ddp_runner.data.workers import system_limits
from ddp_runner.data.workers.timeouts import BatchLateError, PoolError
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.rules.phases import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddp_runner.data.workers.fetch import SampleFailed
    from ddp_runner.data.workers.pool import WorkerPool

SAMPLES_REPLACED = "bad samples were replaced: see quarantine.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingRepaired:
    """A fault of loading that was repaired inside the rank, ``seconds`` after it was noticed.

    ``inexact_reason`` is empty where every step gets the samples that it would have had.
    ``kernel_kills``: so many workers the kernel has killed for memory since the last one that was reported.
    """

    fault: Fault
    action: str
    seconds: float
    inexact_reason: str = ""
    kernel_kills: int = 0


class KillCounter(Protocol):
    """Counts the processes that the kernel has killed for memory; times are monotonic."""

    def look_sometimes(self, now_s: float) -> None:
        """Called now and then, so that an old kill is not taken for a new one."""
        ...

    def claim(self, now_s: float) -> bool:
        """Return True if a process that has just ended of SIGKILL was one of them; each is claimed once."""
        ...


class NoKills:
    """Claims nothing: nobody counts kills here."""

    def look_sometimes(self, now_s: float) -> None:
        """See :meth:`KillCounter.look_sometimes`."""

    def claim(self, now_s: float) -> bool:
        """See :meth:`KillCounter.claim`."""
        del now_s
        return False


class LoaderKills:
    """Claims the kills of one loader's workers, and reports them to the counter of the ranks."""

    def __init__(self, kills: KillCounter) -> None:
        self._kills = kills
        self._unreported = 0

    def look_sometimes(self, now_s: float) -> None:
        """See :meth:`KillCounter.look_sometimes`."""
        self._kills.look_sometimes(now_s)

    def has_killed(self, pool: WorkerPool, worker: int) -> bool:
        """Return True if the kernel has killed ``worker`` for memory; to be asked once."""
        by_sigkill = pool.process(worker).exitcode == -signal.SIGKILL
        killed = by_sigkill and self._kills.claim(time.monotonic())
        self._unreported += killed
        return killed

    def take_unreported(self) -> int:
        """Return the number of kills claimed since the last call."""
        unreported, self._unreported = self._unreported, 0
        return unreported


def fault_of_worker(
    error: PoolError,
    pool: WorkerPool | None,
    *,
    kills: LoaderKills,
    rank: int,
    step: int,
    log: Callable[[str], None],
    phase: Phase = Phase.DATA,
) -> Fault:
    """``error`` as a fault, with all that is known of the worker to blame; called while it is handled.

    ``pool``: the one that raised it, not ended yet; None if it could not be started. The stack of
    a worker that is late goes to ``log``.
    """
    late = isinstance(error, BatchLateError)
    cause = str(error)
    kind = FaultKind.LOADER_TIMEOUT if late else FaultKind.LOADER_WORKER_DIED
    if pool is not None and error.worker >= 0:
        if kills.has_killed(pool, error.worker):
            kind = FaultKind.OUT_OF_MEMORY
        for other in range(len(pool.pids)):
            if other != error.worker:
                kills.has_killed(pool, other)
        report = worker_report(pool, error.worker, for_memory=kind is FaultKind.OUT_OF_MEMORY)
        cause = f"{error}: {report}" if late or type(error) is PoolError else report
        if late and (stack := pool.stack(error.worker)):
            log(f"the stack of loader worker {error.worker}:\n{stack}")
    return Fault(
        kind=kind,
        rank=rank,
        step=step,
        phase=phase.label,
        cause=cause,
        detail=traceback.format_exc(),
        at_ns=time.monotonic_ns(),
    )


def fault_of_samples(
    indices: tuple[int, ...],
    why: str,
    *,
    detail: str,
    rank: int,
    step: int,
    epoch: int,
    phase: str = Phase.DATA.label,
) -> Fault:
    """The samples at ``indices`` cannot be loaded (several: not together); ``why`` in one line."""
    which = ", ".join(str(index) for index in indices)
    of = "validation " if phase == Phase.EVALUATE.label else ""
    noun = f"{of}sample" if len(indices) == 1 else f"one of the {of}samples"
    return Fault(
        kind=FaultKind.BAD_SAMPLE,
        rank=rank,
        step=step,
        phase=phase,
        cause=f"{noun} {which} (epoch {epoch + 1}) could not be loaded: {why}",
        detail=detail,
        at_ns=time.monotonic_ns(),
    )


def fault_of_failure(
    failed: SampleFailed, *, rank: int, step: int, epoch: int, phase: Phase = Phase.DATA
) -> Fault:
    """An exception of the dataset or the collate function as a fault; refused memory is no bad sample."""
    fault = fault_of_samples(
        failed.indices,
        failed.error,
        detail=failed.traceback,
        rank=rank,
        step=step,
        epoch=epoch,
        phase=phase.label,
    )
    if not failed.for_memory:
        return fault
    return replace(fault, kind=FaultKind.OUT_OF_MEMORY, cause=f"out of memory: {fault.cause}")


def refuse_dataset(failed: SampleFailed) -> None:
    """Raise BadInputError where no other sample and no other worker would help."""
    if failed.refused:
        raise BadInputError(failed.option, "", failed.refused)


def worker_report(pool: WorkerPool, worker: int, *, for_memory: bool) -> str:
    """Return a line about a worker: number, pid, state, memory, how it ended, what it was loading.

    ``for_memory``: the kernel killed it for that.
    """
    process = pool.process(worker)
    peak = system_limits.in_mb(pool.peak_bytes(worker))
    state = _state(process.pid, process.exitcode, peak)
    if for_memory:
        state = f"was killed by the kernel: out of memory, {peak} resident when it began its batch"
    return f"loader worker {worker} (pid {process.pid}) {state}; {pool.activity(worker)}"


def _state(pid: int | None, exitcode: int | None, peak: str) -> str:
    if exitcode is None:
        try:
            facts = psutil.Process(pid)
            return f"is {facts.status()}, {system_limits.in_mb(facts.memory_info().rss)} resident"
        except psutil.NoSuchProcess:
            return "has ended, status unknown"
    if exitcode >= 0:
        return f"exited with code {exitcode}, {peak} resident at most"
    name = signal.Signals(-exitcode).name
    hints = {
        signal.SIGKILL: " (by somebody, or by the kernel for want of memory)",
        signal.SIGBUS: f" ({system_limits.SHARED_MEMORY} full, or a mapped file was cut short)",
    }
    hint = hints.get(signal.Signals(-exitcode), "")
    return f"was killed by {name}{hint}, {peak} resident at most"
