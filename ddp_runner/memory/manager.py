"""MemoryManager: looks at memory between steps, reacts to pressure, enforces the hard limit.

It never kills a process, never touches the model, and holds a bounded amount of data itself. All
methods run in the rank's main thread, at a step boundary.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from ddp_runner.core.memory_leak import LeakWindow
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.memory.readings import Reader, Reading, SystemReader
from ddp_runner.memory.reclaim import empty_device_cache, keep_freed_heap, reclaim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from ddp_runner.core.settings import MemorySettings
    from ddp_runner.memory.readings import Reading


# Decides how tight memory is: a share of a limit -> a level, with hysteresis. Never measures.


class Level(IntEnum):
    """The memory pressure: how close memory is to its limit; a higher number is worse."""

    OK = 0
    WARN = 1
    REACT = 2
    LIMIT = 3

    @property
    def label(self) -> str:
        """The lower-case name that people and files see."""
        return self.name.lower()


def next_level(
    current: Level,
    share: float,
    *,
    warn: float,
    react: float,
    limit: float,
    hysteresis: float = 0.05,
) -> Level:
    """The level after ``share`` (used / limit; may exceed 1) was seen while at ``current``.

    A level is entered at once when its threshold is reached, and left only when the share has
    fallen ``hysteresis`` below that threshold: a share that swings around a threshold is one event.
    Raises ValueError unless ``0 <= warn <= react <= limit`` and ``hysteresis >= 0``.
    """
    if not 0 <= warn <= react <= limit or hysteresis < 0:
        raise ValueError(f"thresholds must rise: warn={warn} react={react} limit={limit}")
    thresholds = ((Level.LIMIT, limit), (Level.REACT, react), (Level.WARN, warn))
    for level, threshold in thresholds:
        margin = hysteresis if level <= current else 0.0
        if share >= threshold - margin:
            return level
    return Level.OK


def may_collect_fully(*, since_last_s: float, cost_s: float, cost_share: float = 0.001) -> bool:
    """Return whether a full garbage collection of ``cost_s`` stays within its share of the time.

    A full collection walks every object of the process: 40-60 ms with torch imported, which is a
    step or more of a small model. ``since_last_s`` is the time since the last one.
    """
    return cost_s <= cost_share * since_last_s


_MB = 1_000_000
_LOOKS_BETWEEN_REACTIONS = 10  # while a level lasts; a reaction costs some 50 ms
_LEAST_GAP_S = 0.5  # between looks
HEAP_SHARE = 1 / 32  # of the memory, which the ranks of a machine may keep of what they have freed
_LOG_LEVEL = {
    Level.OK: "info",
    Level.WARN: "warning",
    Level.REACT: "warning",
    Level.LIMIT: "error",
}


class Loads(Protocol):
    """A loader whose memory counts as the rank's."""

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Processes that load for this rank now."""

    def shrink_prefetch(self) -> None:
        """Hold fewer batches ahead, where that can be; may be called many times."""


class MemoryManager:
    """Watches the memory of one rank, its loader workers and its device.

    ``log`` takes (``info``, ``warning`` or ``error``,
    message). A GB is 10^9 bytes throughout.
    """

    def __init__(
        self,
        settings: MemorySettings,
        *,
        rank: int,
        loader: Loads,
        log: Callable[[str, str], None],
        device: torch.device | None = None,
        read: Reader | None = None,
        least_gap_s: float = _LEAST_GAP_S,
    ) -> None:
        """``least_gap_s``: between looks after steps, however short those are: a look takes 0.2 ms."""
        self._settings = settings
        self._least_gap_s = least_gap_s
        self._looked_at_s = -math.inf
        self._rank = rank
        self._loader = loader
        self._pids_beside: Callable[[], tuple[int, ...]] = tuple
        self._log = log
        self._device = device
        self._read = read if read is not None else SystemReader(device=device)
        self._level = Level.OK
        self._looks_since_reaction = _LOOKS_BETWEEN_REACTIONS
        self._leaks = {
            name: LeakWindow(settings)
            for name in ("this rank", "its loader workers", "its device allocations")
        }
        self._suspected: dict[str, Mapping[str, object]] = {}
        self._peaks = dict.fromkeys(
            ("peak_rss_bytes", "peak_loader_bytes", "peak_device_bytes", "peak_device_permille"), 0
        )
        self._newest: Reading | None = None
        self._oom_kills: int | None = None
        self._collected_at_s = time.monotonic()
        self._collect_cost_s = 0.0

    @property
    def level(self) -> Level:
        """The pressure level at the last look."""
        return self._level

    @property
    def host_is_short(self) -> bool:
        """True if host memory was short at the last reading, so that whatever can be freed should be."""
        if self._level < Level.REACT or self._newest is None:
            return False
        return tightest_use(self._newest, self._settings).on_host

    def after_step(self, step: int) -> None:
        """Look and react if it is time to; two integer operations otherwise.

        Raises FaultError (OUT_OF_MEMORY) when rank and loaders together still use more than
        ``max_memory_gb`` after all that can be freed was freed.
        """
        if self._settings.cleanup_interval and step % self._settings.cleanup_interval == 0:
            self._clean_up()
        if step % self._settings.memory_check_interval == 0:
            now_s = time.monotonic()
            if now_s - self._looked_at_s >= self._least_gap_s:
                self._looked_at_s = now_s
                self._look(step)

    @contextlib.contextmanager
    def beside(self, loader_pids: Callable[[], tuple[int, ...]]) -> Iterator[None]:
        """Count the workers of another loader too within the block, such as an evaluation's."""
        self._pids_beside = loader_pids
        try:
            yield
        finally:
            self._pids_beside = tuple

    def in_evaluation(self, step: int) -> None:
        """Look now, and react. It is no sign of a leak. Raises FaultError as ``after_step``."""
        self._judge(step, self._measure())

    @property
    def suspected_leaks(self) -> tuple[Mapping[str, object], ...]:
        """The newest suspicion of each place: rank, where, bytes_per_1000_steps, since_step."""
        return tuple(self._suspected.values())

    def peaks(self) -> dict[str, int]:
        """The highest ``peak_rss_bytes``, ``peak_loader_bytes`` and ``peak_device_bytes`` so far.

        ``peak_device_permille``: of the device's memory, so much was taken at most, by all. Rank and device peaks are the system's own high-water marks; the loaders' is the highest
        of the looks.
        """
        self._measure()
        return dict(self._peaks)

    def newest(self) -> Reading:
        """Return the newest reading, which is at most ``memory_check_interval`` steps old."""
        return self._measure() if self._newest is None else self._newest

    def room_bytes(self) -> int:
        """Host memory that may still be taken, below every limit that is known."""
        reading = self._measure()
        room_bytes = reading.available_bytes
        if self._settings.max_memory_gb is not None:
            limit_bytes = int(self._settings.max_memory_gb * GB)
            room_bytes = min(room_bytes, limit_bytes - reading.rss_bytes - reading.loader_bytes)
        return max(0, room_bytes)

    def keep_freed(self, *, ranks_here: int) -> None:
        """Keep freed memory for the next step, as far as this one of the machine's ranks may.

        It is given back when memory is short. Nothing changes for a user who has set malloc's limits.
        """
        keep_freed_heap(int(HEAP_SHARE * self.newest().ceiling_bytes / ranks_here))

    def _look(self, step: int) -> None:
        """Measure, follow the level, react, enforce the hard limit."""
        reading = self._measure()
        self._report_leaks(step, reading)
        self._judge(step, reading)

    def _judge(self, step: int, reading: Reading) -> None:
        self._report_kills(reading)
        self._looks_since_reaction += 1
        self._follow_level(reading)
        if self._level >= Level.REACT and self._looks_since_reaction > _LOOKS_BETWEEN_REACTIONS:
            reading = self._react(reading)
        self._enforce_limit(step, reading)

    def _measure(self) -> Reading:
        """Take one reading, and update the peaks with it."""
        reading = self._newest = self._read((*self._loader.worker_pids, *self._pids_beside()))
        total_bytes = reading.device_total_bytes or 1
        for name, size in (
            ("peak_rss_bytes", max(reading.rss_bytes, reading.rss_peak_bytes)),
            ("peak_loader_bytes", reading.loader_bytes),
            ("peak_device_bytes", reading.device_peak_bytes or 0),
            (
                "peak_device_permille",
                -(-1000 * (reading.device_taken_peak_bytes or 0) // total_bytes),
            ),
        ):
            self._peaks[name] = max(self._peaks[name], size)
        return reading

    def _follow_level(self, reading: Reading) -> None:
        """Take on the level of the tightest limit, and say so when it changes."""
        tightest = tightest_use(reading, self._settings)
        settings = self._settings
        level = next_level(
            self._level,
            tightest.share,
            warn=settings.warn_share,
            react=settings.react_share,
            limit=settings.limit_share,
        )
        if level is self._level:
            return
        if level > self._level:
            self._looks_since_reaction = _LOOKS_BETWEEN_REACTIONS + 1  # a rise is acted on at once
        self._level = level
        self._log(_LOG_LEVEL[level], f"memory {level.label}: {tightest}")

    def _react(self, before: Reading) -> Reading:
        """Free what can be freed and read again."""
        self._looks_since_reaction = 0
        on_host = tightest_use(before, self._settings).on_host
        if on_host:
            self._loader.shrink_prefetch()
        done = reclaim(device=self._device)
        after = self._measure()
        freed = before.rss_bytes - after.rss_bytes
        cached = (before.device_reserved_bytes or 0) - (after.device_reserved_bytes or 0)
        self._log(
            "warning",
            f"memory reaction: rank {self._rank} gave back {max(0, freed) / _MB:.0f} MB of host and "
            f"{max(0, cached) / _MB:.0f} MB of device memory in {done.duration_s * 1000:.0f} ms"
            + (", and asked its loader to prefetch less" if on_host else ""),
        )
        return after

    def _enforce_limit(self, step: int, reading: Reading) -> None:
        """Raise when the hard limit is still exceeded after a reaction."""
        if exceeds_hard_limit(reading, self._settings) and self._looks_since_reaction:
            reading = self._react(reading)
        if not exceeds_hard_limit(reading, self._settings):
            return
        rank_gb, loader_gb = reading.rss_bytes / GB, reading.loader_bytes / GB
        cause = (
            f"rank {self._rank} uses {rank_gb + loader_gb:.2f} GB of max_memory_gb={self._settings.max_memory_gb:g} "
            f"({rank_gb:.2f} GB itself, {loader_gb:.2f} GB in its loader workers), after a clean-up;"
            " raise max_memory_gb, or lower batch_size or num_workers"
        )
        raise FaultError(
            Fault(
                kind=FaultKind.OUT_OF_MEMORY,
                rank=self._rank,
                step=step,
                cause=cause,
                at_ns=time.monotonic_ns(),
                may_retry=False,  # found between steps, after all was freed: no split helps
            )
        )

    def _report_kills(self, reading: Reading) -> None:
        """Report that the kernel has killed other processes for memory since the last reading."""
        if reading.oom_kills is None:
            return
        known, self._oom_kills = self._oom_kills, reading.oom_kills
        if known is not None and reading.oom_kills > known:
            count = reading.oom_kills - known
            self._log(
                "warning", f"the kernel killed {count} process(es) of this container for memory"
            )

    def _report_leaks(self, step: int, reading: Reading) -> None:
        """Feed the leak windows and report the leaks that they suspect."""
        sizes = (reading.rss_bytes, reading.loader_bytes, reading.device_allocated_bytes or 0)
        for (name, window), size in zip(self._leaks.items(), sizes, strict=True):
            suspicion = window.observe(step=step, size_bytes=size)
            if suspicion is not None:
                self._suspected[name] = {
                    "rank": self._rank,
                    "where": name,
                    "bytes_per_1000_steps": round(suspicion.rate_bytes_per_1000_steps),
                    "since_step": suspicion.since_step,
                }
                rate_mb = suspicion.rate_bytes_per_1000_steps / _MB
                self._log(
                    "warning",
                    f"suspected memory leak: {name} (rank {self._rank}) has grown steadily by "
                    f"{rate_mb:.0f} MB per 1000 steps since step {suspicion.since_step}, "
                    f"to {size / GB:.2f} GB",
                )

    def _clean_up(self) -> None:
        """The periodic clean-up: all generations where the time allows, else the young ones."""
        now_s = time.monotonic()
        since_last_s = now_s - self._collected_at_s
        if may_collect_fully(since_last_s=since_last_s, cost_s=self._collect_cost_s):
            gc.collect()
            self._collected_at_s = time.monotonic()
            self._collect_cost_s = self._collected_at_s - now_s
        else:
            gc.collect(1)
        # An emptied cache is refilled by slow, synchronising allocations: only under pressure.
        if self._level >= Level.WARN:
            empty_device_cache(self._device)


# Decides which limit a reading is closest to. Values in, values out.

GB = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """The use of one memory limit. ``on_host`` says whether loader prefetch counts in it."""

    used_bytes: int
    limit_bytes: int
    limit_name: str
    on_host: bool

    @property
    def share(self) -> float:
        """Used / limit; above 1 when the limit is exceeded."""
        return self.used_bytes / self.limit_bytes

    def __str__(self) -> str:
        used, limit = self.used_bytes / GB, self.limit_bytes / GB
        return f"{used:.2f} GB used of {limit:.2f} GB ({self.share:.0%} of {self.limit_name})"


def tightest_use(reading: Reading, settings: MemorySettings) -> Use:
    """The use with the highest share: of machine or container, ``max_memory_gb``, or device."""
    machine = Use(
        used_bytes=reading.ceiling_bytes - reading.available_bytes,
        limit_bytes=reading.ceiling_bytes,
        limit_name=reading.ceiling_source,
        on_host=True,
    )
    others = (_own_use(reading, settings), _device_use(reading))
    return max((machine, *(use for use in others if use)), key=lambda use: use.share)


def exceeds_hard_limit(reading: Reading, settings: MemorySettings) -> bool:
    """Return whether the rank and its loaders together use more than ``max_memory_gb``."""
    own = _own_use(reading, settings)
    return own is not None and own.used_bytes > own.limit_bytes


def _own_use(reading: Reading, settings: MemorySettings) -> Use | None:
    """The use of ``max_memory_gb``, if that is set."""
    if settings.max_memory_gb is None:
        return None
    return Use(
        used_bytes=reading.rss_bytes + reading.loader_bytes,
        limit_bytes=max(1, int(settings.max_memory_gb * GB)),
        limit_name="max_memory_gb",
        on_host=True,
    )


def _device_use(reading: Reading) -> Use | None:
    """The use of the device, if there is one. Cached blocks are free for this rank."""
    free, total = reading.device_free_bytes, reading.device_total_bytes
    if free is None or not total:
        return None
    cached = (reading.device_reserved_bytes or 0) - (reading.device_allocated_bytes or 0)
    return Use(
        used_bytes=total - free - cached,
        limit_bytes=total,
        limit_name="device memory",
        on_host=False,
    )
