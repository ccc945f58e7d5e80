"""Collects, for a checkpoint, the per-rank state that the saving rank cannot read itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ddp_runner.kernel.group.transfer import receive_state, send_state
from ddp_runner.training.local_state.local_state import LOCAL, LocalState

if TYPE_CHECKING:
    from torch import Tensor

    from ddp_runner.kernel.group.group import Group


def gather_local(local: LocalState, group: Group, *, step: int) -> None:
    """Send the group's rank 0 the per-rank state of ``step``. Every rank must call it before a checkpoint is made.

    Rank 0 reads that of its own machine itself. Returns once every rank has kept the state that belongs in a file of
    this step.
    """
    if not local.names or group.world_size == 1:
        return
    shown = json.dumps([local.rank, local.machine, local.known()])
    every = [json.loads(one) for one in group.exchange(f"local/{step}", shown)]
    local.learn((known for _, _, known in every), says=group.rank == 0)
    found: dict[str, Tensor] = {}
    for number, (place, machine, _) in enumerate(every):
        if machine == every[0][1] and machine >= 0:
            continue
        if number == group.rank and number != 0:
            mine = local.mine(step)
            send_state(group, {LOCAL: {} if mine is None else {str(place): mine}}, to=[0])
        elif group.rank == 0 and number != 0:
            found |= receive_state(group, source=number)[LOCAL]
    if group.rank == 0:
        local.gathered(step, found)
