"""Owns status.json: the newest state of the run, readable whole at every moment. Never raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_runner.observe.files import Outage, Warn, encode_record
from ddp_runner.system.run_files import replace_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class StatusFile:
    """Replaces status.json; not synced, since it is worth nothing after a power cut."""

    def __init__(self, path: Path, *, warn: Warn | None = None) -> None:
        self._path = path
        self._outage = Outage(path, warn)

    @property
    def writes_lost(self) -> int:
        """How many writes a failing disk has cost."""
        return self._outage.lost_total

    def write(self, record: Mapping[str, object]) -> bool:
        """Replace the file by ``record``; False where the old one had to stay."""
        try:
            replace_file(self._path, encode_record(record))
        except OSError as error:
            self._outage.failed(error)
            return False
        self._outage.ended()
        return True
