"""What ``@record`` of torch.distributed.elastic has written about an exception of a rank, as a fault."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddp_runner.core.classify import classify_error
from ddp_runner.core.faults import Fault, FaultKind, Origin
from ddp_runner.system.run_files import reading

_FILE_BYTES_MAX = 1_000_000
# What an exception may have led to in the same rank, and may not stand for.
_EXPLAINED = (FaultKind.RANK_EXITED, FaultKind.RANK_KILLED)


def error_file(log_file: Path) -> Path:
    """Where a rank is to write it, beside its log; TORCHELASTIC_ERROR_FILE of that rank and attempt."""
    return log_file.absolute().with_name(f"{log_file.stem}_error.json")


def recorded_fault(path: Path, *, rank: int, step: int, hidden: Sequence[str] = ()) -> Fault | None:
    """What stands in the file, as of when it was written; None where there is none that can be read.

    ``hidden``: secrets, which a user's exception may hold.
    """
    try:
        written_utc_s = path.stat().st_mtime
        with reading(path) as file:
            message = json.loads(file.read(_FILE_BYTES_MAX))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    text, trace = str(message), ""
    if isinstance(message, dict):
        text, extra = str(message.get("message", "")), message.get("extraInfo")
        trace = str(extra.get("py_callstack", "")) if isinstance(extra, dict) else ""
    first_line = text.strip().partition("\n")[0]
    name, _, said = text.partition(": ")
    ago_s = max(0.0, time.time() - written_utc_s)
    fault = Fault(
        kind=classify_error(type_name=name, text=said, aborted=False),
        rank=rank,
        step=step,
        cause=first_line or f"rank {rank} has raised an error",
        detail=trace,
        at_ns=time.monotonic_ns() - int(ago_s * 1e9),
    )
    return fault.without(hidden).bounded()


def explained(faults: Sequence[Fault], recorded: Sequence[Fault]) -> list[Fault]:
    """``faults`` of an attempt with what was recorded: a rank that has exited did so because of its exception.

    A rank that somebody else has killed was; one that was ended because of others, and had raised before, counts.
    """
    by_rank = {fault.rank: fault for fault in recorded}
    found = []
    for fault in faults:
        said = by_rank.pop(fault.rank, None)
        if said is None or fault.origin is Origin.OUTSIDE:
            found.append(fault)
        elif fault.kind in _EXPLAINED:
            found.append(said)
        else:  # it has said so itself, with all of the traceback
            found.append(replace(fault, at_ns=min(fault.at_ns, said.at_ns)))
    return found + list(by_rank.values())
