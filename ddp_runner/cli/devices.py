"""Finds the visible GPUs and assigns them to ranks. Asks the vendors' tools; imports no torch."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from ddp_runner.core.errors import BadInputError
from ddp_runner.core.launch_plan import NCCL_BACKENDS, DevicePlan
from ddp_runner.core.threads import AUTO_CPU_RANKS
from ddp_runner.observe.gpus import CUDA_VISIBLE, Gpu, VisibleGpus, find_amd_gpus, visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddp_runner.core.settings import Settings
    from ddp_runner.system.torch_versions import TorchBuild

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader")
_QUERY_TIMEOUT_S = 30.0
CPU_RANKS_MAX = 64  # or one a core: each takes some 200 MB, and a share of a core


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
    return visible(present, environment.get(CUDA_VISIBLE))


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
