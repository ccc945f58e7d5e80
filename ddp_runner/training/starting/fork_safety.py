"""Makes torch's first calls of a rank once before any thread starts, so that forks are safe.

The first call of nearly everything in torch registers something with the C and C++ runtimes, under their
locks (``__cxa_guard_acquire``, and the one of ``__cxa_atexit``), which a fork copies as they are.
A loader worker that is forked while another thread is in such a first call has them locked permanently,
and sleeps at its own first call: seen as a worker that loads its first sample until its time is up.
"""

from __future__ import annotations

import functools
import io

import torch

from ddp_runner.checkpoint.snapshot import HostMemory
from ddp_runner.training.components.tensor_hash import tensor_hash


# INVARIANT nothing-new-in-threads: no thread of a rank calls what torch has not been asked for before.
# Broken if: hashing or saving beside the step begins to use other functions of torch than these.
# Guarded by: test_threads_beside_a_step_make_no_first_call_of_torch.
@functools.cache
def make_forks_safe() -> None:
    """Hash, copy and write a tensor, once in a process and all that are forked from it.

    Takes milliseconds, starts no thread and touches neither a device, a disk nor a random number.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # or compute threads would be started, which no fork inherits
    try:
        tensor = torch.arange(1, 10, dtype=torch.float32, device="cpu")
        tensor_hash(tensor)
        snapshot = HostMemory().snapshot({"tensor": tensor}, steady=[tensor])
        snapshot.copy_steady()
        torch.save(snapshot.content, io.BytesIO())
    finally:
        torch.set_num_threads(threads)
