"""The checkpoints of a folder as rows of the page's table. Reads names and manifests, no content, and draws nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.checkpoint.manifest import Manifest
from ddp_runner.cli.live_page.verification import Verifications
from ddp_runner.observe.format import byte_size, count, figure

MONITORED, WRITTEN = "monitored", "written (UTC)"
COLUMNS = ("step", "state", "verified", "size", MONITORED, "epoch", WRITTEN)


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
                "epoch": "-" if manifest is None else str(manifest.epoch),
                WRITTEN: "-" if manifest is None else manifest.created_utc[:19].replace("T", " "),
            }
        )
    return rows


def _monitored(manifest: Manifest) -> str:
    """The figure that decides which is the best, by name: those of two checkpoints may differ."""
    name = manifest.monitor or "loss"  # of files that do not say
    return "-" if manifest.monitored is None else f"{name} {figure(manifest.monitored)}"
