"""Repairs loading inside the rank: other workers after a fault, stand-ins for bad samples, shares that are read again.

Decides through ``core/loader_recovery.py`` and the quarantine; the loader performs. What cannot be repaired
leaves as a FaultError.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddp_runner.core.loader_recovery import (
    OTHERS_TRIED,
    PROGRESS_STEPS,
    LoaderHistory,
    is_batch_suspect,
    plan_loader_repair,
    workers_to_use,
)
from ddp_runner.data.loader_faults import (
    SAMPLES_REPLACED,
    LoaderKills,
    LoadingRepaired,
    fault_of_samples,
)
from ddp_runner.data.quarantine import Quarantine, QuarantineFullError
from ddp_runner.data.workers.fetch import BatchKey, SampleFailed, SampleReader
from ddp_runner.data.workers.pool import PoolSettings, WorkerPool
from ddp_runner.data.workers.timeouts import PoolError
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddp_runner.core.loader_recovery import LoaderRepair


_BATCH_TRIES_MAX = 3  # of a batch that raises and then loads when it is tried again
_BROKE_KEPT = 64  # batches that broke a worker; most of them by chance, and loaded since
_SHARE_TRIES_MAX = 3  # of a share that raises
_FAULTS_OF_A_SHARE_MAX = 8  # of workers, before one share is there


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A fault of loading, and what was being loaded, where that is known.

    ``why`` is what to say of a sample that turns out to be the cause.
    """

    fault: Fault
    why: str
    key: Any = None
    suspect: int | None = None
    raised: bool = False  # the worker is well; its batch is not
    for_memory: bool = False  # as raised, but for want of memory, which says nothing about a sample
    by_reading: bool = False  # what was being read may have ended the worker, or keeps it
    files_used_up: bool = False


class DataRepair:
    """Repairs one loader, and lives as long as it: what it learns outlasts workers and generations.

    Of data that raises it repairs nothing: what can be done there is the source's to say, in a subclass.
    """

    def __init__(self, kills: LoaderKills) -> None:
        self._kills = kills
        self._history = LoaderHistory(last_step=-PROGRESS_STEPS)
        self.by_value = False  # how workers hand their batches over
        self._unreported: list[tuple[float, LoadingRepaired]] = []

    def begin(self, suspected: Trouble | None) -> None:
        """A step is to be loaded. ``suspected``: what broke the process before this one, if no worker reads it."""

    def repair(self, trouble: Trouble, *, workers: int) -> int:
        """Return the number of workers with which to load the same step again; none of the old ones is left.

        Raises FaultError if nothing would help, or only something that the settings forbid.
        """
        began_s = time.monotonic()
        self._refuse(trouble, workers=workers)
        if trouble.raised:
            return self._after_raised(trouble, workers=workers, began_s=began_s)
        fault = trouble.fault
        self._history = self._history.after_fault(fault.step)
        if trouble.files_used_up and not self.by_value:
            self.by_value = True
            action = "from here on batches are copied through a pipe, which needs no open files"
            self._note(fault, action, began_s)
            return workers
        plan = plan_loader_repair(self._history, workers=workers)
        return self._after_broken(trouble, plan, workers=workers, began_s=began_s)

    def _refuse(self, trouble: Trouble, *, workers: int) -> None:
        """Raise FaultError where nothing would help."""
        del workers
        if trouble.for_memory:
            raise FaultError(trouble.fault)

    def _after_raised(self, trouble: Trouble, *, workers: int, began_s: float) -> int:
        del workers, began_s
        raise FaultError(trouble.fault)

    def _after_broken(
        self, trouble: Trouble, plan: LoaderRepair, *, workers: int, began_s: float
    ) -> int:
        del workers
        self._note(trouble.fault, plan.action, began_s)
        return plan.workers

    def workers_to_use(self, *, step: int, workers: int, asked: int) -> int:
        """Return the number of workers for ``step``; it grows again after a stretch without faults."""
        return workers_to_use(self._history, step=step, workers=workers, asked=asked)

    def delivered(self, indices: tuple[int, ...]) -> list[LoadingRepaired]:
        """Return the repairs that a loaded step has needed; each is reported once. ``indices``: its last samples."""
        del indices
        now_s = time.monotonic()
        reported = [replace(one, seconds=now_s - began_s) for began_s, one in self._unreported]
        self._unreported.clear()
        if reported:
            reported[0] = replace(reported[0], kernel_kills=self._kills.take_unreported())
        return reported

    def _note(self, fault: Fault, action: str, began_s: float, *, inexact_reason: str = "") -> None:
        one = LoadingRepaired(
            fault=fault, action=action, seconds=0.0, inexact_reason=inexact_reason
        )
        self._unreported.append((began_s, one))


