"""A plan of repair in words, for the lines of the log and the summary. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_runner.core.faults import Fault, FaultKind, fault_line, rank_list
from ddp_runner.core.recovery import GiveUp, Incident, ReplaceRanks


def blamed_in_words(incident: Incident, *, ranks: int) -> str:
    """The culprit, and whether it is one of many: that one rank is named must not look like an error."""
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
    """Return a line with the blamed rank and the repair; empty if there is no repair."""
    if isinstance(plan, GiveUp):
        return ""
    wait = f" in {plan.delay_s:g} s" if plan.delay_s else ""
    if incident.culprit.kind is FaultKind.NODE_LOST and plan.loader is None and not plan.dropped:
        repair = [f"waiting for {rank_list(plan.ranks)}"]
    else:
        repair = repair_in_words(plan)
    words = ", ".join([*actions, *repair]) or "forming the world again"
    return f"{blamed_in_words(incident, ranks=ranks)}; {words}{wait}"


def repair_in_words(plan: ReplaceRanks) -> list[str]:
    """Return the parts of the repair in words."""
    words = []
    if plan.ranks:
        source = "" if plan.loader is None else " from the newest checkpoint"
        words.append(f"replacing {rank_list(plan.ranks)}{source}")
    if plan.kept is not None:
        words.append(f"rank {plan.kept} stays, with the newest state")
    if plan.dropped:
        words.append(f"going on without {rank_list(plan.dropped)}")
    return words


def reads_checkpoint(plan: GiveUp | ReplaceRanks) -> bool:
    """Return True if no rank with a state is left."""
    return isinstance(plan, ReplaceRanks) and plan.loader is not None


def _is_back(culprit: Fault) -> str:
    """A node that comes again may bring its ranks along as they were."""
    return "back" if culprit.kind is FaultKind.NODE_LOST else "respawned"


def outcome_in_words(plan: GiveUp | ReplaceRanks, culprit: Fault) -> str:
    """Return the finished repair in words; empty if there was none."""
    if isinstance(plan, GiveUp):
        return ""
    if plan.dropped:
        return f"going on without {rank_list(plan.dropped)}"
    back = _is_back(culprit)
    if plan.ranks == (culprit.rank,):
        return back
    if plan.ranks and plan.kept is not None:
        return f"{rank_list(plan.ranks)} {back}, rank {plan.kept} stayed with the newest state"
    return f"{rank_list(plan.ranks)} {back}" if plan.ranks else "formed again"


def action_in_words(plan: GiveUp | ReplaceRanks, culprit: Fault, *, actions: Sequence[str]) -> str:
    """All that was done about an incident: by the ranks themselves, and with them."""
    if isinstance(plan, GiveUp):
        return f"given up: {plan.reason}"
    words = list(actions)
    if plan.ranks or plan.dropped:
        source = " from the newest checkpoint" if reads_checkpoint(plan) else ""
        words.append(outcome_in_words(plan, culprit) + source)
    elif culprit.kind is FaultKind.REPLICA_DIVERGED and not words:
        words.append("the majority's state taken over")
    return ", ".join(words) or outcome_in_words(plan, culprit)
