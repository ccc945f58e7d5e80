"""Loads an optimizer's state in time that grows with the number of its tensors alone. Steps nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


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
