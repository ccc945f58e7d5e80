"""Two limits that end loader workers in riddles: open files and ``/dev/shm``. Never lowers any."""

from __future__ import annotations

import dataclasses
import resource
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where torch's workers put their batches


def raise_open_file_limit() -> tuple[int, int]:
    """Raise the soft limit of open files to the hard one; ``(before, after)``.

    Every tensor that a worker sends costs the rank an open file while it is alive.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard in {soft, resource.RLIM_INFINITY}:
        # An unlimited hard limit is none that a process may claim: the kernel's own cap decides.
        return soft, soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


def batch_bytes(batch: Any) -> int:
    """Bytes of the tensors and arrays in ``batch``, through mappings, sequences, dataclasses."""
    if isinstance(batch, torch.Tensor):
        return batch.numel() * batch.element_size()
    if isinstance(batch, np.ndarray):
        return batch.nbytes
    if isinstance(batch, (bytes, bytearray)):
        return len(batch)
    return sum(batch_bytes(part) for part in _parts(batch))


def _parts(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, (list, tuple)):
        return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, part.name) for part in dataclasses.fields(batch)]
    return ()


def check_shared_memory(
    *, workers: int, prefetch_factor: int, batch_bytes: int, path: Path = SHARED_MEMORY
) -> str | None:
    """A warning if ``path`` cannot hold every batch that ``workers`` may have ready, else None.

    ``batch_bytes`` is one micro-batch. Counts this rank only, and what is free now.
    """
    if workers == 0 or not path.is_dir():
        return None
    free_bytes = shutil.disk_usage(path).free
    need_bytes = workers * prefetch_factor * batch_bytes
    if need_bytes <= free_bytes:
        return None
    return (
        f"{path} has {in_mb(free_bytes)} free, but {workers} loader workers with {prefetch_factor} "
        f"batches of {in_mb(batch_bytes)} each need {in_mb(need_bytes)}: enlarge it "
        f"(docker run --shm-size), or lower num_workers or prefetch_factor"
    )


def can_pin() -> bool:
    """Whether there is a device for whose copies memory can be pinned."""
    return torch.cuda.is_available()


def in_mb(size_bytes: int) -> str:
    """``size_bytes`` for people."""
    return f"{size_bytes / 2**20:.1f} MB"
