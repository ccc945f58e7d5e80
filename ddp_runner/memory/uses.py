"""Decides which limit a reading is closest to. Values in, values out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_runner.core.settings import MemorySettings
    from ddp_runner.memory.readings import Reading

GB = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How much of one limit is used. ``on_host`` says whether loader prefetch counts in it."""

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
    """Whether rank and loaders together use more than ``max_memory_gb``."""
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
