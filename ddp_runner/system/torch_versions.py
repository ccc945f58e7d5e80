"""The differences between the supported versions of torch. Imports no torch.

Every place that depends on the version stands in :data:`DIFFERENCES`, with the test that finds it. A test of
the feature is used wherever one can be made; a comparison of version numbers is used for what people read,
and nowhere else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# ``tests/run --torch VERSION`` has run on each of them; benchmarks/RESULTS.md has the table.
TESTED = ("2.6.0", "2.9.1", "2.13.0", "2.14.1", "2.15.0")

# Which class the backend ``nccl`` is. torch reads it when torch.distributed is imported.
USE_NCCL2 = "TORCH_DIST_USE_NCCL2"
NCCL2 = "ProcessGroupNCCL2"  # what it is called in torch/distributed/distributed_c10d.py, where there is one
LEGACY = "ProcessGroupNCCL"
_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_NCCL_MIN = (2, 22)
_NCCL_BROKEN = ((2, 28, 3), (2, 28, 8))  # from, to
_NCCL_WANTED = "2.28.9"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference. ``since`` is the first version that has it; ``test`` is how the code finds it, and ``place`` where."""

    since: str
    what: str
    test: str
    place: str


DIFFERENCES = (
    Difference(
        since="2.7",
        what="TCPStore with libuv takes a socket that listens already; before, only the store without libuv does",
        test="it raises NotImplementedError",
        place="kernel/group/tcp_store.py",
    ),
    Difference(
        since="2.7",
        what="DistributedDataParallel takes init_sync=False; before, it always sent the state when it was made",
        test="its __init__ has a parameter of that name",
        place="kernel/replica/replica.py",
    ),
    Difference(
        since="2.7",
        what="_abort_process_group() without a group ends the default one, and of any backend; before, it needs its name, and NCCL",
        test="none is needed: the group is named, and what is left is destroyed",
        place="kernel/group/group.py",
    ),
    Difference(
        since="2.9",
        what="torch.optim.Muon exists",
        test="torch.optim has the name; without torch: the file torch/optim/_muon.py",
        place="training/components/optimizer.py, cli/planning.py",
    ),
    Difference(
        since="2.14",
        what="ProcessGroupNCCL2 exists: as backend nccl2, and as nccl where TORCH_DIST_USE_NCCL2=1",
        test="torch/distributed/distributed_c10d.py has the name",
        place="cli/planning.py, features/doctor/doctor.py",
    ),
    Difference(
        since="2.15",
        what="the backend nccl is ProcessGroupNCCL2, unless TORCH_DIST_USE_NCCL2=0",
        test="none is needed: the variable is 0 in every run, which older versions ignore",
        place="system/environment.py",
    ),
)


def untested(version: str) -> str:
    """One line about a torch that is newer than every one that was tested; else empty."""
    newest = TESTED[-1]
    if _numbers(version) <= _numbers(newest):
        return ""
    return f"torch {version} is newer than {newest}, the newest that this package was tested with"


def nccl_class(environment: Mapping[str, str], *, has_nccl2: bool) -> str:
    """The class that the backend ``nccl`` is in a run which is started in ``environment``."""
    is_new = has_nccl2 and environment.get(USE_NCCL2, "0") != "0"
    return NCCL2 if is_new else LEGACY


def _numbers(version: str) -> tuple[int, int]:
    """``2.15.0+cu132`` -> ``(2, 15)``: a patch release changes nothing that is known here."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The installed torch, read from its files. ``cuda`` is "" for a build without, ``hip`` for one without ROCm.

    ``other`` names the GPUs that it was built for where they are of neither, as ``XPU 20250101``.
    """

    version: str
    cuda: str
    hip: str = ""
    other: str = ""


def torch_build() -> TorchBuild | None:
    """The torch that a rank would import; None if there is none."""
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # a module that was put into sys.modules by hand
        return None
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    xpu = _quoted(text, "xpu")
    return TorchBuild(
        version=_quoted(text, "__version__"),
        cuda=_quoted(text, "cuda"),
        hip=_quoted(text, "hip"),
        other=f"XPU {xpu}" if xpu else "",
    )


def _quoted(text: str, name: str) -> str:
    found = re.search(rf"^{name}\s*(?::[^=\n]+)?=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE)
    return found.group(1) if found else ""


def torch_has(module: str) -> bool:
    """Return whether the installed torch includes this module; True if there is no torch to ask."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    return Path(spec.origin).parent.joinpath(*module.split(".")).with_suffix(".py").is_file()


def has_nccl2() -> bool:
    """Return whether the installed torch has NCCL's newer class, ProcessGroupNCCL2."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    file = Path(spec.origin).parent / "distributed" / "distributed_c10d.py"
    try:
        return NCCL2 in file.read_text(encoding="utf-8")
    except OSError:
        return False


def installed_nccl() -> str:
    """The version of the wheel that torch loads; "" where torch has its own inside."""
    # Reads mails and archives: a tenth of the time in which the command line is imported.
    from importlib import metadata  # noqa: PLC0415

    for name in _WHEELS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTrouble:
    """A version of NCCL on which no repair can rely, in words, and the cure."""

    what: str
    cure: str


def nccl_trouble(version: str, *, cuda: str) -> NcclTrouble | None:
    """Return what is wrong with this version's abort; None if nothing is known."""
    numbers = version_numbers(version)
    low, high = _NCCL_BROKEN
    if numbers >= _NCCL_MIN and not low <= numbers[:3] <= high:
        return None
    which = "2.28.3 to 2.28.8" if numbers >= _NCCL_MIN else "versions before 2.22"
    wheel = f"nvidia-nccl-cu{version_numbers(cuda)[0]}"
    return NcclTrouble(
        what=f"{version}: {which} are known to abort badly, so that a repair may hang",
        cure=f"pip install '{wheel}>={_NCCL_WANTED}', or a torch that brings a newer one",
    )


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, in order; (0,) without any."""
    return tuple(int(part) for part in re.findall(r"\d+", version)) or (0,)
