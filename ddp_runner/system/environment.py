"""The environment of the zygote and so of every rank: what must stand before torch is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_runner.start import IMPORT_FOLDER, PACKAGE_PARENT
from ddp_runner.system.torch_versions import USE_NCCL2

if TYPE_CHECKING:
    from collections.abc import Mapping

# Ranks that must survive a failed collective: the watchdog would kill them.
_NCCL = {
    # From torch 2.15 "nccl" is another class, whose abort no GPU has shown yet; this keeps the one that was read.
    USE_NCCL2: "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_INCLUDE_STACK_TRACE": "0",
    # Its monitor ends a process whose watchdog is stuck, which an abort may do to it for minutes; and
    # the key by which a dump is asked for stays in the store, where a later replacement finds it.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
# The ranks of one machine meet on loopback, whatever its other networks do.
_ONE_MACHINE = {"NCCL_SOCKET_IFNAME": "lo"}
# Else torch.cuda.is_available() starts the driver, and no fork of that process can use CUDA.
_FORKS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# cuBLAS repeats its results only with a fixed workspace, chosen before CUDA starts.
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# By size and topology NCCL chooses how it sums, and so in which order.
_NCCL_IN_ORDER = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_NVLS_ENABLE": "0"}
# CUDA counts the fastest GPU first unless this says otherwise; --gpus and nvidia-smi count by bus.
_BUS_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
# A model whose parts come from a set of names has them in one order in every process, a replacement's too.
_SETS_IN_ORDER = {"PYTHONHASHSEED": "0"}
# Memory of 2 MB and more comes in pages of that size where the kernel leaves it to the program: a replacement
# has its gigabyte in a quarter of the time, and a process that is killed is gone at once.
_LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
# torch's advice at every start; the settings that it is about are this runner's choice.
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
_DEBUG = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "CUDA_LAUNCH_BLOCKING": "1"}


def training_environment(
    own: Mapping[str, str],
    *,
    threads: int,
    is_deterministic: bool = False,
    is_debug: bool = False,
    is_alone: bool = True,
) -> dict[str, str]:
    """``own`` with what a training needs. ``is_alone``: all ranks are on this machine."""
    added = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # numpy would start its threads at import, and a zygote must have none.
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **_SETS_IN_ORDER,
        **_LARGE_PAGES,
        **_BUS_ORDER,
        **_of_gpus(is_deterministic=is_deterministic, is_alone=is_alone),
        **(_DETERMINISTIC if is_deterministic else {}),
        **(_DEBUG if is_debug else _QUIET),
    }
    environment = {**added, **own}
    environment["PYTHONPATH"] = _with_package(own.get("PYTHONPATH", ""))
    return environment


def as_under_torchrun(threads: str, own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an opaque program: as under torchrun, with NCCL's error handling; forks must work."""
    added = {
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": "1",  # as above
        "PYTHONUNBUFFERED": "1",
        **_FORKS,
    }
    environment = {**added, **own}
    environment["PYTHONPATH"] = _with_package(own.get("PYTHONPATH", ""))
    return environment


def probe_environment(own: Mapping[str, str]) -> dict[str, str]:
    """``own`` with what ranks need that only try their collectives, before any run (rank.probe)."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**threads, **_BUS_ORDER, **_of_gpus(is_deterministic=False), **_QUIET, **own}


def _of_gpus(*, is_deterministic: bool, is_alone: bool = True) -> dict[str, str]:
    """Return the defaults for NCCL and CUDA. ``is_alone``: all ranks are on one machine."""
    network = _ONE_MACHINE if is_alone else {}
    return {**_NCCL, **network, **_FORKS, **(_NCCL_IN_ORDER if is_deterministic else {})}


def kept_against_advice(
    own: Mapping[str, str], *, is_deterministic: bool, is_alone: bool = True
) -> tuple[str, ...]:
    """Return a line for each of the user's variables that make repairs on GPUs impossible, slow or inexact.

    ``is_alone``: as for :func:`training_environment`.
    """
    wanted = _of_gpus(is_deterministic=is_deterministic, is_alone=is_alone)
    return tuple(
        f"{name}={own[name]} of your environment is kept; {value} is what repairs on GPUs need"
        for name, value in wanted.items()
        if own.get(name, value) != value
    )


def _with_package(path: str) -> str:
    """The search path with this package, wherever the user's working directory is."""
    parts = [part for part in path.split(":") if part]
    if not {PACKAGE_PARENT, IMPORT_FOLDER} & set(parts):
        parts.append(IMPORT_FOLDER)
    return ":".join(parts)
