"""Plans the repair of an incident from its fault, earlier incidents and the budget. The supervisor performs the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ddp_runner.kernel.rules.classify import Attribution
from ddp_runner.kernel.rules.election import EMPTY_STEP, ReplicaProgress
from ddp_runner.kernel.rules.exits import RunStatus
from ddp_runner.kernel.rules.faults import Fault, FaultKind, Origin
from ddp_runner.kernel.rules.limits import RecoveryLimits
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.rules.repeats import count_tries, row_without_progress, same_error

# The cause does not go away by trying again.
NEVER_RETRIED = frozenset(
    {
        FaultKind.BAD_INPUT,
        FaultKind.NON_FINITE,
        FaultKind.LOSS_EXPLODED,
        FaultKind.BAD_SAMPLE,
        FaultKind.CHECKPOINT_BAD,
        FaultKind.STORAGE_FAILED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """The faults that one repair handles, once they are gathered: who, when, and how far the run had come."""

    attribution: Attribution
    at_s: float
    committed_step: int
    ever_formed: bool
    done_between: int = 0  # since that step: rounds of an evaluation, comparisons, saves
    generation: int | None = None
    kept: int | None = None  # the rank that raised and whose process went on all the same
    dropped: tuple[int, ...] = ()  # ranks that were given up for it
    plain_retry: bool = False  # nothing was left to change, and the same was tried again

    @property
    def culprit(self) -> Fault:
        """Return the fault that began the incident."""
        return self.attribution.culprit


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldFacts:
    """The ranks that remain after a fault.

    ``lost`` ranks have no usable process; ``filled`` says whether another one has a state, or is
    loading one (``goes_back``: all ranks roll back to an older one), and ``newest_step`` is the last step that the newest of them committed; ``present`` counts the
    ranks of the generation, the lost ones included. ``parked`` ranks raised an exception themselves
    and wait; they count neither as lost nor as filled. ``unending`` ranks were killed, but their
    processes (rank -> pid) do not end; they are lost too.
    """

    lost: tuple[int, ...]
    filled: bool
    present: int
    newest_step: int = EMPTY_STEP
    parked: tuple[ReplicaProgress, ...] = ()
    unending: Mapping[int, int] = field(default_factory=dict)
    goes_back: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceRanks:
    """Fork ``ranks`` again, then form the next generation; all other ranks keep process and state.

    ``reader`` is the one of them that reads the newest checkpoint, because no replica is left;
    None if a survivor will be the source. With no ranks at all the world just forms again.
    ``dropped`` ranks are given up: the others take over their share of the global batch. ``kept``
    has raised an exception, and continues because its state is the newest.
    """

    ranks: tuple[int, ...]
    reader: int | None
    delay_s: float
    dropped: tuple[int, ...] = ()
    kept: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """End the run, because of ``fault``.

    ``began``: what began a row of failures of which ``fault`` is the last, where that is another one.
    """

    fault: Fault
    reason: str
    status: RunStatus
    began: Fault | None = None


Plan = ReplaceRanks | GiveUp


def plan_recovery(  # noqa: PLR0911 - the rules in the order in which they hold
    incident: Incident,
    *,
    world: WorldFacts,
    history: Sequence[Incident],
    settings: RecoveryLimits,
) -> Plan:
    """Return the plan for ``incident``; ``history`` holds the earlier ones, oldest first."""
    fault = incident.culprit
    world, kept = judge_parked(incident, world=world, history=history)
    hopeless = _why_hopeless(incident, history)
    if hopeless:
        return GiveUp(fault=fault, reason=hopeless, status=RunStatus.FAILED)
    dropped = ranks_to_drop(incident, world=world, history=history, settings=settings)
    wanted = tuple(rank for rank in world.lost if rank not in dropped)
    unending = [pid for rank, pid in world.unending.items() if rank in wanted]
    if unending:  # its successor might meet it
        return GiveUp(
            fault=fault,
            reason=f"process {unending[0]} does not end, though it was killed",
            status=RunStatus.GAVE_UP,
        )
    if not dropped and _is_bounded_by_itself(incident) and not _will_change_nothing(fault, history):
        return ReplaceRanks(ranks=wanted, reader=_reader(wanted, world), delay_s=0.0)
    counted = [earlier for earlier in history if not _is_bounded_by_itself(earlier)]
    stuck = row_without_progress(incident, counted)
    given_up_before = {rank for earlier in stuck for rank in earlier.dropped}
    if dropped and not given_up_before.issuperset(dropped):
        return ReplaceRanks(
            ranks=wanted, reader=_reader(wanted, world), delay_s=0.0, dropped=dropped, kept=kept
        )
    tries = count_tries(stuck)
    if tries.count >= settings.no_progress_generations:
        return GiveUp(
            fault=fault,
            reason=f"no step committed in {tries.count} generations",
            status=RunStatus.GAVE_UP,
            began=tries.first,
        )
    window_start_s = incident.at_s - settings.restart_window_s
    recent = [
        earlier
        for earlier in counted
        if earlier.at_s >= window_start_s and not _is_of_the_network(earlier)
    ]
    if len(recent) >= settings.max_restarts and not _is_of_the_network(incident):
        return GiveUp(
            fault=fault,
            reason=budget_spent(len(recent) + 1, "repair", settings),
            status=RunStatus.GAVE_UP,
        )
    return ReplaceRanks(
        ranks=wanted,
        reader=_reader(wanted, world),
        delay_s=backoff_s(tries.repeats - 1, settings),
        dropped=dropped,
        kept=kept,
    )


def _why_hopeless(incident: Incident, history: Sequence[Incident]) -> str:
    """Return why no other process could do better; empty where one might."""
    fault = incident.culprit
    starts = fault.phase == Phase.STARTUP.label
    if fault.kind in NEVER_RETRIED or not fault.may_retry:
        return "trying again would not help"
    if not incident.ever_formed and (
        fault.kind is FaultKind.RANK_RAISED or (fault.kind is FaultKind.OUT_OF_MEMORY and starts)
    ):
        return "it failed while starting"
    if fault.kind is FaultKind.RANK_RAISED and _has_come_again(incident, history):
        return "the same error at the same step again"
    if _disagree_again(incident, history):
        return "the ranks disagreed at this step before"
    return ""


def budget_spent(count: int, what: str, settings: RecoveryLimits) -> str:
    """Return ``11 repairs within an hour (--max-restarts 10)``: why there is no further one."""
    window_s = settings.restart_window_s
    within = "an hour" if window_s == 3600 else f"{window_s:g} s"
    many = "s" * (count != 1)
    return f"{count} {what}{many} within {within} (--max-restarts {settings.max_restarts})"


def judge_parked(
    incident: Incident, *, world: WorldFacts, history: Sequence[Incident]
) -> tuple[WorldFacts, int | None]:
    """Return ``world`` without parked ranks, and the parked rank that is kept.

    They are lost, except for one that is ahead of all others: without it a committed step would be
    lost. A rank that was kept once and raised the same again is never kept: its process may be the fault.
    """
    tired = {
        fault.rank for fault, earlier in _repeated(incident, history) if fault.rank == earlier.kept
    }
    ahead = [
        replica
        for replica in world.parked
        if replica.committed_step > world.newest_step and replica.rank not in tired
    ]
    newest = min(ahead, key=lambda one: (-one.committed_step, one.rank), default=None)
    kept = None if newest is None else newest.rank
    lost = {replica.rank for replica in world.parked if replica.rank != kept}
    return replace(
        world,
        lost=tuple(sorted({*world.lost, *lost})),
        filled=world.filled or kept is not None,
        parked=(),
    ), kept


def _repeated(incident: Incident, history: Sequence[Incident]) -> list[tuple[Fault, Incident]]:
    """Each cause that is the same error at the same place as a cause of an earlier incident, with that.

    At the end of a run all is at one step: there the place is how far its evaluation has come. An error that comes from
    outside, as of a loader worker that somebody has killed, says nothing about the run.
    """
    there = [
        earlier
        for earlier in history
        if earlier.committed_step != incident.committed_step
        or earlier.done_between == incident.done_between
    ]
    return [
        (fault, earlier)
        for fault in incident.attribution.causes
        for earlier in there
        if fault.origin is not Origin.OUTSIDE
        and any(same_error(fault, one) for one in earlier.attribution.causes)
    ]


def _has_come_again(incident: Incident, history: Sequence[Incident]) -> bool:
    """Return whether an error came again in a process that replaced one which had raised it.

    A rank that was late when others raised the error, and then continued into the step, raises it for the first time.
    """
    return any(
        fault.kind is FaultKind.RANK_RAISED
        and fault.rank != earlier.kept
        and any(
            same_error(fault, one) and one.rank == fault.rank for one in earlier.attribution.causes
        )
        for fault, earlier in _repeated(incident, history)
    )


def _disagree_again(incident: Incident, history: Sequence[Incident]) -> bool:
    """Return whether the ranks did different things at a step twice; no single process is to blame for that."""
    earlier = [one.culprit.step for one in history if one.culprit.is_disagreement]
    return incident.culprit.is_disagreement and incident.culprit.step in earlier


def is_short_for_steps(fault: Fault) -> bool:
    """Return whether a rank has too little memory for its step, so that half a batch may help.

    A rank that starts or forms has no batch in memory yet: a process that has just died may still hold it.
    """
    is_short = fault.kind is FaultKind.OUT_OF_MEMORY
    return is_short and fault.phase not in (Phase.STARTUP.label, Phase.FORMING.label)


def _is_bounded_by_itself(incident: Incident) -> bool:
    """Return whether neither the budget nor a lack of progress counts.

    Each try changes something that can be changed only a limited number of times (a batch is halved, a flag is
    set), and ``may_retry`` is False after the last. A try with ``plain_retry`` changes nothing.
    """
    fault = incident.culprit
    is_set_once = fault.kind in (FaultKind.REDUCTION_UNFINISHED, FaultKind.COMPILATION_FAILED)
    # Its process is replaced once to see, and all go back ``rollbacks_max`` times.
    is_looked_into = fault.kind is FaultKind.WRONG_GRADIENT
    is_bounded = is_short_for_steps(fault) or is_set_once or is_looked_into
    return is_bounded and not incident.plain_retry


def _is_of_the_network(incident: Incident) -> bool:
    """Return whether a machine was lost, which the run does not cause; only a lack of progress counts then."""
    return incident.culprit.kind is FaultKind.NODE_LOST


def _will_change_nothing(fault: Fault, history: Sequence[Incident]) -> bool:
    """Return whether the last try for this kind changed nothing; a replacement reports its changes only later."""
    earlier = [one.plain_retry for one in history if one.culprit.kind is fault.kind]
    return earlier[-1:] == [True]


def ranks_to_drop(
    incident: Incident,
    *,
    world: WorldFacts,
    history: Sequence[Incident],
    settings: RecoveryLimits,
) -> tuple[int, ...]:
    """The lost ranks that are not worth another try, if enough others are left without them.

    A lost device does not come back by itself, and a process that does not end blocks its slot; any
    other rank is given up once it was a cause ``slot_failures_max`` times within the window. Never a
    rank that the state would die with.
    """
    if not settings.min_ranks or not (world.filled or world.goes_back):
        return ()
    window_start_s = incident.at_s - settings.restart_window_s
    recent = [incident, *(earlier for earlier in history if earlier.at_s >= window_start_s)]
    causes = [
        fault
        for one in recent
        for fault in one.attribution.causes
        if fault.kind
        is not FaultKind.WRONG_GRADIENT  # it becomes a device that is lost, or nothing
    ]
    hopeless = tuple(
        rank
        for rank in world.lost
        if rank in world.unending
        or sum(fault.rank == rank for fault in causes) >= settings.slot_failures_max
        or any(
            fault.rank == rank and fault.kind is FaultKind.DEVICE_LOST
            for fault in incident.attribution.causes
        )
    )
    return hopeless if world.present - len(hopeless) >= settings.min_ranks else ()


def _reader(ranks: Sequence[int], world: WorldFacts) -> int | None:
    return None if world.filled or not ranks else ranks[0]


def backoff_s(failures_in_a_row: int, settings: RecoveryLimits) -> float:
    """Return the wait before the next try: ``backoff_first_s`` at first, then doubling from half a second.

    Only a repetition of the same cause makes it longer: faults from outside do not get rarer by waiting.
    """
    if failures_in_a_row <= 0:
        return settings.backoff_first_s
    return min(
        settings.backoff_max_s, max(settings.backoff_first_s, 0.5) * 2.0 ** (failures_in_a_row - 1)
    )


def regrow_delay_s(failed_returns: int, settings: RecoveryLimits) -> float:
    """Wait before a given-up rank is tried again: longer after each return that did not last.

    Never longer than ``restart_window_s``, after which its faults are forgotten anyway.
    """
    longest_s = max(settings.regrow_after, settings.restart_window_s)
    return min(longest_s, settings.regrow_after * 2.0 ** min(failed_returns, 60))
