"""A file in a checkpoint folder that names its owner, for coordinators that may not know of each other."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.kernel.system.run_files import read_small, replace_file_synced

OWNER_NAME = ".owner"
_TERM_BYTES = 16
_FILE_BYTES_MAX = 8 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The content of the file: the owner's ``term``, and the nodes that it continued ``without``."""

    term: str
    without: tuple[int, ...]


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

    def take(self, *, without: Sequence[int] = ()) -> None:
        """Make this coordinator the folder's owner. ``without``: nodes that the run continues without. Raises OSError."""
        text = " ".join([self.term, *map(str, without)])
        replace_file_synced(self.folder / OWNER_NAME, f"{text}\n".encode())

    def is_other(self) -> bool:
        """Return whether another coordinator has taken the folder since. A missing or unreadable file proves nothing."""
        found = self.read()
        return found is not None and found.term != self.term

    def read(self) -> Owner | None:
        """Return the owner; None if there is none, or the file cannot be read."""
        try:
            found = read_small(self.folder / OWNER_NAME, bytes_max=_FILE_BYTES_MAX)
            term, *without = found.decode().split()
            return Owner(term=term, without=tuple(map(int, without)))
        except (OSError, ValueError):
            return None
