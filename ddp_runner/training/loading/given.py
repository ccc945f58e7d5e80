"""Tasks and results in one's own Python program: a class that is handed over, and the trained model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ddp_runner.checkpoint.entry_names import bare_state, load_bare_state, read_as
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.config.run_names import HANDED_OVER
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.system.launch_folder import begin_here
from ddp_runner.training.components.ema import Ema
from ddp_runner.training.starting.task_import import load_task


def spec_in_this_process(task: object) -> str:
    """``module:NAME`` for a task class (or factory, or ready task), for use in this process alone."""
    if isinstance(task, str):
        return task
    name = getattr(task, "__qualname__", type(task).__name__).rpartition(".")[2]
    module = str(getattr(task, "__module__", ""))
    if getattr(sys.modules.get(module), name, None) is task:
        return f"{module}:{name}"
    kept = sys.modules.setdefault(HANDED_OVER, ModuleType(HANDED_OVER))
    name = name if name.isidentifier() else "Task"
    setattr(kept, name, task)
    return f"{HANDED_OVER}:{name}"


def with_task_named(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with its task by name, where it holds the class itself."""
    named = dict(config)
    for key in ("task", "run.task"):
        if key in named and not isinstance(named[key], (str, Mapping)):
            named[key] = spec_in_this_process(named[key])
    run = named.get("run")
    if isinstance(run, Mapping) and "task" in run:
        named["run"] = {**run, "task": spec_in_this_process(run["task"])}
    return named


def give_average(model: nn.Module, ema: Ema | None) -> nn.Module:
    """``model`` as it is to be used: with the average where one is kept, and not for training."""
    if ema is not None and ema.started:
        with ema.swapped_in(model):
            averaged = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(averaged)
    return model.eval()


def load_trained(settings: Settings, checkpoint_dir: Path) -> nn.Module:
    """The task's model, on the CPU, as the last checkpoint has it. Raises BadInputError."""
    begin_here()
    loaded = CheckpointStore(checkpoint_dir, keep_last=settings.checkpoint.keep_last).load("last")
    if loaded is None:
        raise BadInputError("checkpoint_dir", checkpoint_dir, "holds no checkpoint")
    model = load_task(settings).build_model()
    load_bare_state(model, read_as(loaded.state["model"], bare_state(model)))
    average = loaded.state.get("ema")
    if not average or not average["parameters"]:
        return give_average(model, None)
    ema = Ema(model, float(average["decay"]))
    ema.load_state_dict(average)
    return give_average(model, ema)
