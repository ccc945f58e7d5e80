"""The port between a rank's training and its surroundings, which form generations and hear of progress and faults.

``kernel/rank/runtime.py`` implements it for supervised ranks, ``training/local_runtime.py`` without a supervisor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ddp_runner.kernel.group.abort import AbortSwitch
from ddp_runner.kernel.group.group import Membership
from ddp_runner.kernel.group.tcp_store import StoreLink
from ddp_runner.kernel.replica.loss import Loss
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import Fault
from ddp_runner.kernel.system.disk import Disk
from ddp_runner.kernel.wire.board import Slot
from ddp_runner.kernel.wire.events import Report, TuningChanged
from ddp_runner.kernel.wire.messages import CopyWritten, Message, Ready, WriteCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The place of a rank in its run. ``loads``: it starts from the newest checkpoint or empty.

    ``short_of_memory_in``: the phase in which its predecessor ended for lack of memory, if it did;
    ``learnt``: the changes that the predecessor reported before it ended. ``device_free_bytes``: the free memory
    of its GPU when the first process of this rank started, if the rank has the GPU alone; 0: unknown.
    ``not_after``: states of later steps are in doubt and not loaded; below 0: none are in doubt.
    ``preload``: the memory of the run's training and validation samples; empty without a supervisor.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: str
    loads: bool
    short_of_memory_in: str = ""
    learnt: TuningChanged | None = None
    device_free_bytes: int = 0
    not_after: int = -1
    preload: tuple[str, ...] = ()
    memory_slots: tuple[str, ...] = ()  # where copies of the state outlive this process
    local_slots: tuple[str, ...] = ()  # where per-rank state outlives this process
    has_saver: bool = False  # a process beside the ranks makes files of them
    log_folder: int = 0  # ranks with the same number write their logs into one folder
    other_devices: tuple[str, ...] = ()  # which have parts of this rank's batches
    mode: str = ""  # how several devices are used and why, in words; empty: nobody chose
    code: str = ""  # a digest of what all machines run alike; empty: of one machine, or not alike

    @property
    def devices(self) -> int:
        """The number of devices that share each of this rank's batches."""
        return 1 + len(self.other_devices)

    @property
    def computing_devices(self) -> int:
        """The number of devices of all ranks: the ``batch_size`` is that of each."""
        return self.world_size * self.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A membership to join, the way to its store, and the switch that frees this rank from it."""

    membership: Membership
    link: StoreLink
    switch: AbortSwitch


class Log(Protocol):
    """Where a rank writes what happens, a line per event. No method raises.

    ``step`` is the default step of a line; ``hidden``: secrets that no line shows.
    """

    step: int | None
    hidden: tuple[str, ...]
    is_debug: bool

    def debug(self, message: str, *, step: int | None = None) -> None:
        """Log a message for debugging."""
        ...

    def progress(self, message: str, *, step: int | None = None) -> None:
        """Log figures that only the file shows."""
        ...

    def detail(self, message: str, *, step: int | None = None) -> None:
        """Log what only some readers want."""
        ...

    def info(self, message: str, *, step: int | None = None) -> None:
        """Log what is worth reading."""
        ...

    def warning(self, message: str, *, step: int | None = None) -> None:
        """Log that something is not as it should be."""
        ...

    def error(self, message: str, *, step: int | None = None) -> None:
        """Log a failure."""
        ...


class Runtime(Protocol):
    """A trainer's surroundings. All calls come from the trainer's own thread."""

    rank_info: RankInfo
    run_id: str
    slot: Slot
    disk: Disk
    is_watched: bool  # a supervisor finds ranks that hang

    @property
    def logger(self) -> Log:
        """The log of this rank."""
        ...

    def next_generation(self, ready: Ready) -> Generation | None:
        """Say what this rank has and wait for the next generation.

        None where there will be none: this rank is to save what it has, without the others.
        """
        ...

    def report(self, message: Message) -> None:
        """Pass a message on; never blocks for long, never raises for a lost listener."""
        ...

    def stop_asked(self) -> StopReason | None:
        """Return the reason why this rank should vote for the run to stop after the step, or None."""
        ...

    def save_asked(self) -> bool:
        """Return True if a checkpoint was asked for since the last call."""
        ...

    def order(self, order: WriteCopy) -> CopyWritten:
        """Have a file made of a copy, where ``rank_info.has_saver``; returns what came of it. For any thread."""
        ...

    def take_owed(self) -> WriteCopy | None:
        """Return the order of a previous rank process that is still unanswered; asked once."""
        ...

    def survives(self, fault: Fault) -> bool:
        """Return True if this process continues after ``fault``; else the trainer raises it."""
        ...

    def training_loss(self, loss: Loss) -> Loss:
        """Return the loss that training computes: ``loss``, with injected faults if they were asked for."""
        ...


def without_secrets_in(message: Message, secrets: tuple[str, ...]) -> Message:
    """``message``, where the texts of a user's exception may hold secrets."""
    return message.without(secrets) if isinstance(message, Report) else message
