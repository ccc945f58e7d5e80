"""Collects, for a checkpoint, the per-rank state that the saving rank cannot read itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddp_runner.kernel.group.transfer import receive_state, send_state
from ddp_runner.training.local_state.local_state import LOCAL, LocalState

if TYPE_CHECKING:
    from torch import Tensor

    from ddp_runner.kernel.group.group import Group


def gather_local(local: LocalState, group: Group, *, step: int) -> None:
    """Send the per-rank state of ``step`` to the group's rank 0, and to the first rank of one other machine.

    Every rank must call it before a checkpoint or a copy is made. Who receives reads that of its own machine itself.
    Returns once every rank has kept the state that belongs in a file of this step.
    """
    if not local.names or group.world_size == 1:
        return
    shown = json.dumps([local.rank, local.machine, local.known()])
    every = [json.loads(one) for one in group.exchange(f"local/{step}", shown)]
    local.learn((known for _, _, known in every), says=group.rank == 0)
    found: dict[str, Tensor] = {}
    receivers = _receivers([machine for _, machine, _ in every])
    for number, (place, machine, _) in enumerate(every):
        to = [one for one in receivers if one != number and not _reads(every[one][1], machine)]
        if number == group.rank and to:
            mine = local.mine(step)
            send_state(group, {LOCAL: {} if mine is None else {str(place): mine}}, to=to)
        elif group.rank in to:
            found |= receive_state(group, source=number)[LOCAL]
    if group.rank in receivers:
        local.gathered(step, found)


def _receivers(machines: Sequence[int]) -> list[int]:
    """Return the rank that saves, and the first one of another machine, whose copy in memory is whole, too."""
    other = next((n for n, one in enumerate(machines) if one >= 0 and one != machines[0]), None)
    return [0] if other is None else [0, other]


def _reads(reader: int, machine: int) -> bool:
    """Return True if a rank of the machine ``reader`` reads the state of one of ``machine`` itself."""
    return reader == machine >= 0
