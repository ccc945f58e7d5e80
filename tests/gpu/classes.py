"""Seconds from a kill to the next step by each of NCCL's classes, with a rank on every GPU."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tests.gpu import repairs
from tests.gpu.facts import rehearses


def measure(facts):
    """Both classes in turn, where torch has both; ``faster`` names the one with the shorter repairs."""
    import torch
    import torch.distributed as dist

    if not rehearses() and not hasattr(dist, "ProcessGroupNCCL2"):
        facts.note("left_out", f"torch {torch.__version__} has one class for NCCL")
        return
    gpus = 1 if rehearses() else torch.cuda.device_count()
    folder = Path(tempfile.mkdtemp(prefix="gpu_classes_"))
    try:
        found = repairs.compare_classes(facts, folder, gpus=gpus, limit_s=facts.left_s - 3)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    facts.note("repaired_s", found)
    if all(found.values()):
        facts.note("faster", min(found, key=lambda name: min(found[name])))
