"""One thing that goes wrong, while it is being gathered and in words: its faults, and what is done about them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ddp_runner.kernel.processes.rank_process import place_in
from ddp_runner.kernel.rules.classify import VICTIM_KINDS
from ddp_runner.kernel.rules.divergence import disagreement, where_each_was
from ddp_runner.kernel.rules.faults import Fault, FaultKind, fault_line, rank_list
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.rules.recovery import GiveUp, Incident, ReplaceRanks

STACKS_TIME_S = 1.0  # for a rank that hangs to write its stacks, before it is killed
# Whoever follows such a rank starts like any other: it asks for no less, and nobody judges its state.
_REPLACED_ALIKE = frozenset(
    {FaultKind.RANK_KILLED, FaultKind.RANK_EXITED, FaultKind.RANK_HUNG, FaultKind.NODE_LOST}
)


@dataclass(slots=True, kw_only=True)
class OpenIncident:
    """Faults that belong together, until every rank has answered or ended."""

    faults: list[Fault]
    began_s: float
    event_id: int
    # Of each rank that is in the state HUNG, when it was asked where it hangs. It is killed once it has
    # reported that, or after STACKS_TIME_S.
    pending_kills: dict[int, float] = field(default_factory=dict)
    # Of each rank with a fault, when that was reported: one that is woken goes on, and gives more.
    last_sign_s: dict[int, float] = field(default_factory=dict)
    # Each rank that was asked: the step it has committed, and the collectives it has begun since.
    collectives: dict[int, tuple[int, int]] = field(default_factory=dict)
    ended: dict[int, Fault] = field(default_factory=dict)  # how ranks ended, with their last output
    # Ranks whose replacement was asked for before the last answer came, and has no fault of its own.
    forked_ahead: set[int] = field(default_factory=set)
    _tried_ahead: set[int] = field(default_factory=set)
    # Ranks whose process answers, and is replaced nevertheless; and the newest step from which the ranks may resume,
    # None if any step will do.
    distrusted: set[int] = field(default_factory=set)
    not_after: int | None = None

    def may_fork_ahead(self, rank: int) -> bool:
        """Return True if no further news can change how this dead rank is replaced.

        True once for a rank in an incident: more deaths of it would not be counted.
        """
        kinds = {fault.kind for fault in self.faults if fault.rank == rank} - VICTIM_KINDS
        return bool(kinds) and kinds <= _REPLACED_ALIKE and rank not in self._tried_ahead

    def fork_ahead(self, ranks: Iterable[int]) -> None:
        """These are being replaced before the incident is closed."""
        for rank in ranks:
            self.forked_ahead.add(rank)
            self._tried_ahead.add(rank)

    def explained_faults(self) -> list[Fault]:
        """The faults, with what is known only now: what each rank was doing."""
        return [self._explained(fault) for fault in self.faults]

    def _explained(self, fault: Fault) -> Fault:
        if fault.kind is FaultKind.RANK_HUNG and fault.rank in self.ended:
            stack = self.ended[fault.rank].detail
            cause = _with(fault.cause, place_in(stack)) + self._begun_while_hung(fault.rank)
            cause += self._not_formed()
            return replace(fault, cause=cause, detail=stack)
        if fault.kind is not FaultKind.COLLECTIVE_STUCK:
            return fault
        if fault.is_disagreement:
            return replace(fault, cause=_with(fault.cause, where_each_was(self._places())))
        apart = disagreement(self._begun())
        if not apart or any(one.kind is FaultKind.RANK_HUNG for one in self.faults):
            return fault
        cause = f"{fault.cause}; they are not in the same one: begun in this step has {apart}"
        return replace(fault, cause=cause, is_disagreement=True)

    def _not_formed(self) -> str:
        """A rank that connects to one that it cannot reach hangs as well: then the way between them is why."""
        stuck = [
            fault.cause
            for fault in self.faults
            if fault.kind is FaultKind.COLLECTIVE_STUCK and fault.phase == Phase.FORMING.label
        ]
        return f"; {stuck[0]}" if stuck else ""

    def _begun_while_hung(self, rank: int) -> str:
        """Distinguishes a rank that waits in a collective of its own from one that is stuck elsewhere."""
        begun = self._begun()
        apart = disagreement(begun) if begun.get(rank, 0) > 0 else ""
        return f"; collectives begun in this step: {apart}" if apart else ""

    def _begun(self) -> dict[int, int]:
        """Collectives of each rank in its step; nobody's where they are not in the same one."""
        is_same = len({step for step, count in self.collectives.values() if count >= 0}) == 1
        return {rank: count for rank, (_, count) in self.collectives.items()} if is_same else {}

    def _places(self) -> dict[int, str]:
        """Return the place of each rank when the collective broke, as far as it is known."""
        victims = {fault.rank: fault for fault in self.faults if fault.kind in VICTIM_KINDS}
        return {
            rank: place_in(fault.detail) or f"in {fault.phase}"
            for rank, fault in (victims | self.ended).items()
        }


