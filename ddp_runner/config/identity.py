"""What a run means and how its steps are computed, as plain values; written forms of settings.

Sorts every setting by what a change of it means to a run that is resumed. Decides no resume.
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
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ddp_runner.config.compose import validate_record
from ddp_runner.config.fields import BUILT_IN_TASKS, known_fields
from ddp_runner.config.foreign import REMOVED
from ddp_runner.config.stage_list import OF_A_STAGE
from ddp_runner.core.batch_sizes import global_batch, micro_batch, shares_of
from ddp_runner.core.run_stages import uses_best
from ddp_runner.core.secrets import HIDDEN, holds_secret, masked

if TYPE_CHECKING:
    from ddp_runner.core.settings import JsonValue, Settings

_NOTHING: Mapping[str, object] = {}
# What runs had before there was a setting, of those that a resume key has.
_BEFORE_CHOICE: Mapping[str, object] = {
    "optim.train_layers": "full",
    "optim.optimizer": "adamw",
}
# What runs of earlier versions had in a resume key, where they did not choose something else.
_NO_LONGER: Mapping[str, JsonValue] = {"data.largest_samples": False}
_DESCRIBED = "describe() "
_SEALED = re.compile(r"\*\*\* scrypt [0-9a-f]{32} [0-9a-f]{64}")
GLOBAL_BATCH = "data.batch_size x ranks"
# The settings of the model that each built-in task reads; a user's own task reads none of them.
_BYTES_MODEL = ("seq_len", "hidden_size", "num_layers", "num_heads", "dropout")
MODEL_OF_TASK: Mapping[str, tuple[str, ...]] = {
    "bytes": _BYTES_MODEL,
    "synthetic": ("vocab_size", "dataset_size", *_BYTES_MODEL),
}


class OnResume(Enum):
    """What it means that a setting differs from the run's that is resumed."""

    REFUSED = "another run"  # part of resume_key()
    REPORTED = (
        "goes on, with other steps"  # part of recipe(); what is computed alike is not reported
    )
    CANNOT_MATTER = "the same steps"


