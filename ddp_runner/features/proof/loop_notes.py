"""A rank's part in the drill of a user's own loop: which rank is drilled, and what it notes beside its share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_runner.features.proof.notes import Drills
from ddp_runner.features.proof.rules import drilled_rank_of_loop
from ddp_runner.kernel.group.group import Group, Membership
from ddp_runner.training.exactness.own_share import ShareNotes
from ddp_runner.training.own_loop.kept import KeptState
from ddp_runner.training.own_loop.parts import LoopParts

# What a loop's record has beside that of a task.
PROGRAM, KNOWN = "program", "known"


class LoopDrills(Drills):
    """A rank's part in the drills of its loop. Rank 0 is never drilled: a loop does there what is wanted once."""

    _state: KeptState

    def __init__(self, parts: LoopParts, program: dict[str, str]) -> None:
        """``program``: files that the loop is made of -> a hash."""
        super().__init__(parts)
        self._program = program

    def _drilled(self, number: int, membership: Membership) -> int | None:
        return drilled_rank_of_loop(number, membership.local_world_size)

    def _record(self, notes: ShareNotes, group: Group) -> dict[str, Any]:
        return {
            **super()._record(notes, group),
            PROGRAM: self._program,
            KNOWN: known_to_differ(self._state),
        }


def known_to_differ(state: KeptState) -> Sequence[str]:
    """What a replacement of this rank lacks, by what is known so far, in words: the run says so by itself."""
    own = sorted(state.side.differing)
    return [
        *(f"{name} is not kept" for name in state.carried),
        *(f"each rank has its own {name}" for name in own),
    ]
