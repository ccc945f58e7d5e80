"""Processes that are forked from a rank while its threads are at work: loader workers, above all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = shutil.which("cc")
ROOT = Path(__file__).resolve().parents[2]
# A C++ function takes this lock at its first call only, to make what it keeps for all later ones.
COUNTING_LOCK = """
#include <sched.h>
static long calls;
long first_calls(void) { return calls; }
int __cxa_guard_acquire(char *guard) {
    __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    for (char free = 0;; free = 0, sched_yield()) {
        if (__atomic_load_n(guard, __ATOMIC_ACQUIRE)) return 0;
        if (__atomic_compare_exchange_n(guard + 1, &free, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return 1;
    }
}
void __cxa_guard_release(char *guard) {
    __atomic_store_n(guard, 1, __ATOMIC_RELEASE);
    __atomic_store_n(guard + 1, 0, __ATOMIC_SEQ_CST);
}
void __cxa_guard_abort(char *guard) { __atomic_store_n(guard + 1, 0, __ATOMIC_SEQ_CST); }
"""
# As the threads that hash and save do, which make no tensor of their own.
BESIDE_A_STEP = """
import ctypes, io, threading
import torch
from ddp_runner.checkpoint.snapshot import HostMemory
from ddp_runner.training.components.tensor_hash import tensor_hash
from ddp_runner.training.starting.fork_safety import make_forks_safe

first_calls = ctypes.CDLL(None).first_calls
first_calls.restype = ctypes.c_long

def beside_a_step(tensors):
    for tensor in tensors:
        tensor_hash(tensor)
        snapshot = HostMemory().snapshot({"tensor": tensor}, steady=[tensor])
        snapshot.copy_steady()
        torch.save(snapshot.content, io.BytesIO())

tensors = [torch.ones(size) for size in (9, 128, 4096)]
before = first_calls()
make_forks_safe()
ahead = first_calls()
thread = threading.Thread(target=beside_a_step, args=(tensors,))
thread.start()
thread.join()
print(ahead - before, first_calls() - ahead)
"""


@pytest.mark.skipif(not COMPILER, reason="there is no C compiler")
def test_threads_beside_a_step_make_no_first_call_of_torch(tmp_path):
    """A process forked during such a call inherits the call's lock, and waits for it at its own first call."""
    (tmp_path / "lock.c").write_text(COUNTING_LOCK, encoding="utf-8")
    lock = tmp_path / "lock.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", lock, tmp_path / "lock.c"], check=True)
    program = subprocess.run(
        [sys.executable, "-c", BESIDE_A_STEP],
        env={**os.environ, "LD_PRELOAD": str(lock), "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )
    ahead, beside = map(int, program.stdout.split())
    assert ahead > 0, "the lock is counted"
    assert beside == 0
