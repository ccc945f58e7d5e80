"""The environment of the zygote and so of every rank: what must stand before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping

from ddp_runner.core.launch import LaunchPlan
from ddp_runner.start import PACKAGE_PARENT

# Ranks that must survive a failed collective (DESIGN section 12): the watchdog would kill them.
_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_INCLUDE_STACK_TRACE": "0",
}
# cuBLAS repeats its results only with a fixed workspace, chosen before CUDA starts.
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# CUDA counts the fastest GPU first unless told otherwise; --gpus and nvidia-smi count by bus.
_BUS_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
# A model whose parts come from a set of names has them in one order in every process, a replacement's too.
_SETS_IN_ORDER = {"PYTHONHASHSEED": "0"}
# torch's advice at every start; the settings that it is about are this runner's choice.
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
_DEBUG = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "CUDA_LAUNCH_BLOCKING": "1"}


def zygote_environment(plan: LaunchPlan, own: Mapping[str, str]) -> dict[str, str]:
    """``own`` with what this run needs. A variable that the user has set is left alone."""
    threads = str(plan.threads_per_rank)
    added = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # numpy would start its threads at import, and a zygote must have none.
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        **_SETS_IN_ORDER,
        **_BUS_ORDER,
        **_NCCL,
        **(_DETERMINISTIC if plan.settings.run.deterministic else {}),
        **(_DEBUG if plan.settings.run.debug else _QUIET),
    }
    environment = {**added, **own}
    environment["PYTHONPATH"] = _with_package(own.get("PYTHONPATH", ""))
    return environment


def _with_package(path: str) -> str:
    """The search path with this package's folder, wherever the user's working directory is."""
    parts = [part for part in path.split(":") if part]
    if PACKAGE_PARENT not in parts:
        parts.append(PACKAGE_PARENT)
    return ":".join(parts)
