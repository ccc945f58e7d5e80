"""Messages between supervisor, zygote and ranks, each a packet (``kernel/wire/packets.py``). Never touches a socket.

What a rank reports of itself is the event that the journal has: the reports of ``kernel/wire/events.py`` are messages, too.
What is no event stands here: orders, answers to them, and what only the supervisor's own books need.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.helper_roles import SPEC_OF
from ddp_runner.kernel.wire import packets as wire
from ddp_runner.kernel.wire.events import REPORTS, Cut, OfFault, Report
from ddp_runner.kernel.wire.fork_specs import ForkKind, NothingMore, Spec
from ddp_runner.kernel.wire.packets import WireError

NO_PROCESS = 0  # in a Forked, of one that the run can do without
PACKET_BYTES_MAX = 128 * 1024  # a local socket's default buffer holds one


BRIEF_CHARACTERS_MAX = 300


def brief(message: object) -> str:
    """``message`` on one line, for a log; without what its class keeps to itself."""
    text = " ".join(repr(message).split())
    return text if len(text) <= BRIEF_CHARACTERS_MAX else f"{text[:BRIEF_CHARACTERS_MAX]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Supervisor -> rank: join generation ``generation`` through the store of its launch.

    ``secret`` is new for each generation, and the same for all its ranks. ``owes_drill``: the number of the rank whose
    share is drilled soon, as a drill was cut short or a rank replaced; below 0: none. ``store_host``,
    ``store_port`` and ``term`` (of :class:`~ddp_runner.kernel.system.folder_owner.FolderOwner`): where the
    store is from now on, for a rank that was cut off from it; empty where they are as they were.
    """

    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    run_id: str
    secret: str = field(repr=False)
    owes_drill: int = -1
    store_host: str = ""
    store_port: int = 0
    term: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Supervisor -> rank: leave ``generation`` at once, also from inside a collective.

    ``newest_step``: the newest committed step of its ranks, which a rank in that step finishes first; below 0: none.
    """

    generation: int
    newest_step: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortHeard:
    """Rank -> supervisor, answering ``Abort`` where collectives end in silence: it commits nothing more."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """Supervisor -> rank: write where every thread is into the log; another rank hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivesBegun:
    """Rank -> supervisor, answering ``Stacks``: how many since it committed ``step``; below 0: in no group.

    Of a script, which answers ``CountCollectives`` as well, all so far; ``in_others``: in groups of some ranks.
    """

    rank: int
    step: int
    count: int
    in_others: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Rank of a script -> supervisor: its program has ended with ``exit_code``, and its process ends next.

    ``words``: what it gave to ``sys.exit`` in place of a number. ``at_ns`` is CLOCK_MONOTONIC.
    """

    rank: int
    exit_code: int
    at_ns: int
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountCollectives:
    """Supervisor -> rank of a script: answer with :class:`CollectivesBegun`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Supervisor -> rank: finish the step, save, end."""

    reason: StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Supervisor -> rank: save at the next step boundary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReopenLog:
    """Supervisor -> rank: your log file was removed or moved away; write to a new one of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAlone:
    """Supervisor -> rank outside a generation: no generation follows; save your state without other ranks.

    ``run_id``: the run's, which a rank without a generation does not know. ``term``: the coordinator's, on several
    machines.
    """

    run_id: str = ""
    term: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inject:
    """Supervisor -> rank: do this to yourself at your next phase change (injection ``number`` of a random plan)."""

    kind: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Rank -> supervisor: it has come so far in its start; ``stage`` is a :class:`Stage`'s number."""

    rank: int
    stage: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Rank -> supervisor: everything is built; waiting for a Form.

    ``committed_step`` is -1 if empty; ``run_id`` is that of the checkpoint it resumes, or empty.
    ``notes``: lines to show people once. ``is_complete``: no step is left to train. ``changed_task``: the task's
    file, where it is not the one that the checkpoint was made with; else empty. ``ends_in_silence``: a collective
    that is aborted ends like one that is whole, so that an abort takes two phases. ``device_free_bytes``: on its
    GPU, before any was taken. ``block``: lines of rank 0. ``is_given_all``: a user's task that gets all settings.
    """

    rank: int
    committed_step: int
    run_id: str
    total_steps: int
    steps_per_epoch: int
    train_samples: int
    parameters: int
    device: str
    precision: str = ""
    notes: tuple[str, ...] = ()
    is_complete: bool = False
    changed_task: str = ""
    ends_in_silence: bool = False
    device_free_bytes: int = 0
    block: tuple[str, ...] = ()
    is_given_all: bool = False
    is_from_memory: bool = False  # it has taken its state from a copy in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Rank -> supervisor: one logged step."""

    rank: int
    step: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotSaved:
    """Rank -> supervisor, answering ``SaveAlone``: its state is on no disk."""

    rank: int
    step: int
    cause: str
    is_its_own: bool = False  # the cause, and not the disk's: another rank may be able to save


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCopy:
    """Rank -> supervisor -> saver: make a file of the copy in memory that has the number ``sealed``.

    ``rank`` has made the copy. Supervisor -> rank, ahead of a Form: this is still to be answered, to you.
    The rest: of the store whose file it is to be.
    """

    rank: int
    sealed: int  # no two copies of a machine have the same
    step: int
    directory: str
    keep_last: int
    keep_every: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyWritten:
    """Saver -> supervisor -> rank: what came of a :class:`WriteCopy`: a file, or ``problem`` and why."""

    sealed: int
    step: int
    # "disk", "state", "nobody" (is there that writes), "gone" (the copy), "other"; empty: there is a file.
    problem: str = ""
    text: str = ""
    manifest: str = ""
    blocked_s: float = 0.0
    write_s: float = 0.0
    notes: tuple[str, ...] = ()
    proved: tuple[int, ...] = ()  # steps whose files were read once more


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverReady:
    """Saver -> supervisor: it has the memory with the copies; what ends it from here on is its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWorkers:
    """Rank -> supervisor: the process ids of this rank's loader workers now."""

    rank: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillAt:
    """Supervisor -> rank: the step that begins with ``step`` committed ones is to be drilled, for the share of ``rank``.

    A rank that has come further ignores it. ``diagnoses``: a drill of that rank has failed, and the rank must hand over its state and batch.
    """

    rank: int
    step: int
    diagnoses: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillPart:
    """Rank -> supervisor: its part of what a drill of ``step`` needs is in its folder.

    ``problem``: why it is not, and there will be no such drill.
    """

    rank: int
    step: int
    part: str
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotKept:
    """Supervisor -> rank: a drill has found that steps use ``what``, in words, which no state holds."""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherStage:
    """Rank -> supervisor: the newest checkpoint is of this stage, which all ranks must resume."""

    rank: int
    number: int
    first_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Rank -> supervisor: the trainer returned. ``report`` is what summary.json needs of it."""

    rank: int
    reason: StopReason
    step: int
    report: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartProgress:
    """Rank under an outside launcher -> its next restart: how far this one has come, and by when.

    ``spent_ns``: where the time went, as the board counts it, and ``first_step_ns`` when the first
    step began (0: not yet). ``clock`` names the boot that times count from. ``step`` is -1 at first.
    """

    rank: int
    generation: int
    run_id: str
    clock: str
    began_ns: int
    at_ns: int
    step: int = -1
    formed_ns: int = 0
    first_step_ns: int = 0
    spent_ns: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Supervisor -> zygote: fork a process of this kind. Supervisor -> spare: become that rank.

    ``module``: its ``main()`` is the process, or its ``run()`` that of a program. ``is_dispensable``: the run goes on where it
    cannot be forked. ``rank``, ``local_rank``: -1 where it is none. Descriptors come along.
    """

    token: int
    kind: ForkKind
    module: str = ""
    is_dispensable: bool = False
    rank: int = -1
    local_rank: int = -1
    spec: Spec = field(default_factory=NothingMore)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """Zygote -> supervisor: the process of ``token`` runs as ``pid``, the supervisor's child, or cannot be forked."""

    token: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReady:
    """Store host -> supervisor: the TCPStore listens."""

    port: int


