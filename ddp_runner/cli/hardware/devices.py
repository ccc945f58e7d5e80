"""Finds the visible GPUs, chooses the mode that they allow, and assigns them to ranks.

Asks the vendors' tools; imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.cli.hardware.machine import AUTO_CPU_RANKS
from ddp_runner.core.batch_sizes import SHARES
from ddp_runner.core.launch_plan import NCCL_BACKENDS, DevicePlan
from ddp_runner.core.modes import (
    Collectives,
    Mode,
    ModeChoice,
    asks_for_collectives,
    choose_mode,
)
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.run_files import from_json, read_lines
from ddp_runner.observe.gpus import CUDA, Gpu, VisibleGpus, find_amd_gpus, visible
from ddp_runner.system.torch_versions import installed_nccl, torch_build

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddp_runner.core.settings import RunSettings, Settings
    from ddp_runner.system.torch_versions import TorchBuild

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader")
_QUERY_TIMEOUT_S = 30.0
CPU_RANKS_MAX = 64  # or one a core: each takes some 200 MB, and a share of a core
_NCCL, _GLOO = "cpu:gloo,cuda:nccl", "gloo"


def find_gpus(environment: Mapping[str, str], build: TorchBuild | None) -> VisibleGpus:
    """The GPUs that a rank's torch would see under ``environment``."""
    if build is None:
        return VisibleGpus(why_none="torch is not installed")
    if build.other:
        return VisibleGpus(
            why_none=f"torch {build.version} is built for {build.other}, "
            "and only NVIDIA's (CUDA) and AMD's GPUs (ROCm) can be used",
            is_unsupported=True,
        )
    if build.hip:
        return find_amd_gpus(environment)
    if not build.cuda:
        return VisibleGpus(why_none=f"torch {build.version} is a build without CUDA")
    present = _present()
    if isinstance(present, VisibleGpus):
        return present
    return visible(present, environment.get(CUDA))


def _present() -> tuple[Gpu, ...] | VisibleGpus:
    """The machine's GPUs, or the reason why there are none."""
    try:
        answer = subprocess.run(  # noqa: S603 - a fixed command
            _QUERY, capture_output=True, text=True, check=False, timeout=_QUERY_TIMEOUT_S
        )
    except FileNotFoundError:
        return VisibleGpus(why_none="nvidia-smi was not found: no NVIDIA driver here")
    except (OSError, subprocess.TimeoutExpired) as error:
        return VisibleGpus(why_none=f"nvidia-smi does not answer ({error})", is_surprising=True)
    if answer.returncode != 0:
        reason = " ".join((answer.stdout + answer.stderr).split())[:160]
        return VisibleGpus(why_none=f"nvidia-smi failed: {reason}", is_surprising=True)
    return parse_query(answer.stdout) or VisibleGpus(why_none="nvidia-smi lists none")


