"""Gives memory back: Python garbage, the device cache, the C heap. Never decides when."""

from __future__ import annotations

import ctypes
import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaimed:
    """The result of one reclaim: Python objects collected, and how long the training loop waited."""

    objects: int
    duration_s: float


def reclaim(*, device: torch.device | None) -> Reclaimed:
    """Collect all garbage, empty the cache of ``device``, return free C heap to the system.

    The order matters: garbage holds tensors, whose blocks go to the cache and to the heap. The
    heap step is what helps on a CPU: after 100,000 tensors of 8 kB were freed, glibc kept 430 MB
    until malloc_trim gave it back in 30 ms. Without anything to give it takes 2 us.
    """
    start_s = time.monotonic()
    objects = gc.collect()
    empty_device_cache(device)
    trim_heap()
    return Reclaimed(objects=objects, duration_s=time.monotonic() - start_s)


def empty_device_cache(device: torch.device | None) -> None:
    """Return cached blocks to a CUDA ``device`` that is in use; nothing for any other."""
    if device is None or device.type != "cuda":
        return
    import torch  # noqa: PLC0415 - this room is imported by processes without torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def trim_heap() -> bool:
    """Return free heap pages to the system; False where the C library (musl, macOS) cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
