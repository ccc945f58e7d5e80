"""Knows the folder of each attempt: the logs of its ranks, and what ``@record`` of torch.distributed.elastic writes there."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_runner.kernel.rules.classify import classify_error
from ddp_runner.kernel.rules.faults import Fault
from ddp_runner.kernel.system.run_files import reading

_FILE_BYTES_MAX = 1_000_000


class AttemptFiles:
    """Names, makes and reads the files of all attempts, which are on this machine."""

    def __init__(self, log_dir: str) -> None:
        self._log_dir = log_dir

    def folder(self, attempt: int) -> Path:
        """Return where the ranks of an attempt write."""
        return Path(self._log_dir, f"attempt_{attempt}")

    def log(self, attempt: int, rank: int) -> Path:
        """Return the log of a rank in an attempt."""
        return self.folder(attempt) / f"rank_{rank}.log"

    def name(self, attempt: int, rank: int) -> str:
        """Return the name of such a log within the folder of logs, of whichever machine."""
        return f"attempt_{attempt}/rank_{rank}.log"

    def make(self, attempt: int, ranks: Sequence[int]) -> None:
        """Make the folder of an attempt; errors that an earlier launch has left in it go."""
        self.folder(attempt).mkdir(exist_ok=True)
        for rank in ranks:
            error_file(self.log(attempt, rank)).unlink(missing_ok=True)

    def recorded(
        self, attempt: int, steps: Mapping[int, int], *, hidden: Sequence[str]
    ) -> list[Fault]:
        """Return the errors that ranks of an attempt have left there. ``steps``: those that each rank has done."""
        found = (
            recorded_fault(error_file(self.log(attempt, rank)), rank=rank, step=step, hidden=hidden)
            for rank, step in steps.items()
        )
        return [fault for fault in found if fault is not None]


def error_file(log_file: Path) -> Path:
    """Return where a rank is to write its error, beside its log; TORCHELASTIC_ERROR_FILE of that rank and attempt."""
    return log_file.absolute().with_name(f"{log_file.stem}_error.json")


def recorded_fault(path: Path, *, rank: int, step: int, hidden: Sequence[str] = ()) -> Fault | None:
    """Return what stands in the file, as of when it was written; None where there is none that can be read.

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
