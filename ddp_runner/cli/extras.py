"""Checks that this machine has what trackers and the page need: packages and keys. Imports none of them."""

from __future__ import annotations

import netrc
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner import start
from ddp_runner.config.compose import raise_problems
from ddp_runner.config.sources import PRESETS_FOLDER
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.secrets import GIVEN_BY_FILE, is_secret

if TYPE_CHECKING:
    from ddp_runner.core.settings import Settings


KEY = "log.trackers"
_NEEDS: Mapping[str, Mapping[str, str]] = {  # of each tracker: modules, and what has them
    "tensorboard": {"tensorboard": "tensorboard>=2.14,<3"},
    "wandb": {"wandb": "wandb>=0.18,<1"},
    "mlflow": {"mlflow": "mlflow-skinny>=3,<4"},
}
_OF_DATABASES = {"sqlalchemy": "sqlalchemy>=2,<3", "alembic": "alembic>=1.10,<2"}
_SERVERS = ("http://", "https://", "databricks")
_LAUNCHER = "launch_training.sh"
_OFFLINE = ("offline", "disabled", "dryrun")


def take_keys(files: Sequence[Path]) -> tuple[str, ...]:
    """Set the keys of a ``.env`` next to the configuration that the environment lacks; return a line that names it."""
    # Beside the file that launch() has written others may have put theirs: it lies in /tmp. A preset's
    # folder is one of the working folder.
    by_program = Path(os.environ.get(start.LAUNCHED_VARIABLE, ""))
    by_hand = [one for one in files if one != by_program and one.parent != Path(PRESETS_FOLDER)]
    keys = env_keys(by_hand, os.environ)
    os.environ.update(keys)
    if keys:  # beside those of a run that has started this one
        before = [name for name in os.environ.get(GIVEN_BY_FILE, "").split(",") if name]
        os.environ[GIVEN_BY_FILE] = ",".join(dict.fromkeys([*before, *keys]))
    return (f"{ENV_FILE}: {', '.join(sorted(keys))}",) if keys else ()


def refuse_missing(settings: Settings, environment: Mapping[str, str]) -> None:
    """Raise BadInputError for a tracker that is not installed, or could not log in."""
    names = settings.log.trackers
    needs = {name: _needs(name, environment) for name in names}
    problems = [
        BadInputError(KEY, name, how_to_install(name, *needed.values(), extra=name))
        for name, needed in needs.items()
        if any(find_spec(module) is None for module in needed)
    ]
    if not problems and "wandb" in names and not _can_log_in(environment):
        expected = "has no key: set WANDB_API_KEY (also in .env), or WANDB_MODE=offline"
        problems.append(BadInputError(KEY, "wandb", expected))
    raise_problems(problems)


def _needs(name: str, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the modules that a tracker needs, with their packages."""
    is_local = not environment.get("MLFLOW_TRACKING_URI", "").startswith(_SERVERS)
    more = _OF_DATABASES if name == "mlflow" and is_local else {}
    return {**_NEEDS.get(name, {}), **more}


def how_to_install(what: str, *packages: str, extra: str) -> str:
    """Return that ``what`` is not installed, with the commands that install it."""
    wanted = f"`pip install 'ddp_runner[{extra}]'`"
    if start.IS_CHECKOUT:
        wanted = (
            f"`{_launcher()} environment --extra {extra}`, or `pip install {shlex.join(packages)}`"
        )
    return f"{what} is not installed for {sys.executable}: {wanted}"


def _launcher() -> str:
    """Return the checkout's script as it was typed, or where it lies: only it has the word ``environment``."""
    if start.COMMAND.endswith(_LAUNCHER):
        return start.COMMAND
    return shlex.quote(str(Path(start.PACKAGE_PARENT, _LAUNCHER)))


def page_missing() -> str:
    """Return the package that the live page lacks, with the command that installs it; empty if it is there."""
    if find_spec("nicegui") is not None:
        return ""
    return how_to_install("NiceGUI", "nicegui>=3,<4", extra="page")


def _can_log_in(environment: Mapping[str, str]) -> bool:
    """Return whether W&B finds a key in one of its places, or needs none."""
    if environment.get("WANDB_MODE", "") in _OFFLINE or environment.get("WANDB_API_KEY"):
        return True
    path = environment.get("NETRC") or str(Path("~/.netrc").expanduser())
    host = environment.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2]
    try:
        return netrc.netrc(path).authenticators(host.partition("/")[0]) is not None
    except (OSError, netrc.NetrcParseError):
        return False


# Keys of services from a ``.env`` file that lies beside the configuration. What is set already
# wins.

ENV_FILE = ".env"
_BYTES_MAX = 64 * 1024
_LINE = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*)", re.ASCII)
_OF_TRACKERS = ("WANDB_", "MLFLOW_")  # a project, an address: no secrets, and of use nowhere else


def env_keys(files: Sequence[Path], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add: keys of the ``.env`` next to each of ``files``, or in the working folder.

    Names with KEY, TOKEN, SECRET or PASSWORD, and those of W&B and MLflow; other lines are left alone, and so is
    what ``environment`` has, even if it is empty. Raises BadInputError for a file that cannot be read.
    """
    folders = dict.fromkeys(path.parent for path in files) or {Path(): None}
    found: dict[str, str] = {}
    for folder in folders:
        found |= parse_env(_read(folder / ENV_FILE))
    return {
        name: value
        for name, value in found.items()
        if name not in environment and (is_secret(name, value) or name.startswith(_OF_TRACKERS))
    }


def parse_env(text: str) -> dict[str, str]:
    """Parse lines ``NAME=VALUE``, as a shell does but without substitutions; other lines are left out."""
    found = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is not None:
            found[match[1]] = _value(match[2])
    return found


def _value(written: str) -> str:
    for quote in ("'", '"'):
        end = written.find(quote, 1)
        if written.startswith(quote) and end > 0:
            return written[1:end]
    return re.split(r"\s+#", written, maxsplit=1)[0].strip()


def _read(path: Path) -> str:
    if not path.is_file():  # which a pipe, that would be waited for, is not
        return ""
    try:
        with path.open("rb") as file:
            return file.read(_BYTES_MAX).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise BadInputError(ENV_FILE, str(path), f"cannot be read: {reason}") from error
