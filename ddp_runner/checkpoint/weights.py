"""Reads files of tensors, ours or foreign, as plain data; never runs code that a file holds."""

from __future__ import annotations

import os
import pickle
import pickletools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from ddp_runner.checkpoint.catalog import (
    Catalog,
    Entry,
    NoCheckpointError,
    checkpoints_at,
    reason_of,
)
from ddp_runner.checkpoint.left_out import left_out, start_record
from ddp_runner.checkpoint.weight_files import WeightFilesError, read_weight_files
from ddp_runner.kernel.rules.classify import lacks_memory
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system.run_files import open_given, open_to_read

_WEIGHT_KEYS = ("model", "state_dict", "model_state_dict")
_EXPECTED = (
    "expected a checkpoint, a folder of checkpoints, safetensors, a folder of shards with their index, or a"
    " file made with torch.save(model.state_dict(), FILE)"
)
_OPTION = "--init-from"
_NAME_IN_ERROR = re.compile(r"GLOBAL ([A-Za-z_][\w.]+)")
_SHOWN_MAX = 200
_LISTED_MAX = 3
_ARCHIVE_BEGINS = b"PK"
_CODE = frozenset({"GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"})


class UnreadableError(Exception):
    """torch.load refused a file; the text says why in a line of our own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """The state dict of a file. ``start``: of what it leaves out (``left_out.start_record``); empty where it is whole.

    ``checkpoint``: of ours, that it is; None where it is another file.
    """

    weights: Mapping[str, Any]
    start: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Entry | None = None


class Content(Enum):
    """Decides whether tensors are read at once, or stay in the file until they are used."""

    READ = "read"
    MAPPED = "mapped"


def read_archive(
    path: Path, *, map_location: str | torch.device, content: Content = Content.READ
) -> Any:
    """Return what plain ``torch.load(weights_only=True)`` gives for a file of this program, which is no link.

    Raises UnreadableError; errors for want of memory pass unchanged, since they are no fault of the file.
    """
    try:
        descriptor = open_to_read(path)
    except OSError as error:
        raise UnreadableError(reason_of(error)) from error
    return _load(descriptor, map_location=map_location, content=content)


def _load(descriptor: int, *, map_location: str | torch.device, content: Content) -> Any:
    """Load an opened file, and close it."""
    try:
        # By its number: between two looks at a name, another file may be put there.
        return torch.load(
            f"/proc/self/fd/{descriptor}",
            map_location=map_location,
            weights_only=True,
            mmap=content is Content.MAPPED,
        )
    except Exception as error:  # garbage makes an unpickler raise whatever it comes to
        if lacks_memory(error):
            raise
        raise UnreadableError(_reason(error, os.pread(descriptor, 1 << 16, 0))) from error
    finally:
        os.close(descriptor)


def _reason(error: Exception, begin: bytes) -> str:
    """Why torch refused a file that begins so. Torch's own words say how to run what it holds."""
    if not begin:
        return "is empty"
    is_archive = begin.startswith(_ARCHIVE_BEGINS)
    named = _NAME_IN_ERROR.search(str(error))
    is_refused = isinstance(error, pickle.UnpicklingError) and "operand" not in str(error)
    if named or (is_refused if is_archive else _holds_objects(begin)):
        return f"holds objects that could run code; refused{f' ({named[1]})' if named else ''}"
    if not is_archive:
        return "is not a file of tensors"
    first = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
    return f"is damaged, or not a file of tensors: {first[:_SHOWN_MAX]}"


def _holds_objects(begin: bytes) -> bool:
    """Return True if ``begin`` begins a pickle that makes anything but plain values."""
    seen = False
    try:
        for operation, _, _ in pickletools.genops(begin):
            seen = seen or operation.name in _CODE
    except ValueError:  # the end of what was read, or no pickle; text may look like an old one
        return seen and begin.startswith(pickle.PROTO)
    return seen


def load_weights(
    path: Path, *, average: bool = False, map_location: str | torch.device = "cpu"
) -> dict[str, Any]:
    """The model's state dict in a file, whole: as :func:`read_weights`, which says what files it takes.

    Raises BadInputError (``--init-from``) for what leaves out weights too.
    """
    found = read_weights(path, average=average, map_location=map_location)
    if found.start:
        raise BadInputError(_OPTION, path, "leaves out the start weights of its run; use final.pt")
    return dict(found.weights)


