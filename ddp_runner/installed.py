"""Finds what the folders of ``features/`` bring along, by the name of a file. It imports none of them by name."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

_PACKAGE = f"{__package__}.features"
_FOLDER = os.path.join(os.path.dirname(__file__), "features")  # noqa: PTH118, PTH120 - pathlib takes 5 ms


@cache
def names(part: str) -> tuple[str, ...]:
    """Return the features that have a file ``part``, such as ``words``, in alphabetical order."""
    try:
        folders = sorted(os.listdir(_FOLDER))  # noqa: PTH208
    except FileNotFoundError:
        return ()  # all features were deleted
    return tuple(
        folder
        for folder in folders
        if os.path.isfile(os.path.join(_FOLDER, folder, f"{part}.py"))  # noqa: PTH113, PTH118
    )


@cache
def parts(part: str) -> tuple[ModuleType, ...]:
    """Import the module ``part`` of each feature that has one, in alphabetical order of the features."""
    return tuple(import_module(f"{_PACKAGE}.{feature}.{part}") for feature in names(part))
