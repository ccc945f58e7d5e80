"""A file with the reports of one rank under another launcher, which outlives restarts.

A supervisor remembers which run this is, why it is not exact, what was learnt of its memory, whether it
has saved anything and where its time went. Without one the ranks of the next restart read it here.
Decides nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ddp_runner.kernel.system.run_files import read_lines
from ddp_runner.kernel.wire.events import (
    CheckpointSaved,
    Faulted,
    FaultTolerated,
    Proved,
    RepairedInPlace,
    TuningChanged,
)
from ddp_runner.kernel.wire.messages import Finished, Message, RestartProgress, decode, encode
from ddp_runner.kernel.wire.packets import WireError
from ddp_runner.observe.files import LineFile

KEPT = (
    TuningChanged,
    Faulted,
    FaultTolerated,
    Finished,
    RestartProgress,
    RepairedInPlace,
    Proved,
    CheckpointSaved,
)

# What the log of an older version says instead.
_OLDER_WORDS = (
    (b'"type": "Adjusted"', b'"type": "TuningChanged"'),
    (b'"remedy": ', b'"action": '),
    (b'"type": "Saved"', b'"type": "CheckpointSaved"'),
)


class RestartLog:
    """Appends the messages of this rank.

    ``learnt`` is the newest tuning that an earlier process reported, ``run_id`` the run it was of.
    Another launch, which is no restart, begins a new file: it may be of another job, and what a
    checkpoint was made with stands in the checkpoint.
    """

    def __init__(
        self, log_dir: Path, *, rank: int, is_restart: bool, warn: Callable[[str], None]
    ) -> None:
        path = restart_log_path(log_dir, rank)
        with contextlib.suppress(OSError):  # its name in older versions
            (log_dir / f"told_rank_{rank}.jsonl").replace(path)
        earlier = list(read_restart_log(path)) if is_restart else []
        tunings = [one for one in earlier if isinstance(one, TuningChanged) and one.tuning]
        self.learnt = tunings[-1] if tunings else None
        self.has_saved = any(isinstance(one, CheckpointSaved) for one in earlier)
        self.run_id = next(
            (x.run_id for x in earlier[::-1] if isinstance(x, RestartProgress) and x.run_id), ""
        )
        if not is_restart:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self._file = LineFile(path, warn=warn)

    def keep(self, message: Message) -> None:
        """Write down what counts after a restart."""
        if isinstance(message, KEPT):
            self._file.append(encode(message) + b"\n")


def restart_log_path(log_dir: Path, rank: int) -> Path:
    """The file of a rank."""
    return log_dir / f"restart_log_rank_{rank}.jsonl"


def read_restart_log(path: Path) -> Iterator[Message]:
    """Yield a rank's reports, oldest first; a torn line is skipped."""
    with contextlib.suppress(OSError):
        for line in read_lines(path):
            packet = line.rstrip(b"\n")
            for older, newer in _OLDER_WORDS:
                packet = packet.replace(older, newer)
            with contextlib.suppress(WireError):
                yield decode(packet)