def _with(cause: str, note: str) -> str:
    return f"{cause} ({note})" if note else cause


# What is done about it, in words.


def blamed_in_words(incident: Incident, *, ranks: int) -> str:
    """Name the culprit, or say that all ranks raised: that one is named must not look like an error."""
    raised = [c for c in incident.attribution.causes if c.kind is FaultKind.RANK_RAISED]
    all_did = len(raised) == ranks > 1
    return (
        f"all {ranks} ranks raised, first {fault_line(raised[0])}"
        if all_did
        else fault_line(incident.culprit)
    )


def repair_line(
    plan: GiveUp | ReplaceRanks, incident: Incident, *, actions: Sequence[str], ranks: int
) -> str:
    """Say who is blamed and what is done about it; empty where nothing is."""
    if isinstance(plan, GiveUp):
        return ""
    wait = f" in {plan.delay_s:g} s" if plan.delay_s else ""
    if incident.culprit.kind is FaultKind.NODE_LOST and plan.reader is None and not plan.dropped:
        repair = [f"waiting for {rank_list(plan.ranks)}"]
    else:
        repair = repair_in_words(plan)
    words = ", ".join([*actions, *repair]) or "forming the process group again"
    return f"{blamed_in_words(incident, ranks=ranks)}; {words}{wait}"


def repair_in_words(plan: ReplaceRanks) -> list[str]:
    """Say what is done, part by part."""
    words = []
    if plan.ranks:
        source = "" if plan.reader is None else " from the newest checkpoint"
        words.append(f"replacing {rank_list(plan.ranks)}{source}")
    if plan.kept is not None:
        words.append(f"rank {plan.kept} stays, with the newest state")
    if plan.dropped:
        words.append(f"going on without {rank_list(plan.dropped)}")
    return words


def reads_checkpoint(plan: GiveUp | ReplaceRanks) -> bool:
    """Return whether no rank with a state is left."""
    return isinstance(plan, ReplaceRanks) and plan.reader is not None


def outcome_in_words(
    plan: GiveUp | ReplaceRanks, culprit: Fault, *, replaced: str = "replaced"
) -> str:
    """Say what was done; empty where nothing was. ``replaced``: the word for ranks that are there again."""
    if isinstance(plan, GiveUp):
        return ""
    if plan.dropped:
        return f"going on without {rank_list(plan.dropped)}"
    # A node that comes again may bring its ranks along as they were.
    back = "back" if culprit.kind is FaultKind.NODE_LOST else replaced
    if plan.ranks == (culprit.rank,):
        return back
    if plan.ranks and plan.kept is not None:
        return f"{rank_list(plan.ranks)} {back}, rank {plan.kept} stayed with the newest state"
    return f"{rank_list(plan.ranks)} {back}" if plan.ranks else "formed again"


_RESPAWNED = "respawned"  # in events.jsonl and summary.json, which programs read


def action_in_words(plan: GiveUp | ReplaceRanks, culprit: Fault, *, actions: Sequence[str]) -> str:
    """Say all that was done about an incident, by the ranks themselves and with them."""
    if isinstance(plan, GiveUp):
        return f"given up: {plan.reason}"
    outcome = outcome_in_words(plan, culprit, replaced=_RESPAWNED)
    words = list(actions)
    if plan.ranks or plan.dropped:
        source = " from the newest checkpoint" if reads_checkpoint(plan) else ""
        words.append(outcome + source)
    elif culprit.kind is FaultKind.REPLICA_DIVERGED and not words:
        words.append("the majority's state taken over")
    return ", ".join(words) or outcome
