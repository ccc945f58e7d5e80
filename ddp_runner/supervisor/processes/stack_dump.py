"""Has ranks that answer nothing write to their logs where they are, before they are killed. Decides nothing."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable

from ddp_runner.core.board import Cell
from ddp_runner.supervisor.processes.children import kill, signal_main_thread
from ddp_runner.supervisor.processes.rank_process import RankHandle

STACKS_SIGNAL = signal.SIGRTMIN  # nobody sends it to all processes of a run


def force_stacks(handles: Iterable[RankHandle], hung: Collection[int]) -> None:
    """Have ranks that answer nothing write theirs by signal, once they are awake, and no file."""
    # INVARIANT only-the-hung: a healthy rank never gets this signal. The handler walks the
    # frames of threads that go on running, which now and then ends the process (SIGSEGV; seen in
    # one of about 30 runs of four hangs each; CPython issue 116008).
    # Broken if: survivors are made to dump this way.
    # Guarded by: test_survivors_write_their_stacks_and_live.
    for handle in handles:
        if handle.rank in hung:
            handle.slot.set(Cell.CONDEMNED, 1)
            if handle.pid is not None:
                signal_main_thread(handle.pid, STACKS_SIGNAL)


def wake(handles: Iterable[RankHandle]) -> None:
    """Let stopped ranks go on: those that hang to write their stacks, a spared one to leave.

    The generation has been aborted by now, so a rank that wakes up finds itself fenced out.
    """
    for handle in handles:
        if handle.pid is not None:
            kill(handle.pid, signal.SIGCONT)
