"""Has ranks try a repair ahead of any run (rank.probe), within a limit, and ends all of it."""

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
from typing import TYPE_CHECKING

from ddp_runner import start
from ddp_runner.cli.checks import Check, Verdict
from ddp_runner.supervisor.processes.environment import probe_environment
from ddp_runner.system.reach import LOOPBACK, why_unreachable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LIMIT_S = 30.0  # for the ranks, once torch is imported
_IMPORT_LIMIT_S = 60.0
_GRACE_S = 15.0  # past its own limit: to end its ranks, and to be ended
_IMPORTED = b"imported\n"
_MODULE = "ddp_runner.rank.probe"  # by name: it needs torch, and the command line must not
_NAME = "collectives"


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
            what = "the check itself has not ended" if is_imported else "importing torch: no end"
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
        found = f"{who}: all-reduce, abort, second forming in {probed.seconds:.1f} s"
        return Check(name=_NAME, verdict=Verdict.OK, found=found)
    cure = (
        "NCCL_DEBUG=WARN shows more; try NCCL_P2P_DISABLE=1, fewer GPUs (-g 0), or --backend gloo"
        if is_nccl
        else "end what stops processes here or forbids connections on 127.0.0.1, and try again"
    )
    return Check(name=_NAME, verdict=Verdict.FAIL, found=f"{who}: {probed.failure}", cure=cure)
