"""``doctor``: can this machine train? One line per check, with the cure where there is one."""

from __future__ import annotations

import itertools
import json
import os
import platform
import resource
import shutil
import socket
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.cli.command import CHECKPOINT_DIR, JSON, LOG_DIR, Arguments, SmallCommand, show
from ddp_runner.cli.hardware.devices import find_gpus, plan_devices
from ddp_runner.cli.hardware.machine import core_count
from ddp_runner.cli.hardware.machine_checks import (
    Check,
    Verdict,
    check_gpus,
    check_memory,
    failure,
    graded,
    ok,
    probe,
    warning,
)
from ddp_runner.cli.python_environment import PYTHON_MIN, REPOSITORY, requirement_lines, unmet
from ddp_runner.cli.several import several_machines
from ddp_runner.config import resolve
from ddp_runner.config.compose import raise_problems
from ddp_runner.config.relations import device_problems, unwritable_reason
from ddp_runner.core.launch_plan import DevicePlan, group_backend
from ddp_runner.core.settings.declaration import Option
from ddp_runner.core.settings.whole_run import CHECKPOINTS, LOGS
from ddp_runner.features.doctor.gpu_checks import check_collectives, gpu_checks
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.kernel.system.reach import LOOPBACK, why_unreachable
from ddp_runner.observe.format import byte_size
from ddp_runner.observe.gpus import CUDA, HIP, ROCR, VisibleGpus
from ddp_runner.observe.terminal import fitted
from ddp_runner.start import COMMAND, IS_CHECKOUT
from ddp_runner.system.torch_versions import (
    TESTED,
    TorchBuild,
    has_nccl2,
    installed_nccl,
    nccl_class,
    torch_build,
    untested,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_CPU, _QUICK = "--cpu", "--quick"
_CPU_RANKS = 2  # that are tried
_SHARED_MEMORY_NAME = "/dev/shm"  # noqa: S108 - the mount that loader workers use
_SHARED_MEMORY = Path(_SHARED_MEMORY_NAME)
_SHARED_MEMORY_BYTES_MIN = 1024**2  # for locks; batches are elsewhere
_DISK_BYTES_MIN = 1024**3
_OPEN_FILES_MIN = 1024
_LABEL_COLUMNS = 22


def _run(arguments: Arguments) -> int:
    """Print every check; 1 if one fails. Raises BadInputError."""
    of_several = _of_several(arguments)
    folders = {
        "logs": arguments.values.get("--log-dir", LOGS),
        "checkpoints": arguments.values.get("--checkpoint-dir", CHECKPOINTS),
    }
    build = torch_build()
    seen = find_gpus(dict(os.environ), build)
    tried = _tried(arguments, seen)
    has_failed = False
    checks = all_checks(folders, seen, build, tried=tried)
    for check in itertools.chain(checks, of_several):
        has_failed = has_failed or check.verdict is Verdict.FAIL
        if JSON.long in arguments.switches:
            print(json.dumps({**asdict(check), "verdict": check.verdict.value}))
        else:
            for line in _lines(check):
                for part in fitted(line, "INFO", _columns(), labels=_LABEL_COLUMNS):
                    show(part)
    return ExitCode.FAILED if has_failed else ExitCode.DONE


def _of_several(arguments: Arguments) -> Iterator[Check]:
    """Return the checks for a run on several machines, if they are asked for. Raises BadInputError."""
    several, given = several_machines(), arguments.values
    if not any(option.long in given for option in several.of_doctor):
        return iter(())
    return several.checks(given, os.environ)


def _columns() -> int | None:
    """Return the width of the terminal; None where standard output is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _lines(check: Check) -> list[str]:
    text = f"{check.verdict.value:<5} {check.name:<15} {check.found}"
    return [text, *([f"{'':<{_LABEL_COLUMNS}}-> {check.cure}"] if check.cure else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The devices on which ranks are tried, and their backend."""

    places: tuple[DevicePlan, ...]
    backend: str
    is_quick: bool = False
    is_shown: bool = False  # a line for people while it lasts


def _tried(arguments: Arguments, seen: VisibleGpus) -> Tried:
    """Choose devices and backend as training would. Raises BadInputError for choices that training would refuse."""
    given = [
        (name, arguments.values[option])
        for option, name in (("--gpus", "run.gpus"), ("--backend", "ddp.backend"))
        if option in arguments.values
    ]
    if _CPU in arguments.switches or not (seen.gpus or "--gpus" in arguments.values):
        given += [("run.device", "cpu"), ("run.nproc_per_node", str(_CPU_RANKS))]
    settings = resolve(command_line=given).settings
    raise_problems(device_problems(settings))
    places = plan_devices(settings, found=seen, cores=core_count())
    is_on_gpu = places[0].visible_index is not None
    return Tried(
        places=places,
        backend=group_backend(settings, is_on_gpu=is_on_gpu),
        is_quick=_QUICK in arguments.switches,
        is_shown=sys.stdout.isatty() and JSON.long not in arguments.switches,
    )


def all_checks(
    folders: dict[str, str], seen: VisibleGpus, build: TorchBuild | None, *, tried: Tried
) -> Iterator[Check]:
    """Every check, in the order in which a cure would be tried."""
    yield check_python()
    yield check_packages()
    yield check_torch()
    yield check_gpus(seen)
    if build is not None:
        yield from check_together(tried, seen, build)
    yield graded("cores", core_count(), least=2, shown=str(core_count()), cure="one rank is used")
    yield check_memory()
    yield check_shared_memory()
    yield check_open_files()
    yield check_loopback()
    yield check_host_name()
    for name, folder in folders.items():
        yield check_folder(name, Path(folder).expanduser())


def check_python() -> Check:
    """The interpreter that ranks run with."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info >= PYTHON_MIN:
        return ok("Python", found)
    return failure("Python", found, "use Python 3.10 or newer")


def check_packages() -> Check:
    """Installed versions against the requirements; nothing is imported."""
    wanted = wanted_packages()
    problems = unmet(wanted)
    if not problems:
        return ok("packages", f"all {len(wanted)} requirements are met")
    names = " ".join(f"'{line}'" for line in wanted if unmet([line]))
    return failure("packages", "; ".join(problems), f"{sys.executable} -m pip install {names}")


def wanted_packages() -> list[str]:
    """Return the package's requirements, from its checkout's file or from its installed metadata."""
    file = REPOSITORY / "requirements.txt"
    if IS_CHECKOUT and file.is_file():
        return requirement_lines(file.read_text(encoding="utf-8"))
    try:
        reported = metadata.requires("ddp_runner") or []
    except metadata.PackageNotFoundError:
        return []
    return [line for line in reported if "extra ==" not in line]


def check_torch() -> Check:
    """The torch build that ranks would import."""
    build = torch_build()
    if build is None:
        return failure("torch", "missing", "pip install torch")
    kind = build.other or (f"CUDA {build.cuda}" if build.cuda else "without CUDA")
    if build.hip:
        kind = f"ROCm {build.hip}"
    found = f"{build.version}, {kind}"
    if build.cuda or build.hip:
        nccl = installed_nccl()
        named = nccl_class(os.environ, has_nccl2=has_nccl2())
        found += f", {f'NCCL {nccl}, ' if nccl else ''}backend nccl is {named}"
    if said := untested(build.version):
        cure = "it is used; a tested one: pip install 'torch<=" + TESTED[-1] + "'"
        return warning("torch", f"{found}; {said}", cure)
    return ok("torch", found)


def check_together(tried: Tried, seen: VisibleGpus, build: TorchBuild) -> Iterator[Check]:
    """The GPUs that were chosen with their libraries, and a repair in small over them."""
    devices = [place.device for place in tried.places]
    probed = None
    if not tried.is_quick:
        with _saying("trying the collectives, which takes some seconds", is_shown=tried.is_shown):
            probed = probe(backend=tried.backend, devices=devices, environment=os.environ)
    gpus = [seen.gpus[p.visible_index] for p in tried.places if p.visible_index is not None]
    library = "RCCL" if build.hip else "NCCL"
    if build.hip:
        rccl, takes_rccl = probed.nccl if probed else "", bool(gpus) and tried.backend != "gloo"
        yield from amd_checks(os.environ, rccl=rccl, takes_rccl=takes_rccl)
    elif gpus:
        nccl, takes_nccl = probed.nccl if probed else "", tried.backend != "gloo"
        yield from gpu_checks(gpus, build, nccl=nccl, takes_nccl=takes_nccl)
    if probed:
        yield check_collectives(tried.backend, devices, probed, library=library)


@contextmanager
def _saying(text: str, *, is_shown: bool) -> Iterator[None]:
    """Have ``text`` stand in the last line of a terminal for the length of the block."""
    if is_shown:
        print(f"      {text}", end="\r", flush=True)
    try:
        yield
    finally:
        if is_shown:
            print(" " * (6 + len(text)), end="\r", flush=True)


def check_shared_memory() -> Check:
    """Room for the locks of loader workers; their batches are in memory files without a name."""
    if not _SHARED_MEMORY.is_dir():
        cure = "data is loaded in the rank itself: num_workers=0"
        return warning(_SHARED_MEMORY_NAME, "missing", cure)
    free_bytes = shutil.disk_usage(_SHARED_MEMORY).free
    return graded(
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
    return graded(
        "open files",
        _OPEN_FILES_MIN if is_unlimited else hard,
        least=_OPEN_FILES_MIN,
        shown="no limit" if is_unlimited else f"{hard} at most",
        cure="raise it: ulimit -Hn 65536, or LimitNOFILE= of the service",
    )


def check_loopback() -> Check:
    """Ranks of one machine meet on 127.0.0.1."""
    if why := why_unreachable(LOOPBACK):
        what, _, cure = why.partition("; ")
        return failure("loopback", f"{LOOPBACK} {what}", cure)
    return ok("loopback", f"{LOOPBACK} answers")


def check_host_name() -> Check:
    """Gloo and NCCL look their own machine up by name when nothing else is set."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return warning(
            "host name",
            f"{name} does not resolve: {error}",
            f"add '127.0.0.1 {name}' to /etc/hosts",
        )
    return ok("host name", f"{name} is {address}")


