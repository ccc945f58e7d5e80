"""Finds out if two machines share a folder: one puts a file there under an unguessable name.

A path proves nothing: it may be the same on machines that share nothing.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_PREFIX = ".probe-"


def is_shared(folder: Path, term: str) -> bool:
    """Return whether ``folder`` on this machine contains the probe of the coordinator with that term."""
    # A path from another machine: nothing but a plain word becomes part of a name.
    return term.isalnum() and _probe(folder, term).is_file()


class FolderProbe:
    """The coordinator's file in ``folder``, from :meth:`write` to :meth:`remove`."""

    def __init__(self, folder: Path, term: str) -> None:
        self._folder = folder
        self._path = _probe(folder, term)
        self._made: list[Path] = []  # folders that were not there before, the innermost first

    def write(self) -> None:
        """Put it there, and the folder if need be. Where that cannot be, no folder is shared."""
        missing = []
        for one in (self._folder, *self._folder.parents):
            if one.exists():
                break
            missing.append(one)
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._made = missing
            self._path.touch()

    def remove_others(self) -> None:
        """Remove the probes that killed coordinators have left; the folder belongs to this one now."""
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f"{_PREFIX}*"):
                if path != self._path:
                    path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Leave the folder as it was, also where nothing else has come into it."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            for folder in self._made:
                folder.rmdir()


def _probe(folder: Path, term: str) -> Path:
    return folder / f"{_PREFIX}{term}"
