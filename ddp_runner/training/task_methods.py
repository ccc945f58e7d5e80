"""Methods of a task that nothing calls: named in a line, or refused where another trainer would call them."""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from torch import nn

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.system.code_files import is_users_file
from ddp_runner.training.figures.measuring import measures
from ddp_runner.training.task import Task

# What is called here, with this many arguments.
HOOKS = {
    "build_model": 0,
    "build_datasets": 0,
    "loss": 2,
    "metrics": 2,
    "build_metrics": 0,
    "figures": 1,
    "sample": 1,
    "layer_groups": 0,
    "describe": 0,
    "local_state": 0,
    "configure_optimizers": 1,
    "predict": 2,
    "on_epoch_end": 1,
    "on_evaluation_end": 1,
}
_LOSS, _DATA = "write loss(model, batch)", "write build_datasets()"
_METRICS = "write metrics(model, batch)"
_OPTIMIZER = "write configure_optimizers(model)"
_EPOCH_END = "write on_epoch_end(context)"
_EVALUATION_END = "write on_evaluation_end(context)"
# Other trainers call these, and a task that has them counts on it.
_REFUSED = {
    "forward": "build_model() gives the module that has it",
    "training_step": _LOSS,
    "validation_step": f"evaluations call loss(model, batch) too; for more {_METRICS}",
    "train_dataloader": _DATA,
    "val_dataloader": _DATA,
    "build_optimizer": _OPTIMIZER,
    "build_scheduler": _OPTIMIZER,
}
_COLLATE = "give Datasets(collate=...)"
_UNUSED = {
    "collate": _COLLATE,
    "collate_fn": _COLLATE,
    "validation_collate": "give Datasets(validation_collate=...)",
    "train_step": _LOSS,
    "compute_loss": _LOSS,
    "eval_step": _METRICS,
    "compute_metrics": _METRICS,
    "test_step": _METRICS,
    "predict_step": "write predict(model, batch)",
    "on_train_epoch_end": _EPOCH_END,
    "training_epoch_end": _EPOCH_END,
    "on_validation_epoch_end": _EVALUATION_END,
    "on_validation_end": _EVALUATION_END,
    "validation_epoch_end": _EVALUATION_END,
}
_HOOKS_OF_CONTEXT = ("on_epoch_end", "on_evaluation_end")
_ALIKE = 0.85  # of letters, for a slip of the finger


def unused_methods(task: object) -> tuple[str, ...]:
    """A line for each method that its writer may believe to be called."""
    kind = type(task)
    lines = [
        f"{kind.__name__}.{name} is not used: {instead}"
        for name, instead in _uncalled(kind, _UNUSED)
    ]
    if callable(getattr(task, "metrics", None)) and not measures(cast("Task", task)):
        lines.append(f"{kind.__name__}.metrics is not used: it must take (model, batch)")
    return tuple(lines)


def refuse_uncalled(task: object, spec: str) -> None:
    """Raise BadInputError for a method that another trainer would call, a slip of a hook's name or an unfit hook."""
    kind = type(task)
    found = [] if isinstance(task, nn.Module) else list(_uncalled(kind, _REFUSED))
    found += _uncalled(kind, {name: f"did you mean {hook}?" for name, hook in slips(kind)})
    for name, instead in found:
        raise BadInputError("--task", spec, f"{kind.__name__}.{name} is not used: {instead}")
    for name in _HOOKS_OF_CONTEXT:
        if not _takes_one(getattr(task, name, None)):
            raise BadInputError("--task", spec, f"{kind.__name__}.{name} must take (context)")


def _takes_one(hook: object) -> bool:
    """Return False for what would be called with one argument and cannot be."""
    if not callable(hook):
        return True  # it is not called
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return True  # of a built-in function nobody knows
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True


def slips(kind: type) -> list[tuple[str, str]]:
    """Methods that are spelled almost like a hook that ``kind`` does not have, each with that hook."""
    missing = [hook for hook in HOOKS if not callable(getattr(kind, hook, None))]
    own = [name for one in _users_classes(kind) for name in vars(one)]
    near = {
        name: difflib.get_close_matches(name, missing, n=1, cutoff=_ALIKE)
        for name in own
        if name not in HOOKS and not name.startswith("_")
    }
    return [
        (name, hooks[0]) for name, hooks in near.items() if hooks and _fits(kind, name, hooks[0])
    ]


def _fits(kind: type, name: str, hook: str) -> bool:
    """Return True if the method can be called like the hook."""
    method = inspect.getattr_static(kind, name)
    is_bound = inspect.isfunction(method)
    if not is_bound and not isinstance(method, (staticmethod, classmethod)):
        return False
    arguments = [None] * (HOOKS[hook] + is_bound)
    try:
        inspect.signature(getattr(kind, name)).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


def _uncalled(kind: type, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield those of ``names`` that are the user's methods, and that none of the user's files mentions."""
    own = {name for one in _users_classes(kind) for name in vars(one)}
    wanted = [name for name in names if name in own and callable(getattr(kind, name))]
    if not wanted:
        return
    named = _names_in_files(kind)
    for name in wanted:
        if named is not None and name not in named:
            yield name, names[name]


def _users_classes(kind: type) -> list[type]:
    return [one for one in kind.__mro__ if (path := _file_of(one)) and is_users_file(str(path))]


def _names_in_files(kind: type) -> set[str] | None:
    """Return the names that the task's file and the user's modules in its folder mention; None if unreadable."""
    paths = {path for one in _users_classes(kind) if (path := _file_of(one))}
    folders = {path.parent for path in paths}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "")
        if path.suffix == ".py" and is_users_file(str(path)) and folders & {*path.parents}:
            paths.add(path)
    found: set[str] = set()
    for path in paths:
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def _file_of(kind: type) -> Path | None:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return Path(file) if file and file.endswith(".py") else None
