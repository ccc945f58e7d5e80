"""``doctor``: can this machine train? One line per check, with the cure where there is one."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import sys
from dataclasses import asdict, dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.cli.arguments import CHECKPOINT_DIR, JSON, LOG_DIR, parse_small
from ddp_runner.cli.devices import find_gpus
from ddp_runner.cli.machine import core_count, torch_build
from ddp_runner.cli.output import show
from ddp_runner.config.naming import CHECKPOINTS, LOGS
from ddp_runner.config.relations import unwritable_reason
from ddp_runner.core.exits import ExitCode
from ddp_runner.environment import PYTHON_MIN, REPOSITORY, requirement_lines, unmet
from ddp_runner.memory.limits import container_limit
from ddp_runner.observe.format import byte_size
from ddp_runner.start import COMMAND, IS_CHECKOUT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HELP = f"""Usage:  {COMMAND} doctor [-l DIR] [-c DIR] [--json]

Checks everything that training needs; exit 1 if something is missing.

  -l, --log-dir DIR         folder of logs to check [logs]
  -c, --checkpoint-dir DIR  folder of checkpoints to check [checkpoints]
      --json                one JSON object a line, for programs"""
_SHARED_MEMORY_NAME = "/dev/shm"  # noqa: S108 - the mount that loader workers use
_SHARED_MEMORY = Path(_SHARED_MEMORY_NAME)
_SHARED_MEMORY_BYTES_MIN = 1024**2  # for locks; batches are elsewhere
_MEMORY_BYTES_MIN = 2 * 1024**3
_DISK_BYTES_MIN = 1024**3
_OPEN_FILES_MIN = 1024


class Verdict(Enum):
    """``WARN`` trains, but worse or not everywhere; ``FAIL`` does not train."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check. ``cure`` is what to do, empty when the verdict is OK."""

    name: str
    verdict: Verdict
    found: str
    cure: str = ""


def run(words: Sequence[str]) -> int:
    """Print every check; 1 if one fails. Raises BadInputError."""
    arguments = parse_small(words, valued=(LOG_DIR, CHECKPOINT_DIR), switches=(JSON,))
    if arguments.wants_help:
        print(HELP)
        return ExitCode.DONE
    folders = {
        "logs": arguments.values.get("--log-dir", LOGS),
        "checkpoints": arguments.values.get("--checkpoint-dir", CHECKPOINTS),
    }
    has_failed = False
    for check in all_checks(folders):
        has_failed = has_failed or check.verdict is Verdict.FAIL
        if JSON in arguments.switches:
            print(json.dumps({**asdict(check), "verdict": check.verdict.value}))
        else:
            for line in _lines(check):
                show(line)
    return ExitCode.FAILED if has_failed else ExitCode.DONE


def _lines(check: Check) -> list[str]:
    text = f"{check.verdict.value:<5} {check.name:<15} {check.found}"
    return [text, *([f"{'':21} -> {check.cure}"] if check.cure else [])]


def all_checks(folders: dict[str, str]) -> Iterator[Check]:
    """Every check, in the order in which a cure would be tried."""
    yield check_python()
    yield check_packages()
    yield check_torch()
    yield check_gpus()
    yield _graded("cores", core_count(), least=2, shown=str(core_count()), cure="one rank is used")
    yield check_memory()
    yield check_shared_memory()
    yield check_open_files()
    yield check_loopback()
    yield check_host_name()
    for name, folder in folders.items():
        yield check_folder(name, Path(folder).expanduser())


def _graded(name: str, value: float, *, least: float, shown: str, cure: str) -> Check:
    """OK from ``least`` on, a warning below."""
    if value >= least:
        return Check(name=name, verdict=Verdict.OK, found=shown)
    return Check(name=name, verdict=Verdict.WARN, found=shown, cure=cure)


def check_python() -> Check:
    """The interpreter that ranks run with."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info >= PYTHON_MIN:
        return Check(name="Python", verdict=Verdict.OK, found=found)
    return Check(name="Python", verdict=Verdict.FAIL, found=found, cure="use Python 3.10 or newer")


def check_packages() -> Check:
    """Installed versions against the requirements; nothing is imported."""
    wanted = wanted_packages()
    problems = unmet(wanted)
    if not problems:
        found = f"all {len(wanted)} requirements are met"
        return Check(name="packages", verdict=Verdict.OK, found=found)
    names = " ".join(f"'{line}'" for line in wanted if unmet([line]))
    return Check(
        name="packages",
        verdict=Verdict.FAIL,
        found="; ".join(problems),
        cure=f"{sys.executable} -m pip install {names}",
    )


def wanted_packages() -> list[str]:
    """What this package requires: by its checkout's file, or by what it was installed with."""
    file = REPOSITORY / "requirements.txt"
    if IS_CHECKOUT and file.is_file():
        return requirement_lines(file.read_text(encoding="utf-8"))
    try:
        told = metadata.requires("ddp_runner") or []
    except metadata.PackageNotFoundError:
        return []
    return [line for line in told if "extra ==" not in line]


