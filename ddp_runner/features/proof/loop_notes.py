"""Does a rank's part in the drill of a user's own loop: selects the drilled rank, and adds notes on its share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.data.loader import MicroBatch
from ddp_runner.features.proof.notes import Drills, Looked
from ddp_runner.features.proof.rules import UNSEEN_STATE, drilled_rank_of_loop
from ddp_runner.kernel.group.group import Group, Membership
from ddp_runner.training.beside_steps import Noting
from ddp_runner.training.exactness.own_share import ShareNotes
from ddp_runner.training.own_loop.declared import OwnLoop
from ddp_runner.training.own_loop.kept import KeptState
from ddp_runner.training.own_loop.parts import LoopParts

# The entries that a loop's record has in addition to a task's.
PROGRAM, CARRIED, BESIDE, RECEIVED = "program", "carried", "beside", "received"
_RECEIVED_MAX = (
    10_000  # numbers from other ranks; of more a drill gets none, and asks the ranks that it lacks
)


class LoopDrills(Drills):
    """Does a rank's part in the drills of its loop. Rank 0 is never drilled: loops do one-time work there."""

    _state: KeptState

    def __init__(self, parts: LoopParts, loop: OwnLoop) -> None:
        super().__init__(parts)
        modules = () if loop.net is None else loop.net.modules()
        if any(isinstance(one, nn.SyncBatchNorm) for one in modules):
            self._drill_at = None  # no share can be computed without the other ranks
        self._loop = loop
        self._beside: dict[str, str] = {}  # the state outside the model when the drilled step began

    def _drilled(self, number: int, membership: Membership) -> int | None:
        return drilled_rank_of_loop(number, membership.world_size)

    def _is_drilled_next(self) -> None:
        self._beside = self._state.side.digests()

    def _looked_into(self, stepper: Noting, micro_batches: Sequence[MicroBatch]) -> Looked:
        """Return nothing: a loop's rank cannot compute its share a second time."""
        del stepper, micro_batches
        return Looked()

    def _record(self, notes: ShareNotes, group: Group) -> dict[str, Any]:
        return {
            **super()._record(notes, group),
            PROGRAM: self._loop.program,
            RECEIVED: _to_record(self._loop.received),
            # State that only the update uses does not explain a share that differs.
            CARRIED: [one for one in self._state.carried if one != UNSEEN_STATE],
            BESIDE: self._beside,
        }


def _to_record(received: Sequence[Tensor | None]) -> list[Any]:
    if sum(one.numel() for one in received if one is not None) > _RECEIVED_MAX:
        return []
    return [
        None if one is None else (str(one.dtype).removeprefix("torch."), one.tolist())
        for one in received
    ]


def from_record(record: Sequence[Any], device: torch.device) -> list[Tensor | None]:
    """Return the tensors that a drilled rank has received from other ranks; None for one that was not noted."""
    return [
        one and torch.tensor(one[1], dtype=getattr(torch, one[0]), device=device) for one in record
    ]


def explanation(carried: Sequence[str], before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return why a replacement must compute something else, in words; an empty text if no reason is known.

    ``before`` and ``now``: digests of the state outside the model, of the rank and of the replacement. The run itself
    reports lost state when a rank is replaced.
    """
    own = [name for name, one in sorted(before.items()) if now.get(name, one) != one]
    known = [
        *(f"{name} is not kept" for name in carried),
        *(f"{name} differs between ranks" for name in own),
    ]
    return f"{', '.join(known)}, so a replacement computes something else" if known else ""
