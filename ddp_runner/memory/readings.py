"""Reads all memory that a rank can run out of. Judges and frees nothing.

Cost on a 400 MB rank: statm and meminfo take 10-25 us each and are read every time. The unique
memory of a forked worker is in smaps_rollup, which walks its page tables (4.3 ms per worker), so it
is read every 30 s and carried forward by the worker's RSS in between.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import psutil

from ddp_runner.kernel.processes.memory_limits import (
    Limit,
    container_limit,
    free_bytes,
    oom_kill_count,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_UNIQUE_INTERVAL_S = 30.0
_MAXRSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # getrusage(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A reading of memory. Device fields are None without a CUDA device.

    ``rss_bytes`` counts every page of the rank, also those shared with the process that forked it.
    ``loader_bytes`` counts only what the workers hold beyond pages that others map too, so that the
    two may be added: a worker forked from a rank of 400 MB has an RSS of 340 MB and holds 1 MB.
    ``available_bytes`` is what may still be allocated below ``ceiling_bytes``, which is physical
    memory or the container's limit. ``device_free_bytes`` is free on the device for any process;
    reserved minus allocated is free for this one besides. ``device_taken_peak_bytes`` is the most that this
    process has had reserved, with what is taken by all else: contexts, libraries, other processes.
    """

    rss_bytes: int
    rss_peak_bytes: int
    loader_bytes: int
    available_bytes: int
    ceiling_bytes: int
    ceiling_source: str
    oom_kills: int | None = None
    device_allocated_bytes: int | None = None
    device_reserved_bytes: int | None = None
    device_free_bytes: int | None = None
    device_total_bytes: int | None = None
    device_peak_bytes: int | None = None
    device_taken_peak_bytes: int | None = None

    @property
    def memory_efficiency(self) -> float | None:
        """Peak of tensors over peak of what torch has reserved on the device, 0 to 1; None before the first use."""
        sizes = (self.device_total_bytes, self.device_free_bytes, self.device_reserved_bytes)
        total, free, reserved = (0 if size is None else size for size in sizes)
        peak = (self.device_taken_peak_bytes or 0) - (total - free - reserved)
        if not self.device_peak_bytes or peak <= 0:
            return None
        return min(1.0, self.device_peak_bytes / peak)


class Reader(Protocol):
    """The port through which MemoryManager sees memory."""

    def __call__(self, loader_pids: tuple[int, ...]) -> Reading:
        """Measure now. Called from the rank's main thread."""
        ...


@dataclass(slots=True, kw_only=True)
class _Worker:
    """One loader worker: its unique bytes at ``at_s``, when its RSS was ``rss_bytes``."""

    process: psutil.Process
    unique_bytes: int
    rss_bytes: int
    at_s: float


class SystemReader:
    """Reads this process, its loader workers, its container and ``device``."""

    def __init__(
        self,
        *,
        device: torch.device | None = None,
        limit: Limit | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._self = psutil.Process()
        self._device = device if device is not None and device.type == "cuda" else None
        self._now_s = now_s
        self._workers: dict[int, _Worker] = {}
        physical = int(psutil.virtual_memory().total)
        self._limit = limit if limit is not None else container_limit()
        if self._limit is not None and self._limit.bytes >= physical:
            self._limit = None  # a limit beyond physical memory never bites
        self._ceiling = physical if self._limit is None else self._limit.bytes
        self._source = "physical memory" if self._limit is None else self._limit.source

    def __call__(self, loader_pids: tuple[int, ...]) -> Reading:
        """Measure now."""
        return Reading(
            rss_bytes=int(self._self.memory_info().rss),
            rss_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT_BYTES,
            loader_bytes=self._read_loaders(loader_pids),
            available_bytes=self._available(),
            ceiling_bytes=self._ceiling,
            ceiling_source=self._source,
            oom_kills=oom_kill_count(),
            **self._read_device(),
        )

    def _available(self) -> int:
        """Return the bytes that may still be allocated on this machine and in this container."""
        return free_bytes(self._limit)

    def _read_loaders(self, pids: tuple[int, ...]) -> int:
        """Unique bytes of all workers that still run."""
        self._workers = {pid: worker for pid, worker in self._workers.items() if pid in pids}
        return sum(self._read_worker(pid) for pid in pids)

    def _read_worker(self, pid: int) -> int:
        """Unique bytes of one worker; 0 when it has ended."""
        try:
            return self._follow_worker(pid)
        except psutil.NoSuchProcess:  # a worker may end at any time; its loader reports that
            self._workers.pop(pid, None)
            return 0

    def _follow_worker(self, pid: int) -> int:
        """Unique bytes of one worker. Raises psutil.NoSuchProcess (also for a zombie)."""
        now_s = self._now_s()
        worker = self._workers.get(pid)
        process = psutil.Process(pid) if worker is None else worker.process
        rss = int(process.memory_info().rss)
        if worker is not None and now_s - worker.at_s < _UNIQUE_INTERVAL_S:
            # New pages of a worker are its own, so RSS growth since the last full look is unique.
            return max(0, worker.unique_bytes + rss - worker.rss_bytes)
        unique = _unique_bytes(process, rss)
        self._workers[pid] = _Worker(
            process=process, unique_bytes=unique, rss_bytes=rss, at_s=now_s
        )
        return unique

    def _read_device(self) -> dict[str, int]:
        """The device fields of a Reading; empty without a CUDA device or before its first use."""
        if self._device is None:
            return {}
        import torch  # noqa: PLC0415 - this room is imported by processes without torch

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return {}  # asking would create a context of some hundred MB on the device
        stats = torch.cuda.memory_stats(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = stats.get("reserved_bytes.all.current", 0)
        return {
            "device_allocated_bytes": stats.get("allocated_bytes.all.current", 0),
            "device_reserved_bytes": reserved,
            "device_free_bytes": free,
            "device_total_bytes": total,
            "device_peak_bytes": stats.get("allocated_bytes.all.peak", 0),
            "device_taken_peak_bytes": total
            - free
            - reserved
            + stats.get("reserved_bytes.all.peak", 0),
        }


def _unique_bytes(process: psutil.Process, rss_bytes: int) -> int:
    """The USS of ``process``; its RSS where the system does not know the USS."""
    try:
        return int(process.memory_full_info().uss)
    except psutil.AccessDenied:
        return rss_bytes
