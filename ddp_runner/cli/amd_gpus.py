"""AMD's GPUs as a torch for ROCm counts them: by amd-smi or rocm-smi, else by torch in a child. Imports no torch.

``amd-smi list --json`` is a list of ``{"gpu", "bdf", "uuid", "kfd_id", "node_id", ...}``; ``amd-smi static
--json`` has ``asic`` and ``vram`` of each, since ROCm 6.4 as ``{"gpu_data": [...]}``. ``rocm-smi --json`` has
an object for each ``card<N>``, and lines of warnings before it.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddp_runner.cli.gpus import Gpu, VisibleGpus, visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LIST = ("amd-smi", "list", "--json")
_STATIC = ("amd-smi", "static", "--asic", "--vram", "--json")
_ROCM = ("rocm-smi", "--showproductname", "--showuniqueid", "--showmeminfo", "vram", "--json")
_ASK_TIMEOUT_S = 30.0
_TORCH_TIMEOUT_S = 120.0  # it imports torch, and opens each device
_MIB = 1024**2
_BY_TORCH = """
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([{"name": one.name, "memory": one.total_memory} for one in found]))
"""
ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


def find_amd_gpus(environment: Mapping[str, str]) -> VisibleGpus:
    """Those that a rank's torch would see under ``environment``."""
    present = _by_amd_smi(environment) or _by_rocm_smi(environment)
    if present:
        return visible_amd(present, environment)
    return _by_torch(environment)  # to which the variables are known already


def visible_amd(present: Sequence[Gpu], environment: Mapping[str, str]) -> VisibleGpus:
    """Apply ROCR_VISIBLE_DEVICES, then HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES in its place.

    The second counts among those that the first has left.
    """
    seen = visible(present, environment.get(ROCR), variable=ROCR)
    if not seen.gpus:
        return seen
    name = HIP if HIP in environment else CUDA
    left = [replace(gpu, index=place) for place, gpu in enumerate(seen.gpus)]
    return visible(left, environment.get(name), variable=name)