def parse_query(text: str) -> tuple[Gpu, ...]:
    """nvidia-smi's CSV lines, in the order of the bus."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) >= 4 and cells[0].isdecimal():
            name = ", ".join(cells[2:-1])
            found.append(Gpu(index=int(cells[0]), uuid=cells[1], name=name, memory=cells[-1]))
    return tuple(sorted(found, key=lambda gpu: gpu.index))


def plan_devices(settings: Settings, *, found: VisibleGpus, cores: int) -> tuple[DevicePlan, ...]:
    """The place of each rank. Raises BadInputError for GPUs or ranks that cannot be had."""
    run = settings.run
    is_left_open = run.device == "auto" and not run.gpus
    if is_left_open and found.is_unsupported:
        # Whoever installed such a torch means its GPUs: never hours on the CPU without a word.
        raise BadInputError("run.device", "auto", f"{found.why_none}; --cpu trains on the CPU")
    if run.device == "cpu" or (is_left_open and not found.gpus):
        count = run.nproc_per_node
        ranks = min(AUTO_CPU_RANKS, cores) if count == "auto" else count
        most = max(CPU_RANKS_MAX, cores)
        if ranks > most:
            raise BadInputError("--nproc-per-node", ranks, f"must be at most {most} on the CPU")
        if settings.ddp.backend in NCCL_BACKENDS:
            expected = "needs GPUs, and this run is on the CPU"
            raise BadInputError("ddp.backend", settings.ddp.backend, expected)
        return (DevicePlan(device="cpu", name="CPU", visible_index=None),) * ranks
    if not found.gpus:
        option, value = ("--gpus", _comma(run.gpus)) if run.gpus else ("run.device", "cuda")
        raise BadInputError(option, value, f"no GPU can be used: {found.why_none}; or use --cpu")
    wrong = [index for index in run.gpus if index >= len(found.gpus)]
    if wrong:
        there = ", ".join(f"{index} ({gpu.name})" for index, gpu in enumerate(found.gpus))
        raise BadInputError(
            "--gpus", _comma(run.gpus), f"no such GPU: {_comma(wrong)}; there are {there}"
        )
    chosen = run.gpus or tuple(range(len(found.gpus)))
    return tuple(
        DevicePlan(device=f"cuda:{index}", name=found.gpus[index].name, visible_index=index)
        for index in _one_per_rank(settings, chosen)
    )


def _one_per_rank(settings: Settings, chosen: Sequence[int]) -> tuple[int, ...]:
    count = settings.run.nproc_per_node
    ranks = len(chosen) if count == "auto" else count
    if ranks > len(chosen) and settings.ddp.backend != "gloo":
        raise BadInputError(
            "--nproc-per-node",
            ranks,
            f"must be at most the number of GPUs, {len(chosen)}; --cpu trains on the CPU, and "
            "ddp.backend=gloo lets ranks share a GPU",
        )
    return tuple(chosen[rank % len(chosen)] for rank in range(ranks))


def _comma(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in numbers)


def find_collectives(devices: Sequence[str], environment: Mapping[str, str]) -> Collectives:
    """Return the backend for ranks on ``devices``: known by NCCL's package, else tried, which takes some seconds.

    ROCm has RCCL under NCCL's name; an installed RCCL does not prove that a GPU can use it.
    """
    build = torch_build()
    library = "RCCL" if build is not None and build.hip else "NCCL"
    version = installed_nccl() if library == "NCCL" else ""
    if version:
        return Collectives(backend="nccl", found=f"NCCL {version}")
    probe = import_module("ddp_runner.cli.hardware.machine_checks").probe  # few launches try
    tried = probe(backend=_NCCL, devices=devices, environment=environment)
    if not tried.failure:
        return Collectives(backend="nccl", found=f"{library} {tried.nccl} was tried and works")
    if not probe(backend=_GLOO, devices=devices, environment=environment).failure:
        return Collectives(
            backend="gloo", found=f"{library} was tried and does not work, gloo does"
        )
    return Collectives(
        backend="", found=f"neither {library} nor gloo works here (run doctor for details)"
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


def with_shares(
    settings: Settings, devices: Sequence[DevicePlan], *, is_alone: bool
) -> tuple[Settings, tuple[str, ...]]:
    """``settings`` with the shares that ``data.shares=auto`` gives on ``devices``, and a line on them.

    A run that has a checkpoint keeps the shares that it was written with; a fresh start takes what an earlier launch
    of this name has proposed for such devices. Without either, auto stays, and the ranks are measured.
    """
    if settings.data.shares != "auto":
        return settings, ()
    if settings.stages or not is_alone:
        where = "with stages" if settings.stages else "on several machines"
        raise BadInputError(SHARES, "auto", f"is not measured {where}: give a number for each rank")
    if len(devices) == 1:
        return _sharing(settings, ()), ("data.shares=auto: the only rank has all samples",)
    run = settings.run
    names = [place.name for place in devices]
    # INVARIANT shares-stay: a launch that resumes shares out its steps as the checkpoint's run did.
    # Broken if: a proposal is taken in the middle of a run.
    # Guarded by: test_auto_shares_are_kept_by_a_resume_taken_by_fresh_starts.
    began = None if run.resume == "none" else _shares_of_checkpoint(run, ranks=len(devices))
    proposed = _proposed(Path(run.log_dir) / "events.jsonl", names)
    shown = ",".join(map(str, proposed or ()))
    if began is not None:
        words = ",".join(map(str, began)) or "equal shares"
        line = f"data.shares=auto: {words}, as this run began"
        if proposed and proposed != began:
            line += f"; data.shares={shown}, as measured, would change its steps from here on"
        # Equal ones are still measured, for the next fresh start.
        keeps: tuple[int, ...] | Literal["auto"] = began
        if not began and proposed is None:
            keeps = "auto"
        return _sharing(settings, keeps), (line,)
    if proposed is None:
        return settings, ("data.shares=auto: equal shares, and the first steps are measured",)
    words = shown or "equal shares"
    return _sharing(settings, proposed), (
        f"data.shares=auto: {words}, as an earlier launch measured",
    )


def _sharing(settings: Settings, shares: tuple[int, ...] | Literal["auto"]) -> Settings:
    return replace(settings, data=replace(settings.data, shares=shares))


def _shares_of_checkpoint(run: RunSettings, *, ranks: int) -> tuple[int, ...] | None:
    """Return the shares of the checkpoint that a launch resumes; None without one, () if its ranks differ."""
    try:
        entries = Catalog(Path(run.checkpoint_dir)).resolve(run.resume)
    except OSError:
        return None  # which the claim of the folder says
    for entry in entries:
        if entry.manifest is None or entry.problem is not None:
            continue
        found = entry.manifest.recipe.get(SHARES)
        if entry.manifest.recipe.get("ranks") != ranks or not isinstance(found, list):
            return ()
        return tuple(int(str(one)) for one in found)
    return None


def _proposed(journal: Path, devices: Sequence[str]) -> tuple[int, ...] | None:
    """The newest proposal for such devices; empty where that is equal shares, None where there is none."""
    found = None
    try:
        for line in read_lines(journal):
            if b'"shares_proposed"' not in line:
                continue
            with contextlib.suppress(ValueError, TypeError, KeyError):
                event = from_json(line)
                if event["event"] == "shares_proposed" and event["devices"] == list(devices):
                    found = tuple(int(one) for one in event["shares"])
    except OSError:
        return None
    return found if not found or (len(found) == len(devices) and min(found) > 0) else None
