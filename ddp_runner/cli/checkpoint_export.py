"""``checkpoints export``: a checkpoint's weights as files for other programs, made by a child with torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from ddp_runner import start
from ddp_runner.cli.output import show
from ddp_runner.core.exits import ExitCode
from ddp_runner.core.faults import BadInputError
from ddp_runner.supervisor.processes.environment import probe_environment

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ddp_runner.checkpoint.catalog import Catalog, Entry

FORMATS = ("safetensors", "pt")
DTYPES = ("fp32", "bf16", "fp16")
_MODULE = "ddp_runner.rank.export"  # by name: it needs torch, and the command line must not


def export(
    catalog: Catalog, entry: Entry, *, to: Path, values: Mapping[str, str], average: bool
) -> int:
    """Write the weights into ``to``, an empty or new folder; the exit code. Raises BadInputError."""
    form, dtype = values.get("--format", "safetensors"), values.get("--dtype", "")
    if form not in FORMATS:
        raise BadInputError("--format", form, f"must be {' or '.join(FORMATS)}")
    if dtype and dtype not in DTYPES:
        raise BadInputError("--dtype", dtype, f"must be {', '.join(DTYPES)}")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise BadInputError("--to", to, "must be a new or an empty folder")
    if (problem := catalog.verify(entry)) is not None:
        raise BadInputError(str(entry.path), "", f"cannot be trusted: {problem}")
    settings = None if entry.manifest is None else entry.manifest.about.get("settings")
    spec = {
        "path": str(entry.path),
        "to": str(to),
        "format": form,
        "dtype": dtype,
        "average": average,
        "init_from": values.get("--init-from", ""),
        "settings": settings,
    }
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as pipe:
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, start.__file__, _MODULE, str(writer), str(os.getpid())],
                stdin=subprocess.PIPE,
                pass_fds=(writer,),
                env=probe_environment(os.environ),
            )
        finally:
            os.close(writer)
        process.communicate(json.dumps(spec).encode())
        answer = pipe.read()
    try:
        said = json.loads(answer)
    except ValueError:
        show(f"the export ended with {process.returncode}")
        return ExitCode.FAILED
    if said.get("refused"):
        raise BadInputError(str(entry.path), "", said["refused"])
    for line in said["lines"]:
        show(line)
    return ExitCode.DONE
