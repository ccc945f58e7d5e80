"""The weights of a run that is complete, as plain files beside its checkpoints. Saves no state."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_runner.checkpoint.catalog import FINAL, FINAL_AVERAGE
from ddp_runner.core.board import Cell
from ddp_runner.core.faults import FaultError
from ddp_runner.core.phases import Phase
from ddp_runner.training.disk_faults import DiskFaults
from ddp_runner.training.rank_context import RankParts


def publish_final(parts: RankParts) -> None:
    """Write the model's state dict, and that with the average where one is kept; for rank 0.

    Every reader finds the file of before or the whole new one. What the disk refuses is a warning: the
    newest checkpoint has the same.
    """
    state, store = parts.state, parts.store
    has_average = state.ema is not None and state.ema.started
    names = (FINAL, FINAL_AVERAGE) if has_average else (FINAL,)
    is_there = all((store.directory / name).is_file() for name in names)
    if is_there and state.begun_step == state.committed_step:
        return  # this launch has trained nothing
    parts.runtime.slot.stamp(Phase.CHECKPOINT, time.monotonic_ns())
    try:
        for name in names:
            with contextlib.ExitStack() as average:
                if name == FINAL_AVERAGE and state.ema is not None:
                    average.enter_context(state.ema.swapped_in(state.model))
                path = store.publish_weights(name, _on_host(state.weights()))
            parts.runtime.logger.info(f"weights at the end: {path}", step=state.committed_step)
        if not has_average:
            store.withdraw_weights(FINAL_AVERAGE)
    except FaultError as error:
        if parts.runtime.slot.get(Cell.FENCED):
            raise  # this process is about to be killed: its successor writes them
        faults = DiskFaults(state, parts.runtime)
        refused = faults.storage_failed(error.fault.cause)
        faults.warn(refused, "the newest checkpoint has the same weights")


def _on_host(weights: Mapping[str, Any]) -> dict[str, Any]:
    """``weights`` as any machine can read them; tied ones stay tied."""
    copies: dict[tuple[object, ...], Tensor] = {}
    found: OrderedDict[str, Any] = OrderedDict()
    for name, value in weights.items():
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            found[name] = value.cpu() if isinstance(value, Tensor) else value
            continue
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if not value.numel() or place not in copies:
            copies[place] = value.detach().cpu()
        found[name] = copies[place]
    if (versions := getattr(weights, "_metadata", None)) is not None:
        found._metadata = versions  # type: ignore[attr-defined] # noqa: SLF001 - as torch hangs it on
    return found
