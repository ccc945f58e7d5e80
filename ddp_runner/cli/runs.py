"""Finds the run that a small command is about: the folder that is named, the run's name, or the newest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ddp_runner.config.run_names import at_home, is_name
from ddp_runner.core.settings.whole_run import CHECKPOINTS, LATEST, LOGS
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.run_files import read_small
from ddp_runner.system.followed_run import NAME, followed_run

if TYPE_CHECKING:
    from ddp_runner.cli.command import Arguments

_CONFIG_BYTES_MAX = 1 << 20
_POINTER_BYTES_MAX = 256
_RECORDS = ("summary.json", "status.json")


def latest_logs(root: Path = Path(LOGS)) -> Path | None:
    """The log folder of the newest run below ``root``; None where nothing points to one."""
    latest = root / LATEST
    try:
        if latest.is_symlink():
            name = str(latest.readlink())
        else:
            name = read_small(latest, bytes_max=_POINTER_BYTES_MAX).decode().strip()
    except (OSError, ValueError):
        return None
    return root / name if is_name(name) and (root / name).is_dir() else None


def log_dir_of(arguments: Arguments) -> Path:
    """The log folder that ``-l`` or ``--name`` asks for, else the newest run's. Raises BadInputError."""
    asked = arguments.values.get("--log-dir")
    if asked is not None:
        folder = at_home(asked)
        if not folder.is_dir():
            raise BadInputError("--log-dir", asked, _no_folder(folder))
        return folder if _holds_a_run(folder) else latest_logs(folder) or folder
    if (name := _asked_name(arguments)) is not None:
        return _folder_of(name, Path(LOGS, name))
    # Without names, runs wrote into the folder itself.
    newest = latest_logs() or (Path(LOGS) if _holds_a_run(Path(LOGS)) else _newest_followed())
    if newest is None:
        raise BadInputError("--log-dir", LOGS, "holds no run yet; --log-dir names another folder")
    return newest


def checkpoint_dir_of(arguments: Arguments) -> Path:
    """The folder that ``-c`` or ``--name`` asks for, else the newest run's. Raises BadInputError."""
    asked = arguments.values.get("--checkpoint-dir")
    if asked is not None:
        folder = at_home(asked)
        if not folder.is_dir():
            raise BadInputError("--checkpoint-dir", asked, _no_folder(folder))
        return folder
    if (name := _asked_name(arguments)) is not None:
        return _folder_of(name, Path(CHECKPOINTS, name))
    newest = latest_logs()
    if newest is None:
        folder = Path(CHECKPOINTS)
    else:
        folder = _recorded(newest) or Path(CHECKPOINTS, newest.name)
    if not folder.is_dir():
        where = ": no run has saved here; give the folder of a run"
        if newest is not None:
            where = f": run {newest.name} saves there; give another folder, or --name"
        elif (logs := _newest_followed()) is not None:
            where = elsewhere(logs, is_of_checkpoints=True)
        raise BadInputError("--checkpoint-dir", folder, f"no such folder{where}")
    return folder


def _no_folder(path: Path) -> str:
    return "is a file; give a folder" if path.exists() else "no such folder"


def elsewhere(logs: Path, *, is_of_checkpoints: bool = False) -> str:
    """``; this machine followed a run of node0, where it is in /data/logs``; empty where it has not."""
    found = followed_run(logs)
    if found is None:
        return ""
    folder = found.checkpoint_dir if is_of_checkpoints else found.log_dir
    return f"; this machine followed a run of {found.host}, where it is in {folder}"


def _newest_followed() -> Path | None:
    notes = sorted(Path(LOGS).glob(f"*/{NAME}"), key=lambda path: path.stat().st_mtime)
    return notes[-1].parent if notes else None


def _asked_name(arguments: Arguments) -> str | None:
    name = arguments.values.get("--name")
    if name is not None and not is_name(name):
        raise BadInputError("--name", name or "''", "is not the name of a run")
    return name


def _folder_of(name: str, folder: Path) -> Path:
    if folder.is_dir():
        return folder
    root = folder.parent
    if where := elsewhere(Path(LOGS, name), is_of_checkpoints=root == Path(CHECKPOINTS)):
        raise BadInputError("--name", name, f"no such folder {folder}{where}")
    names = sorted(one.name for one in root.iterdir() if one.is_dir()) if root.is_dir() else []
    known = [one for one in names if is_name(one)]
    there = f"; there are {', '.join(known[:8])}" if known else ""
    raise BadInputError("--name", name, f"no such folder {folder}{there}")


def _holds_a_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in _RECORDS)


def _recorded(logs: Path) -> Path | None:
    """Return where the newest run in ``logs`` saves, by its config.yaml; None if that cannot be read."""
    try:
        text = read_small(logs / "config.yaml", bytes_max=_CONFIG_BYTES_MAX)
        found = yaml.safe_load(text)["run"]["checkpoint_dir"]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return None
    return Path(found) if isinstance(found, str) else None
