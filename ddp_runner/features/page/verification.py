"""The checkpoints of a folder as rows of the page's table, and what reading them whole has shown. Draws nothing.

They are read whole when somebody asks for it, one file at a time.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from ddp_runner.checkpoint.catalog import Catalog, Entry
from ddp_runner.checkpoint.manifest import Manifest
from ddp_runner.observe.format import byte_size, count, figure

READING = "is being read"
MONITORED, WRITTEN = "monitored", "written (UTC)"
COLUMNS = ("step", "state", "verified", "size", MONITORED, "epochs", WRITTEN)


class Verifications:
    """The results of verified checkpoint files, by path and time of their manifests."""

    def __init__(self) -> None:
        self._found: dict[tuple[Path, float], str] = {}
        self._is_busy = threading.Lock()

    def of(self, entry: Entry) -> str:
        """Return the result of reading the file: empty if nobody has asked."""
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


def checkpoint_rows(folder: Path, verified: Verifications) -> list[dict[str, Any]]:
    """Each checkpoint of ``folder``, newest first."""
    catalog = Catalog(folder)
    try:
        entries, best = catalog.entries(), catalog.best()
    except OSError:
        return []
    rows = []
    for entry in entries:
        manifest = entry.manifest
        is_best = best is not None and best.step == entry.step
        rows.append(
            {
                "step": count(entry.step),
                "state": entry.problem or ("best" if is_best else "complete"),
                "verified": verified.of(entry) or "-",
                "size": "-" if manifest is None else byte_size(manifest.size_bytes),
                MONITORED: "-" if manifest is None else _monitored(manifest),
                "epochs": "-" if manifest is None else str(manifest.epoch),
                WRITTEN: "-" if manifest is None else manifest.created_utc[:19].replace("T", " "),
            }
        )
    return rows


def _monitored(manifest: Manifest) -> str:
    """The figure that decides which is the best, by name: those of two checkpoints may differ."""
    name = manifest.monitor or "loss"  # of files that do not say
    return "-" if manifest.monitored is None else f"{name} {figure(manifest.monitored)}"
