"""The checks of ``doctor`` on GPUs and their libraries. Asks nvidia-smi, and imports no torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_runner.cli.hardware.machine_checks import Check, Probed, failure, ok, warning
from ddp_runner.observe.format import byte_size
from ddp_runner.observe.gpus import run_tool
from ddp_runner.system.torch_versions import installed_nccl, nccl_trouble, version_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ddp_runner.observe.gpus import Gpu
    from ddp_runner.system.torch_versions import TorchBuild

_COMMAND = "nvidia-smi"
_ASK_TIMEOUT_S = 30.0
_CSV = "--format=csv,noheader,nounits"
_APPS = ("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", _CSV)
_MEMORY = ("--query-gpu=index,memory.free,memory.total", _CSV)
_PEERS = ("topo", "-p2p", "r")
_FREE_SHARE_MIN = 0.8
_MIB = 1024**2
_NAME = "collectives"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds memory of a GPU; ``used_bytes`` is None where the driver hides it."""

    uuid: str
    pid: int
    name: str
    used_bytes: int | None


def gpu_checks(
    gpus: Sequence[Gpu], build: TorchBuild, *, nccl: str, takes_nccl: bool
) -> Iterator[Check]:
    """The checks of the chosen ``gpus``. ``nccl``: the version that was loaded, where that is known."""
    yield judge_driver(ask(()), cuda=build.cuda)
    if takes_nccl:
        yield judge_nccl(nccl or installed_nccl(), cuda=build.cuda)
    once = list(dict.fromkeys(gpus))
    if len(once) > 1:
        yield judge_peers(parse_peers(ask(_PEERS)), [gpu.index for gpu in once])
    yield judge_memory(once, parse_memory(ask(_MEMORY)), parse_holders(ask(_APPS)))


def ask(words: Sequence[str]) -> str:
    """Return the answer of nvidia-smi; "" if it fails."""
    answer = run_tool((_COMMAND, *words), os.environ, timeout_s=_ASK_TIMEOUT_S)
    return "" if answer is None or answer.returncode else answer.stdout


def judge_driver(banner: str, *, cuda: str) -> Check:
    """The driver, by nvidia-smi's first lines, against the CUDA that torch was built with."""
    driver = re.search(r"Driver Version:\s*([\d.]+)", banner)
    newest = re.search(r"CUDA(?: UMD)? Version:\s*(\d+)\.(\d+)", banner)
    if driver is None:
        return _unknown("driver", "nvidia-smi does not say it")
    if newest is None:
        return ok("driver", f"{driver.group(1)}; torch is built with CUDA {cuda}")
    major, minor = newest.groups()
    found = f"{driver.group(1)} for CUDA up to {major}.{minor}; torch is built with {cuda}"
    # Within a major version a driver runs what a newer toolkit has built.
    if int(major) >= version_numbers(cuda)[0]:
        return ok("driver", found)
    return failure("driver", found, f"update the driver, or install a torch for CUDA {major}")


def judge_nccl(version: str, *, cuda: str) -> Check:
    """Judge whether repairs can rely on this NCCL's abort."""
    if not version:
        return ok("NCCL", "inside torch, which shows its version when the collectives are tried")
    trouble = nccl_trouble(version, cuda=cuda)
    if trouble is None:
        return ok("NCCL", version)
    return warning("NCCL", trouble.what, trouble.cure)


def parse_peers(text: str) -> Mapping[tuple[int, int], str]:
    """The matrix of ``nvidia-smi topo -p2p r``: what stands for each ordered pair of GPUs."""
    found: dict[tuple[int, int], str] = {}
    columns: list[int] = []
    for line in text.splitlines():
        cells = re.sub(r"\x1b\[[\d;]*m", "", line).split()  # its header is underlined
        if not cells or not re.fullmatch(r"GPU\d+", cells[0]):
            continue
        if not columns and all(re.fullmatch(r"GPU\d+", cell) for cell in cells):
            columns = [int(cell[3:]) for cell in cells]
            continue
        row = int(cells[0][3:])
        found |= {(row, column): cell for column, cell in zip(columns, cells[1:], strict=False)}
    return found


