"""Loads an optimizer's state in time that grows with the number of its tensors alone, and finds what no state has.

Steps nothing.
"""

from __future__ import annotations

import itertools
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, GeneratorType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_runner.system.code_files import is_users_file
from ddp_runner.values.object_graph import LEAVES, attributes_of, own_classes

# What torch sets on an optimizer: also its schedulers and its GradScaler, for a moment or for good.
_OF_TORCH = frozenset(
    [
        *("defaults", "state", "param_groups", "step", "found_inf", "grad_scale", "_opt_called"),
        *("_params", "_numel_cache", "_step_supports_amp_scaling", "_zero_grad_profile_name"),
        *("_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused"),
    ]
)
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_COUNTING = (list, dict, set, deque, array, np.ndarray, itertools.count, GeneratorType)


def hidden_state(
    optimizers: Mapping[str, Any], schedulers: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what steps of the optimizers may change and no checkpoint has, by name.

    These are attributes beside torch's own, unless the class describes its state itself by ``state_dict()``, and
    variables of hooks and of schedulers' functions.
    """
    found: dict[str, Any] = {}
    for name, one in optimizers.items():
        if getattr(type(one), "state_dict", None) is Optimizer.state_dict:
            hidden = ("_optimizer_", "_" if type(one).__module__.startswith("torch.") else "__")
            found |= {
                f"{name}.{key}": value
                for key, value in attributes_of(one).items()
                if key not in _OF_TORCH and not key.startswith(hidden)
            }
            found |= {
                f"{name}: {kind.__name__}.{key}": value
                for kind in own_classes(one)
                for key, value in attributes_of(kind).items()
            }
        for hooks in _HOOKS:
            found |= _of_functions(name, vars(one).get(hooks, {}).values())
    for name, one in (schedulers or {}).items():
        found |= _of_functions(name, getattr(one, "lr_lambdas", ()))
    return found


def _of_functions(name: str, functions: Iterable[Any]) -> dict[str, Any]:
    return {
        f"{name}: {function.__name__}.{key}": value
        for function in functions
        if isinstance(function, FunctionType)
        for key, value in _variables_of(function)
        if type(value) in LEAVES or isinstance(value, _COUNTING)
    }


def _variables_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    own = attributes_of(function)
    yield from own.items()
    if own or is_users_file(function.__code__.co_filename):
        names = (one for one in function.__code__.co_names if one in function.__globals__)
        yield from ((one, function.__globals__[one]) for one in names)


def load_optimizer_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict(state)``, whose tensors are taken over as they are where they fit.

    torch looks for each number of each parameter in the whole list of them: at ten thousand that takes
    seconds. Raises what load_state_dict() raises. The groups stay the same objects: another optimizer may
    share them, as SAM does with its base, and a program may hold one to change its rate.
    """
    own = vars(optimizer).get("param_groups")
    _load(optimizer, state)
    loaded = vars(optimizer).get("param_groups")
    if own is None or loaded is None or len(own) != len(loaded):
        return
    for group, new in zip(own, loaded, strict=True):
        if group is not new:
            group.clear()
            group.update(new)
    optimizer.param_groups = own


def _load(optimizer: Any, state: Mapping[str, Any]) -> None:
    if not _loads_plainly(optimizer) or not _fits(optimizer, state):
        optimizer.load_state_dict(state)
        return
    entries: defaultdict[Any, Any] = defaultdict(dict)
    groups = []
    for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        flags = {name: saved[name] for name in ("fused", "capturable") if name in saved}
        for parameter, number in zip(own["params"], saved["params"], strict=True):
            if number in state["state"]:
                alone = [{**flags, "params": [number]}]
                entries[parameter] = {
                    key: _fitted(parameter, value, number, alone, key)
                    for key, value in state["state"][number].items()
                }
        names = {"param_names": own["param_names"]} if "param_names" in own else {}
        groups.append({**names, **saved, "params": own["params"]})
    optimizer.__setstate__({"state": entries, "param_groups": groups})


def room_for_state(optimizer: Any) -> dict[int, dict[str, Tensor]]:
    """Memory for what ``optimizer`` will keep, placed as in the state of its state_dict().

    It is there at once, not page by page as it is written. Of optimizers that are not known, nothing.
    """
    room: dict[int, dict[str, Tensor]] = {}
    number = 0
    for part in getattr(optimizer, "parts", [optimizer]):
        for group in part.param_groups:
            for parameter in group["params"]:
                names = _kept_like_parameter(part, group)
                room[number] = {name: torch.empty_like(parameter).zero_() for name in names}
                number += 1
    return room


def _kept_like_parameter(optimizer: Any, group: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of what has the parameter's shape and type."""
    if isinstance(optimizer, torch.optim.Adam):  # and AdamW
        return ("exp_avg", "exp_avg_sq")
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if group["momentum"] else ()
    return ("momentum_buffer",) if type(optimizer).__name__ == "Muon" else ()


def _loads_plainly(optimizer: Any) -> bool:
    kind = type(optimizer)
    return (
        getattr(kind, "load_state_dict", None) is torch.optim.Optimizer.load_state_dict
        and kind.__module__.startswith("torch.optim.")
        and not optimizer._optimizer_load_state_dict_pre_hooks  # noqa: SLF001 - what it would call
        and not optimizer._optimizer_load_state_dict_post_hooks  # noqa: SLF001
    )


def _fits(optimizer: Any, state: Mapping[str, Any]) -> bool:
    """Return True if ``state`` has the optimizer's groups, and flat entries like those of torch's optimizers."""
    own = [len(group["params"]) for group in optimizer.param_groups]
    numbers = {number for group in state["param_groups"] for number in group["params"]}
    return (
        own == [len(group["params"]) for group in state["param_groups"]]
        and numbers.issuperset(state["state"])
        and not any(
            isinstance(value, (dict, list, tuple))
            for entry in state["state"].values()
            for value in entry.values()
        )
    )


def _fitted(
    parameter: Tensor, value: Any, number: int, groups: list[dict[str, Any]], key: str
) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.optim.Optimizer._process_value_according_to_param_policy(  # noqa: SLF001
        parameter, value, number, groups, key
    )
