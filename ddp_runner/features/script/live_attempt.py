"""Keeps what one start of all ranks of a script has come to: who has ended, how, and whose fault that is. Acts on nobody."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_runner.features.script.rules import Attempt, explained, first_cause
from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.rules.classify import RankExit, classify_exit
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.wire.messages import Leaving

LATE_S = 10.0  # for ranks to end after the first has


class LiveAttempt:
    """Holds the facts of the attempt in hand; :class:`ScriptAgent` makes another one for each.

    ``number`` counts from 0; torchrun calls it the restart count.
    """

    def __init__(self, number: int, *, now_s: float) -> None:
        self.number = number
        self.began_s = now_s  # when its ranks were asked for; before that, when it was due
        self.faults: list[Fault] = []
        # When what is left of it gets SIGKILL; None: nobody was asked to end.
        self.rest_ends_by_s: float | None = None
        # Rank -> with which code it would have ended a shell's command.
        self._codes: dict[int, int] = {}
        # Ranks whose program had ended before anybody was asked to end, and those that said so afterwards.
        self._left: dict[int, Leaving] = {}
        self._left_when_asked: set[int] = set()
        self._others_ended_s: float | None = None  # when the first ranks had ended
        self._stepped_ns: int | None = None  # when its first optimizer step was seen

    @property
    def is_ending(self) -> bool:
        """Return whether what is left of it was asked to end."""
        return self.rest_ends_by_s is not None

    def heard_leaving(self, message: Leaving) -> None:
        """Note that the program of a rank has ended; its process follows."""
        if self.is_ending:
            self._left_when_asked.add(message.rank)
        else:
            self._left[message.rank] = message

    def has_done(self, rank: int, at_ns: int) -> None:
        """Note that a rank has ended with 0, by itself."""
        self._left.setdefault(rank, Leaving(rank=rank, exit_code=0, at_ns=at_ns))

    def left_with(self, rank: int) -> Leaving | None:
        """Return with what the program of a rank has ended by itself; None where it has not."""
        return self._left.get(rank)

    def is_silent(self, rank: int) -> bool:
        """Return whether a rank has not said that it ends since all were asked to; who ends because of SIGTERM says so."""
        return rank not in self._left_when_asked

    def failed(self, rank: int, code: int) -> None:
        """Note with which code a rank has failed; the newest counts."""
        self._codes[rank] = code

    def said_error(self, rank: int) -> None:
        """Note that a rank has raised; it has the code of Python unless its process ends with another."""
        self._codes.setdefault(rank, 1)

    def has_fault_of(self, rank: int) -> bool:
        """Return whether a rank has a fault in this attempt."""
        return any(known.rank == rank for known in self.faults)

    def ending_themselves(self) -> set[int]:
        """Return the ranks whose program has ended or raised: what they still write, as a traceback, is not to be cut off."""
        said = {fault.rank for fault in self.faults if fault.kind is not FaultKind.RANK_HUNG}
        return said | self._left.keys()

    def are_others_late(self, left: int, *, of: int, now_s: float) -> bool:
        """Return whether ``left`` of so many ranks still run though others have ended for a while; True once."""
        if left == of:
            self._others_ended_s = None
        elif self._others_ended_s is None:
            self._others_ended_s = now_s
        elif self._others_ended_s + LATE_S < now_s:
            self._others_ended_s = float("inf")
            return True
        return False

    def are_loads_known(self, steps: int, *, known_ns: int, now_ns: int) -> bool:
        """Return whether it is known what ranks had read when the first of them made a step. ``known_ns``: of when facts are."""
        if steps and self._stepped_ns is None:
            self._stepped_ns = now_ns
        return self._stepped_ns is not None and known_ns >= self._stepped_ns

    def judged(
        self, handles: Sequence[RankHandle], recorded: Sequence[Fault], *, steps: int, now_s: float
    ) -> Attempt:
        """Return the attempt as a failed one. ``recorded``: what its ranks have left in the files for their errors."""
        done = [
            fault_of_leaving(left, handles[rank])
            for rank, left in self._left.items()
            if not left.exit_code
        ]
        culprit = first_cause(explained(self.faults, recorded), done)
        code = self._codes.get(culprit.rank, 1)
        return Attempt(fault=culprit, exit_code=code, steps=steps, at_s=now_s)


def fault_of_leaving(left: Leaving, handle: RankHandle) -> Fault:
    """Return the end of a rank's program as a fault, as the rank itself has said it."""
    reading = handle.slot.read()
    return classify_exit(
        RankExit(
            rank=left.rank,
            step=reading.step,
            phase=reading.phase.label,
            at_ns=left.at_ns,
            exit_code=left.exit_code,
            signal_number=None,
            words=left.words,
        )
    )
