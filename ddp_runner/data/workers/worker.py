"""What a loader worker does before it loads: ties its life to its rank. Never loads anything."""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.data.workers.count import leave_cores
from ddp_runner.system import parent_death

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The rank acts on these at its next step boundary, and still needs batches to get there.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STACKS_SIGNAL = signal.SIGRTMIN  # as the ranks have it


@contextmanager
def run_signals_held() -> Iterator[None]:
    """Hold the run's signals back while workers are forked: they inherit that, until they ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerStart:
    """The ``worker_init_fn`` of a rank's loader workers, which are forked from that rank."""

    def __init__(
        self,
        *,
        rank: int,
        rank_pid: int,
        stacks: int,
        reserved_cores: int = 0,
        then: Callable[[int], None],
    ) -> None:
        self._rank = rank
        self._then = then  # what the worker's source has to do
        self._reserved_cores = reserved_cores
        self._rank_pid = rank_pid
        self._stacks = stacks  # the file that its stack goes to, where it is asked for

    def __call__(self, worker: int) -> None:
        """Set up worker number ``worker``; runs in the worker, once."""
        # INVARIANT die-downhill: the kernel ends a worker with its rank, also one that is stuck.
        # Broken if: the workers are forked by anything but the rank's own process.
        # Guarded by: test_no_worker_outlives_a_killed_rank.
        parent_death.die_with_parent(self._rank_pid)
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        parent_death.set_process_name(f"loader {self._rank}.{worker}")
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
        # A forked worker inherits the rank's handlers: its children are none of the rank's
        # business, and its signals must not wake the rank's event loop.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        let_go_of_devices()
        leave_cores(self._reserved_cores)
        self._then(worker)


def let_go_of_devices(prefix: str = "/dev/nvidia") -> None:
    """Close the GPUs that a rank has opened: a fork cannot use them.

    While anybody holds one, the driver keeps the memory of a rank that has died (Megatron-LM#3684).
    """
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # closed since it was listed
            if str(descriptor.readlink()).startswith(prefix):
                os.close(int(descriptor.name))
