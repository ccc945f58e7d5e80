"""Computes the default number of ranks on a machine without GPUs, and the threads per rank. Pure."""

from __future__ import annotations

AUTO_CPU_RANKS = 2
_PER_GPU_RANK_MAX = 8


def share_of_cores(cores: int, *, ranks: int, on_cpu: bool, own: str = "") -> int:
    """Intra-op threads of each rank where the settings say nothing. ``own``: the user's OMP_NUM_THREADS."""
    outermost = own.split(",", maxsplit=1)[0].strip()  # one for each level of nesting
    if outermost.isdecimal() and int(outermost):
        return int(outermost)
    share = max(1, cores // max(1, ranks))
    return share if on_cpu else min(share, _PER_GPU_RANK_MAX)