def judge_peers(matrix: Mapping[tuple[int, int], str], chosen: Sequence[int]) -> Check:
    """Judge whether the chosen GPUs, by nvidia-smi's numbers, read each other's memory."""
    pairs = [(one, other) for one in chosen for other in chosen if one < other]
    known = {pair: matrix[pair] for pair in pairs if pair in matrix}
    if len(known) < len(pairs):
        return _unknown("peer access", "nvidia-smi does not say it")
    without = [
        f"{one} and {other} ({says})" for (one, other), says in known.items() if says != "OK"
    ]
    if not without:
        return ok("peer access", f"all {len(pairs)} pairs" if len(pairs) > 1 else "yes")
    return warning(
        "peer access",
        f"none between GPU {'; '.join(without)}",
        "they exchange through the host's memory, which is slower; choose others with -g",
    )


def parse_memory(text: str) -> Mapping[int, tuple[int, int]]:
    """nvidia-smi's number of a GPU -> its free and all its memory, in bytes."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and all(cell.isdecimal() for cell in cells):
            index, free, total = (int(cell) for cell in cells)
            found[index] = (free * _MIB, total * _MIB)
    return found


def parse_holders(text: str) -> tuple[Holder, ...]:
    """The lines of --query-compute-apps; a name may hold commas, memory may be ``[N/A]``."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) >= 4 and cells[1].isdecimal():
            used = int(cells[-1]) * _MIB if cells[-1].isdecimal() else None
            name = ", ".join(cells[2:-1])
            found.append(Holder(uuid=cells[0], pid=int(cells[1]), name=name, used_bytes=used))
    return tuple(found)


def judge_memory(
    gpus: Iterable[Gpu], memory: Mapping[int, tuple[int, int]], holders: Sequence[Holder]
) -> Check:
    """Judge how much of each GPU's memory is free, and name the processes that hold the rest."""
    known = [gpu for gpu in gpus if gpu.index in memory]
    if not known:
        return _unknown("GPU memory", "nvidia-smi does not say what is free")
    reported, is_short = [], False
    for gpu in known:
        free, total = memory[gpu.index]
        theirs = [_shown_holder(holder) for holder in holders if holder.uuid == gpu.uuid]
        lacks = free < _FREE_SHARE_MIN * total
        is_short = is_short or lacks
        if lacks and not theirs:
            theirs = ["processes that nvidia-smi does not show (of another container?)"]
        held = f", held by {' and '.join(theirs)}" if theirs else ""
        reported.append(f"{gpu.index}: {byte_size(free)} of {byte_size(total)} free{held}")
    found = "; ".join(reported)
    if not is_short:
        return ok("GPU memory", found)
    return warning("GPU memory", found, "end what holds it, or choose other GPUs with -g")


def _shown_holder(holder: Holder) -> str:
    size = "" if holder.used_bytes is None else f" ({byte_size(holder.used_bytes)})"
    return f"process {holder.pid} {holder.name}{size}"


def _unknown(name: str, why: str) -> Check:
    return warning(name, f"not known: {why}", "look for yourself: nvidia-smi")


def check_collectives(
    backend: str, devices: Sequence[str], probed: Probed, *, library: str = "NCCL"
) -> Check:
    """Check that ranks on ``devices`` can do together what training and a repair need.

    ``library``: the library behind the backend nccl here.
    """
    is_nccl = "nccl" in backend
    shown = f"{library} {probed.nccl}" if is_nccl else "gloo"
    count = len(devices)
    where = "" if devices[0] == "cpu" else f" on {', '.join(dict.fromkeys(devices))}"
    who = f"{shown}, {count} rank{'s' if count > 1 else ''}{where}"
    if not probed.failure:
        return ok(_NAME, f"{who}: all-reduce, abort, second forming in {probed.seconds:.1f} s")
    cure = (
        "NCCL_DEBUG=WARN shows more; try NCCL_P2P_DISABLE=1, fewer GPUs (-g 0), or --backend gloo"
        if is_nccl
        else "end what stops processes here or forbids connections on 127.0.0.1, and try again"
    )
    return failure(_NAME, f"{who}: {probed.failure}", cure)
