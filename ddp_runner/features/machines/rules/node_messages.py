"""Messages between the supervisors of two nodes, each a frame (``kernel/wire/packets.py``). Never touches a socket.

A side takes those that the other one sends. Both ends are of one version, which ``Hello`` makes sure of.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from ddp_runner.core.gpu_reading import Watched
from ddp_runner.features.machines.rules.majority import Peer, Record
from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.wire.events import RunEnds
from ddp_runner.kernel.wire.packets import by_name

LOOK_EVERY_S = 0.5  # the longest time from one Look to the next

# Of all stacks in a Look, as they are written there: half of a frame.
STACKS_BYTES_MAX = 128 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """Ranks that a node has kept with their memory while it was cut off, or a copy of their state that is left.

    ``node``: the number that it had; ``term``, ``generation`` and ``run_id``: of its ranks' newest Form. ``inexact_reasons``:
    of the run, as the coordinator has said last.
    """

    node: int
    term: str
    generation: int
    run_id: str
    inexact_reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Follower -> coordinator, first of all: who it is, and what it would run.

    ``supervisor``: a name of its process that no other has. ``node_rank``: the number that it was
    given on its command line, if any.
    ``ranks``: how many it has. ``run_id``: of ``--rdzv-id``. ``meaning``: what the run means, by key;
    it must be the coordinator's. ``versions``: of Python, torch and this package, which must be too.
    ``copied``: as ``parked``, of the newest copy of the state in its memory, which is of step ``copied_step``.
    ``record``: of the coordinators before, where a majority decides; ``at_host`` and ``at_port``: where it hears of votes.
    """

    host: str
    supervisor: str
    node_rank: int | None
    ranks: int
    run_id: str
    meaning: dict[str, Any]
    versions: dict[str, str]
    # Of the newest checkpoint in its folder that looks sound; EMPTY_STEP and nothing for none.
    newest_step: int = EMPTY_STEP
    newest_run_id: str = ""
    # What it runs: digests of files by name, and versions of packages.
    code: dict[str, str] = field(default_factory=dict)
    # Settings that hold for all machines and were asked for here, or are of an earlier Welcome.
    asked: dict[str, Any] = field(default_factory=dict)
    parked: Parked | None = None
    copied: Parked | None = None
    copied_step: int = EMPTY_STEP
    was_there: bool = False  # this process has been a node of the run before
    record: Record | None = None
    at_host: str = ""
    at_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Anybody who has the token -> coordinator, in the place of a Hello: what is there? It takes no part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Coordinator -> whoever asked: its run, how many machines are there, and what they need.

    ``term``: the coordinator's, which its folders show. ``checkpoint_dir`` and ``log_dir``: as it was
    given them.
    """

    run_id: str
    there: int
    most: int
    ranks: int
    versions: dict[str, str]
    term: str
    checkpoint_dir: str
    log_dir: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Coordinator -> follower: it is node ``node``, whose ranks begin with ``first_rank``.

    ``node`` below 0: it is a spare, with no ranks, until another Welcome follows; ``waits_for`` says for
    what. ``keeps_parked``: what its parked ranks have in memory is still of use; ``keeps_copied``: the copy that it has.
    """

    node: int
    first_rank: int
    world_size: int
    store_host: str
    store_port: int
    term: str  # the coordinator's, of which there is one at a time
    silent_s: float  # after which each of the two takes the other for lost
    keeps_parked: bool = False
    keeps_copied: bool = False
    settings: dict[str, Any] = field(default_factory=dict)  # the coordinator's, which hold for all
    waits_for: str = ""
    coordinator: int = 0  # the number of its own machine
    logs_number: int = 0  # of its log folder
    # Where the coordinator is, and its folders there.
    host: str = ""
    log_dir: str = ""
    checkpoint_dir: str = ""
    ballot: int = 0  # the number of the coordinator's; 0: no majority decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Coordinator -> follower, before the order to form: who has ``generation``, for a machine's Record.

    ``members``: empty for a machine that takes no part in votes. ``run``: as in a Record.
    """

    ballot: int
    generation: int
    members: tuple[Peer, ...]
    before: tuple[Peer, ...]
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOver:
    """Coordinator -> follower, before RunEnds: the run has ended in order in that generation, as ``machines`` have written down."""

    ballot: int
    generation: int
    machines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverNoted:
    """Follower -> coordinator, answering RunOver: this machine has written it down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteWanted:
    """Follower without a coordinator -> another one: vote for it. ``formed`` and ``generation``: its newest generation."""

    ballot: int
    term: str
    formed: int
    formed_term: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """The answer: this ``machine`` has voted as it was asked."""

    machine: str
    ballot: int
    term: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Elected:
    """A coordinator -> a machine that it does not hear: it coordinates, and listens there."""

    ballot: int
    term: str
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Follower -> coordinator, answering Welcome: whether it has the coordinator's folders."""

    shares_checkpoints: bool
    shares_logs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Coordinator -> follower: why it cannot take part; bad input there, exit code 2."""

    name: str
    value: str
    expected: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLook:
    """One rank at the time of a :class:`Look`. ``cells``: its slot on the board, as whole numbers.

    Times among them are of the follower's clock. ``stack``: where it hangs, once it was asked and has
    said so.
    """

    cells: list[int]
    pid: int | None
    stopped_s: float
    is_killed: bool
    resident_bytes: int
    written_bytes: int
    stack: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Follower -> coordinator, each :data:`LOOK_EVERY_S` and at once when something has happened.

    ``now_ns``: the follower's clock. ``can_fork`` and ``has_spare``: what waits there. ``round_trip_s``: from its newest
    look that was answered to the answer.
    """

    number: int
    now_ns: int
    can_fork: bool
    has_spare: bool
    round_trip_s: float
    ranks: dict[str, RankLook]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Coordinator -> follower, the answer to Look ``number``: how the run stands.

    ``restarts``: how often all ranks of a script have restarted.
    """

    number: int
    generation: int
    committed_step: int
    is_fault_free: bool
    inexact_reasons: list[str] = field(default_factory=list)
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRank:
    """Coordinator -> follower: a process for a rank that has none, or the one that was parked.

    ``start``: a RankStart's fields.

    ``process``: which one of the rank's it is; whatever is said of it comes with this number.
    """

    rank: int
    process: int
    start: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStarted:
    """Follower -> coordinator: the process of a rank is known."""

    rank: int
    process: int
    pid: int
    was_spare: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGone:
    """Follower -> coordinator: the process of a rank was reaped, ``age_s`` ago; or never comes.

    Never comes: ``exit_code`` and ``signal_number`` are both None. The rest is what it had written,
    and its slot on the board by then.
    """

    rank: int
    process: int
    exit_code: int | None
    signal_number: int | None
    age_s: float
    killed_for_memory: bool
    last: str
    when_asked: str
    before_log: str
    now_ns: int
    cells: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToRank:
    """Coordinator -> follower: pass this on to a rank. ``packet``: a message of ``kernel/wire/messages.py``, as it is."""

    rank: int
    packet: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FromRank:
    """Follower -> coordinator: a rank of its has sent this ``packet``, passed on as it is."""

    rank: int
    process: int
    packet: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRank:
    """Coordinator -> follower: SIGKILL this rank."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceRank:
    """Coordinator -> follower: from here on this rank may publish nothing, or may again."""

    rank: int
    is_fenced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalRank:
    """Coordinator -> follower: send a signal to this rank."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRank:
    """Coordinator -> follower: from here on this rank shows where it hangs.

    ``by_force``: it answers nothing, so it is made to, and may write no file any more.
    """

    rank: int
    by_force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetAsked:
    """Coordinator -> follower: what this rank is asked next is another question."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Follower -> coordinator: a line for people."""

    text: str
    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWanted:
    """Follower -> coordinator: its launcher has asked it to stop. ``reason``: a StopReason's value."""

    reason: str
    is_leaving: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWanted:
    """Follower -> coordinator: somebody there wants a checkpoint after this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndWanted:
    """Follower -> coordinator: somebody there wants the run to end as it is."""


FromFollower = (
    Hello
    | Question
    | VoteWanted
    | Elected
    | Folders
    | Look
    | Watched
    | RankStarted
    | RankGone
    | FromRank
    | Said
    | StopWanted
    | SaveWanted
    | EndWanted
    | OverNoted
)
FromCoordinator = (
    Welcome
    | Answer
    | Refused
    | Generation
    | RunOver
    | Vote
    | Beat
    | StartRank
    | ToRank
    | EndRank
    | FenceRank
    | SignalRank
    | AskRank
    | ForgetAsked
    | RunEnds
)
NodeMessage = FromFollower | FromCoordinator
FROM_FOLLOWER: dict[str, type[FromFollower]] = by_name(FromFollower)
FROM_COORDINATOR: dict[str, type[FromCoordinator]] = by_name(FromCoordinator)


def shortened_stack(stack: str, *, ranks: int) -> str:
    """The begin of ``stack``, which says where it hangs: a :class:`Look` has so many in one frame."""
    most = STACKS_BYTES_MAX // ranks
    while (size := len(json.dumps(stack))) > most:
        stack = stack[: len(stack) * most // size]
    return stack
