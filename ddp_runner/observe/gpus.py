"""GPUs as values, which of them a variable leaves visible, and how AMD's are found and read. Imports no torch.

AMD's are counted as a torch for ROCm does: by amd-smi or rocm-smi, else by torch in a child.
``amd-smi list --json`` is a list of ``{"gpu", "bdf", "uuid", "kfd_id", "node_id", ...}``; ``amd-smi static
--json`` has ``asic`` and ``vram`` of each, since ROCm 6.4 as ``{"gpu_data": [...]}``. ``rocm-smi --json`` has
an object for each ``card<N>``, and lines of warnings before it. ``amd-smi metric --json`` has ``usage``, ``power``,
``temperature``, ``clock`` and ``mem_usage`` of each GPU, their figures as ``{"value": 47, "unit": "%"}``, as bare numbers in
older versions, and ``"N/A"`` for what a GPU does not have.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddp_runner.core.gpu_reading import GpuReading
from ddp_runner.system.torch_versions import torch_build

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LIST = ("amd-smi", "list", "--json")
_STATIC = ("amd-smi", "static", "--asic", "--vram", "--json")
_ROCM = ("rocm-smi", "--showproductname", "--showuniqueid", "--showmeminfo", "vram", "--json")
_AMD_USE = ("amd-smi", "metric", "-u", "-p", "-c", "-t", "-m", "--json")
_ROCM_USE = (*_ROCM[:-1], "--showuse", "--showtemp", "--showpower", "--showclocks", "--json")
_USE_TIMEOUT_S = 10.0  # a driver that hangs: below what their reader is given
_ASK_TIMEOUT_S = 30.0
_TORCH_TIMEOUT_S = 120.0  # it imports torch, and opens each device
_MIB = 1024**2
_BY_TORCH = """
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([{"name": one.name, "memory": one.total_memory} for one in found]))
"""
ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of this machine; ``index`` is its tool's, ``memory`` is text (``143771 MiB``)."""

    index: int
    uuid: str
    name: str
    memory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpus:
    """GPUs in the order in which torch counts them; ``why_none`` says why there are none."""

    gpus: tuple[Gpu, ...] = ()
    why_none: str = ""
    is_surprising: bool = False  # a GPU could be expected here: people should hear of it
    is_unsupported: bool = False  # torch was built for GPUs that this runner cannot use


def visible(present: Sequence[Gpu], mask: str | None, *, variable: str = CUDA) -> VisibleGpus:
    """Apply such a variable as CUDA does: indices or UUID prefixes, up to the first bad."""
    if mask is None:
        return VisibleGpus(gpus=tuple(present))
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in mask.split(",")):
        gpu = _named(present, entry)
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return VisibleGpus(
        gpus=tuple(chosen),
        why_none="" if chosen else f"{variable}={mask!r} hides every GPU",
    )


