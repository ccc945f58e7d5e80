"""Reads files of tensors, ours or foreign, as plain data; never runs code that a file holds."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddp_runner.core.classify import lacks_memory
from ddp_runner.core.faults import BadInputError

_WEIGHT_KEYS = ("model", "state_dict", "model_state_dict")
_LOAD_ERRORS = (RuntimeError, ValueError, KeyError, EOFError, OSError, pickle.UnpicklingError)


class UnreadableError(Exception):
    """torch.load refused a file; the text is its first line."""


def read_archive(path: Path, *, map_location: str | torch.device) -> Any:
    """What plain ``torch.load(weights_only=True)`` gives.

    Raises UnreadableError; what is raised for want of memory stays, since that is no fault of the file.
    """
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except _LOAD_ERRORS as error:
        if lacks_memory(error):
            raise
        text = str(error).strip() or type(error).__name__
        raise UnreadableError(text.splitlines()[0]) from error


def load_weights(path: Path, *, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """The model's state dict in a file, under the names that stand there, for ``--init-from``.

    Takes a checkpoint of ours, a plain state dict, or a dict that holds one as ``model``,
    ``state_dict`` or ``model_state_dict``. Raises BadInputError (``--init-from``) otherwise.
    """
    expected = "expected a file of weights that torch.load(weights_only=True) reads"
    if not Path(path).is_file():
        raise BadInputError("--init-from", path, f"no such file; {expected}")
    try:
        content = read_archive(path, map_location=map_location)
    except UnreadableError as error:
        raise BadInputError("--init-from", path, f"{expected}: {error}") from error
    for key in _WEIGHT_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not _is_state_dict(content):
        raise BadInputError("--init-from", path, f"holds no state dict; {expected}")
    return dict(content)


def _is_state_dict(content: object) -> bool:
    return (
        isinstance(content, Mapping)
        and all(isinstance(key, str) for key in content)
        and any(isinstance(value, torch.Tensor) for value in content.values())
    )
