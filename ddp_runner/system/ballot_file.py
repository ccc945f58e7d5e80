"""The file in a machine's own checkpoint folder that keeps its :class:`~ddp_runner.core.machines.majority.Record`."""

from __future__ import annotations

import secrets
from pathlib import Path

from ddp_runner.core.machines.majority import Record
from ddp_runner.kernel.system.run_files import read_small, replace_file_synced
from ddp_runner.kernel.wire import packets as wire

NAME = ".votes"
_NAME_BYTES = 8
_KINDS: dict[str, type[Record]] = {"Record": Record}


class BallotFile:
    """Owned by one supervisor. A file that is not there, or cannot be read, is that of a new machine."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._new_name = secrets.token_hex(_NAME_BYTES)

    def read(self) -> Record:
        """Return the record of this machine."""
        try:
            found: Record = wire.decode(read_small(self.path), _KINDS)
        except (OSError, ValueError, TypeError):
            return Record(machine=self._new_name)
        return found

    def write(self, record: Record) -> None:
        """Keep ``record`` before anything is said or done by it. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file_synced(self.path, wire.encode(record))
