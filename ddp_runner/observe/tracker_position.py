"""How far a tracker of a run is, with its id and link: a file in the log folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_runner.system.run_files import from_json, read_small


def position_path(log_dir: Path, name: str) -> Path:
    """Return the path of a tracker's position."""
    return log_dir / f".tracker_{name}.json"


def read_position(path: Path) -> Mapping[str, Any]:
    """Return the stored position; empty if there is none, or it is of no use."""
    try:
        record = from_json(read_small(path))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
