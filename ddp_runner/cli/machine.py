"""The resources of this machine: cores, memory, the installed torch's build. Imports no torch."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path

from ddp_runner.system.torch_versions import NCCL2

_CGROUP = Path("/sys/fs/cgroup")


def torch_has(module: str) -> bool:
    """Return whether the installed torch includes this module; True if there is no torch to ask."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    return Path(spec.origin).parent.joinpath(*module.split(".")).with_suffix(".py").is_file()


def has_nccl2() -> bool:
    """Return whether the installed torch has NCCL's newer class, ProcessGroupNCCL2."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    file = Path(spec.origin).parent / "distributed" / "distributed_c10d.py"
    try:
        return NCCL2 in file.read_text(encoding="utf-8")
    except OSError:
        return False


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
