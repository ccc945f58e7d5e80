"""Shared by integrations: the run of this process, and random generators as a batch has left them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import ddp_runner
from ddp_runner.training.own_loop.batches import BETWEEN, have_new_workers
from ddp_runner.values.generators import seed_step

if TYPE_CHECKING:
    from ddp_runner import AttachedRun

# A library would form a process group by these variables, which is the run's to do.
_OF_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")

# The run that this process is a rank of, if a supervisor has started it: one, whatever a program imports.
RUN: AttachedRun | None = ddp_runner.attach() if ddp_runner.is_supervised() else None
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))


def show_one_process() -> None:
    """Remove the variables of a rank, so that the library sees one process and forms no group."""
    if RUN is not None:
        for name in _OF_RANK:
            os.environ.pop(name, None)


def refuse(refused: tuple[str, object, str] | None) -> None:
    """Raise BadInputError of a name, its value and what is expected; None refuses nothing."""
    if refused is not None:
        raise ddp_runner.BadInputError(*refused)


def loss_scaler(scaler: Any) -> dict[str, Any]:
    """Return what ``run.keep()`` is given of a library's loss scaler for fp16; nothing where there is none."""
    return {} if scaler is None else {"scaler": scaler}


def named_by_kind(objects: Iterable[Any]) -> dict[str, Any]:
    """Return the objects by the names of their classes; a second one of a class gets a number too."""
    found: dict[str, Any] = {}
    for one in objects:
        name = type(one).__name__
        found[f"{name} {len(found)}" if name in found else name] = one
    return found


def begin_evaluation(loader: Any, sampler: Any, *, seed: int, step: int) -> None:
    """Have all ranks draw the same random numbers in an evaluation of all samples, so that its figures are the same.

    Each rank stops early, or takes the best weights, by its own figures. What a step draws is seeded with its batch.
    """
    have_new_workers(getattr(loader, "base_dataloader", loader))
    seed_step(seed=seed, step=step, rank=0, micro_step=BETWEEN)
    # accelerate makes one, and each pass goes on with it.
    generator = getattr(sampler, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(torch.initial_seed())


class Draws:
    """The random generators as a batch has left them: what is drawn before the step begins is drawn aside."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._python = random.getstate()
        self._numpy = np.random.get_state()  # noqa: NPY002 - the generator that libraries draw from
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back(self) -> None:
        """Draw from here on as if nothing had been drawn."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002 - as above
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