def read_weights(
    path: Path, *, average: bool = False, map_location: str | torch.device = "cpu"
) -> StoredWeights:
    """The model's weights in a file, under the names that stand there, for ``--init-from``.

    ``average``: with the moving average that a checkpoint of ours has, in the place of the weights. Takes a checkpoint of ours, a pointer to one (``last``, ``best``), a folder of them (the newest
    that is whole), a plain state dict, or a dict that holds one as ``model``, ``state_dict`` or
    ``model_state_dict``; safetensors, an index of shards, a folder with these. Raises BadInputError
    (``--init-from``) otherwise.
    """
    try:
        foreign = _foreign(path, average=average, map_location=map_location)
        if foreign is not None:
            return StoredWeights(weights=foreign)
        entries = checkpoints_at(path)
        if not entries:
            opened = open_given(path.expanduser())
            return _weights_in(opened, average=average, map_location=map_location)
    except (NoCheckpointError, UnreadableError, WeightFilesError, OSError) as error:
        raise BadInputError(_OPTION, path, f"{reason_of(error)}; {_EXPECTED}") from error
    wrong = []
    for entry in entries:
        try:
            damage = Catalog(entry.path.parent).verify(entry)
            if damage is None:
                opened = open_to_read(entry.path)
                found = _weights_in(opened, average=average, map_location=map_location)
                return replace(found, checkpoint=entry)
        except (UnreadableError, OSError) as error:
            damage = reason_of(error)
        wrong.append(f"{entry.path.name} {damage}" if entry.path != path else damage)
    shown = "; ".join(wrong[:_LISTED_MAX])
    raise BadInputError(_OPTION, path, f"{shown}; {_EXPECTED}")


def _foreign(
    path: Path, *, average: bool, map_location: str | torch.device
) -> dict[str, Any] | None:
    """Weights in the forms of others; None where it is none of these, or a folder of checkpoints."""
    path = Path(os.path.realpath(path.expanduser(), strict=True))
    if path.is_dir() and Catalog(path).entries():
        return None

    def read(descriptor: int) -> Any:
        return _load(descriptor, map_location=map_location, content=Content.READ)

    found = read_weight_files(path, read)
    if found is None:
        return None
    if average:
        raise UnreadableError("holds no average (EMA): it is no checkpoint of this program")
    if not _is_state_dict(found):
        raise UnreadableError("holds no state dict")
    return {
        name: one.to(map_location) if isinstance(one, torch.Tensor) else one
        for name, one in found.items()
    }


def _weights_in(
    descriptor: int, *, average: bool, map_location: str | torch.device
) -> StoredWeights:
    content = _load(descriptor, map_location=map_location, content=Content.READ)
    is_partial = isinstance(content, Mapping) and bool(left_out(content))
    start = start_record(content) if is_partial else {}
    if average:
        return StoredWeights(weights=_averaged(content), start=start)
    for key in _WEIGHT_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if not _is_state_dict(content):
        raise UnreadableError("holds no state dict")
    return StoredWeights(weights=dict(content), start=start)


def holds_average(path: Path) -> bool:
    """Return whether a checkpoint has an average that has begun. Reads no tensor. Raises UnreadableError."""
    content = read_archive(path, map_location="cpu", content=Content.MAPPED)
    kept = content.get("ema") if isinstance(content, Mapping) else None
    return isinstance(kept, Mapping) and any(kept.get(key) for key in ("parameters", "buffers"))


def _averaged(content: object) -> dict[str, Any]:
    """The weights of a checkpoint of ours with its average in their place; tied ones all get it."""
    weights = content.get("model") if isinstance(content, Mapping) else None
    kept = content.get("ema") if isinstance(content, Mapping) else None
    if not isinstance(weights, Mapping) or not isinstance(kept, Mapping):
        raise UnreadableError("holds no average (EMA): it is of a run without ema_decay")
    means = {**kept.get("parameters", {}), **kept.get("buffers", {})}
    if not means:
        raise UnreadableError("holds an average (EMA) that has not begun")
    # An average has tied weights once, by the first of their names.
    by_place = {_place(weights[name]): mean for name, mean in means.items() if name in weights}
    return {
        name: by_place[_place(own)].to(own.dtype) if _place(own) in by_place else own
        for name, own in weights.items()
    }


def _place(value: object) -> object:
    """Return the place of a tensor's numbers: equal for two names of one weight."""
    if (
        not isinstance(value, torch.Tensor)
        or value.layout is not torch.strided
        or not value.numel()
    ):
        return object()
    return value.data_ptr(), tuple(value.shape), value.stride()


def _is_state_dict(content: object) -> bool:
    return (
        isinstance(content, Mapping)
        and all(isinstance(key, str) for key in content)
        and any(isinstance(value, torch.Tensor) for value in content.values())
    )
