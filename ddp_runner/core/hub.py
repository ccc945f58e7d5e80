"""Parses the names of model repositories on the Hugging Face hub. Reads nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass

HUB = "hf://"
EXTRA = "hub"
EXPECTED = "must be hf://USER/NAME, or hf://USER/NAME@REVISION"
_WRITTEN = re.compile(r"hf://([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """``revision``: a branch, tag or commit; empty for the main branch."""

    name: str
    revision: str = ""


def is_of_hub(written: str) -> bool:
    """Return whether the text names something on the hub, well formed or not."""
    return written.startswith(HUB)


def repository_of(written: str) -> Repository | None:
    """The repository that ``hf://USER/NAME[@REVISION]`` names; None for any other text."""
    match = _WRITTEN.fullmatch(written)
    if match is None or any(part.strip(".") == "" for part in match[1].split("/")):
        return None
    return Repository(name=match[1], revision=match[2] or "")


def lacks_hub(*, python: str) -> str:
    """Return the error text for a missing huggingface_hub, with the command that installs it."""
    return f"needs huggingface_hub: {python} -m pip install 'huggingface_hub>=0.23,<3'"