# Every setting, once; ``task.X`` are all refused. Those of the model matter to whoever reads them: the
# built-in tasks (refused), and a task of the user's that is given all settings (reported). What
# follows from several is reported as what follows:
# ranks, device, precision, threads, the end of a schedule.
ON_RESUME: Mapping[str, OnResume] = {
    key: kind
    for kind, keys in {
        OnResume.REFUSED: """
            run.task run.seed optim.optimizer optim.train_layers model.vocab_size model.dataset_size model.seq_len model.hidden_size
            model.num_layers model.num_heads model.dropout data.path data.batch_size
            data.accumulation data.accumulation_total data.global_batch_size data.validation_fraction
        """,
        OnResume.REPORTED: """
            run.epochs run.max_steps run.load_best_at_end run.device run.nproc_per_node run.mode run.threads_per_rank
            run.deterministic run.matmul_precision run.channels_last data.micro_batch_size data.shares data.stream_end optim.learning_rate optim.weight_decay
            optim.beta1 optim.beta2 optim.momentum optim.epsilon optim.max_grad_value
            optim.schedule optim.schedule_steps optim.warmup_steps optim.decay_steps
            optim.min_learning_rate optim.plateau_patience optim.plateau_min_delta
            optim.plateau_factor optim.plateau_cooldown
            optim.max_grad_norm optim.unfreeze optim.precision optim.amp_growth_interval optim.ema_decay
            optim.ema_every optim.ema_start_step optim.ema_device ddp.backend
            ddp.bucket_cap_mb ddp.gradient_dtype ddp.sync_batchnorm run.compile run.compile_mode run.compile_dynamic
        """,
        # Samples and their random numbers depend on seed, epoch and index, never on who loads them
        # or how soon. What decides about faults is reported when there is one.
        OnResume.CANNOT_MATTER: """
            run.name run.max_time run.target_loss run.early_stopping_patience
            run.early_stopping_min_delta run.resume run.stage run.init_from run.init_strict run.log_dir
            run.checkpoint_dir
            run.gpus run.allow_different_code run.audit run.test run.debug run.detect_anomaly run.inject
            optim.amp_init_scale run.compile_fullgraph
            data.evaluation_batch_size data.preload data.num_workers data.workers_total data.prefetch_factor data.pin_memory data.loader_timeout_s
            data.on_bad_sample data.max_bad_samples data.compare_samples ddp.find_unused_parameters ddp.relax_after_steps ddp.static_graph
            ddp.gradient_as_bucket_view ddp.collective_timeout_s ddp.port
            memory.memory_check_interval memory.cleanup_interval memory.max_memory_gb
            memory.regrow_micro_batch memory.activation_checkpointing memory.warn_share memory.react_share memory.limit_share
            memory.leak_window_steps memory.leak_mb_per_1000_steps
            checkpoint.save_interval checkpoint.save_every_steps checkpoint.memory_every
            checkpoint.keep_last
            checkpoint.keep_every checkpoint.after_save
            checkpoint.after_save_grace_s checkpoint.monitor checkpoint.mode checkpoint.only_trained
            checkpoint.rescue_dir log.log_interval log.evaluate_interval log.evaluate_every_steps
            log.evaluate_batches log.evaluate_at_start log.display log.trackers log.gpu_watch_s log.profile
            log.phase_times log.page log.page_port log.page_can_inject
            recovery.max_restarts recovery.restart_window_s recovery.no_progress_generations
            recovery.min_ranks recovery.slot_failures_max recovery.regrow_after
            recovery.backoff_first_s recovery.backoff_max_s recovery.startup_timeout_s
            recovery.form_timeout_s recovery.node_silent_s recovery.node_patience_s recovery.coordinator_wait_s
             recovery.warm_spare recovery.hang_min_s recovery.hang_factor
            recovery.first_step_timeout_s recovery.evaluation_timeout_s
            recovery.checkpoint_timeout_s recovery.stop_timeout_s recovery.max_errors_per_epoch
            recovery.rollbacks_max recovery.explosion_window recovery.explosion_loss_factor
            recovery.explosion_grad_factor recovery.explosion_loss_max
            recovery.explosion_rate_factor recovery.explosion_recover_steps
            recovery.replica_check_steps recovery.drill_at
            recovery.require_exact
        """,
    }.items()
    for key in keys.split()
}
# Keys of a recipe that act through the learning rate alone.
RATE_KEYS = (
    *("learning_rate", "schedule", "schedule_steps", "warmup_steps", "decay_steps"),
    "min_learning_rate",
)
TOTAL_STEPS = "steps of the run"
TASK_FILE = "the task's file"
TASK_MODULE = "the task's module "  # and its name: one that the task imports, and nobody installed
_AS_WRITTEN = (
    "run.deterministic",
    "run.matmul_precision",
    "run.channels_last",
    "optim.amp_growth_interval",
    *(f"optim.{name}" for name in RATE_KEYS),
    "optim.weight_decay",
    "optim.beta1",
    "optim.beta2",
    "optim.momentum",
    "optim.epsilon",
    "optim.max_grad_norm",
    "optim.unfreeze",
    "optim.max_grad_value",
    "optim.plateau_patience",
    "optim.plateau_min_delta",
    "optim.plateau_factor",
    "optim.plateau_cooldown",
    "optim.ema_decay",
    "optim.ema_every",
    "optim.ema_start_step",
    "optim.ema_device",
    "ddp.bucket_cap_mb",
    "ddp.gradient_dtype",
    "ddp.sync_batchnorm",
    "run.compile",
    "run.compile_mode",
    "run.compile_dynamic",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What follows from settings and machine together. ``threads``: of a rank, 0 on a GPU.

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
    """How the steps of this launch are computed: a change makes other weights of the same run."""
    sections = to_record(settings)
    written: dict[str, JsonValue] = {}
    for key in _AS_WRITTEN:
        section, _, name = key.partition(".")
        written[key] = sections[section][name]  # type: ignore[index]
    is_best_used = uses_best(settings.stage, load_best_at_end=settings.run.load_best_at_end)
    if settings.optim.plateau_patience or is_best_used:  # weights then follow from evaluations
        log = settings.log
        written["checkpoint.monitor"] = settings.checkpoint.monitor
        written["log.evaluate_interval"] = log.evaluate_interval
        written["log.evaluate_every_steps"] = log.evaluate_every_steps
        written["log.evaluate_batches"] = log.evaluate_batches
        if settings.checkpoint.mode != "min":  # as files of before it have none
            written["checkpoint.mode"] = settings.checkpoint.mode
    if settings.data.stream_end != "wrap":  # as above
        written["data.stream_end"] = settings.data.stream_end
    if found.own_task_reads_model:
        written |= {f"model.{name}": v for name, v in sections["model"].items()}  # type: ignore[attr-defined]
    if found.task_file:
        written[TASK_FILE] = f"sha256:{found.task_file[:16]}"
    written |= {f"{TASK_MODULE}{name}": f"sha256:{one}" for name, one in found.task_modules.items()}
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


def task_has_changed(old: Mapping[str, object], new: Mapping[str, object]) -> bool:
    """Whether the task's file, or one that it imports, is another in the recipe ``new`` than in ``old``."""
    return any(
        old[key] != new.get(key)
        for key in old
        if key == TASK_FILE or (key.startswith(TASK_MODULE) and key in new)
    )


def _shares(shares: Sequence[int]) -> list[object]:
    """In smallest numbers; none where they are equal, as without the setting."""
    if len(set(shares)) <= 1:
        return []
    return [share // math.gcd(*shares) for share in shares]


def resume_key(settings: Settings, *, world_size: int) -> dict[str, JsonValue]:
    """What must not change between a checkpoint and the run that resumes from it.

    ``world_size``: of ranks, or of all their devices where they have more than one.

    Task and its arguments, model, data, global batch, seed and the kind of optimizer: a change of any
    of them makes another run. Rates, schedules, intervals and folders may change. Keys are dotted names.
    """
    task = settings.run.task
    found: dict[str, JsonValue] = {
        "run.task": task,
        "run.seed": settings.run.seed,
        "optim.optimizer": settings.optim.optimizer,
        "optim.train_layers": settings.optim.train_layers,
    }
    for name in MODEL_OF_TASK.get(task, ()):
        found[f"model.{name}"] = getattr(settings.model, name)
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
    """Whether ``value`` stands for a secret in a resume key."""
    return isinstance(value, str) and _SEALED.fullmatch(value) is not None


def described_key(name: str) -> str:
    """What a resume key calls what the task's ``describe()`` has as ``name``."""
    return f"{_DESCRIBED}{name}"


def is_described(key: str) -> bool:
    """Whether a key of a resume key is one of ``described_key``."""
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
    found = {key: v for key, v in new.items() if key in old or v != _BEFORE_CHOICE.get(key)}
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
        if isinstance(section, (Mapping, tuple)):
            record[field.name] = _plain(section)
        else:
            record[field.name] = _plain(dataclasses.asdict(section))
    return record


def shared_settings(settings: Settings) -> dict[str, JsonValue]:
    """Dotted key -> value of what holds for all machines of a run, as its coordinator has it.

    Without what a machine must have alike from the beginning, which is compared before one is let in.
    """
    record: Mapping[str, Any] = to_record(settings)
    return {
        key: record[section][name]
        for key, spec in known_fields().items()
        if not spec.per_machine and ON_RESUME[key] is OnResume.CANNOT_MATTER
        for section, _, name in (key.partition("."),)
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


def _plain(value: object) -> object:
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
    """Of what the steps of a stage follow from, as far as it may be a stage's own; without its secrets."""
    record = to_record(settings)
    found: dict[str, object] = {"task": masked(record["task"]), **_NO_LONGER}
    for key in sorted(OF_A_STAGE):
        if ON_RESUME[key] is not OnResume.CANNOT_MATTER:
            section, _, name = key.partition(".")
            found[key] = record[section][name]  # type: ignore[index]
    begins_with = "" if settings.stage is None else settings.stage.begins_with
    found["init_from"] = begins_with or settings.run.init_from
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def read_yaml(text: str) -> dict[str, object]:
    """What :func:`to_yaml` has written, as nested plain values. Raises ValueError for anything else."""
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
    return yaml.safe_dump(masked(record), sort_keys=False, allow_unicode=True, width=100)
