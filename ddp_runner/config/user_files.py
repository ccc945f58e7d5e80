"""Where settings of a person and of a project stand: a file at home, and named ones in ``presets/``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.config.suggest import nearest
from ddp_runner.core.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

PRESETS_FOLDER = "presets"
HOME_FILE = ".config/ddp_runner.yaml"  # in the home folder; lies under all other files


def home_files(environment: Mapping[str, str]) -> tuple[Path, ...]:
    """The file of settings in the home folder that ``environment`` names, if it is there."""
    home = environment.get("HOME", "")
    path = Path(home, HOME_FILE)
    return (path,) if home and path.is_file() else ()


def named_file(name: str) -> Path:
    """The file of settings that is called so, with or without its ending."""
    path = Path(name)
    endings = (path, *(Path(f"{name}{ending}") for ending in (".yaml", ".yml")))
    return next((one for one in endings if one.is_file()), path)


def preset_file(name: str) -> Path:
    """``presets/NAME.yaml`` in the working directory. Raises BadInputError where there is none."""
    folder = Path(PRESETS_FOLDER)
    path = folder / f"{name}.yaml"
    known = sorted(one.stem for one in folder.glob("*.yaml"))
    if name in known and path.is_file():
        return path
    if not known:
        raise BadInputError("--preset", name, f"no such file {path}")
    near = nearest(name, known)
    hint = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
    raise BadInputError("--preset", name, f"no such file {path}; {hint}")