def check_torch() -> Check:
    """The torch build that ranks would import."""
    build = torch_build()
    if build is None:
        return Check(name="torch", verdict=Verdict.FAIL, found="missing", cure="pip install torch")
    kind = build.other or (f"CUDA {build.cuda}" if build.cuda else "without CUDA")
    return Check(name="torch", verdict=Verdict.OK, found=f"{build.version}, {kind}")


def check_gpus() -> Check:
    """The GPUs that ranks would see."""
    seen = find_gpus(dict(os.environ), torch_build())
    if seen.gpus:
        found = ", ".join(f"{i}: {gpu.name} {gpu.memory}" for i, gpu in enumerate(seen.gpus))
        return Check(name="GPUs", verdict=Verdict.OK, found=found)
    if seen.is_unsupported:
        cure = "install a torch for CUDA, or train with --cpu"
        return Check(name="GPUs", verdict=Verdict.FAIL, found=seen.why_none, cure=cure)
    if seen.is_surprising:
        cure = "make nvidia-smi work, or train with --cpu"
        return Check(name="GPUs", verdict=Verdict.WARN, found=seen.why_none, cure=cure)
    return Check(name="GPUs", verdict=Verdict.OK, found=f"none, trains on the CPU: {seen.why_none}")


def check_memory() -> Check:
    """Physical memory, cut to the container's limit."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shown = byte_size(total_bytes)
    limit = container_limit()
    if limit is not None and limit.bytes < total_bytes:
        total_bytes = limit.bytes
        shown = f"{byte_size(total_bytes)}, the container's limit"
    cure = "use fewer ranks (-n 1) and smaller batches (-b 4)"
    return _graded("memory", total_bytes, least=_MEMORY_BYTES_MIN, shown=shown, cure=cure)


def check_shared_memory() -> Check:
    """Room for the locks of loader workers; their batches are in memory files without a name."""
    if not _SHARED_MEMORY.is_dir():
        cure = "data is loaded in the rank itself: num_workers=0"
        return Check(name=_SHARED_MEMORY_NAME, verdict=Verdict.WARN, found="missing", cure=cure)
    free_bytes = shutil.disk_usage(_SHARED_MEMORY).free
    return _graded(
        _SHARED_MEMORY_NAME,
        free_bytes,
        least=_SHARED_MEMORY_BYTES_MIN,
        shown=f"{byte_size(free_bytes)} free",
        cure="start the container with --shm-size=1g, or train with num_workers=0",
    )


def check_open_files() -> Check:
    """The hard limit of open files, to which each rank raises its own."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    is_unlimited = hard == resource.RLIM_INFINITY
    return _graded(
        "open files",
        _OPEN_FILES_MIN if is_unlimited else hard,
        least=_OPEN_FILES_MIN,
        shown="no limit" if is_unlimited else f"{hard} at most",
        cure="raise it: ulimit -Hn 65536, or LimitNOFILE= of the service",
    )


def check_loopback() -> Check:
    """Ranks of one machine meet on 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=5.0):
                pass
            port = server.getsockname()[1]
    except OSError as error:
        cure = "bring the loopback interface up: ip link set lo up"
        found = f"127.0.0.1 does not answer: {error}"
        return Check(name="loopback", verdict=Verdict.FAIL, found=found, cure=cure)
    return Check(name="loopback", verdict=Verdict.OK, found=f"127.0.0.1 answers (port {port})")


def check_host_name() -> Check:
    """Gloo and NCCL look their own machine up by name when nothing else is set."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Check(
            name="host name",
            verdict=Verdict.WARN,
            found=f"{name} does not resolve: {error}",
            cure=f"add '127.0.0.1 {name}' to /etc/hosts",
        )
    return Check(name="host name", verdict=Verdict.OK, found=f"{name} is {address}")


def check_folder(name: str, folder: Path) -> Check:
    """Whether ``folder`` can be made and written, and has room."""
    reason = unwritable_reason(folder)
    if reason:
        cure = f"choose another folder with --{name.removesuffix('s')}-dir"
        return Check(name=name, verdict=Verdict.FAIL, found=f"{folder} {reason}", cure=cure)
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    return _graded(
        name,
        free_bytes,
        least=_DISK_BYTES_MIN,
        shown=f"{folder} can be written, {byte_size(free_bytes)} free",
        cure="free some space, or choose a folder on another disk",
    )
