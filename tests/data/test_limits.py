"""The limits preflight: what it measures and when it warns."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import torch

from ddp_runner.data.limits import batch_bytes, check_shared_memory


@dataclass
class Pair:
    left: torch.Tensor
    right: object


def test_batch_bytes_counts_tensors_and_arrays_wherever_they_are():
    """Containers of any depth are counted, other values are not."""
    tensor = torch.zeros(10, dtype=torch.int64)
    assert batch_bytes(tensor) == 80
    assert batch_bytes({"a": [tensor, np.zeros(3)], "b": (b"four", "text", 7)}) == 80 + 24 + 4
    assert batch_bytes(Pair(left=tensor, right=None)) == 80


def test_shared_memory_too_small_is_told_with_both_sizes(tmp_path):
    """The warning names the place, what is free and what is needed."""
    text = check_shared_memory(workers=2, prefetch_factor=4, batch_bytes=2**50, path=tmp_path)
    assert text is not None
    assert str(tmp_path) in text
    assert "free" in text
    assert f"{2**33}.0 MB" in text


def test_enough_shared_memory_is_no_warning(tmp_path):
    """Controls: a small batch, no workers, a system without such a folder."""
    assert check_shared_memory(workers=2, prefetch_factor=2, batch_bytes=1, path=tmp_path) is None
    assert check_shared_memory(workers=0, prefetch_factor=2, batch_bytes=2**50) is None
    nowhere = tmp_path / "none"
    assert (
        check_shared_memory(workers=2, prefetch_factor=2, batch_bytes=2**50, path=nowhere) is None
    )


def test_open_file_limit_is_raised_to_the_hard_one():
    """The soft limit becomes the hard one, and the second call finds nothing to do."""
    code = (
        "import resource as r\n"
        "from ddp_runner.data.limits import raise_open_file_limit as up\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (100, 200))\n"
        "assert up() == (100, 200) and r.getrlimit(r.RLIMIT_NOFILE) == (200, 200)\n"
        "assert up() == (200, 200)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