def _named(present: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return next((gpu for gpu in present if gpu.index == int(entry)), None)
    if entry.startswith("MIG-"):
        return Gpu(index=-1, uuid=entry, name="MIG slice", memory="")
    matches = [gpu for gpu in present if entry and gpu.uuid.lower().startswith(entry.lower())]
    return matches[0] if len(matches) == 1 else None


def find_amd_gpus(environment: Mapping[str, str]) -> VisibleGpus:
    """Return the GPUs that a rank's torch would see under ``environment``."""
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


class NoAmdToolError(Exception):
    """Raised if neither of AMD's tools shows a GPU; the text says why."""


class AmdReader:
    """Asks amd-smi, else rocm-smi, what the GPUs under ``environment`` use, as torch counts them.

    Raises NoAmdToolError where torch is not built for ROCm, or neither shows a GPU. A look starts a process, for some
    tenths of a second; what a GPU does not have is None.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        build = torch_build()
        if build is None or not build.hip:
            raise NoAmdToolError("torch is not built for ROCm")
        self._environment = dict(environment)
        self._listed = _ask(_LIST, environment, timeout_s=_USE_TIMEOUT_S)
        self.source = "amd-smi"
        present = parse_amd_smi(self._listed, _ask(_STATIC, environment, timeout_s=_USE_TIMEOUT_S))
        if not present:
            self.source = "rocm-smi"
            present = parse_rocm_smi(_ask(_ROCM, environment, timeout_s=_USE_TIMEOUT_S))
        if not present:
            raise NoAmdToolError("neither amd-smi nor rocm-smi shows a GPU")
        seen = visible(present, environment.get(ROCR), variable=ROCR).gpus
        chosen = visible_amd(present, environment).gpus
        self._present = present
        # In torch's order; the second variable counts what the first one has left.
        self._places = [seen[one.index].index for one in chosen if one.index >= 0]

    def read(self) -> tuple[GpuReading, ...]:
        """Read each GPU; one that the tool does not show any more has a problem."""
        if self.source == "amd-smi":
            rows = parse_amd_use(self._listed, self._asked(_AMD_USE))
        else:
            rows = parse_rocm_use(self._asked(_ROCM_USE))
        found = []
        for index, place in enumerate(self._places):
            gpu = self._present[place]
            problems = () if place in rows else (f"{self.source} says nothing of it",)
            reading = rows.get(place) or GpuReading(index=index, problems=problems)
            found.append(replace(reading, index=index, name=gpu.name, uuid=gpu.uuid))
        return tuple(found)

    def close(self) -> None:
        """Do nothing: nothing is held between two readings."""

    def _asked(self, command: Sequence[str]) -> Any:
        return _ask(command, self._environment, timeout_s=_USE_TIMEOUT_S)


def parse_amd_use(listed: Any, metric: Any) -> dict[int, GpuReading]:
    """Return the readings by place in HIP's order: ``amd-smi metric`` for the GPUs of ``amd-smi list``."""
    more = {row.get("gpu"): row for row in _rows(metric)}
    found = {}
    for place, row in enumerate(_in_hip_order(listed)):
        own = more.get(row["gpu"])
        if own is None:
            continue
        usage, power, heat, memory = (
            _part(own, name) for name in ("usage", "power", "temperature", "mem_usage")
        )
        clocks = _part(own, "clock")
        use = _first(usage, "gfx_activity", "gfx_usage")
        clock, most = _clock(clocks, "gfx_0", "gfx")
        found[place] = GpuReading(
            index=place,
            use=None if use is None else min(1.0, use / 100),
            memory_used_bytes=_bytes_of(memory, "used_vram", "used_visible_vram"),
            memory_total_bytes=_bytes_of(memory, "total_vram", "total_visible_vram"),
            temperature_c=_first(heat, "hotspot", "edge", "mem"),
            power_w=_first(power, "socket_power", "current_socket_power", "average_socket_power"),
            clock_mhz=clock,
            clock_max_mhz=most,
            memory_clock_mhz=_clock(clocks, "mem_0", "mem")[0],
            throttling=("power or heat",) if power.get("throttle_status") == "THROTTLED" else (),
        )
    return found


def parse_rocm_use(found: Any) -> dict[int, GpuReading]:
    """The same of ``rocm-smi --json``, whose keys differ between versions and GPUs in their middle."""
    readings = {}
    for place, values in enumerate(_cards(found)):

        def first(*begins: str, values: Mapping[str, Any] = values) -> float | None:
            named = (values[key] for begin in begins for key in values if key.startswith(begin))
            return next((one for one in map(_number, named) if one is not None), None)

        use, memory = first("gpu use (%)"), first("vram total used memory (b)")
        total = first("vram total memory (b)")
        readings[place] = GpuReading(
            index=place,
            use=None if use is None else min(1.0, use / 100),
            memory_used_bytes=None if memory is None else int(memory),
            memory_total_bytes=None if total is None else int(total),
            temperature_c=first(
                "temperature (sensor junction)", "temperature (sensor edge)", "temperature ("
            ),
            power_w=first(
                "current socket graphics package power", "average graphics package power"
            ),
            clock_mhz=first("sclk clock speed"),
            memory_clock_mhz=first("mclk clock speed"),
        )
    return readings


def _part(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = row.get(name)
    return part if isinstance(part, dict) else {}


def _first(part: Mapping[str, Any], *names: str) -> float | None:
    return next((one for name in names if (one := _number(part.get(name))) is not None), None)


def _bytes_of(part: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = part.get(name)
        if (size := _number(value)) is not None:
            unit = value.get("unit", "MB") if isinstance(value, dict) else "MB"
            return int(size * {"B": 1, "GB": 1024**3, "GiB": 1024**3}.get(unit, _MIB))
    return None


def _clock(clocks: Mapping[str, Any], *names: str) -> tuple[float | None, float | None]:
    """The clock of the first of these, and its highest."""
    for name in names:
        part = _part(clocks, name)
        if (now := _first(part, "clk", "cur_clk")) is not None:
            return now, _first(part, "max_clk")
    return None, None


def _number(value: Any) -> float | None:
    """``47``, ``"47.0"``, ``"(1500Mhz)"`` or ``{"value": 47, "unit": "%"}``; None for what is none."""
    if isinstance(value, dict):
        value = value.get("value")
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    match = re.fullmatch(r"\(?(-?\d+(?:\.\d+)?)\s*[a-zA-Z%°]*\)?", str(value).strip())
    return float(match[1]) if match else None


def _by_amd_smi(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    listed = _ask(_LIST, environment)
    return parse_amd_smi(listed, _ask(_STATIC, environment)) if listed is not None else ()


def _by_rocm_smi(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    return parse_rocm_smi(_ask(_ROCM, environment))


def _by_torch(environment: Mapping[str, str]) -> VisibleGpus:
    """Ask torch in a separate process: no fork of this one could use a device that torch has started."""
    answer = run_tool((sys.executable, "-c", _BY_TORCH), environment, timeout_s=_TORCH_TIMEOUT_S)
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
    """Return the GPUs in the order of the kernel's nodes, which is HIP's; ``static`` may be None."""
    more = {row.get("gpu"): row for row in _rows(static)}
    found = []
    for place, row in enumerate(_in_hip_order(listed)):
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
    """Return the GPUs in the order of the kernel's nodes if these are shown, else of the cards."""
    return tuple(
        Gpu(
            index=place,
            uuid=_unique(values.get("unique id")),
            name=str(values.get("card series") or values.get("device name") or "AMD GPU"),
            memory=_mib(values.get("vram total memory (b)")),
        )
        for place, values in enumerate(_cards(found))
    )


def _in_hip_order(listed: Any) -> list[dict[str, Any]]:
    rows = [row for row in _rows(listed) if isinstance(row.get("gpu"), int)]
    if all(isinstance(row.get("node_id"), int) for row in rows):
        rows.sort(key=lambda row: row["node_id"])
    return rows


def _cards(found: Any) -> list[dict[str, Any]]:
    """Return the values of each card that rocm-smi lists, with lower-case keys."""
    if not isinstance(found, dict):
        return []
    cards = [
        (int(match[1]), values)
        for name, values in found.items()
        if (match := re.fullmatch(r"card(\d+)", name)) and isinstance(values, dict)
    ]
    lowered = [(n, {key.lower(): text for key, text in values.items()}) for n, values in cards]
    nodes = [str(values.get("node id", "")) for _, values in lowered]
    by_node = all(node.isdecimal() for node in nodes)
    lowered.sort(key=lambda one: int(one[1]["node id"]) if by_node else one[0])
    return [values for _, values in lowered]


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


def _ask(
    command: Sequence[str], environment: Mapping[str, str], *, timeout_s: float = _ASK_TIMEOUT_S
) -> Any:
    """Return the command's answer from JSON; None if the command is missing, fails, or has no JSON."""
    answer = run_tool(command, environment, timeout_s=timeout_s)
    return _json(answer.stdout) if answer is not None and answer.returncode == 0 else None


def run_tool(
    command: Sequence[str], environment: Mapping[str, str], *, timeout_s: float
) -> subprocess.CompletedProcess[str] | None:
    """Run a tool of a driver's; None if it is missing or does not end in time."""
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
