"""Several optimizers that are one to the step, the checkpoint and the state that is sent. Builds none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_runner.training.components.optimizer_state import load_optimizer_state


class _States(Mapping[Tensor, Any]):
    """The entries of several optimizers; one that is not there is not made, as theirs would be."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, parameter: Tensor) -> Any:
        for one in self._optimizers:
            if parameter in one.state:
                return one.state[parameter]
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for one in self._optimizers for parameter in one.state)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers)


def entries_of(optimizer: Any, parameter: Tensor) -> list[dict[str, Any]]:
    """Return the entries for ``parameter``: one of each optimizer that has any, as SAM and its base do."""
    parts = getattr(optimizer, "parts", [optimizer])
    return [one.state[parameter] for one in parts if parameter in one.state]


class SeveralOptimizers:
    """Several optimizers as if they were one: their groups and states, one after the other."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    @property
    def parts(self) -> list[torch.optim.Optimizer]:
        """The optimizers themselves, in order."""
        return list(self._optimizers)

    def step(self) -> None:
        """Step all optimizers, in order."""
        for one in self._optimizers:
            one.step()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in order."""
        return [group for one in self._optimizers for group in one.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """The states of all optimizers; if two have an entry for one parameter, see :func:`entries_of`."""
        return _States(self._optimizers)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all optimizers."""
        for one in self._optimizers:
            one.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict like that of one optimizer: parameters are numbered consecutively."""
        states: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for begin, one in self._parts():
            found = one.state_dict()
            states.update({begin + number: entry for number, entry in found["state"].items()})
            groups += [
                {**group, "params": [begin + number for number in group["params"]]}
                for group in found["param_groups"]
            ]
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`. Raises ValueError where it does not fit."""
        groups = list(state["param_groups"])
        for begin, one in self._parts():
            count = len(one.param_groups)
            own, groups = groups[:count], groups[count:]
            numbers = [number for group in own for number in group["params"]]
            own = [{**g, "params": [number - begin for number in g["params"]]} for g in own]
            entries = {n - begin: state["state"][n] for n in numbers if n in state["state"]}
            load_optimizer_state(one, {"state": entries, "param_groups": own})

    def _parts(self) -> Iterator[tuple[int, torch.optim.Optimizer]]:
        """Each optimizer with the number of its first parameter."""
        begin = 0
        for one in self._optimizers:
            yield begin, one
            begin += sum(len(group["params"]) for group in one.param_groups)
