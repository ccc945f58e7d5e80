"""What a check of this machine has found: its GPUs and memory, and ranks that try a repair. Imports no torch.

Everybody who starts a run may ask here; ``doctor`` checks more.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ddp_runner import start
from ddp_runner.kernel.processes.memory_limits import container_limit
from ddp_runner.kernel.system.reach import LOOPBACK, why_unreachable
from ddp_runner.observe.format import byte_size
from ddp_runner.system.environment import probe_environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddp_runner.observe.gpus import VisibleGpus

LIMIT_S = 30.0  # for the ranks, once torch is imported
_IMPORT_LIMIT_S = 60.0
_GRACE_S = 15.0  # past its own limit: to end its ranks, and to be ended
_IMPORTED = b"imported\n"
_MEMORY_BYTES_MIN = 2 * 1024**3
_MODULE = "ddp_runner.rank.probe"  # by name: it needs torch, and the command line must not


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


def ok(name: str, found: str) -> Check:
    """Return a check that has found nothing wrong."""
    return Check(name=name, verdict=Verdict.OK, found=found)


def warning(name: str, found: str, cure: str) -> Check:
    """Return a check of something that trains, but worse or not everywhere."""
    return Check(name=name, verdict=Verdict.WARN, found=found, cure=cure)


def failure(name: str, found: str, cure: str) -> Check:
    """Return a check of something that does not train."""
    return Check(name=name, verdict=Verdict.FAIL, found=found, cure=cure)


def graded(name: str, value: float, *, least: float, shown: str, cure: str) -> Check:
    """OK from ``least`` on, a warning below."""
    if value >= least:
        return ok(name, shown)
    return warning(name, shown, cure)


def check_gpus(seen: VisibleGpus) -> Check:
    """The GPUs that ranks would see."""
    if seen.gpus:
        shown = [f"{i}: {gpu.name} {gpu.memory}".strip() for i, gpu in enumerate(seen.gpus)]
        return ok("GPUs", ", ".join(shown))
    if seen.is_unsupported:
        cure = "install a torch for CUDA or ROCm, or train with --cpu"
        return failure("GPUs", seen.why_none, cure)
    if seen.is_surprising:
        cure = "repair the tool that lists GPUs, or train with --cpu"
        return warning("GPUs", seen.why_none, cure)
    return ok("GPUs", f"none, trains on the CPU: {seen.why_none}")


def check_memory() -> Check:
    """Physical memory, cut to the container's limit."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shown = byte_size(total_bytes)
    limit = container_limit()
    if limit is not None and limit.bytes < total_bytes:
        total_bytes = limit.bytes
        shown = f"{byte_size(total_bytes)}, the container's limit"
    cure = "use fewer ranks (-n 1) and smaller batches (-b 4)"
    return graded("memory", total_bytes, least=_MEMORY_BYTES_MIN, shown=shown, cure=cure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """The result of the trial. ``failure`` is empty if all went well; ``nccl`` if there is none."""

    failure: str
    seconds: float = 0.0
    nccl: str = ""


def probe(
    *,
    backend: str,
    devices: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float = LIMIT_S,
    module: str = _MODULE,
) -> Probed:
    """Form, sum, abort, form and sum again, with a rank for each of ``devices``. Blocks until then."""
    if why := why_unreachable(LOOPBACK):
        return Probed(failure=f"{LOOPBACK} {why.partition('; ')[0]}")
    reader, writer = os.pipe()
    spec = json.dumps({"backend": backend, "devices": list(devices), "limit_s": limit_s})
    written = os.memfd_create("probe")
    with os.fdopen(reader, "rb", buffering=0) as pipe, os.fdopen(written, "rb") as output:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, start.__file__, module, str(writer), str(os.getpid()), spec],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(writer,),
                start_new_session=True,  # a Ctrl-C is ours, and ends it in order
                env=probe_environment(environment),
            )
        finally:
            os.close(writer)
        try:
            said = _heard(pipe.fileno(), limit_s=limit_s)
        except BaseException:
            process.terminate()
            raise
        finally:
            _end(process)
        return said or Probed(failure=_why(process.returncode, output.fileno()))


def _heard(pipe: int, *, limit_s: float) -> Probed | None:
    """Return the trial's report; None if it ends without one."""
    deadline_s, text = time.monotonic() + _IMPORT_LIMIT_S, b""
    is_imported = False
    while True:
        left_s = deadline_s - time.monotonic()
        if not select.select([pipe], [], [], max(0.0, left_s))[0]:
            what = (
                "the check itself has not ended" if is_imported else "importing torch has not ended"
            )
            waited_s = limit_s + _GRACE_S if is_imported else _IMPORT_LIMIT_S
            return Probed(failure=f"{what} within {waited_s:g} s")
        packet = os.read(pipe, 65_536)
        text += packet
        if not is_imported and text.startswith(_IMPORTED):
            is_imported, deadline_s = True, time.monotonic() + limit_s + _GRACE_S
        if not packet:
            break
    answer = text.removeprefix(_IMPORTED)
    return Probed(**json.loads(answer)) if answer.endswith(b"}\n") else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """See it end; it ends its ranks, and the kernel does where it cannot."""
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GRACE_S / 3)
            return


def _why(code: int | None, output: int) -> str:
    """Explain the end of a trial without a report, by the last line that it wrote."""
    size = os.fstat(output).st_size
    text = os.pread(output, 4000, max(0, size - 4000)).decode(errors="replace").strip()
    said = text.splitlines()[-1] if text else "it wrote nothing"
    return f"the check ended with {code}: {said}"
