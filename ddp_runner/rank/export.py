"""Writes a checkpoint's weights as files for other programs. Trains nothing; runs as a separate process."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner import config
from ddp_runner.checkpoint.catalog import FINAL
from ddp_runner.checkpoint.entry_names import load_bare_state, read_as
from ddp_runner.checkpoint.hub import fetched
from ddp_runner.checkpoint.publish import DurableWriter, publish
from ddp_runner.checkpoint.safetensors_file import write_safetensors
from ddp_runner.checkpoint.weights import StoredWeights, holds_average, read_weights
from ddp_runner.core.hub import is_of_hub
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.system import parent_death
from ddp_runner.kernel.system.disk import RealDisk
from ddp_runner.training.components.start_weights import filled
from ddp_runner.training.starting.task_import import load_task
from ddp_runner.values.generators import seed_all

_OPTION = "--init-from"
_SHOWN_MAX = 300
_CURE = "give its start weights by --init-from PATH, or use the run's final.pt, which is complete"
Source = tuple[str, Callable[[], Mapping[str, Any]]]
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


# A checkpoint may leave out what its run has begun with; who exports it has no run to take that from.


def whole_weights(path: Path, *, average: bool, init_from: str = "") -> tuple[dict[str, Any], str]:
    """Return the weights in ``path``, and where those are from that it leaves out; "" where it is whole.

    Nothing is built for them: files that may have them are read, and the SHA-256 in the checkpoint decides.

    ``init_from``: what its run has begun with, where that is not where it was. Raises BadInputError where what is left out is nowhere.
    """
    found = read_weights(path, average=average)
    if not found.start:
        return dict(found.weights), ""
    wrong: dict[str, str] = {}
    for words, source in _sources(path, found, init_from):
        try:
            weights = filled(found.weights, found.start, source())
        except BadInputError as error:
            wrong[words] = first_line(error)
            continue
        if weights is not None:
            return weights, words
        wrong[words] = "other weights"
    reasons = "; ".join(f"{words}: {why}" for words, why in wrong.items())
    count = sum(name not in found.weights for name in found.start["hashes"])
    expected = (
        f"leaves out {count} start weights of the run (checkpoint.only_trained), which cannot be"
        f" found{reasons and f' ({reasons})'}: {_CURE}"
    )
    raise BadInputError("checkpoint", path, expected)


def built_model(settings: Settings, *, with_data: bool) -> nn.Module:
    """Build the task's model as a rank does; ``with_data``: behind its datasets, which many need not."""
    seed_all(settings.run.seed)
    task = load_task(settings)
    if with_data:
        task.build_datasets()
        seed_all(settings.run.seed)
    return task.build_model()


def first_line(error: Exception) -> str:
    """Return what an error says, for a line of a message."""
    said = str(error)
    if isinstance(error, BadInputError) and error.option == _OPTION:  # who asks names it
        said = error.expected
    return (said.strip() or type(error).__name__).splitlines()[0][:_SHOWN_MAX]


def _sources(path: Path, found: StoredWeights, init_from: str) -> Iterator[Source]:
    """Yield what may have the missing weights, in words, and how to read it."""
    final = path.parent / FINAL
    if final.is_file():
        yield str(final), lambda: read_weights(final).weights
    named = init_from or str(found.start.get("init_from") or "")
    if named:
        yield f"--init-from {named}", lambda: _read_named(named).weights


def _read_named(init_from: str) -> StoredWeights:
    path, average = config.init_from_path(init_from)
    if is_of_hub(init_from):
        path, average = fetched(init_from), False
    return read_weights(path, average=average)
