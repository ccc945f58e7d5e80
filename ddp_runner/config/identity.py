"""Plain values that say what a run means and how its steps are computed; written forms of settings.

A setting says at its field what a change of it means to a run that is resumed. Decides no resume.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ddp_runner.config.compose import validate_record
from ddp_runner.config.fields import BUILT_IN_TASKS, known_fields
from ddp_runner.config.foreign import REMOVED
from ddp_runner.core.batch_sizes import global_batch, micro_batch, shares_of
from ddp_runner.core.run_stages import uses_best
from ddp_runner.core.settings.declaration import OF_RATE, OnResume
from ddp_runner.kernel.rules.secrets import HIDDEN, holds_secret, masked

if TYPE_CHECKING:
    from ddp_runner.core.settings import JsonValue, Settings

_NOTHING: Mapping[str, object] = {}
_PLAIN_TYPES = frozenset({str, int, float, bool})
# What runs of earlier versions had in a resume key, where they did not choose something else.
_NO_LONGER: Mapping[str, JsonValue] = {"data.largest_samples": False}
_DESCRIBED = "describe() "
# libyaml takes a quarter of the time, which saves 5 ms of each launch; not every PyYAML was built with it. Its text differs
# only in characters beyond U+FFFF, which it escapes, and is read the same.
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_SEALED = re.compile(r"\*\*\* scrypt [0-9a-f]{32} [0-9a-f]{64}")
GLOBAL_BATCH = "data.batch_size x ranks"
# Names of settings of the optimizer that act through the learning rate alone.
RATE_KEYS = tuple(spec.name for spec in known_fields().values() if OF_RATE in spec.notes)
TOTAL_STEPS = "steps of the run"
_MODE = "checkpoint.mode"
DIGEST = "sha256:"  # how the value of a file begins
TASK_FILE = "the task's file"
TASK_MODULE = "the task's module "  # and its name: one that the task imports, and nobody installed


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Values that follow from settings and machine together. ``threads``: of a rank, 0 on a GPU.

    ``task_file``: its SHA-256, empty for a built-in task. ``task_modules``: digests of the files that it imports.
    ``own_task_reads_model``: the task is the user's and is given all settings. ``devices``: of a rank.
    """

    total_steps: int
    ranks: int
    device: str
    precision: str
    backend: str
    threads: int
    torch: str
    task_file: str = ""
    task_modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    own_task_reads_model: bool
    devices: int = 1


def recipe(settings: Settings, found: Surroundings) -> dict[str, JsonValue]:
    """Return the values that decide how steps are computed: a change gives the same run other weights."""
    sections = to_record(settings)
    written = _as_written(settings, OnResume.REPORTED)
    is_best_used = uses_best(settings.stage, load_best_at_end=settings.run.load_best_at_end)
    if settings.optim.plateau_patience or is_best_used:  # weights then follow from evaluations
        log = settings.log
        written["checkpoint.monitor"] = settings.checkpoint.monitor
        written["log.evaluate_interval"] = log.evaluate_interval
        written["log.evaluate_every_steps"] = log.evaluate_every_steps
        written["log.evaluate_batches"] = log.evaluate_batches
        written[_MODE] = settings.checkpoint.mode
    if found.own_task_reads_model:
        written |= {f"model.{name}": v for name, v in sections["model"].items()}  # type: ignore[attr-defined]
    if found.task_file:
        written[TASK_FILE] = f"{DIGEST}{found.task_file[:16]}"
    written |= {
        f"{TASK_MODULE}{name}": f"{DIGEST}{one}" for name, one in found.task_modules.items()
    }
    return {
        **written,
        "data.micro_batch_size": micro_batch(settings.data, devices=found.devices),
        "data.shares": _shares(shares_of(settings.data)),
        TOTAL_STEPS: found.total_steps,
        "ranks": found.ranks,
        "device": found.device,
        "precision": found.precision,
        "ddp.backend": found.backend,
        "threads per rank": found.threads,
        "torch": found.torch,
    }


def _as_written(settings: Settings, kind: OnResume) -> dict[str, JsonValue]:
    """The values of the settings of this kind, but of those that something else follows from.

    Of what only some tasks read, those that this one reads.
    """
    record: Mapping[str, Any] = to_record(settings)
    return {
        key: record[spec.section][spec.name]
        for key, spec in known_fields().items()
        if spec.on_resume is kind and not spec.is_derived
        if not spec.read_by or settings.run.task in spec.read_by
    }