def check_folder(name: str, folder: Path) -> Check:
    """Check that ``folder`` can be created and written, and has room."""
    reason = unwritable_reason(folder)
    if reason:
        cure = f"choose another folder with --{name.removesuffix('s')}-dir"
        return failure(name, f"{folder} {reason}", cure)
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    return graded(
        name,
        free_bytes,
        least=_DISK_BYTES_MIN,
        shown=f"{folder} can be written, {byte_size(free_bytes)} free",
        cure="free some space, or choose a folder on another disk",
    )


# What ``doctor`` finds out about AMD's GPUs and their libraries. Imports no torch.

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
        yield ok("RCCL", found)
    yield check_variables(environment)


def check_driver(root: Path = _ROOT) -> Check:
    """The kernel's driver."""
    module = root / "sys" / "module" / "amdgpu"
    if not module.is_dir():
        return failure("driver", "the kernel has no amdgpu", "load it: modprobe amdgpu")
    try:
        version = (module / "version").read_text(encoding="utf-8").strip()
    except OSError:  # the kernel's own has none
        version = "the kernel's own"
    return ok("driver", f"amdgpu, {version}")


def check_access(root: Path = _ROOT) -> Check:
    """The device by which programs reach the driver."""
    device = root / "dev" / "kfd"
    if not device.exists():
        cure = "start the container with --device=/dev/kfd --device=/dev/dri"
        return failure("access", "/dev/kfd is not there", cure)
    if not os.access(device, os.R_OK | os.W_OK):
        cure = "add the user to the groups render and video, and log in again"
        return failure("access", "/dev/kfd may not be opened", cure)
    return ok("access", "/dev/kfd can be opened")


