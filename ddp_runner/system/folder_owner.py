"""Whose a checkpoint folder is, among coordinators that may know nothing of each other: a file in it says so."""

from __future__ import annotations

import secrets
from pathlib import Path

from ddp_runner.system.run_files import read_small, replace_file_synced

OWNER_NAME = ".owner"
_TERM_BYTES = 16
_FILE_BYTES_MAX = 256


def new_term() -> str:
    """A name for one coordinator's time, which no other one has."""
    return secrets.token_hex(_TERM_BYTES)


class FolderOwner:
    """The owner of ``folder`` is the newest coordinator that has taken it; ``term`` is this one's.

    A lock is better where the file system carries it from machine to machine. What slips in between a
    look and a rename is found by the checksum in its manifest.
    """

    def __init__(self, folder: Path, term: str) -> None:
        self.folder = folder
        self.term = term

    def take(self) -> None:
        """From now on the folder is this one's. Raises OSError."""
        replace_file_synced(self.folder / OWNER_NAME, f"{self.term}\n".encode())

    def is_other(self) -> bool:
        """Whether another one has taken it since. A file that is gone, or cannot be read, says nothing."""
        try:
            found = read_small(self.folder / OWNER_NAME, bytes_max=_FILE_BYTES_MAX)
        except OSError:
            return False
        return found.strip() != self.term.encode()
