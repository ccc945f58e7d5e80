"""What ``doctor`` finds out about AMD's GPUs and their libraries. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.cli.amd_gpus import CUDA, HIP, ROCR
from ddp_runner.cli.checks import Check, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ROOT = Path("/")
# What changes which GPUs there are, what they can do, or how they meet.
WATCHED = (
    *(ROCR, HIP, CUDA, "GPU_DEVICE_ORDINAL", "HSA_OVERRIDE_GFX_VERSION"),
    *("HSA_FORCE_FINE_GRAIN_PCIE", "NCCL_P2P_DISABLE", "PYTORCH_TUNABLEOP_ENABLED"),
)


def amd_checks(
    environment: Mapping[str, str], *, rccl: str, takes_rccl: bool, root: Path = _ROOT
) -> Iterator[Check]:
    """The checks of a torch for ROCm. ``rccl``: the version that was loaded, where that is known."""
    yield check_driver(root)
    yield check_access(root)
    if takes_rccl:
        found = rccl or "inside torch, which shows its version when the collectives are tried"
        yield Check(name="RCCL", verdict=Verdict.OK, found=found)
    yield check_variables(environment)


def check_driver(root: Path = _ROOT) -> Check:
    """The kernel's driver."""
    module = root / "sys" / "module" / "amdgpu"
    if not module.is_dir():
        cure = "load it: modprobe amdgpu"
        found = "the kernel has no amdgpu"
        return Check(name="driver", verdict=Verdict.FAIL, found=found, cure=cure)
    try:
        version = (module / "version").read_text(encoding="utf-8").strip()
    except OSError:  # the kernel's own has none
        version = "the kernel's own"
    return Check(name="driver", verdict=Verdict.OK, found=f"amdgpu, {version}")


def check_access(root: Path = _ROOT) -> Check:
    """The device by which programs reach the driver."""
    device = root / "dev" / "kfd"
    if not device.exists():
        cure = "start the container with --device=/dev/kfd --device=/dev/dri"
        found = "/dev/kfd is not there"
        return Check(name="access", verdict=Verdict.FAIL, found=found, cure=cure)
    if not os.access(device, os.R_OK | os.W_OK):
        cure = "add the user to the groups render and video, and log in again"
        found = "/dev/kfd may not be opened"
        return Check(name="access", verdict=Verdict.FAIL, found=found, cure=cure)
    return Check(name="access", verdict=Verdict.OK, found="/dev/kfd can be opened")


def check_variables(environment: Mapping[str, str]) -> Check:
    """Those of the user's environment that matter."""
    found = [f"{name}={environment[name]}" for name in WATCHED if name in environment]
    shown = ", ".join(found) or "none of ROCm's is set"
    if HIP in environment and CUDA in environment and environment[HIP] != environment[CUDA]:
        cure = f"{HIP} counts, and {CUDA} says something else: set one of them"
        return Check(name="variables", verdict=Verdict.WARN, found=shown, cure=cure)
    return Check(name="variables", verdict=Verdict.OK, found=shown)
