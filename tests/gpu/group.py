"""One generation of torch's process group, as the product forms and aborts it, but by hand."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

from tests.gpu.facts import Timed, device_name, error_text, rehearses

PRODUCT = {
    "TORCH_DIST_USE_NCCL2": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_INCLUDE_STACK_TRACE": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}  # what ranks find in their environment; see ddp_runner.system.environment


def preload():
    """Import what the product's zygote imports, so that forks have it; seconds."""
    from ddp_runner.kernel.rank import zygote

    return zygote.preload("ddp_runner.rank.trained:")


def backend():
    """NCCL, or what stands for it on the CPU."""
    if not rehearses():
        return "nccl"
    from tests.kernel.group import silent

    silent.register()
    return silent.BACKEND


def device():
    """Where the group computes."""
    import torch

    return torch.device(device_name())


def memory_store():
    """A store of this process alone."""
    from torch.distributed import HashStore

    return HashStore()


def join(store, generation, *, rank=0, world_size=1, is_eager=True, timeout_s=30.0):
    """Form the default group."""
    import torch.distributed as dist

    dist.init_process_group(
        backend(),
        store=dist.PrefixStore(f"{generation}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device() if is_eager and not rehearses() else None,
    )


def abort():
    """The communicators of the default group alone, as the product does."""
    import torch.distributed as dist

    dist.distributed_c10d._get_default_group()._get_backend(device()).abort()


def leave():
    """torch's world, once its communicators are aborted, as the product does."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()
    world = getattr(dist.distributed_c10d, "_world", None)
    if world is not None and not dist.is_initialized():
        world.group_count = 0


def summed(value=1.0, size=1024):
    """An all-reduce to its end: its first number."""
    import torch
    import torch.distributed as dist

    tensor = torch.full((size,), float(value), device=device())
    dist.all_reduce(tensor)
    return float(tensor[0])


def sleep_on_device(seconds, cycles_per_s=1.9e9):
    """Enqueue a kernel that takes about so long; on the CPU in its place the caller sleeps."""
    if rehearses():
        time.sleep(min(seconds, 0.2))
        return
    import torch

    torch.cuda._sleep(int(seconds * cycles_per_s))


def held():
    """Descriptors, threads and MB of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "rss_mb": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    }


class Beside:
    """A call in a thread of its own: when it began and ended, and what came of it."""

    def __init__(self, function, *arguments, after_s=0.0):
        self.error = ""
        self.value = None
        self.s = None
        self._after_s = after_s
        self._thread = threading.Thread(target=self._run, args=(function, arguments), daemon=True)
        self._thread.start()

    def _run(self, function, arguments):
        time.sleep(self._after_s)
        with Timed() as spent:
            try:
                self.value = function(*arguments)
            except Exception as error:  # noqa: BLE001 - the error is the fact
                self.error = error_text(error)
        self.s = spent.s

    def reported(self, timeout_s=30.0):
        """As a fact."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return {"lasts": f"not over after {timeout_s:g} s"}
        reported = {"s": self.s}
        if self.error:
            reported["raised"] = self.error
        elif self.value is not None:
            reported["value"] = self.value
        return reported
