"""The kernel's ports in the supervisor: what it asks of machines, records, checkpoints, and of what works next to a run.

Each is implemented outside of the kernel, or by a part of it that a test replaces, and handed in by :mod:`ddp_runner.supervisor.assembly`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.parent.run_facts import RunFacts
from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.rank_start import RankStart, StartedBy
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import Fault
from ddp_runner.kernel.rules.helper_roles import Role
from ddp_runner.kernel.rules.recovery import Incident
from ddp_runner.kernel.wire import events
from ddp_runner.kernel.wire.messages import Built, Finished, Forked, Message, Ready


class ProcessView(Protocol):
    """The process of a rank, as far as its node knows: :class:`~ddp_runner.kernel.processes.rank_process.RankProcess`."""

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


class EventRecorder(Protocol):
    """Where keepers of processes note what happens; on a machine that only follows, its link to the coordinator."""

    @property
    def facts(self) -> RunFacts:
        """The known facts about the run."""

    def record(self, event: events.Event, *, cause: int | None = None) -> int:
        """Record an event, which event ``cause`` has led to, and return its id."""

    def say(self, text: str, *, level: str = "INFO") -> None:
        """Show a line to people."""


class RunRecord(EventRecorder, Protocol):
    """The record of a run as its supervisor keeps it: :class:`~ddp_runner.supervisor.reporting.recorder.Recorder`."""

    @property
    def may_write(self) -> bool:
        """Whether the run has its folders, and its files are open."""

    @property
    def hidden(self) -> Sequence[str]:
        """Texts that no line and no record may hold."""

    @property
    def history(self) -> Sequence[Incident]:
        """The incidents so far, oldest first."""

    def shown(self, fault: Fault) -> Fault:
        """Return ``fault`` without the texts that are hidden."""

    def metrics(self, step: int, rank: int, values: Mapping[str, float]) -> None:
        """Take in what a rank has measured in a step, or in an evaluation after it."""

    def reported(self, report: events.Report) -> None:
        """Record what a rank reports of itself."""

    def saved(self, saved: events.CheckpointSaved) -> None:
        """Record a checkpoint that a rank reports."""

    def world_formed(self, now_s: float, *, committed_step: int, productive_ns: int) -> None:
        """Record that every rank trains: the run begins, or its incidents are over."""

    def keep_words(self, rank: int, text: str) -> None:
        """Keep what a rank said before it had a log file."""


class StartProgress(Protocol):
    """Who waits for the zygote: :class:`~ddp_runner.supervisor.reporting.start_progress.Start`, where there is a start to show."""

    def imported(self, now_s: float) -> None:
        """Take note that the zygote is ready."""


class ShownStart(StartProgress, Protocol):
    """A start that people watch: :class:`~ddp_runner.supervisor.reporting.start_progress.Start`."""

    def built(self, message: Built) -> None:
        """Take note of how far a rank has come."""

    def formed(self, now_s: float) -> None:
        """Take note that every rank is in its first generation."""

    def show_output(self) -> None:
        """Show what processes have printed so far, as long as there is no log file."""

    def without_shown(self, text: str) -> str:
        """Return the part of a process's last output that is still to be shown."""


class Checkpoints(Protocol):
    """The checkpoints on disk: :class:`~ddp_runner.checkpoint.unreported.Published`."""

    @property
    def is_any_new(self) -> bool:
        """Whether this launch has published one."""

    def newest(self) -> tuple[int, str] | None:
        """Return step and path of the newest one, whichever launch has written it."""


class Opening(Protocol):
    """How a run takes its folders and begins its record: :class:`~ddp_runner.supervisor.reporting.run_begin.RunBegin`."""

    def claim(self, ready: Sequence[Ready]) -> None:
        """Take the folders of the run that its ranks have resumed. Raises BadInputError where they are another's."""

    def record(self, ready: Sequence[Ready]) -> bool:
        """Record the beginning. Returns whether the run was complete before, so that nothing is to be done."""


class RespawnScheduler(Protocol):
    """Who decides what becomes of a rank without a process: :class:`~ddp_runner.kernel.recovery.repair.Repair`, or who asks it."""

    def schedule_respawn(self, handle: RankHandle) -> None:
        """Take note that the rank needs another process, if it is wanted."""


