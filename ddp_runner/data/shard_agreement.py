"""Lets the ranks of a generation agree on a stream's shards: which rank has which, and each one's position."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ddp_runner.data.shards import Deal, LaneMark, ShardPositions, Stand, as_text, from_text
from ddp_runner.kernel.rules.errors import BadInputError

SAID_EVERY_S = 2.0  # so much of a rank's work at most its replacement has to read again
_EVERY_STEPS_MAX = 1000
_RANKS = 32  # with more of them it is said more rarely: each reads what all have said


class Exchanging(Protocol):
    """The group of a generation."""

    def exchange(self, name: str, value: str) -> list[str]:
        """Return the ``value`` that each rank has given under ``name``, by rank."""
        ...


class ShardAgreement:
    """The part of one rank in the agreement; every rank calls the same methods at the same steps."""

    def __init__(self, positions: ShardPositions) -> None:
        self._positions = positions
        self._said_step, self._said_s = -1, 0.0

    def deal_alike(
        self,
        group: Exchanging,
        *,
        rank: int,
        world_size: int,
        step: int,
        steps_of: Callable[[Deal], int] | None = None,
    ) -> int:
        """Have all ranks go by one deal before ``step``. Returns for how many the shards were dealt before.

        ``steps_of``: how long an epoch of a deal is, where it ends for all lanes at one step.

        Raises BadInputError where there are fewer shards than ranks.
        """
        # INVARIANT dealt-alike: in one generation all ranks have their shards from one deal.
        # Broken if: each deals again from when it last heard of the others: a fault may have kept some from it.
        # Guarded by: test_ranks_that_last_heard_of_others_at_different_steps_deal_alike.
        stand = self._positions.stand
        mine = json.dumps(None if stand is None else [stand.step, stand.deal.world_size])
        known = [json.loads(answer) for answer in group.exchange(f"dealt/{step}", mine)]
        if all(one is None or one[1] == world_size for one in known):
            return world_size
        _, newest = max((one, number) for number, one in enumerate(known) if one is not None)
        record = stand.to_record() if stand is not None and rank == newest else None
        records = group.exchange(f"deal/{step}", json.dumps(record))
        stand = Stand.from_record(json.loads(records[newest]))
        try:
            if steps_of is None:
                again = stand.dealt_again(step=step, world_size=world_size)
            else:
                again = stand.begun_again(step=step, world_size=world_size, steps_of=steps_of)
        except ValueError as error:
            raise BadInputError("--task", "", str(error)) from error
        self._positions.stand = again
        return stand.deal.world_size

    def say(self, group: Exchanging, marks: Sequence[LaneMark], *, deal: Deal, step: int) -> None:
        """Have every rank know where the lanes of this one are before ``step``, and those of all others."""
        now_s, stand = time.monotonic(), self._positions.stand
        every = 1 if stand is None else stand.every
        if 0 <= self._said_step < step:
            step_s = (now_s - self._said_s) / (step - self._said_step)
            every_s = SAID_EVERY_S * max(1.0, deal.world_size / _RANKS)
            every = max(1, min(_EVERY_STEPS_MAX, int(every_s / max(step_s, 1e-6))))
        answers = group.exchange(f"shards/{step}", json.dumps([every, as_text(marks)]))
        known = [json.loads(answer) for answer in answers]
        self._said_step, self._said_s = step, time.monotonic()
        self._positions.stand = Stand(
            step=step,
            deal=deal,
            marks=tuple(from_text(text) for _, text in known),
            every=known[0][0],  # of one rank, so that all do so at the same step
        )

    def is_said(self, step: int) -> bool:
        """Return True if all ranks know all positions before ``step``; the same on all ranks."""
        return self._positions.stand is not None and self._positions.stand.step == step

    def is_due(self, step: int) -> bool:
        """Return True if all ranks must exchange positions before ``step``; the same on all ranks."""
        stand = self._positions.stand
        return stand is None or step >= stand.step + stand.every
