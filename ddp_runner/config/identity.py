"""What a run means, as plain values, and the written forms of settings. Decides no resume."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import yaml

from ddp_runner.config.compose import validate_record

if TYPE_CHECKING:
    from ddp_runner.core.settings import JsonValue, Settings

GLOBAL_BATCH = "data.batch_size x ranks"
# The settings of the model that each built-in task reads; a user's own task reads none of them.
_BYTES_MODEL = ("seq_len", "hidden_size", "num_layers", "num_heads", "dropout")
_MODEL_OF_TASK: Mapping[str, tuple[str, ...]] = {
    "bytes": _BYTES_MODEL,
    "synthetic": ("vocab_size", "dataset_size", *_BYTES_MODEL),
}


def meaning(settings: Settings, *, world_size: int) -> dict[str, JsonValue]:
    """What must not change between a checkpoint and the run that resumes from it.

    Task and its arguments, model, data, global batch and seed: a change of any of them makes
    another run. Rates, schedules, intervals and folders may change. Keys are dotted names.
    """
    task = settings.run.task
    found: dict[str, JsonValue] = {"run.task": task, "run.seed": settings.run.seed}
    for name in _MODEL_OF_TASK.get(task, ()):
        found[f"model.{name}"] = getattr(settings.model, name)
    if task != "synthetic":
        path = settings.data.path
        found["data.path"] = os.path.normpath(path) if path else ""
        found["data.validation_fraction"] = settings.data.validation_fraction
    found[GLOBAL_BATCH] = settings.data.batch_size * world_size
    for name in sorted(settings.task):
        found[f"task.{name}"] = settings.task[name]
    return found


def difference(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """One line for each key whose value differs, such as ``run.seed: 1 -> 2``."""
    missing = "(not set)"
    return [
        f"{key}: {_written(old.get(key, missing))} -> {_written(new.get(key, missing))}"
        for key in sorted({*old, *new})
        if old.get(key, missing) != new.get(key, missing)
    ]


def _written(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def to_record(settings: Settings) -> dict[str, object]:
    """Settings as nested dicts of JSON values, in the order of the dataclasses."""
    record: dict[str, object] = {}
    for field in dataclasses.fields(settings):
        section = getattr(settings, field.name)
        if isinstance(section, Mapping):
            record[field.name] = _plain(section)
        else:
            record[field.name] = _plain(dataclasses.asdict(section))
    return record


def from_record(record: Mapping[str, object]) -> Settings:
    """The settings that :func:`to_record` gave. Raises BadInputError for any other mapping."""
    return validate_record(record)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def digest(settings: Settings) -> str:
    """SHA-256 (hex) of the settings as canonical JSON."""
    text = json.dumps(to_record(settings), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def to_yaml(settings: Settings) -> str:
    """The settings as YAML that ``--config`` reads again."""
    return yaml.safe_dump(to_record(settings), sort_keys=False, allow_unicode=True, width=100)
