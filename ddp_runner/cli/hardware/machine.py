"""The cores and open files that this machine gives to a run. Apart from its devices: cores are asked for before anything else."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.observe.format import counted

AUTO_CPU_RANKS = 2  # on a machine without GPUs
_PER_GPU_RANK_MAX = 8  # threads
_CGROUP = Path("/sys/fs/cgroup")
_FILE_BYTES = 1 << 16  # for logs, the smallest checkpoint, and memory that has no name
_OPEN_FILES_BASE, _OPEN_FILES_PER_RANK = 64, 16  # of the process that has most: supervisor or rank


def core_count() -> int:
    """Cores that this process may use: its CPU affinity, cut to the container's quota."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, min(cores, math.ceil(quota)) if quota else cores)


def cpu_quota(root: Path = _CGROUP) -> float | None:
    """The container's CPU quota in cores (cgroup v2 or v1); None without one."""
    try:
        limit, period = (root / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            limit = (root / "cpu" / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return None
    if limit in ("max", "-1"):
        return None
    return int(limit) / int(period)


def share_of_cores(cores: int, *, ranks: int, on_cpu: bool, own: str = "") -> int:
    """Intra-op threads of each rank where the settings say nothing. ``own``: the user's OMP_NUM_THREADS."""
    outermost = own.split(",", maxsplit=1)[0].strip()  # one for each level of nesting
    if outermost.isdecimal() and int(outermost):
        return int(outermost)
    share = max(1, cores // max(1, ranks))
    return share if on_cpu else min(share, _PER_GPU_RANK_MAX)


def allow_files(world_size: int) -> None:
    """Raise this process's limit of open files to what a run needs. Raises BadInputError where limits forbid a run."""
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY and size < _FILE_BYTES:
        raise BadInputError(
            "ulimit -f", "", f"allows files of {size:,} bytes; a run needs {_FILE_BYTES:,}"
        )
    needed = _OPEN_FILES_BASE + _OPEN_FILES_PER_RANK * world_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BadInputError(
            "ulimit -n",
            hard,
            f"allows too few open files: {counted(world_size, 'rank')} need {needed}",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