class Stages(Protocol):
    """What follows once all ranks have finished: ``StageChange``, beside the supervisor."""

    @property
    def is_changing(self) -> bool:
        """Whether other ranks have been asked for, so that who has finished has a successor."""

    @property
    def refusal(self) -> Callable[[str], str] | None:
        """Puts into words that the stage in hand cannot be trained; None where there are no stages."""

    def formed(self, first: Ready | None) -> None:
        """Take note that ranks form."""

    def why_the_run_ends(self, finished: Finished, *, stop: StopReason | None) -> StopReason | None:
        """Return the reason, or None where other ranks are to follow. ``stop``: what the ranks were asked for."""

    def begin_next(self, finished: Finished) -> None:
        """Ask for the ranks that follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the supervisor, as an observer needs it.

    ``is_fault_free``: every rank trains and nothing is repaired. ``ends_undisturbed``: ranks finish, or have, all that
    were asked are there, and nobody has asked for a stop. ``at_end``: all ranks have finished.
    """

    now_s: float
    is_fault_free: bool
    ends_undisturbed: bool = False
    at_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A fault of a rank that responds normally; its process is replaced.

    ``not_after``: all ranks roll back to a state of this step, or an older one; None: they keep theirs.
    ``action``: what the repair does, in words; empty where its plan says that.
    """

    fault: Fault
    not_after: int | None = None
    action: str = ""


class Observer:
    """Works next to a run, which can do without it. It overrides what it cares about; the rest does nothing."""

    hears_while_ending = True  # also while the newest state is still on its way to disk

    def hears(self) -> Mapping[type[object], Callable[..., None]]:
        """Return the messages of ranks that are its own, each with what it does with one and its rank."""
        return {}

    def look(self, turn: Turn) -> None:
        """Get a turn, also while the run ends."""

    def found(self) -> Found | None:
        """Return a fault that this observer has found, once, or None; called after each :meth:`look`."""
        return None

    def look_after_repair(self, turn: Turn) -> None:
        """Get a turn while the run does not end, once everything is repaired that can be."""

    def injections_left(self, rank: int) -> Mapping[int, int]:
        """Return number -> times of the faults that a process of ``rank`` is still to cause in itself."""
        del rank
        return {}

    def shown(self) -> Mapping[str, Mapping[str, object]]:
        """Return what people are shown of it, each part under a name."""
        return {}

    def begins(self) -> None:
        """Take note that the folders of the run are its own from here on."""

    def forms(self, first: RankHandle) -> None:
        """Take note that ranks are about to form, and ``first`` is to save."""

    def restarts(self) -> None:
        """Take note that all ranks are replaced by some that train something else."""

    def went_back(self, step: int) -> None:
        """Take note that all ranks go on from this step, which was committed before, in the processes that they have."""

    def open_reasons(self) -> Collection[str]:
        """Return reasons for which the run is not exact, and may be again."""
        return ()

    def last_words(self) -> str:
        """Return what is to be known of the checkpoints of a run that has ended early; empty where that is nothing."""
        return ""

    def owes(self) -> RankHandle | None:
        """Return whose share the generation that forms is to have drilled soon; None: nobody's."""
        return None

    def holds_the_end(self, now_s: float, *, is_stopped: bool) -> bool:
        """Whether a run that is complete is to wait. ``is_stopped``: somebody has asked for an end."""
        del now_s, is_stopped
        return False

    def objections(self, step: int) -> tuple[str, ...]:
        """Return why a run that is complete has failed; ``step``: the one with which it is complete."""
        del step
        return ()

    def tidies_up(self) -> None:
        """Remove what it has left on disk; every process has ended."""


@runtime_checkable
class HelperPolicy(Protocol):
    """What a role has of its own: why there is a process of it, and what comes of its end."""

    @property
    def role(self) -> Role:
        """The role of its processes."""

    def said(self) -> Mapping[type[object], Callable[..., None]]:
        """Return what its processes say, each with what is done about it, and when."""

    def was_forked(self, forked: Forked, now_s: float) -> None:
        """Take note that the zygote has answered: the process is there, or cannot be."""

    def ended(self, ended: Ended, output: str, now_s: float) -> Fault | None:
        """Take note that it was reaped, having written that. Returns what is to be repaired, if anything."""

    def zygote_ended(self, now_s: float) -> None:
        """Take note that forks which are owed will not come."""


class Host(Protocol):
    """One machine of a run. It performs and decides nothing; ranks are known to it by their numbers.

    On the machine of the supervisor it is a :class:`~ddp_runner.kernel.processes.node.Node`.
    """

    @property
    def host(self) -> str:
        """The host's name; empty if there is only one machine."""

    @property
    def processes(self) -> Mapping[int, ProcessView]:
        """Of each rank that it has."""

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