def value_before(old: Mapping[str, object], new: Mapping[str, object], key: str) -> object:
    """Return the value of ``key`` in the recipe ``old``, or the setting's default if its version lacked the setting.

    A key that only some runs write counts as unchanged if ``old`` lacks it: the value in ``new`` is returned.
    """
    spec = known_fields().get(key)
    is_written = spec is not None and not spec.is_derived and spec.on_resume is OnResume.REPORTED
    is_newer = key == _MODE and "checkpoint.monitor" in old
    if key in old or spec is None or not (is_written or is_newer):
        return old.get(key, new[key])
    return _plain(spec.default)


def task_has_changed(old: Mapping[str, object], new: Mapping[str, object]) -> bool:
    """Return True if the task's file, or one that it imports, differs between the recipes ``old`` and ``new``."""
    return any(
        old[key] != new.get(key)
        for key in old
        if key == TASK_FILE or (key.startswith(TASK_MODULE) and key in new)
    )


def _shares(shares: Sequence[int]) -> list[object]:
    """Return the shares divided by their greatest common divisor; empty if they are equal."""
    if len(set(shares)) <= 1:
        return []
    return [share // math.gcd(*shares) for share in shares]


def resume_key(settings: Settings, *, world_size: int) -> dict[str, JsonValue]:
    """Return the values that must be equal in a checkpoint and in the run that resumes from it.

    ``world_size``: of ranks, or of all their devices where they have more than one.

    Task and its arguments, model, data, global batch, seed and the kind of optimizer: a change of any
    of them makes another run. Rates, schedules, intervals and folders may change. Keys are dotted names.
    """
    task = settings.run.task
    found = _as_written(settings, OnResume.REFUSED)
    if task != "synthetic":
        path = settings.data.path
        found["data.path"] = os.path.normpath(path) if path else ""
        found["data.validation_fraction"] = settings.data.validation_fraction
    found[GLOBAL_BATCH] = global_batch(settings.data, world_size=world_size)
    return found | task_resume_key(settings)


def task_resume_key(
    settings: Settings, *, like: Mapping[str, object] = _NOTHING
) -> dict[str, JsonValue]:
    """The task's arguments in a resume key: of a secret there is only a hash.

    ``like``: the resume key that they are to be compared with.
    """
    found: dict[str, JsonValue] = {}
    for name in sorted(settings.task):
        key, value = f"task.{name}", settings.task[name]
        is_known = key in like and like[key] == value  # written by a version that hid nothing
        hides = holds_secret(name, value) and not is_known
        found[key] = _sealed(value, like.get(key)) if hides else value
    return found


def _sealed(value: object, like: object) -> str:
    """A hash that shows whether two secrets are the same, and little else.

    With a salt, so that equal secrets of two runs look different and no table helps; and slow, since
    a short secret could be found by trying all there are. The salt of ``like`` is taken, if it has one.
    """
    parts = like.split() if is_sealed(like) and isinstance(like, str) else []
    salt = bytes.fromhex(parts[2]) if parts else os.urandom(16)
    text = json.dumps(value, sort_keys=True).encode()
    made = hashlib.scrypt(text, salt=salt, n=2**14, r=8, p=1, dklen=32)
    return f"{HIDDEN} scrypt {salt.hex()} {made.hex()}"


def is_sealed(value: object) -> bool:
    """Return True if ``value`` stands for a secret in a resume key."""
    return isinstance(value, str) and _SEALED.fullmatch(value) is not None


def described_key(name: str) -> str:
    """Return the name that a resume key uses for the entry ``name`` of the task's ``describe()``."""
    return f"{_DESCRIBED}{name}"


def is_described(key: str) -> bool:
    """Return True if ``key`` was made by ``described_key``."""
    return key.startswith(_DESCRIBED)


def difference(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """One line for each key whose value differs, such as ``run.seed: 1 -> 2``."""
    missing = "(not set)"
    return [
        f"{key}: {_written(old.get(key, missing), key)} -> {_written(new.get(key, missing), key)}"
        for key in sorted({*old, *new})
        if old.get(key, missing) != new.get(key, missing)
    ]


def aligned(old: Mapping[str, object], new: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """``new`` as the version that wrote ``old`` would have it, where both mean the same.

    That is with the old word for a task's file or for data where both words name one place, and without
    what it had no choice of, or its task did not describe yet, and with what there is no choice of now.
    """
    # Before there was a setting, runs had what its default means.
    known = known_fields()
    found = {
        key: v
        for key, v in new.items()
        if key in old or key not in known or v != _plain(known[key].default)
    }
    found |= {key: v for key, v in _NO_LONGER.items() if key in old}
    if not any(map(is_described, old)):  # its task said nothing of itself yet
        found = {key: v for key, v in found.items() if not is_described(key)}
    for key in ("run.task", "data.path"):
        before, now = old.get(key), new.get(key)
        if isinstance(before, str) and isinstance(now, str) and _place(before) == _place(now):
            found[key] = before
    return found


def _place(word: str) -> str:
    if not word or word in BUILT_IN_TASKS:
        return word
    path, py, name = word.partition(".py")
    is_file = bool(py) and (not name or name.startswith(":"))
    return f"{Path(path).resolve()}{py}{name}" if is_file or ":" not in word else word


def _written(value: object, key: str) -> str:
    if value != "(not set)" and (is_sealed(value) or holds_secret(key, value)):
        return HIDDEN
    return value if isinstance(value, str) and value else json.dumps(value)


def to_record(settings: Settings) -> dict[str, object]:
    """Settings as nested dicts of JSON values, in the order of the dataclasses."""
    record: dict[str, object] = {}
    for field in dataclasses.fields(settings):
        section = getattr(settings, field.name)
        if section is None or section == ():
            continue  # there are no stages
        record[field.name] = _plain(section)
    return record


def shared_settings(settings: Settings) -> dict[str, JsonValue]:
    """Dotted key -> value of what holds for all machines of a run, as its coordinator has it.

    Without what a machine must have alike from the beginning, which is compared before one is let in.
    """
    record: Mapping[str, Any] = to_record(settings)
    return {
        key: record[spec.section][spec.name]
        for key, spec in known_fields().items()
        if not spec.per_machine and spec.on_resume is OnResume.CANNOT_MATTER
    }


def with_shared(settings: Settings, shared: Mapping[str, object]) -> Settings:
    """``settings`` with values as :func:`shared_settings` gives them. Raises BadInputError."""
    record: dict[str, Any] = to_record(settings)
    for key, value in shared.items():
        section, _, name = key.partition(".")
        record[section][name] = value
    return from_record(record)


def record_to_show(settings: Settings) -> dict[str, JsonValue]:
    """The same without secrets, and with text for numbers that JSON has not."""
    found = _finite(masked(to_record(settings)))
    assert isinstance(found, dict)
    return found


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_record(record: Mapping[str, object]) -> Settings:
    """The settings that :func:`to_record` gave, of an earlier version, too. Raises BadInputError for any other mapping."""
    return validate_record(_without_removed(record))


def _without_removed(record: Mapping[str, object]) -> dict[str, object]:
    found = dict(record)
    for section, _, name in (key.partition(".") for key in REMOVED):
        values = found.get(section)
        if isinstance(values, Mapping):
            found[section] = {key: value for key, value in values.items() if key != name}
    return found


def _plain(value: Any) -> object:
    if (
        value is None or type(value) in _PLAIN_TYPES
    ):  # most by far: others are asked for what they are
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def digest(settings: Settings) -> str:
    """SHA-256 (hex) of the settings as canonical JSON, without their secrets."""
    text = json.dumps(masked(to_record(settings)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def stage_digest(settings: Settings) -> str:
    """Return a digest of the values that a stage's steps depend on and that it may set; without secrets."""
    record: Mapping[str, Any] = to_record(settings)
    found: dict[str, object] = {"task": masked(record["task"]), **_NO_LONGER}
    for key, spec in known_fields().items():
        if spec.per_stage and spec.on_resume is not OnResume.CANNOT_MATTER:
            found[key] = record[spec.section][spec.name]
    begins_with = "" if settings.stage is None else settings.stage.begins_with
    found["init_from"] = begins_with or settings.run.init_from
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def read_yaml(text: str) -> dict[str, object]:
    """Return the nested plain values that :func:`to_yaml` has written. Raises ValueError for anything else."""
    try:
        record = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    if not isinstance(record, dict):
        raise ValueError("not a mapping")  # noqa: TRY004 - as all that is not one of ours
    return _without_removed(record)


def to_yaml(settings: Settings) -> str:
    """The settings as YAML that ``--config`` reads again; secrets are hidden, and must be given again."""
    record = to_record(settings)
    record.pop("stage", None)  # which a launch finds out
    text: str = yaml.dump(
        masked(record), Dumper=_DUMPER, sort_keys=False, allow_unicode=True, width=100
    )
    return text
