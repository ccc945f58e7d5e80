"""Whose a checkpoint folder is, among coordinators that may know nothing of each other: a file in it says so."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_runner.system.run_files import read_small, replace_file_synced

OWNER_NAME = ".owner"
_TERM_BYTES = 16
_FILE_BYTES_MAX = 8 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """What stands in the file: whose ``term`` it is, and which nodes it went on ``without``."""

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
        """From now on the folder is this one's. ``without``: nodes that the run goes on without. Raises OSError."""
        text = " ".join([self.term, *map(str, without)])
        replace_file_synced(self.folder / OWNER_NAME, f"{text}\n".encode())

    def is_other(self) -> bool:
        """Whether another one has taken it since. A file that is gone, or cannot be read, says nothing."""
        found = self.read()
        return found is not None and found.term != self.term

    def read(self) -> Owner | None:
        """Who has taken it; None where nobody has, or that cannot be read."""
        try:
            found = read_small(self.folder / OWNER_NAME, bytes_max=_FILE_BYTES_MAX)
            term, *without = found.decode().split()
            return Owner(term=term, without=tuple(map(int, without)))
        except (OSError, ValueError):
            return None
