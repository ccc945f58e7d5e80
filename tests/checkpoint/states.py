"""Small checkpoints whose content shows their step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ddp_runner.checkpoint.manifest import CheckpointFacts
from ddp_runner.checkpoint.store import CheckpointStore, Saved

if TYPE_CHECKING:
    from pathlib import Path

    from ddp_runner.system.disk import Disk


def state_of(step: int, *, mark: str = "") -> dict[str, object]:
    return {
        "model": {"weight": torch.full((3, 5), float(step))},
        "counters": {"step": step, "mark": mark},
    }


def facts_of(step: int, *, monitored: float | None = None, **others: object) -> CheckpointFacts:
    """What a store needs to know of a checkpoint beside its state."""
    return replace(
        CheckpointFacts(
            step=step,
            epoch=step // 100,
            samples=step * 8,
            run_id="run-1",
            meaning={"model": {"hidden_size": 64}, "seed": 7},
            settings_digest="d" * 64,
            monitored=monitored,
            reason="test",
        ),
        **others,
    )


def save(
    directory: Path,
    step: int,
    *,
    keep_last: int = 2,
    keep_every: int = 0,
    monitored: float | None = None,
    mark: str = "",
    disk: Disk | None = None,
    state: dict[str, object] | None = None,
    about: dict[str, object] | None = None,
) -> Saved:
    store = CheckpointStore(directory, keep_last=keep_last, keep_every=keep_every, disk=disk)
    return store.save(
        state_of(step, mark=mark) if state is None else state,
        facts_of(step, monitored=monitored, about=about or {}),
    )


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.stem[5:]) for path in directory.glob("step_*.pt"))