def _by_amd_smi(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    listed = _ask(_LIST, environment)
    return parse_amd_smi(listed, _ask(_STATIC, environment)) if listed is not None else ()


def _by_rocm_smi(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    return parse_rocm_smi(_ask(_ROCM, environment))


def _by_torch(environment: Mapping[str, str]) -> VisibleGpus:
    """By torch itself, in a process that ends: what it starts no fork of ours could use."""
    answer = _run((sys.executable, "-c", _BY_TORCH), environment, timeout_s=_TORCH_TIMEOUT_S)
    lines = answer.stdout.strip().splitlines() if answer is not None else []
    found = _json(lines[-1]) if lines else None
    if answer is None or answer.returncode != 0 or not isinstance(found, list):
        said = answer.stderr.strip().splitlines()[-1:] if answer is not None else []
        why = f"neither amd-smi nor rocm-smi shows a GPU, and torch fails: {''.join(said)[:160]}"
        return VisibleGpus(why_none=why, is_surprising=True)
    gpus = tuple(
        Gpu(index=index, uuid="", name=str(one["name"]), memory=_mib(one["memory"]))
        for index, one in enumerate(found)
    )
    why = "" if gpus else "torch sees no AMD GPU, nor do amd-smi and rocm-smi"
    return VisibleGpus(gpus=gpus, why_none=why, is_surprising=not gpus)


def parse_amd_smi(listed: Any, static: Any) -> tuple[Gpu, ...]:
    """In the order of the kernel's nodes, which is that of HIP; ``static`` may be None."""
    rows = [row for row in _rows(listed) if isinstance(row.get("gpu"), int)]
    if all(isinstance(row.get("node_id"), int) for row in rows):
        rows.sort(key=lambda row: row["node_id"])
    more = {row.get("gpu"): row for row in _rows(static)}
    found = []
    for place, row in enumerate(rows):
        own = more.get(row["gpu"], {})
        asic = own.get("asic")
        asic = asic if isinstance(asic, dict) else {}
        vram = own.get("vram")
        size = vram.get("size") if isinstance(vram, dict) else None
        name = asic.get("market_name")
        found.append(
            Gpu(
                index=place,
                uuid=_unique(asic.get("asic_serial")) or _of_uuid(row.get("uuid")),
                name=name if isinstance(name, str) and name != "N/A" else "AMD GPU",
                memory=_memory(size),
            )
        )
    return tuple(found)


def parse_rocm_smi(found: Any) -> tuple[Gpu, ...]:
    """In the order of the kernel's nodes where they are shown, else of the cards."""
    if not isinstance(found, dict):
        return ()
    cards = [
        (int(match[1]), values)
        for name, values in found.items()
        if (match := re.fullmatch(r"card(\d+)", name)) and isinstance(values, dict)
    ]
    lowered = [(n, {key.lower(): text for key, text in values.items()}) for n, values in cards]
    nodes = [str(values.get("node id", "")) for _, values in lowered]
    by_node = all(node.isdecimal() for node in nodes)
    lowered.sort(key=lambda one: int(one[1]["node id"]) if by_node else one[0])
    return tuple(
        Gpu(
            index=place,
            uuid=_unique(values.get("unique id")),
            name=str(values.get("card series") or values.get("device name") or "AMD GPU"),
            memory=_mib(values.get("vram total memory (b)")),
        )
        for place, (_, values) in enumerate(lowered)
    )


def _rows(found: Any) -> list[dict[str, Any]]:
    if isinstance(found, dict):
        found = found.get("gpu_data", [found])
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _unique(text: Any) -> str:
    """A GPU's name in ROCR_VISIBLE_DEVICES, of its 64-bit number in hexadecimal; "" for none."""
    if not isinstance(text, str) or not re.fullmatch(r"0[xX][0-9a-fA-F]{1,16}", text):
        return ""
    number = int(text, 16)
    return f"GPU-{number:016x}" if number else ""


def _of_uuid(text: Any) -> str:
    """The same, of amd-smi's UUID, whose first byte and last seven bytes it is."""
    digits = text.replace("-", "") if isinstance(text, str) else ""
    if not re.fullmatch(r"[0-9a-fA-F]{32}", digits):
        return ""
    return _unique(f"0x{digits[:2]}{digits[18:]}")


def _memory(size: Any) -> str:
    """``{"value": 196592, "unit": "MB"}``, or text such as ``196592 MB``."""
    if isinstance(size, dict):
        size = f"{size.get('value', '')} {size.get('unit', '')}"
    found = re.fullmatch(r"(\d+)\s*(B|MB|MiB|GB|GiB)?", str(size).strip())
    if found is None:
        return ""
    unit = {"B": 1, "GB": 1024**3, "GiB": 1024**3}.get(found[2] or "MB", _MIB)
    return _mib(int(found[1]) * unit)


def _mib(size_bytes: Any) -> str:
    text = str(size_bytes)
    return f"{int(text) // _MIB} MiB" if text.isdecimal() else ""


def _ask(command: Sequence[str], environment: Mapping[str, str]) -> Any:
    """What it answers, as JSON; None where it is not there, fails, or says something else."""
    answer = _run(command, environment, timeout_s=_ASK_TIMEOUT_S)
    return _json(answer.stdout) if answer is not None and answer.returncode == 0 else None


def _run(
    command: Sequence[str], environment: Mapping[str, str], *, timeout_s: float
) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(  # noqa: S603 - fixed commands
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=dict(environment),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _json(text: str) -> Any:
    """The first value that begins a line of ``text``, before which there may be lines of warnings."""
    for begin in re.finditer(r"^\s*(?=[\[{])", text, re.MULTILINE):
        with contextlib.suppress(ValueError):
            return json.JSONDecoder().raw_decode(text[begin.end() :])[0]
    return None
