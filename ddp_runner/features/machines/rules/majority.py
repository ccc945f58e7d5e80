"""Decides by a majority which machine coordinates, where each machine has a checkpoint folder of its own.

Each machine keeps a :class:`Record` in its folder. Nothing is read or sent here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

LEAST_MACHINES = 3  # of two, none has a majority without the other

Ballot = tuple[int, str]  # the number and the term of one coordinator; the greater one is newer
Formed = tuple[
    int, str, int
]  # the ballot of a generation's coordinator and the generation's number
NEVER: Ballot = (0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A machine of a generation. ``machine``: its name, which stays with its folder; ``host`` and ``port``: where it listens."""

    machine: str
    number: int
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Holds what a machine keeps on its disk about the coordinators of its run.

    ``promised`` and ``promised_term``: the newest ballot that it has voted for or obeyed. ``ballot``, ``term``, ``generation`` and
    ``members``: of the newest generation that its ranks were asked to form, the coordinator's first. ``before``: the members of the newest generation
    that all machines know of; empty once that is this one. ``run``: of that generation, which all those after it keep. ``over``: the machines that have
    written down that the run has ended in that generation.
    """

    machine: str
    promised: int = 0
    promised_term: str = ""
    ballot: int = 0
    term: str = ""
    generation: int = 0
    members: tuple[Peer, ...] = ()
    before: tuple[Peer, ...] = ()
    run: str = ""
    over: tuple[str, ...] = ()

    @property
    def formed(self) -> Formed:
        """The newest generation; a greater one is newer."""
        return (self.ballot, self.term, self.generation)

    @property
    def has_promised(self) -> Ballot:
        """The newest ballot that this machine has voted for or obeyed."""
        return (self.promised, self.promised_term)


def why_no_vote_holds(*, least: int, most: int) -> str:
    """Return in words why no majority can decide in such a run; empty if one can.

    Each group that trains has ``least`` machines or more: where two such groups may have no machine in common, nothing
    says which is the newer one.
    """
    if most < LEAST_MACHINES:
        return "two machines have no majority without each other"
    if 2 * least <= most:
        return f"--nnodes {least}:{most} lets a half of the machines train alone"
    return ""


def may_vote(record: Record, ballot: Ballot, formed: Formed) -> bool:
    """Return whether the machine with ``record`` votes for a candidate whose newest generation is ``formed``."""
    # INVARIANT one-vote: a machine votes once for each ballot, and for no candidate with an older memory than its own
    # generation has. Broken if: two machines are elected in one ballot, or a committed step is left behind.
    # Guarded by: test_a_machine_votes_once_and_for_no_older_memory.
    is_older = formed < record.formed or (formed == record.formed and bool(record.over))
    return ballot > record.has_promised and not is_older


def may_obey(record: Record, ballot: Ballot) -> bool:
    """Return whether this machine may still form a generation for the coordinator of ``ballot``."""
    # INVARIANT promise-is-kept: a machine that has voted for a coordinator trains for no older one. Broken if: the older one
    # commits a step beside the new one.
    # Guarded by: test_a_machine_votes_once_and_for_no_older_memory.
    return ballot >= record.has_promised


def promising(record: Record, ballot: Ballot) -> Record:
    """Return the record of a machine that votes for ``ballot``."""
    number, term = ballot
    return replace(record, promised=number, promised_term=term)


def has_majority(record: Record, machines: Collection[str]) -> bool:
    """Return whether no others can be as many of those that had the newest generation of ``record``."""
    # INVARIANT majority-of-both: until all machines know a generation, a majority of the one before is needed too. Broken
    # if: machines that know of it and machines that do not each find a majority.
    # Guarded by: test_a_generation_has_a_majority_of_those_before.
    return all(_is_most(group, machines) for group in (record.members, record.before) if group)


def _is_most(group: Sequence[Peer], machines: Collection[str]) -> bool:
    """Return whether they are more than half; the coordinator's machine, which is first, decides between two halves."""
    twice = 2 * sum(one.machine in machines for one in group)
    return twice > len(group) or (twice == len(group) and group[0].machine in machines)


def newest(records: Iterable[Record]) -> Record:
    """Return the record of the newest generation."""
    return max(records, key=lambda one: one.formed)


def is_newest(record: Record, formed: Formed, known: Record) -> bool:
    """Return whether no step was made without the memory of ``formed``. ``record``: of its machine; ``known``: the newest."""
    # A step takes all members: one whose memory is older proves that the generation has made none.
    names = {one.machine for one in known.members}
    return formed >= known.formed or record.machine in names


def may_form(records: Sequence[Record]) -> bool:
    """Return whether the machines that are there may train together: no others can have gone on without them."""
    # INVARIANT majority-forms: a generation has more than half of the machines of the one before. Broken if: a coordinator
    # that is cut off trains with a minority, while the others elect another one.
    # Guarded by: test_a_generation_has_a_majority_of_those_before.
    return has_majority(newest(records), {one.machine for one in records}) or is_over(records)


def is_over(records: Sequence[Record]) -> bool:
    """Return whether the newest run has ended in order, and the machines that do not know so are no majority.

    Its newest state is on a disk then, and no memory of it must be waited for.
    """
    # INVARIANT end-is-known: a run counts as ended only if no majority of its newest generation can be without that
    # knowledge. Broken if: a new launch trains beside machines that have elected another coordinator.
    # Guarded by: test_an_end_counts_once_no_majority_can_be_without_it.
    known = newest(records)
    over = {name for one in records if one.formed == known.formed for name in one.over}
    groups = [group for group in (known.members, known.before) if group]
    return bool(over) and not any(
        _is_most(group, {one.machine for one in group} - over) for group in groups
    )


def known_by_all(record: Record) -> tuple[Peer, ...]:
    """Return the members of the newest generation that all its machines know, as far as this record says."""
    return record.before or record.members


def forming(
    record: Record,
    *,
    ballot: Ballot,
    generation: int,
    members: Sequence[Peer],
    before: Sequence[Peer],
    run: str = "",
) -> Record:
    """Return the record of a machine that is asked to form. ``before``: :func:`known_by_all` of the newest record there."""
    number, term = ballot
    return replace(
        promising(record, ballot),
        ballot=number,
        term=term,
        generation=generation,
        members=tuple(members),
        before=tuple(before),
        run=run,
        over=(),
    )


def confirmed(record: Record) -> Record:
    """Return the record of a machine whose newest generation trains: all members know it."""
    return replace(record, before=())


def ended(record: Record, machines: Iterable[str]) -> Record:
    """Return the record of a machine whose run has ended in order; ``machines`` have written that down."""
    return replace(record, over=tuple(sorted({*record.over, *machines})))


def others_of(record: Record) -> list[Peer]:
    """Return the other machines that have a say after the newest generation of ``record``, each once."""
    known = {peer.machine: peer for peer in (*record.before, *record.members)}
    known.pop(record.machine, None)
    return list(known.values())
