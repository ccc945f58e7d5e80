"""The values that a preset, or a built-in task's recipe, lays over the defaults of ``core.settings``. Nothing here is a rule.

A preset is chosen by the device and has the defaults that fields have there. It holds nothing that a user's own task would learn otherwise by, except the ``_test``
presets, whose runs end in seconds. A recipe belongs to a built-in task. It stands here and not in ``tasks``, since
settings are resolved where torch is not imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_runner.config.fields import device_defaults

if TYPE_CHECKING:
    from collections.abc import Mapping

_CPU = device_defaults("cpu")
_GPU = device_defaults("gpu")
_SMALL: Mapping[str, object] = {
    "run.task": "synthetic",
    "run.epochs": 2,
    "model.vocab_size": 64,
    "model.dataset_size": 256,
    "model.seq_len": 32,
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "data.batch_size": 8,
    "data.num_workers": 1,
    "checkpoint.save_interval": 1,
    "log.log_interval": 4,
    "log.evaluate_batches": 4,
}
PRESETS: Mapping[str, Mapping[str, object]] = {
    "gpu": _GPU,
    "cpu": _CPU,
    "cpu_program": _CPU,
    "gpu_test": {**_GPU, **_SMALL},
    "cpu_test": {**_CPU, **_SMALL},
}
# A language model that learns in about three minutes on two cores.
_LANGUAGE_MODEL_ON_CPU: Mapping[str, object] = {
    "run.max_steps": 3000,
    "data.batch_size": 8,
    "model.hidden_size": 128,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.dropout": 0.0,
    "optim.learning_rate": 6e-3,
    "optim.beta2": 0.98,
    "checkpoint.save_every_steps": 200,
    "log.evaluate_every_steps": 500,
    "log.log_interval": 20,
}
_TRIED_OUT = {"optim.learning_rate": 1e-3, "optim.warmup_steps": 4}
# By preset and task. A recipe lies below everything but the defaults.
RECIPES: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "cpu": {
        "bytes": {**_LANGUAGE_MODEL_ON_CPU, "log.evaluate_batches": 25},
        "synthetic": _LANGUAGE_MODEL_ON_CPU,
    },
    "cpu_test": {"bytes": _TRIED_OUT, "synthetic": _TRIED_OUT},
    "gpu_test": {"bytes": _TRIED_OUT, "synthetic": _TRIED_OUT},
}
# Pairs of settings by epochs and by steps: one of them is in force.
CADENCES = (
    ("checkpoint.save_interval", "checkpoint.save_every_steps"),
    ("log.evaluate_interval", "log.evaluate_every_steps"),
)
WORKERS = ("data.num_workers", "data.workers_total")  # for each rank, over the ranks of a machine
