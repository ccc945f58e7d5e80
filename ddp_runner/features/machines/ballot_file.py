"""The file in a machine's own checkpoint folder that keeps its :class:`~ddp_runner.features.machines.rules.majority.Record`."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from ddp_runner.features.machines.rules.majority import Record
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.run_files import read_small, replace_file_synced
from ddp_runner.kernel.wire import packets as wire

NAME = ".votes"
_NAME_BYTES = 8
_KINDS: dict[str, type[Record]] = {"Record": Record}


class BallotFile:
    """Owned by one supervisor, which keeps the record in memory once it has read it.

    ``yields_to``: where the coordinator listens to which this machine has given way before it had formed anything.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._new_name = secrets.token_hex(_NAME_BYTES)
        self._kept: Record | None = None
        self.yields_to: tuple[str, int] | None = None

    def read(self) -> Record:
        """Return the record of this machine; one without a file is new. Raises OSError."""
        # A machine whose record cannot be read is no new machine: it would vote twice in one ballot.
        if self._kept is None:
            try:
                self._kept = wire.decode(read_small(self.path), _KINDS)
            except FileNotFoundError:
                self._kept = Record(machine=self._new_name)
            except (ValueError, TypeError) as error:
                raise OSError(errno.EINVAL, "is no record of votes", str(self.path)) from error
        return self._kept

    @property
    def may_be_written(self) -> bool:
        """Return whether the folder, or the one that it would be made in, lets this user write."""
        folders = (self.path.parent, *self.path.parent.absolute().parents)
        return os.access(next(one for one in folders if one.exists()), os.W_OK | os.X_OK)

    def write(self, record: Record) -> None:
        """Keep ``record`` before anything is said or done by it. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file_synced(self.path, wire.encode(record))
        self._kept = record


def unreadable(file: BallotFile, error: OSError) -> BadInputError:
    """Return the error of a machine that cannot coordinate, as its record of votes cannot be read."""
    reason = error.strerror or str(error)
    return BadInputError(
        "run.checkpoint_dir", file.path, f"the votes of this machine cannot be read: {reason}"
    )
