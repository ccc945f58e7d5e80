"""Finds out what the choice of a mode depends on, and gives ranks their devices by it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_runner.cli.gpu_checks import installed_nccl
from ddp_runner.cli.probing import probe
from ddp_runner.core.modes import (
    Collectives,
    Mode,
    ModeChoice,
    asks_for_collectives,
    choose_mode,
)
from ddp_runner.system.torch_versions import torch_build

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddp_runner.core.launch_plan import DevicePlan
    from ddp_runner.core.settings import Settings

_NCCL, _GLOO = "cpu:gloo,cuda:nccl", "gloo"


def find_collectives(devices: Sequence[str], environment: Mapping[str, str]) -> Collectives:
    """By what ranks on ``devices`` can meet: known by NCCL's package, else tried, which takes some seconds.

    Of ROCm there is RCCL, under NCCL's name; that it is there says little of whether a GPU can use it.
    """
    build = torch_build()
    library = "RCCL" if build is not None and build.hip else "NCCL"
    version = installed_nccl() if library == "NCCL" else ""
    if version:
        return Collectives(backend="nccl", found=f"NCCL {version}")
    tried = probe(backend=_NCCL, devices=devices, environment=environment)
    if not tried.failure:
        return Collectives(backend="nccl", found=f"{library} {tried.nccl} was tried and works")
    if not probe(backend=_GLOO, devices=devices, environment=environment).failure:
        return Collectives(
            backend="gloo", found=f"{library} was tried and does not work, gloo does"
        )
    return Collectives(
        backend="", found=f"neither {library} nor gloo works here (doctor says more)"
    )


def choose(
    settings: Settings,
    devices: Sequence[DevicePlan],
    *,
    machines: int,
    find: Callable[[Sequence[str], Mapping[str, str]], Collectives] = find_collectives,
) -> ModeChoice:
    """The mode of a run on ``devices``, one a rank so far. Raises BadInputError."""
    is_on_gpu = devices[0].visible_index is not None
    found = None
    is_alone = machines == 1
    if is_alone and asks_for_collectives(settings, devices=len(devices), is_on_gpu=is_on_gpu):
        found = find([place.device for place in devices], os.environ)
    choice = choose_mode(
        settings,
        devices=len(devices),
        is_on_gpu=is_on_gpu,
        collectives=found,
        machines=machines,
    )
    asks_nobody = settings.run.mode == "data_parallel" and settings.ddp.backend == "auto"
    if asks_nobody and is_on_gpu and not installed_nccl():
        return replace(choice, backend=_GLOO)  # one rank alone needs no NCCL
    return choice


def placed(devices: tuple[DevicePlan, ...], mode: Mode) -> tuple[DevicePlan, ...]:
    """The devices of each rank in ``mode``, of one a rank."""
    first, *others = devices
    if mode is Mode.SINGLE:
        return (first,)
    if mode is Mode.DATA_PARALLEL:
        return (replace(first, others=tuple(place.device for place in others)),)
    return devices


def with_backend(settings: Settings, choice: ModeChoice) -> Settings:
    """``settings``, with the backend that was found where none was asked for."""
    if not choice.backend:
        return settings
    assert choice.backend == "gloo", "what there is beside NCCL"
    return replace(settings, ddp=replace(settings.ddp, backend="gloo"))