_NoReport = (
    Form
    | Abort
    | AbortHeard
    | Cut
    | Stacks
    | CollectivesBegun
    | CountCollectives
    | Leaving
    | Stop
    | Checkpoint
    | ReopenLog
    | SaveAlone
    | Inject
    | Built
    | Ready
    | Metrics
    | NotSaved
    | LoaderWorkers
    | DrillAt
    | DrillPart
    | NotKept
    | Finished
    | RestartProgress
    | OtherStage
    | Fork
    | Forked
    | StoreReady
    | SaverReady
    | WriteCopy
    | CopyWritten
)
# An event that is reported needs no row here.
Message = _NoReport | Report
KINDS: dict[str, type[Message]] = wire.by_name(_NoReport) | REPORTS


def encode(message: Message) -> bytes:
    """One packet, a fault's texts cut to what is kept of them. Raises :class:`WireError` if too long."""
    if isinstance(message, OfFault):
        message = replace(message, fault=message.fault.bounded())
    packet = wire.encode(message)
    if len(packet) > PACKET_BYTES_MAX:
        raise WireError(f"a {type(message).__name__} of {len(packet)} bytes is too long to send")
    return packet


def decode(packet: bytes) -> Message:
    """The message in ``packet``. Raises :class:`WireError` if it is none."""
    message: Message = wire.decode(packet, KINDS)
    return _with_spec(message) if isinstance(message, Fork) else message


def _with_spec(fork: Fork) -> Fork:
    """The kind of process says what class its spec has, which so far is what JSON gave."""
    record = cast("dict[str, Any]", fork.spec)
    try:
        return replace(fork, spec=wire.built(SPEC_OF[fork.kind], record))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise WireError(f"bad Fork: {error}") from error
