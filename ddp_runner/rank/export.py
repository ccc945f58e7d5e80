"""Writes a checkpoint's weights as files for other programs. Trains nothing; runs as a separate process."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner import config
from ddp_runner.checkpoint.disk import RealDisk
from ddp_runner.checkpoint.entry_names import load_bare_state, read_as
from ddp_runner.checkpoint.publish import DurableWriter, publish
from ddp_runner.checkpoint.safetensors_file import write_safetensors
from ddp_runner.checkpoint.weights import holds_average
from ddp_runner.core.errors import BadInputError
from ddp_runner.core.settings import Settings
from ddp_runner.system import parent_death
from ddp_runner.training.begun_weights import built_model, first_line, whole_weights

_DICT_FILE = "checkpoint.pt"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(words: Sequence[str]) -> int:
    """``words``: the pipe to answer by, and the parent's pid. What to do comes from standard input, as JSON."""
    pipe, parent = int(words[0]), int(words[1])
    parent_death.die_with_parent(parent)
    spec = json.loads(sys.stdin.read())
    try:
        answer: dict[str, Any] = {"lines": list(export(spec))}
    except BadInputError as error:
        answer = {"refused": f"{error.expected}"}
    except OSError as error:
        answer = {"refused": f"cannot be written to {spec['to']}: {error.strerror or error}"}
    with os.fdopen(pipe, "wb") as file:
        file.write(json.dumps(answer).encode())
    return 0


def export(spec: Mapping[str, Any]) -> Iterator[str]:
    """Write the files that ``spec`` asks for; yields what to say. Raises BadInputError and OSError."""
    settings, unknown = _settings_of(spec["settings"])
    with contextlib.redirect_stdout(sys.stderr):
        weights, begun = whole_weights(
            Path(spec["path"]), average=spec["average"], init_from=spec["init_from"]
        )
    if spec["init_from"] and not begun:
        yield "--init-from is not needed: the checkpoint has all weights"
    if begun:
        yield f"with what the run has begun with and the checkpoint leaves out, from {begun}"
    dtype = _DTYPES.get(spec["dtype"])
    folder = Path(spec["to"])
    if spec["counts"] is not None:
        average = _average(spec)
        yield from _write_dict(folder, weights, average, dtype=dtype, counts=spec["counts"])
        return
    model, why = (None, unknown) if settings is None else _model_of(settings, weights)
    folder.mkdir(parents=True, exist_ok=True)
    if model is not None:
        model = model if dtype is None else model.to(dtype)
        saves = model.save_pretrained
        safe = {"safe_serialization": spec["format"] == "safetensors"}
        takes = inspect.signature(saves).parameters
        is_open = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
        saves(folder, **(safe if is_open or "safe_serialization" in takes else {}))
        yield from _listed(folder, "by the model's own save_pretrained")
        return
    if why:
        yield f"without save_pretrained: {why}"
    tensors, skipped = _converted(weights, dtype)
    yield from _named(skipped)
    name = f"model.{spec['format']}"
    disk = RealDisk()
    publish(disk, folder / name, lambda out: _write(out, tensors, spec["format"]))
    disk.sync_directory(folder)
    yield from _listed(folder, "the model's state dict")


def _average(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """All weights with the average in their place; None where the run keeps none."""
    path = Path(spec["path"])
    if not holds_average(path):
        return None
    with contextlib.redirect_stdout(sys.stderr):
        return whole_weights(path, average=True, init_from=spec["init_from"])[0]


def _write_dict(
    folder: Path,
    weights: Mapping[str, Any],
    average: Mapping[str, Any] | None,
    *,
    dtype: torch.dtype | None,
    counts: Mapping[str, Any],
) -> Iterator[str]:
    """One file with ``state_dict``, ``ema`` and ``counts``, as other trainers' readers expect them."""
    tensors, skipped = _converted(weights, dtype)
    yield from _named(skipped)
    content: dict[str, Any] = {"state_dict": tensors}
    if average is not None:
        content["ema"] = _converted(average, dtype)[0]
    content |= counts
    disk = RealDisk()
    folder.mkdir(parents=True, exist_ok=True)
    publish(disk, folder / _DICT_FILE, lambda out: torch.save(content, out))  # type: ignore[arg-type]
    disk.sync_directory(folder)
    yield from _listed(folder, f"a dict of {', '.join(content)}")


def _named(skipped: Sequence[str]) -> Iterator[str]:
    if skipped:
        named = ", ".join(skipped[:3])
        yield f"{len(skipped)} entries that are no tensors are left out: {named}"


def _listed(folder: Path, how: str) -> Iterator[str]:
    for one in sorted(folder.iterdir()):
        yield f"{one}  {one.stat().st_size:,} bytes  ({how})"


def _write(out: DurableWriter, tensors: Mapping[str, Tensor], form: str) -> None:
    if form == "safetensors":
        write_safetensors(out.write, tensors)
    else:
        torch.save(dict(tensors), out)  # type: ignore[arg-type] # write and flush do


def _converted(
    weights: Mapping[str, Any], dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors, floating ones in ``dtype``; and the names of what is none."""
    found: dict[str, Tensor] = {}
    skipped = []
    for name, one in weights.items():
        if not isinstance(one, Tensor):
            skipped.append(name)
        elif dtype is not None and one.is_floating_point():
            found[name] = one.to(dtype)
        else:
            found[name] = one
    return found, skipped


def _settings_of(record: object) -> tuple[Settings | None, str]:
    """Return the settings of the checkpoint's run; or None, and the reason."""
    if not isinstance(record, dict):
        return None, "the checkpoint does not say of which settings it is"
    try:
        return config.from_record(record), ""
    except BadInputError as error:
        return None, f"the settings of the checkpoint are none by now ({error})"


def _model_of(settings: Settings, weights: Mapping[str, Any]) -> tuple[Any, str]:
    """The task's model with ``weights``, where it can save itself; else None, and why nobody can say."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            model = _built(settings)
        if not callable(getattr(model, "save_pretrained", None)):
            return None, ""
        load_bare_state(model, read_as(weights, model.state_dict()))
    except Exception as error:  # noqa: BLE001 - whatever a task raises that cannot be built here
        return None, f"its task's model could not be built ({first_line(error)})"
    return model, ""


def _built(settings: Settings) -> nn.Module:
    """Return the task's model, built without its data if possible."""
    try:
        return built_model(settings, with_data=False)
    except Exception:  # noqa: BLE001 - it may need what build_datasets() has made
        return built_model(settings, with_data=True)
