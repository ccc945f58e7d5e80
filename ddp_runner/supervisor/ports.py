"""Defines how a world starts, signals and reads the processes of its ranks, on this or another machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ddp_runner.core import events
from ddp_runner.core.messages import Message
from ddp_runner.supervisor.processes.rank_start import RankStart, StartedBy
from ddp_runner.supervisor.rank_handle import RankHandle
from ddp_runner.supervisor.run_facts import RunFacts


class WhatIsKnown(Protocol):
    """The process of a rank, as far as its node knows: :class:`~.processes.rank_process.RankProcess`."""

    @property
    def pid(self) -> int | None:
        """None while it is not known, and where there is no process."""

    @property
    def written_bytes(self) -> int:
        """The bytes that the process has written."""

    def mark_asked(self) -> None:
        """Note that it was asked for its stacks; asked twice for one fault, it counts once."""

    def forget_asked(self) -> None:
        """Forget that it was asked for its stacks, so that it may be asked again."""

    def has_answered(self, now_s: float) -> bool:
        """Return True if it has written its stacks; asked at each tick."""

    def stack_when_asked(self) -> str:
        """Return the main thread's stack when it was asked; empty if it has not answered."""


class Notes(Protocol):
    """Records what happens to keepers: a :class:`~.reporting.recorder.Recorder`, if there is a run to record."""

    @property
    def facts(self) -> RunFacts:
        """The known facts about the run."""

    def record(self, event: events.Event, *, cause: int | None = None) -> int:
        """Something has happened, because of event ``cause``; returns its id."""

    def say(self, text: str, *, level: str = "INFO") -> None:
        """A line for people."""


class Respawns(Protocol):
    """Decides about a rank without a process: a :class:`~.recovery.repair.Repair`, or an object that asks it."""

    def schedule_respawn(self, handle: RankHandle) -> None:
        """The rank needs another process, if it is wanted."""


class SeesImport(Protocol):
    """Waits for the zygote: a :class:`~.reporting.start_progress.Start`, if there is a start to show."""

    def imported(self, seconds: float) -> None:
        """It is ready."""


class RankHost(Protocol):
    """One machine of a run. It performs and decides nothing; ranks are known to it by their numbers.

    On the machine of the supervisor it is a :class:`~ddp_runner.supervisor.processes.node.Node`.
    """

    @property
    def host(self) -> str:
        """The host's name; empty if there is only one machine."""

    @property
    def processes(self) -> Mapping[int, WhatIsKnown]:
        """The process of each of its ranks."""

    @property
    def shares_logs(self) -> bool:
        """True if its folder of logs is that of this machine."""

    @property
    def can_fork(self) -> bool:
        """True if a process can be forked at once."""

    @property
    def has_spare(self) -> bool:
        """True if a process waits that may become a rank."""

    def start_rank(self, rank: int, start: RankStart) -> StartedBy:
        """A process for a rank that has none."""

    def release(self, rank: int) -> None:
        """No process comes of what was asked for this rank, or its process was reaped."""

    def send(self, rank: int, message: Message) -> None:
        """Send to a rank; that it has just ended is no error here."""

    def kill_rank(self, rank: int) -> bool:
        """SIGKILL a rank; its end follows. False where its pid is not known yet: it is cut off."""

    def signal_rank(self, rank: int, number: int) -> None:
        """Signal the process of a rank, if it is known."""

    def force_stacks(self, rank: int) -> None:
        """Have the main thread of a rank that answers nothing write where it is, once it is awake."""

    def fence(self, rank: int, *, is_fenced: bool) -> None:
        """Have what this rank publishes refused from here on, or taken again."""

    def is_stopped(self, rank: int) -> bool:
        """Return True if the system holds the process of this rank stopped."""

    def stopped_s(self, rank: int, now_s: float) -> float:
        """Return how long it has been seen stopped without a break; 0.0 if it is not stopped now."""

    def is_killed(self, rank: int) -> bool:
        """Return True if the unreaped process of this rank was sent SIGKILL."""

    def claim_kernel_kill(self, now_s: float, *, before_it: int = 0) -> bool:
        """Return True if the kernel most likely sent the SIGKILL that ended a process; asked once for each."""

    def unheard_s(self, now_s: float) -> float:
        """Return the age of its facts about ranks, in seconds."""

    def resident_bytes(self, rank: int) -> int:
        """Memory of the process of this rank; 0 where it is not known."""
