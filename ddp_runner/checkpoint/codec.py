"""State dicts as values: differences, digest, what can be stored. Never touches a disk."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

_LISTED_MAX = 5

# What torch.load(weights_only=True) gives back unchanged in every torch that we support.
_PLAIN_LEAVES = (type(None), bool, int, float, torch.dtype, torch.device, torch.Size)
# More than each takes in the file: the archive itself, a tensor's record in it, and any other value.
_ARCHIVE_BYTES, _TENSOR_BYTES, _VALUE_BYTES = 4096, 1024, 64


def check_state_dict(
    model_state: Mapping[str, object], expected_state: Mapping[str, object]
) -> list[str]:
    """Return in words how a stored state differs from the one that a model expects; empty if it fits.

    Compares names, shapes and types: torch would convert numbers of any type without a word. At most
    five names of each sort are listed, the rest counted.
    """
    missing = [key for key in expected_state if key not in model_state]
    unexpected = [key for key in model_state if key not in expected_state]
    shapes = [
        f"{key} {_shape(model_state[key])} where the model has {_shape(expected)}"
        for key, expected in expected_state.items()
        if key in model_state and _shape(model_state[key]) != _shape(expected)
    ]
    types = [
        f"{key} {_type(model_state[key])} where the model has {_type(expected)}"
        for key, expected in expected_state.items()
        if _type(model_state.get(key)) not in ("", _type(expected)) and _type(expected)
    ]
    differences = []
    for title, entries in (
        ("missing", missing),
        ("unexpected", unexpected),
        ("shape", shapes),
        ("type", types),
    ):
        if entries:
            more = f" and {len(entries) - _LISTED_MAX} more" if len(entries) > _LISTED_MAX else ""
            differences.append(f"{title}: {', '.join(entries[:_LISTED_MAX])}{more}")
    return differences


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return "x".join(str(size) for size in value.shape) or "scalar"
    return type(value).__name__


def _type(value: object) -> str:
    """``float32``; of a tensor whose numbers are not all there, one by one, also how it is made."""
    if not isinstance(value, Tensor):
        return ""
    layout = "" if value.layout is torch.strided else f" ({value.layout})".replace("torch.", "")
    without = " (without values)" if value.is_meta else ""
    return f"{value.dtype}{layout}{without}".removeprefix("torch.")


def weights_sha256(state_dict: Mapping[str, object]) -> str:
    """SHA-256 over the tensors of a state dict, as hexadecimal digits.

    Sorted by key; for each entry: key, NUL, dtype (``torch.float32``), NUL, shape joined by
    commas, NUL, the contiguous little-endian bytes. Entries that are no tensors (a module's extra
    state) are left out. Tensors on a device are copied to the host one at a time.
    """
    digest = hashlib.sha256()
    for key in sorted(state_dict):
        value = state_dict[key]
        if not isinstance(value, Tensor):
            continue
        shape = ",".join(str(size) for size in value.shape)
        digest.update(f"{key}\0{value.dtype}\0{shape}\0".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        # Every machine that torch is built for here is little-endian: its bytes are the digest's.
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tensor_bytes(state: Mapping[str, object]) -> int:
    """Return the bytes of the tensors in ``state``; storages count once. Raises as :func:`stored_bytes`."""
    storages: dict[int, int] = {}
    _visit(state, where="state", storages=storages)
    return sum(storages.values())


def stored_bytes(state: Mapping[str, object]) -> int:
    """Return an upper estimate of the bytes of ``state`` in a file; storages count once.

    Raises TypeError, naming the entry, for a value that plain ``torch.load(weights_only=True)``
    would refuse or change, so that nothing is announced that cannot be read again.
    """
    storages: dict[int, int] = {}
    other_bytes = _visit(state, where="state", storages=storages)
    return _ARCHIVE_BYTES + other_bytes + sum(storages.values())


def _visit(value: Any, *, where: str, storages: dict[int, int]) -> int:
    """Collect the storages below ``value`` by address; the bytes of all else, at most."""
    kind = type(value)
    if kind in (Tensor, torch.nn.Parameter):
        storage = value.untyped_storage()
        storages[storage._cdata] = storage.nbytes()  # noqa: SLF001  # as torch.save names storages
        return _TENSOR_BYTES
    found_bytes = _VALUE_BYTES
    if kind in (dict, OrderedDict):
        for key, item in value.items():
            found_bytes += _visit(key, where=f"a key of {where}", storages=storages)
            found_bytes += _visit(item, where=f"{where}[{key!r}]", storages=storages)
    elif kind in (list, tuple):
        for index, item in enumerate(value):
            found_bytes += _visit(item, where=f"{where}[{index}]", storages=storages)
    elif kind in (str, bytes):
        found_bytes += len(value if isinstance(value, bytes) else value.encode(errors="replace"))
    elif kind not in _PLAIN_LEAVES:
        raise TypeError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which torch.load(weights_only="
            "True) does not give back: store a number, string, tensor, list, tuple or dict"
        )
    return found_bytes
