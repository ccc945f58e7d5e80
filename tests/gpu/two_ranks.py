"""Two or three NCCL ranks on one GPU: refused or not, and there the abort of one of them alone."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

from tests.gpu import group as by_hand
from tests.gpu.facts import Timed, error_text

SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_MIN_CTAS": "1"}
RIGHT = 6.0  # 1 + 2 + 3


def measure(facts):
    """Plainly, then as NCCL 2.30 and later allows it; then the partial abort."""
    import torch  # noqa: F401 - forks have it

    folder = Path(tempfile.mkdtemp(prefix="gpu_two_ranks_"))
    try:
        known = {**by_hand.PRODUCT, "NCCL_DEBUG": "WARN"}
        run(facts, "plain", sum_together, folder, world_size=2, limit_s=5, environment=known)
        known = {**known, **SHARED}
        if run(facts, "shared", sum_together, folder, world_size=2, limit_s=5, environment=known):
            run(
                facts,
                "partial_abort",
                abort_alone,
                folder,
                world_size=3,
                limit_s=8,
                environment=known,
            )
        else:
            facts.note("partial_abort", "not tried: ranks cannot share a GPU here")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(facts, name, function, folder, *, world_size, limit_s, environment):
    """``function`` on so many ranks; whether all ended well."""
    at = facts.under(name)
    path = str(folder / name)
    forks = [
        at.start(f"rank{rank}", function, path, rank, world_size, **environment)
        for rank in range(world_size)
    ]
    return all([fork is not None and fork.finish(limit_s) for fork in forks])  # noqa: C419 - every one


def _store(path, world_size):
    from torch.distributed import FileStore

    return FileStore(path, world_size)


def sum_together(facts, path, rank, world_size):
    """An all-reduce: seconds, or how it is refused."""
    try:
        with Timed() as spent:
            by_hand.join(_store(path, world_size), 0, rank=rank, world_size=world_size, timeout_s=5)
            facts.note("sum", by_hand.summed(rank + 1))
        facts.note("seconds", spent.s)
    except Exception as error:
        facts.note("error", error_text(error))
        raise


def _first_values(tensor):
    return tensor.unique()[:4].tolist()


def abort_alone(facts, path, rank, world_size):
    """Ranks 0 and 1 sum, 2 never does; 0 alone aborts. What rank 1 then takes for its sum is the fact."""
    import torch
    import torch.distributed as dist

    by_hand.join(_store(path, world_size), 0, rank=rank, world_size=world_size, timeout_s=8)
    facts.note("first_sum", by_hand.summed(rank + 1))
    if rank == 2:
        time.sleep(4.0)
        return
    tensor = torch.full((2**20,), float(rank + 1), device=by_hand.device())
    dist.all_reduce(tensor, async_op=True)
    waiting = by_hand.Beside(_first_values, tensor)
    time.sleep(1.0)
    if rank == 0:
        facts.note("abort", by_hand.Beside(by_hand.abort).reported(2.5))
    reported = waiting.reported(2.5)
    facts.note("came_out", reported)
    values = reported.get("value")
    if rank == 1 and values is not None:
        facts.note("is_wrong_and_whole", values != [RIGHT])
