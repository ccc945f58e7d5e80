"""Keys of services from a ``.env`` file that lies beside the configuration. What is set already wins."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_runner.core.faults import BadInputError
from ddp_runner.core.secrets import is_secret

ENV_FILE = ".env"
_BYTES_MAX = 64 * 1024
_LINE = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*)", re.ASCII)
_OF_TRACKERS = "WANDB_"  # its project, its mode: no secrets, and of use nowhere else


def env_keys(files: Sequence[Path], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to add: keys of the ``.env`` beside each of ``files``, or of the working folder's.

    Names with KEY, TOKEN, SECRET or PASSWORD, and those of W&B; other lines are left alone, and so is
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
    """The lines ``NAME=VALUE``, as a shell has them without its substitutions; what is none is left out."""
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
        reason = getattr(error, "strerror", None) or "is no text"
        raise BadInputError(ENV_FILE, str(path), f"cannot be read: {reason}") from error
