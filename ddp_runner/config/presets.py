"""The values that a preset lays over the defaults of ``core.settings``. Nothing here is a rule.

The defaults are those of a GPU run. ``cpu`` is sized so that the default task ends in about three
minutes on two cores; the ``_test`` presets end in seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_CPU: Mapping[str, object] = {
    "data.batch_size": 8,
    "data.num_workers": 0,  # with as many ranks as cores, a worker only takes their time: 2% of CPU
    "model.seq_len": 128,
    "model.hidden_size": 128,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.dropout": 0.0,
    "optim.learning_rate": 6e-3,
    "optim.beta2": 0.98,
    "optim.schedule": "cosine",
    "optim.warmup_steps": 100,
    "optim.use_amp": False,
    "run.max_steps": 3000,
    "checkpoint.save_every_steps": 200,
    "log.evaluate_every_steps": 500,
    "log.evaluate_batches": 25,
    "log.log_interval": 20,
}
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
    "optim.learning_rate": 1e-3,
    "optim.warmup_steps": 4,
    "checkpoint.save_interval": 1,
    "log.log_interval": 4,
    "log.evaluate_batches": 4,
}
PRESETS: Mapping[str, Mapping[str, object]] = {
    "gpu": {},
    "cpu": _CPU,
    "gpu_test": _SMALL,
    "cpu_test": {**_SMALL, "optim.use_amp": False},
}