def check_variables(environment: Mapping[str, str]) -> Check:
    """Check the variables of the user's environment that matter."""
    found = [f"{name}={environment[name]}" for name in WATCHED if name in environment]
    shown = ", ".join(found) or "none of ROCm's is set"
    if HIP in environment and CUDA in environment and environment[HIP] != environment[CUDA]:
        cure = f"{HIP} counts, and {CUDA} says something else: set one of them"
        return warning("variables", shown, cure)
    return ok("variables", shown)


DECLARATION = SmallCommand(
    usage=f"""Usage:  {COMMAND} doctor [-g 0,1] [--quick] [--json]

Checks everything that training needs; exits with 1 if something is missing.
The last check starts ranks on the chosen devices, interrupts a sum over them,
forms a new group and repeats the sum.""",
    options=(
        Option(
            "--gpus", short="-g", metavar="0,1", says="GPUs to check [all; without any, the CPU]"
        ),
        Option(
            "--backend", metavar="NAME", says="communication library: nccl or gloo [nccl on GPUs]"
        ),
        Option(_CPU, says="check the CPU"),
        Option(_QUICK, says="skip that last check, which takes some seconds"),
        replace(LOG_DIR, says="folder of logs to check [logs]"),
        replace(CHECKPOINT_DIR, says="folder of checkpoints to check [checkpoints]"),
        *several_machines().of_doctor,
        JSON,
    ),
    perform=_run,
)
