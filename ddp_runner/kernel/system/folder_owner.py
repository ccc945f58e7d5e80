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
    """The content of the file: the owner's ``term``, and the nodes that it continued ``without``.

    ``at``: where it listens; None where it does not say. ``after``: the term of the coordinator before, until this one has
    formed a generation.
    """

    term: str
    without: tuple[int, ...]
    at: tuple[str, int] | None = None
    after: str = ""


def new_term() -> str:
    """A name for one coordinator's time, which no other one has."""
    return secrets.token_hex(_TERM_BYTES)


class FolderOwner:
    """The owner of ``folder`` is the newest coordinator that has taken it; ``term`` is this one's.

    A lock is better where the file system carries it from machine to machine. What slips in between a
    look and a rename is found by the checksum in its manifest.
    """

    def __init__(self, folder: Path, term: str, *, at: tuple[str, int] | None = None) -> None:
        self.folder = folder
        self.term = term
        self._at = at

    def take(self, *, without: Sequence[int] = (), after: str = "") -> None:
        """Make this coordinator the folder's owner. ``without`` and ``after``: as of an :class:`Owner`. Raises OSError."""
        lines = [" ".join([self.term, *map(str, without)])]
        if self._at is not None:
            host, port = self._at
            lines.append(f"{host} {port} {after}".rstrip())
        replace_file_synced(self.folder / OWNER_NAME, "".join(f"{one}\n" for one in lines).encode())

    def is_other(self) -> bool:
        """Return whether another coordinator has taken the folder since. A missing or unreadable file proves nothing."""
        found = self.read()
        return found is not None and found.term != self.term

    def read(self) -> Owner | None:
        """Return the owner; None if there is none, or the file cannot be read."""
        try:
            found = read_small(self.folder / OWNER_NAME, bytes_max=_FILE_BYTES_MAX)
            first, *rest = found.decode().splitlines()
            term, *without = first.split()
            host, port, *after = rest[0].split() if rest else ("", "0")
            return Owner(
                term=term,
                without=tuple(map(int, without)),
                at=(host, int(port)) if host else None,
                after="".join(after),
            )
        except (OSError, ValueError):
            return None
