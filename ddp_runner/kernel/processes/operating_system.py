"""Starts, signals and reaps processes for a node, through the operating system. Decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import psutil

from ddp_runner.kernel.processes import children
from ddp_runner.kernel.processes.children import Ended, Zygote
from ddp_runner.kernel.processes.guardian import Guardian
from ddp_runner.kernel.processes.memory_limits import KernelKills, container_limit, free_bytes
from ddp_runner.kernel.processes.zygote_start import StartedZygote, ZygoteAhead
from ddp_runner.kernel.system import proc_state
from ddp_runner.kernel.system.control_channel import Channel
from ddp_runner.kernel.wire.messages import Fork


class ZygoteProcess(Protocol):
    """The process that forks the others, however it came to be: :class:`children.Zygote` has the fields."""

    ready: bool

    @property
    def channel(self) -> Channel:
        """Requests go out by it; open until close()."""

    @property
    def output(self) -> int:
        """A file in memory that it writes to; open until close()."""

    @property
    def pid(self) -> int:
        """The process id."""

    def fork(self, request: Fork, descriptors: Sequence[int]) -> None:
        """Ask for a fork; ``Forked`` with the same token answers. Raises ChannelClosedError."""

    def mark_reaped(self, exit_code: int) -> None:
        """Note that the process was reaped."""

    def close(self) -> None:
        """Close channel and output."""


class GuardianProcess(Protocol):
    """Ends what ranks have started, also should the supervisor be killed: :class:`guardian.Guardian`."""

    @property
    def pid(self) -> int | None:
        """The process id; None if there is no process."""

    def marked(self, environment: Mapping[str, str]) -> dict[str, str]:
        """``environment`` for the processes of this run."""

    def start(self) -> None:
        """Start the process. May raise OSError."""

    def watch(self, rank_pid: int) -> None:
        """A rank has begun: its session is this run's."""

    def rank_ended(self, rank_pid: int, *, known: Collection[int]) -> list[int]:
        """End what the rank of this pid, which was reaped, had started; returns their pids."""

    def close(self) -> None:
        """Let go of the process."""


class OperatingSystem(Protocol):
    """Handed to a :class:`Node`, so that a test can pass simulated processes."""

    def start_zygote(self, *, wanted: str, environment: Mapping[str, str]) -> ZygoteProcess:
        """Start the process that forks the others; ``ZygoteReady`` follows on its channel."""

    def make_guardian(self) -> GuardianProcess:
        """The guardian of a run; its process is not started yet."""

    def kernel_kills(self) -> KernelKills:
        """Counts from now on what the kernel kills for memory."""

    def reap(self) -> Iterator[Ended]:
        """Yield every child that has ended since the last call, adopted orphans included."""

    def signal(self, pid: int, number: int) -> None:
        """Signal a child that has not been reaped."""

    def signal_main_thread(self, pid: int, number: int) -> None:
        """Signal a child's main thread, which acts on it before its next instruction."""

    def is_stopped(self, pid: int | None) -> bool:
        """Return True if the kernel holds the process stopped by a signal."""

    def is_killed(self, pid: int | None) -> bool:
        """Return True if an unreaped child has got SIGKILL."""

    def cpu_ticks(self, pid: int) -> int | None:
        """Time that all threads of the process have computed; None where there is none."""

    def waits_for_disk(self, pid: int) -> bool:
        """Return True if the process waits for a device in the kernel, where no signal ends it before that answers."""

    def resident_bytes(self, pid: int) -> int:
        """Resident memory of a process; 0 where it is not known, as of one that ends."""

    def free_bytes(self) -> int:
        """Memory of this machine, or container, that may still be taken."""


class Linux:
    """The real one."""

    def __init__(self, ahead: ZygoteAhead | None = None) -> None:
        """``ahead``: a zygote that was started before it was known what is wanted of it."""
        self._ahead = ahead

    def start_zygote(self, *, wanted: str, environment: Mapping[str, str]) -> ZygoteProcess:
        """Start our own interpreter, with our own module; or take the one that was started ahead."""
        ahead, self._ahead = self._ahead, None
        started = None if ahead is None else ahead.take(environment)
        if started is None:
            return Zygote(StartedZygote(wanted, environment))
        zygote = Zygote(started)
        zygote.send_import(wanted)
        return zygote

    def make_guardian(self) -> GuardianProcess:
        """Return a guardian whose process is not started yet."""
        return Guardian("" if self._ahead is None else self._ahead.mark)

    def kernel_kills(self) -> KernelKills:
        """Return a reader of this container's counters."""
        return KernelKills()

    def reap(self) -> Iterator[Ended]:
        """Reap by waitpid(2)."""
        return children.reap_children()

    def signal(self, pid: int, number: int) -> None:
        """Signal by kill(2)."""
        children.kill(pid, number)

    def signal_main_thread(self, pid: int, number: int) -> None:
        """Signal by tgkill(2)."""
        children.signal_main_thread(pid, number)

    def is_stopped(self, pid: int | None) -> bool:
        """Read the state from proc(5)."""
        return proc_state.is_stopped(pid)

    def is_killed(self, pid: int | None) -> bool:
        """Read the exit status from proc(5)."""
        return children.is_killed(pid)

    def cpu_ticks(self, pid: int) -> int | None:
        """Read the CPU time from proc(5)."""
        return proc_state.cpu_ticks(pid)

    def waits_for_disk(self, pid: int) -> bool:
        """Read the state from proc(5)."""
        return proc_state.waits_for_disk(pid)

    def resident_bytes(self, pid: int) -> int:
        """Read the resident memory from proc(5)."""
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(pid).memory_info().rss)
        return 0

    def free_bytes(self) -> int:
        """Return the free memory below every known limit."""
        return free_bytes(container_limit())
