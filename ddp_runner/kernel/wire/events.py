"""Values for the events of a run: one class for each event of events.jsonl. Pure.

The event's name in the journal is the class's in snake case, and its fields are the journal's, but for those marked
``unwritten``: these are for the other sinks of the recorder (accounting, console, facts), and for the transport. A
:class:`Report` is a message as well: the process that sees the event sends it, and the supervisor completes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ddp_runner.kernel.rules import faults
from ddp_runner.kernel.rules.classify import VICTIM_KINDS
from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.recovery import Incident
from ddp_runner.kernel.rules.secrets import without_secrets

if TYPE_CHECKING:
    from typing_extensions import Self

_UNWRITTEN = {"unwritten": True}
_IF_SET = {"if set": True}  # left out of the journal where it is empty
_ROUNDED = {"digits": 4}  # so many in the journal
# Fields with words of others: what an exception, a process that has died or a disk has said.
_WORDS = frozenset(
    {"action", "detail", "failed", "finding", "inexact_reason"}
    | {"line", "outcome", "said", "text", "warning"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that has happened. ``name``: of the event in the journal."""

    name: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        """Name the event after its class, which may have named it itself."""
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    def written(self) -> dict[str, Any]:
        """The fields as the journal has them."""
        values: dict[str, Any] = {}
        for one in fields(self):
            value, how = getattr(self, one.name), one.metadata
            if "unwritten" in how or ("if set" in how and not value):
                continue
            value = round(value, how["digits"]) if "digits" in how else value
            values[one.name] = list(value) if isinstance(value, tuple) else value
        return values

    def without(self, secrets: Sequence[str]) -> Self:
        """The same event, where the words of others may hold secrets."""
        changed: dict[str, Any] = {}
        for one in fields(self) if secrets else ():
            value = getattr(self, one.name)
            if isinstance(value, faults.Fault):
                changed[one.name] = value.without(secrets)
            elif one.name in _WORDS and isinstance(value, str):
                changed[one.name] = without_secrets(value, secrets)
        return replace(self, **changed) if changed else self

    def in_generation(self, generation: int) -> Self:
        """The same event, as one of this generation of the run, if it says of which it is."""
        del generation
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Event):
    """An event that a rank, or a process beside the ranks, has seen happen and sends to the supervisor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfFault(Report):
    """An event of one fault. ``generation``: of the run; whoever records it knows that."""

    fault: faults.Fault = field(metadata=_UNWRITTEN)
    generation: int = field(default=0, metadata=_UNWRITTEN)

    @property
    def detail(self) -> str:
        """The detail of the fault. The traceback of a lost peer explains nothing, and is left out."""
        return "" if self.fault.kind in VICTIM_KINDS else self.fault.detail

    def in_generation(self, generation: int) -> Self:
        """The same event, as one of this generation."""
        return replace(self, generation=generation)

    def fault_written(self) -> dict[str, Any]:
        """The fault as the journal has it. ``host``: of its rank, where there are several machines."""
        fault = self.fault
        return {
            "kind": fault.kind.value,
            "rank": fault.rank,
            "step": fault.step,
            "phase": fault.phase,
            "text": fault.cause,
            "origin": fault.origin.value,
            "generation": self.generation,
            "detail": self.detail,
            **({"host": fault.host} if fault.host else {}),
        }


# The run.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBegins(Event):
    """Every rank has built what it trains. ``lines``, ``warnings``: what there is to say about it.

    ``took_over``: ranks that have kept their memory, from a coordinator that was lost.
    """

    run_id: str
    command: tuple[str, ...]
    world_size: int
    resumed_step: int
    total_steps: int
    took_over: bool = field(default=False, metadata=_IF_SET)
    lines: tuple[str, ...] = field(default=(), metadata=_UNWRITTEN)
    warnings: tuple[str, ...] = field(default=(), metadata=_UNWRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlreadyComplete(Event):
    """There is nothing to train; the result of before stands."""

    run_id: str
    command: tuple[str, ...]
    step: int
    total_steps: int
    text: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBegins(Event):
    """The ranks of a stage have built what it trains; ``step``: where they go on in it. ``lines``: to be said."""

    stage: str
    number: int
    of: int
    first_step: int
    step: int
    total_steps: int
    lines: tuple[str, ...] = field(default=(), metadata=_UNWRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEnds(Event):
    """A stage that is not the last is over. ``stop_reason``: as of a summary."""

    stage: str
    step: int
    loss: float | None
    stop_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked(Event):
    """The run is to stop after the step. ``reason`` is a :class:`StopReason`'s value."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSignalAtRank(Report):
    """A rank got a stop signal, which was meant for the run."""

    rank: int
    reason: StopReason = field(metadata=_UNWRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAsked(Event):
    """A person wants a checkpoint after the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Report):
    """A checkpoint is on disk.

    ``blocked_s`` and ``productive_ns`` (the rank's productive time when it had reported the save) are None where no
    rank has lived to report it. ``rank``: that has made it. ``is_rescued``: elsewhere than with the others, whose
    disk refuses it.
    """

    step: int
    path: str
    blocked_s: float | None
    size_bytes: int
    productive_ns: int | None = field(default=None, metadata=_UNWRITTEN)
    rank: int = field(default=-1, metadata=_UNWRITTEN)
    sha256: str = field(default="", metadata=_UNWRITTEN)  # of the file
    is_rescued: bool = field(default=False, metadata=_UNWRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderMadeAgain(Event):
    """Somebody has removed a folder of the live run."""

    folder: str
    option: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSaveAsked(Event):
    """A rank is to save alone before the run ends."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSave(Event):
    """The result of the last save. ``failed``: why there is no file."""

    step: int | None
    path: str
    failed: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnds(Event):
    """The last event of a launch; other machines get it, and end. ``line``: why, for people there."""

    status: str
    exit_code: int
    line: str = field(default="", metadata=_UNWRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOutage(Report):
    """The log of a rank loses lines, or no longer does. ``text``: the line for people."""

    rank: int
    text: str


# Generations.


@dataclass(frozen=True, slots=True, kw_only=True)
class Forming(Event):
    """The ranks were asked to form a generation."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFormed(Report):
    """A rank is in the generation, and trains; what that took. ``pid``: as the supervisor knows it."""

    rank: int
    pid: int | None = None
    generation: int
    committed_step: int
    source: int
    group_s: float = field(metadata=_ROUNDED)
    transfer_s: float = field(metadata=_ROUNDED)
    rebuild_s: float = field(metadata=_ROUNDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldFormed(Event):
    """Every rank trains, and there was nothing to repair. ``step``: from this one on."""

    generation: int
    step: int = 0


# Faults and their repair.


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulted(OfFault):
    """A fault was noticed, by its rank or by the supervisor. Its cause is the event of the first of its incident."""

    name: ClassVar[str] = "fault"

    def written(self) -> dict[str, Any]:
        """The fault."""
        return self.fault_written()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTolerated(OfFault):
    """A fault costs what it costs: there is nothing to repair, so it is not counted as one.

    ``rank``: that reports it. ``action``: how the run goes on in spite of it.
    """

    rank: int = field(metadata=_UNWRITTEN)
    action: str

    @property
    def line(self) -> str:
        """The line for people if a save has failed; empty for other faults, which their ranks log."""
        failed = self.fault.kind is faults.FaultKind.STORAGE_FAILED
        return f"{self.fault.cause}; {self.action}" if failed else ""

    def written(self) -> dict[str, Any]:
        """The fault, and what was done."""
        return {**self.fault_written(), "action": self.action}


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedInPlace(OfFault):
    """A rank, or all of them together, repaired a fault within the generation. Its cause is the event of the fault.

    ``rank``: that reports it. ``inexact_reason``: as of :class:`TuningChanged`. ``kernel_kills``: so many of the
    rank's loader workers the kernel has killed for memory.
    """

    rank: int = field(metadata=_UNWRITTEN)
    action: str
    seconds: float = field(metadata=_ROUNDED)
    steps_lost: int = 0
    inexact_reason: str = field(default="", metadata=_UNWRITTEN)
    kernel_kills: int = field(default=0, metadata=_UNWRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Event):
    """The plan for an incident: ``plan`` is the name of the class in ``core.recovery``.

    ``began_s``: when the incident was opened; ``since_s``: when the last step was committed;
    ``detect_s``: how long the culprit had shown no sign of life before it was noticed (None: nobody watched);
    ``outcome`` and ``line``: the repair in words, done and to be done; ``action``: all that was done.
    """

    plan: str
    culprit: int
    kind: str
    replaced: tuple[int, ...]
    dropped: tuple[int, ...]
    kept: int | None
    all_ranks_dead: bool
    victims: tuple[int, ...]
    incident: Incident = field(metadata=_UNWRITTEN)
    began_s: float = field(metadata=_UNWRITTEN)
    generation: int = field(metadata=_UNWRITTEN)
    since_s: float = field(metadata=_UNWRITTEN)
    detect_s: float | None = field(metadata=_UNWRITTEN)
    outcome: str = field(default="", metadata=_UNWRITTEN)
    line: str = field(default="", metadata=_UNWRITTEN)
    action: str = field(default="", metadata=_UNWRITTEN)
    inexact_reason: str = field(default="", metadata=_UNWRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTaken(Event):
    """No rank was left: the world goes on from the copy in memory of ``step``."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired(Event):
    """The world trains again, from ``step`` on, after the incident of ``culprit``.

    ``productive_ns``: how long rank 0 has computed until then, lost steps included. ``is_last``: of the incidents that
    end together, the one that has the lost steps.
    """

    generation: int
    steps_lost: int
    is_last: bool = field(default=True, metadata=_UNWRITTEN)
    seconds: float
    culprit: faults.Fault = field(metadata=_UNWRITTEN)
    outcome: str = field(metadata=_UNWRITTEN)
    step: int
    productive_ns: int = field(metadata=_UNWRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedAhead(Event):
    """Ranks that are certainly needed are forked while others are still to answer."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOfGivenUpRank(Event):
    """A rank that the run does without had a fault."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(Event):
    """All ranks of ``generation`` have heard of its abort: those that get this abort its communicators now."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler(Event):
    """A rank is persistently slow: ``factor`` over the others."""

    rank: int
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesProposed(Event):
    """A proposal of ``data.shares=auto`` from the first steps of this launch. Empty ``shares``: equal ones.

    ``own_step_s``: seconds of a step outside collectives, of each rank; ``devices``: their names.
    """

    shares: tuple[int, ...]
    own_step_s: tuple[float, ...]
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected(Report):
    """A fault of ``--inject`` happens now. ``number``: of the option; None where a random plan did it."""

    kind: str
    rank: int
    number: int | None = None
    step: int = 0
    phase: str = ""


# What ranks change and prove.


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningChanged(Report):
    """A rank changed how it computes, so that the run can go on.

    ``action`` goes into the line that reports the fault; empty where no fault follows.
    ``inexact_reason`` is empty where the weights stay what they would have been, bit for bit.
    ``fault_free``: no repair follows; else this was done about the fault that is reported next, and
    ``tuning`` is what this rank computes with from now on. ``plain_retry``: nothing was left to change.
    """

    rank: int
    step: int
    action: str
    inexact_reason: str
    fault_free: bool = field(default=False, metadata=_UNWRITTEN)
    tuning: dict[str, object] = field(default_factory=dict, metadata=_UNWRITTEN)
    plain_retry: bool = field(default=False, metadata=_UNWRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved(Report):
    """The step that begins with ``step`` committed ones was computed twice, with the same bits.

    ``what``: ``repeated`` where this rank has done so itself, ``drilled`` where a process like a
    replacement of this rank has.
    """

    rank: int
    step: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill(Report):
    """A process like a replacement has computed a rank's share. ``differs``: in what first; empty if in nothing.

    ``updated``: the share is the same, and the process has repeated the update too; ``differs`` is of the update then.
    ``repeats``: the process got the same bits twice. The supervisor adds the rest: ``finding`` is the text for
    people, and also the ``inexact_reason`` if it is the first of its kind.
    """

    rank: int
    step: int
    seconds: float = 0.0
    differs: str = ""
    repeats: bool = True
    updated: bool = field(default=False, metadata=_IF_SET)
    finding: str = field(default="", metadata=_UNWRITTEN)
    inexact_reason: str = field(default="", metadata=_UNWRITTEN)
    host: str = field(default="", metadata=_IF_SET)  # of the rank, where there are several machines


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed(Report):
    """A share was computed several times, because an earlier drill of this rank had found a difference.

    Each text says in what the first difference to the rank's own share is; empty if there is none: ``plain`` as a
    replacement computes it, ``with_state`` with the rank's state outside the model too, ``with_data`` also with its
    batch, ``itself`` in the rank once more. ``had_state``, ``had_data``: it had all of that; else that attempt shows
    nothing. ``agrees``: the process that had both came to its bits twice. ``places``: names of that state that a
    replacement has otherwise.
    The supervisor adds the rest: ``of_step`` and ``first_in`` of the drill that failed, ``source``: where the
    difference comes from, by name, and ``line`` for people.
    """

    rank: int
    step: int
    plain: str = ""
    with_state: str = ""
    with_data: str = ""
    itself: str = ""
    had_state: bool = False
    had_data: bool = False
    agrees: bool = False
    places: tuple[str, ...] = ()
    of_step: int = -1
    first_in: str = ""
    source: str = ""
    host: str = field(default="", metadata=_IF_SET)  # of the rank, where there are several machines
    line: str = field(default="", metadata=_UNWRITTEN)
    is_warning: bool = field(default=False, metadata=_UNWRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class InDoubt(Event):
    """Steps from ``first`` to ``last`` may be wrong on ``rank``: no drill of it has passed since ``first``."""

    rank: int
    first: int
    last: int
    line: str = field(metadata=_UNWRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Undone(Event):
    """The error that a drill has found is no longer in the weights: all ranks rolled back to ``step`` or before.

    ``of_step``: the step of the drill. ``withdrawn``: the inexact reason that no longer applies.
    """

    rank: int
    of_step: int
    step: int
    withdrawn: str = field(metadata=_UNWRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillSkipped(Report):
    """A drill came to nothing; ``text``: why. ``is_said``: whether that is worth a line."""

    rank: int
    step: int
    text: str
    is_said: bool = field(default=False, metadata=_UNWRITTEN)
    host: str = field(default="", metadata=_IF_SET)  # of the rank, where there are several machines


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairsProved(Event):
    """So many of the ``repairs`` that have replaced ranks in this launch are ``proved`` by a drill after them."""

    proved: int
    repairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotProved(Event):
    """The run is complete, a rank was replaced, and no drill has passed since: the newest was that of ``step``."""

    step: int
    text: str
    inexact_reason: str = field(metadata=_UNWRITTEN)


# Helper processes.


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteReady(Report):
    """It has imported torch and the user's task, and forks on request. ``warning``: why forks may not start clean."""

    torch: str
    import_s: float
    warning: str = field(default="", metadata=_UNWRITTEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteEnded(Event):
    """Ranks outlive it; another one is needed for the next fork."""

    exit_code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteReplaced(Event):
    """The one that stood by has taken its place."""

    pid: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyEnded(Event):
    """The zygote that stood by is gone."""

    exit_code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareReady(Report):
    """A spare waits. ``built_bytes``: of what it has built in ``build_s``.

    The supervisor adds ``pid`` and ``kind``, a :class:`SpareKind`'s value.
    """

    pid: int | None = None
    kind: str = ""
    built_bytes: int = 0
    build_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareTaken(Event):
    """The spare has become this rank."""

    rank: int
    pid: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverEnded(Event):
    """The process that writes checkpoints is gone; ``step``: of what it had in hand, -1 where that was nothing."""

    exit_code: int | None
    signal: int | None
    step: int
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareEnded(Event):
    """The spare is gone, or there was no room for one; ``said``: its last line."""

    exit_code: int | None
    signal: int | None
    said: str


# What a message may be: each report of this module.
REPORTS: dict[str, type[Report]] = {
    kind.__name__: kind
    for kind in list(vars().values())
    if isinstance(kind, type) and issubclass(kind, Report) and kind not in (Report, OfFault)
}