class SampleRepair(DataRepair):
    """Repairs loading of samples with indices: finds the bad ones, which other samples may replace."""

    def __init__(
        self,
        reader: SampleReader,
        *,
        quarantine: Quarantine,
        timeout_s: float,
        on_wait: Callable[[], None],
        kills: LoaderKills,
    ) -> None:
        super().__init__(kills)
        self._reader = reader
        self._quarantine = quarantine
        self._timeout_s = timeout_s
        self._on_wait = on_wait
        self._broke: dict[BatchKey, int] = {}  # how many workers broke while they loaded it
        self._good: list[int] = []  # a sample that was loaded

    def begin(self, suspected: Trouble | None) -> None:
        """Replace the suspect of a process that has ended, if a worker cannot load it either.

        Raises FaultError (BAD_SAMPLE) as :meth:`repair` does.
        """
        if suspected is not None:
            self._examine(suspected)

    def delivered(self, indices: tuple[int, ...]) -> list[LoadingRepaired]:
        """See :meth:`DataRepair.delivered`."""
        if indices:
            self._good = [indices[-1]]
        return super().delivered(indices)

    def _refuse(self, trouble: Trouble, *, workers: int) -> None:
        # Fewer workers need less memory; in the rank itself, smaller micro-batches do.
        if trouble.for_memory and workers == 0:
            raise FaultError(trouble.fault)

    def _after_raised(self, trouble: Trouble, *, workers: int, began_s: float) -> int:
        self._history = self._history.after_fault(trouble.fault.step)
        bad = self._find_bad(trouble, workers=workers)
        if bad:
            self._replace(bad, trouble, began_s=began_s)
        else:
            self._try_again(trouble, began_s=began_s)
        return workers

    def _after_broken(
        self, trouble: Trouble, plan: LoaderRepair, *, workers: int, began_s: float
    ) -> int:
        key = trouble.key
        if key is not None and is_batch_suspect(broke=self._count_break(key), repair=plan):
            bad = self._find_bad(trouble, workers=workers)
            if bad:
                self._replace(bad, trouble, began_s=began_s)
                return workers
        return super()._after_broken(trouble, plan, workers=workers, began_s=began_s)

    def _examine(self, trouble: Trouble) -> None:
        key, began_s = trouble.key, time.monotonic()

        def fails(index: int) -> bool:
            part = BatchKey(epoch=key.epoch, indices=(index,))
            return self._load_in_worker(self._reader, part, trouble).failed

        (suspect,) = key.indices
        try:
            if not fails(suspect) or fails(self._quarantine.draw(suspect)):
                return  # it was a chance, or this dataset does not load in any worker
        except PoolError:
            return
        self._replace((suspect,), trouble, began_s=began_s)

    def _count_break(self, key: BatchKey) -> int:
        self._broke[key] = self._broke.pop(key, 0) + 1
        while len(self._broke) > _BROKE_KEPT:
            del self._broke[next(iter(self._broke))]
        return self._broke[key]

    def _find_bad(self, trouble: Trouble, *, workers: int) -> Indices:
        """Return the samples that cannot be loaded, of a batch that broke workers or raised."""
        key = trouble.key

        def fails(indices: Indices) -> bool:
            part = BatchKey(epoch=key.epoch, indices=indices)
            if workers == 0:
                loaded = self._reader.load_here(part, on_sample=lambda _index: self._on_wait())
                return is_failed(loaded)
            return self._load_in_worker(self._reader, part, trouble).failed

        try:
            if trouble.raised:
                return isolate(key.indices, suspect=trouble.suspect, fails=fails)
            bad = self._find_breaking(trouble, key, fails)
            # Where no sample can be loaded, it is not the sample.
            others = [index for index in self._others(key) if index not in bad][:OTHERS_TRIED]
            return bad if bad and not all(fails((index,)) for index in others) else ()
        except PoolError:  # no worker, or no memory: nothing is known about any sample
            return ()

    def _find_breaking(
        self, trouble: Trouble, key: BatchKey, fails: Callable[[Indices], bool]
    ) -> Indices:
        suspect = trouble.suspect
        if suspect is None:
            suspect = self._load_in_worker(self._reader.one_by_one(), key, trouble).sample
        if trouble.fault.kind is not FaultKind.LOADER_TIMEOUT:
            return isolate(key.indices, suspect=suspect, fails=fails)
        # No halves: each one that hangs is waited for, while the other ranks wait for this one.
        if suspect is not None and fails((suspect,)):
            return (suspect,)
        return key.indices if fails(key.indices) else ()

    def _load_in_worker(self, reader: SampleReader, key: BatchKey, trouble: Trouble) -> Attempt:
        return load_in_worker(
            reader,
            key,
            rank=trouble.fault.rank,
            timeout_s=self._timeout_s,
            on_wait=self._on_wait,
            kills=self._kills,
        )

    def _others(self, key: BatchKey) -> list[int]:
        """Samples that ought to load, the likeliest first."""
        return [*self._good, self._quarantine.draw(key.indices[0]), *key.indices]

    def _replace(self, bad: Indices, trouble: Trouble, *, began_s: float) -> None:
        fault, key = trouble.fault, trouble.key
        named = fault_of_samples(
            bad,
            trouble.why,
            detail=fault.detail,
            rank=fault.rank,
            step=fault.step,
            epoch=key.epoch,
            phase=fault.phase,
        )
        if len(bad) > 1:
            raise FaultError(named)
        (index,) = bad
        try:
            instead = self._quarantine.add(
                index, reason=trouble.why, step=fault.step, rank=fault.rank
            )
        except QuarantineFullError as full:
            raise FaultError(replace(named, cause=f"{named.cause} ({full})")) from full
        self._history = self._history.without_cause()
        if not trouble.raised:
            # What is left of the batch broke these workers as well, if it does so again.
            left = tuple(self._quarantine.stand_in(one) for one in key.indices)
            self._broke[key._replace(indices=left)] = self._broke.pop(key, 0)
        action = f"sample {instead} takes the place of {index}, which is not tried again"
        self._note(named, action, began_s, inexact_reason=SAMPLES_REPLACED)

    def _try_again(self, trouble: Trouble, *, began_s: float) -> None:
        """Note that the batch loaded at the second try: its storage may have been out of reach for a moment."""
        if self._history.in_a_row > _BATCH_TRIES_MAX:
            raise FaultError(trouble.fault)
        self._note(trouble.fault, "loaded when it was tried again", began_s)


