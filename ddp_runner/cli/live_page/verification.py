"""Reads checkpoints whole when somebody asks for it, one file at a time, and remembers what came of it."""

from __future__ import annotations

import threading
from pathlib import Path

from ddp_runner.checkpoint.catalog import Catalog, Entry

READING = "is being read"


class Verifications:
    """What is known of the content of checkpoint files, by path and time of their manifests."""

    def __init__(self) -> None:
        self._found: dict[tuple[Path, float], str] = {}
        self._is_busy = threading.Lock()

    def of(self, entry: Entry) -> str:
        """What reading it has shown: empty where nobody has asked."""
        return self._found.get(_key(entry), "")

    def begin(self, folder: Path) -> bool:
        """Read what has not been read, in a thread. False where one is at it already."""
        if not self._is_busy.acquire(blocking=False):
            return False
        threading.Thread(target=self._verify, args=(folder,), daemon=True).start()
        return True

    def _verify(self, folder: Path) -> None:
        try:
            catalog = Catalog(folder)
            for entry in catalog.entries():
                if self.of(entry):
                    continue
                self._found[_key(entry)] = READING
                try:
                    problem = catalog.verify(entry)
                except (OSError, MemoryError) as error:
                    problem = f"cannot be read: {error}"
                self._found[_key(entry)] = problem or "yes"
        except OSError:
            pass  # the table says that there is nothing
        finally:
            self._is_busy.release()


def _key(entry: Entry) -> tuple[Path, float]:
    try:
        return entry.path, entry.path.lstat().st_mtime
    except OSError:
        return entry.path, 0.0
