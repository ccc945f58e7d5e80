"""The declarations of a user's own loop, made once or while it runs; kept over generations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddp_runner.core.settings import DdpSettings
from ddp_runner.core.step_schedule import RunLength
from ddp_runner.training.components.sync_batchnorm import SyncedNorms
from ddp_runner.training.own_loop.between_steps import BetweenSteps
from ddp_runner.training.own_loop.kept import KeptObjects
from ddp_runner.training.own_loop.misuse import misuse, program_files
from ddp_runner.training.own_loop.net import AttachedModule

LOSS = "loss"
KEEP_LOCAL = "keep_local"  # its name in error lines


class RepeatStep(BaseException):
    """Leaves the body of a step that is made again, past any ``except Exception`` in it.

    ``with run.step():`` catches it. In a loop that is not yours, give it to :meth:`AttachedRun.fail_step`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurring:
    """A function that is called between steps, on every rank: every so many steps, or epochs."""

    call: Callable[[], Any]
    steps: int = 0
    epochs: int = 0

    def is_due(self, step: int, length: RunLength) -> bool:
        """Return True if the function is called once ``step`` steps are made."""
        apart = self.steps or self.epochs * length.steps_per_epoch
        return step > 0 and step % apart == 0


@dataclass(slots=True, kw_only=True)
class OwnLoop:
    """``program``: files that the loop is made of -> a hash of what this process has read there.

    ``modules``: how many the process had imported when these were noted.
    """

    ddp: DdpSettings
    program: dict[str, str] = field(default_factory=dict)
    modules: int = 0
    kept: KeptObjects = field(default_factory=KeptObjects)
    local: dict[str, Any] = field(default_factory=dict)  # per-rank state
    net: AttachedModule | None = None
    norms: SyncedNorms | None = None  # of the net, where torch has none for the device
    recurring: list[Recurring] = field(default_factory=list)
    noted: dict[str, Tensor | float] = field(
        default_factory=dict
    )  # in the step in hand, or the newest
    # The results of from_ranks() in this body, None for one with a graph; ``handed``: in a drill, those of the drilled rank.
    received: list[Tensor | None] = field(default_factory=list)
    handed: list[Tensor | None] = field(default_factory=list)
    late_loss: Tensor | float | None = None  # of the newest step, where it was noted after backward
    wants_stop: bool = False
    # The first body of a launch is for nothing, and ends at its update. None: not known before the first batch.
    rehearses: bool | None = None
    calls_together: bool = False  # functions between steps
    is_between: bool = False  # in such a function
    between: BetweenSteps = field(init=False)  # what they draw; there from steps() on

    def note_files(self) -> dict[str, str]:
        """Note the files of the program that were imported since the last call; return them with their hashes."""
        known, self.modules = self.modules, len(sys.modules)
        found = program_files(since=known if known <= self.modules else 0)
        self.program |= found
        return found

    def scales(self) -> list[int]:
        """Torch's counts of changes of the loss scales: ``update()`` changes one, also where nothing is updated."""
        scalers = (
            one for one in self.kept.others.values() if isinstance(one, torch.amp.GradScaler)
        )
        found = (getattr(one, "_scale", None) for one in scalers if one.is_enabled())
        return [-1 if scale is None else scale._version for scale in found]  # noqa: SLF001 - without a look at the device

    def note(self, values: dict[str, Any]) -> None:
        """Keep what the loop says of a step; tensors without their graph, read when they are shown.

        Raises BadInputError for what is no number.
        """
        for name, value in values.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                self.noted[name] = value.detach()
                continue
            try:
                self.noted[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                shape = f" of {value.numel()} elements" if isinstance(value, Tensor) else ""
                kind = type(value).__name__
                raise misuse(f"note({name}=...) is a {kind}{shape}: give one number") from None

    def from_ranks(self, ask: Callable[[], Tensor]) -> Tensor:
        """Return ``ask()``; in a drill, which has no other ranks, what the drilled rank has received there."""
        if self.is_between:
            return ask()
        handed = self.handed.pop(0) if self.handed else None
        if handed is not None:
            return handed
        found = ask()
        self.received.append(None if found.requires_grad else found.clone())
        return found

    def shown(self) -> dict[str, float]:
        """Return the noted values as numbers. Reading waits for the device."""
        return {name: float(value) for name, value in self.noted.items()}