class ShareRepair(DataRepair):
    """Repairs shares of shards, which are read again from their beginning; a rank never reads what broke workers."""

    def __init__(self, kills: LoaderKills) -> None:
        super().__init__(kills)
        self._tries = 0  # of the share that is being read

    def begin(self, suspected: Trouble | None) -> None:
        """See :meth:`DataRepair.begin`."""
        del suspected
        self._tries = 0

    def _refuse(self, trouble: Trouble, *, workers: int) -> None:
        super()._refuse(trouble, workers=workers)
        if not trouble.raised and self._tries >= _FAULTS_OF_A_SHARE_MAX:
            raise FaultError(trouble.fault)
        self._tries += 1

    def _after_raised(self, trouble: Trouble, *, workers: int, began_s: float) -> int:
        """Read it again: its storage may have been out of reach."""
        if self._tries >= _SHARE_TRIES_MAX:
            raise FaultError(trouble.fault)
        self._note(trouble.fault, "read again", began_s)
        return workers

    def _after_broken(
        self, trouble: Trouble, plan: LoaderRepair, *, workers: int, began_s: float
    ) -> int:
        if plan.workers == 0 and trouble.by_reading:
            # What ends a worker, or keeps it, would do so to the rank.
            plan = replace(plan, workers=1, action="1 loader worker restarted")
        return super()._after_broken(trouble, plan, workers=workers, began_s=began_s)


# Finds the samples that break loading, by loading parts of a batch on their own. Never replaces
# any.

Indices = tuple[int, ...]


def isolate(indices: Indices, *, suspect: int | None, fails: Callable[[Indices], bool]) -> Indices:
    """The smallest part of ``indices`` found that fails on its own; () if they all load now.

    ``suspect`` is the sample that was being loaded, tried first. More than one is returned only
    where no half fails without the other. At most 2 log2(len(indices)) + 2 tries.
    """
    if suspect is not None and fails((suspect,)):
        return (suspect,)
    if not fails(indices):
        return ()
    while len(indices) > 1:
        middle = len(indices) // 2
        halves = (indices[:middle], indices[middle:])
        failing = next((half for half in halves if fails(half)), None)
        if failing is None:
            return indices
        indices = failing
    return indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The outcome of a load in a separate worker. ``sample``: the one being loaded when it broke, if known."""

    failed: bool
    sample: int | None = None


def load_in_worker(
    reader: SampleReader,
    key: BatchKey,
    *,
    rank: int,
    timeout_s: float,
    on_wait: Callable[[], None],
    kills: LoaderKills,
) -> Attempt:
    """Have a worker of its own load ``key``: it may raise, die or hang. Raises PoolError without one."""
    settings = PoolSettings(rank=rank, workers=1, prefetch_factor=1, pin_memory=False)
    pool = WorkerPool(reader, iter([key]), settings=settings)
    try:
        _, batch = pool.next(timeout_s=timeout_s, on_wait=on_wait)
    except PoolError as error:
        if error.worker < 0:
            raise
        kills.has_killed(pool, 0)  # claimed, so that nobody takes it for the end of a rank
        _, sample = pool.suspect(0) or (None, None)
        return Attempt(failed=True, sample=sample)
    finally:
        pool.end(grace_s=0.0)
    return Attempt(failed=is_failed(batch))


def is_failed(loaded: Any) -> bool:
    """Return True if the samples themselves made loading fail. Raises PoolError for want of memory."""
    if not isinstance(loaded, SampleFailed):
        return False
    if loaded.for_memory:
        raise PoolError(f"out of memory: {loaded.error}", worker=-1)
    return True
