"""Files of weights as others make them: safetensors, and folders of shards with their index.

Says which file of a folder holds the weights, or lists where they are. Reads no pickle itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_runner.checkpoint.safetensors_file import (
    NotSafetensorsError,
    is_safetensors,
    read_safetensors,
)
from ddp_runner.kernel.system.run_files import from_json, open_given

INDEX = ".index.json"
_FORMS = (
    "model.safetensors.index.json",
    "*.safetensors.index.json",
    "model.safetensors",
    "*.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
_BEGIN_BYTES = 16
_INDEX_BYTES_MAX = 64 * 1024 * 1024


class WeightFilesError(Exception):
    """Files of weights cannot be read; the text says why, to follow the path."""


def weights_file_in(folder: Path) -> Path | None:
    """The file of a folder that holds a model's weights or is their index; None where there is none.

    Raises WeightFilesError where several could be meant.
    """
    for form in _FORMS:
        found = sorted(one for one in folder.glob(form) if not one.name.startswith("."))
        if len(found) > 1:
            names = ", ".join(one.name for one in found[:3])
            raise WeightFilesError(f"holds several ({names}) and no index: name one of them")
        if found:
            return found[0]
    return None


def read_weight_files(path: Path, read_pickled: Callable[[int], Any]) -> dict[str, Any] | None:
    """The weights of a safetensors file, an index, or a folder with either; None where it is none of these.

    ``read_pickled`` reads an opened shard of torch's own. Raises WeightFilesError and OSError.
    """
    path = path.expanduser()
    if path.is_dir():
        found = weights_file_in(path)
        if found is None:
            return None
        path = found
        if path.name == "pytorch_model.bin":
            return _state_dict(read_pickled(open_given(path)), path)
    if path.name.endswith(INDEX):
        return _of_shards(path, read_pickled)
    descriptor = open_given(path)
    if path.suffix != ".safetensors" and not is_safetensors(os.pread(descriptor, _BEGIN_BYTES, 0)):
        os.close(descriptor)
        return None
    return _read(descriptor, path.name)


def _read(descriptor: int, name: str) -> dict[str, Any]:
    try:
        return dict(read_safetensors(descriptor))
    except NotSafetensorsError as error:
        raise WeightFilesError(f"{name} {error}".strip()) from error


def _state_dict(content: Any, path: Path) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise WeightFilesError(f"{path.name} holds no state dict")
    return content


def _of_shards(index: Path, read_pickled: Callable[[int], Any]) -> dict[str, Any]:
    """Return all weights that an index lists, each from the file that it names in its own folder."""
    with os.fdopen(open_given(index), "rb") as file:
        text = file.read(_INDEX_BYTES_MAX + 1)
    try:
        listed = from_json(text) if len(text) <= _INDEX_BYTES_MAX else None
    except ValueError as error:
        raise WeightFilesError(f"{index.name} is not JSON") from error
    places = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(places, dict) or not places:
        raise WeightFilesError(f"{index.name} has no weight_map")
    shards: dict[str, list[str]] = {}
    for name, shard in places.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard:
            raise WeightFilesError(f"{index.name} names {shard!r}, which is no file beside it")
        shards.setdefault(shard, []).append(name)
    found: dict[str, Any] = {}
    for shard, names in shards.items():
        try:
            descriptor = open_given(index.parent / shard)
        except FileNotFoundError as error:
            raise WeightFilesError(f"lacks {shard}, which {index.name} names") from error
        if shard.endswith(".safetensors"):
            content = _read(descriptor, shard)
        else:
            content = _state_dict(read_pickled(descriptor), index.parent / shard)
        if lost := [name for name in names if name not in content]:
            raise WeightFilesError(f"{shard} lacks {lost[0]}, which {index.name} says it has")
        found.update({name: content[name] for name in names})
    return found
