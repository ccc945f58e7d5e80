"""Calls the optional methods of a task: hooks, figures of a loss, a sample at the end. They change no training."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from ddp_runner.kernel.rules.election import EMPTY_STEP
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.components.tensor_hash import state_hashes
from ddp_runner.training.state import TrainState
from ddp_runner.training.task import EpochContext, NamesLoss, ReportsSample, Task
from ddp_runner.values.generators import device_generators, generators_kept

_SHOWN_MAX = 4


class Helpers:
    """A task's; what raises, or gives what nobody expects, is left out with a warning, once each."""

    def __init__(self, task: Task, *, warn: Callable[[str], None]) -> None:
        self._task = task
        self._warn = warn
        self._warned: set[str] = set()

    def figures(self, loss: float) -> dict[str, float]:
        """The task's figures of ``loss`` by name, as plain numbers; none if it has none."""
        if not isinstance(self._task, NamesLoss):
            return {}
        try:
            given: object = self._task.figures(loss)
        except Exception as error:  # noqa: BLE001 - whatever user code raises
            self._leave_out(f"figures() raised {_described(error)}")
            return {}
        if not isinstance(given, Mapping):
            self._leave_out(f"figures() returned {_named(given)}, not a dict of names and numbers")
            return {}
        return {
            str(name): number
            for name, value in given.items()
            if (number := self._number(str(name), value)) is not None
        }

    def sample(self, model: nn.Module) -> str:
        """The task's sample of what ``model`` has learnt; empty if it has none."""
        if not isinstance(self._task, ReportsSample):
            return ""
        try:
            with torch.no_grad():
                given = self._task.sample(model)
            return "" if given is None else str(given)
        except Exception as error:  # noqa: BLE001 - whatever user code raises
            self._leave_out(f"sample() raised {_described(error)}")
            return ""

    def _number(self, name: str, value: object) -> float | None:
        try:
            return float(value)  # type: ignore[arg-type] # what is no number raises
        except (TypeError, ValueError, RuntimeError, OverflowError):
            self._leave_out(f"figures() returned {_named(value)} for {name!r}, not a number")
            return None

    def _leave_out(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            self._warn(f"the task's {why}; left out")


def call_hook(
    task: Task,
    name: str,
    context: EpochContext,
    state: TrainState,
    *,
    warn: Callable[[str], None],
) -> None:
    """Call the hook if the task has it, and put back what it changes: a rank may call it again after a repair.

    Its model is in eval mode, as a sample of it is. Raises BadInputError where it changes what an update does: called
    again, it might find nothing to change, and training would go on with the change.
    """
    hook = getattr(task, name, None)
    if not callable(hook):
        return
    # INVARIANT hooks-observe: a hook leaves no trace in the state from which training continues: after a lost rank
    # all ranks may call it again. Broken if: its changes are kept on some ranks.
    # Guarded by: test_changes_by_a_hook_are_put_back.
    was_training = state.model.training
    state.side.look()
    held = state.side.hold()
    before, flags, options = _updated(state), state.flags(), _options(state)
    # Also for layers that reach other ranks in training mode, where one rank alone may call the model.
    state.model.eval()
    with torch.no_grad(), generators_kept(also=device_generators()):
        hook(context)
    state.model.train(was_training)
    if wrong := _differing(before, _updated(state)):
        state.put_flags(flags)
        for group, kept in zip(state.optimizer.param_groups, options, strict=False):
            group.update(kept)
        if _differing(before, _updated(state)):
            state.committed_step = EMPTY_STEP  # no checkpoint is made of what the hook has changed
        raise BadInputError(
            "--task",
            "",
            f"{name}() changed {', '.join(wrong)}; a hook may be called twice after a repair, so it must leave"
            " parameters and the optimizer as they are. Change a copy of the model, or restore what it changes",
        )
    changed = state.side.follow_changed_since(held)
    state.drop_evaluation()
    if changed:
        warn(
            f"{name}() changed {', '.join(changed)}, which was rolled back, since a repair may call a hook twice."
            " Compute such a value from context.epoch in loss(), or write it to a file"
        )


def _updated(state: TrainState) -> dict[str, object]:
    """Return what an update reads and writes, each under words for people: hashes, flags and options."""
    parameters = dict(state.named_parameters())
    found: dict[str, object] = {
        f"parameter {name}": value for name, value in state_hashes(parameters).items()
    }
    for name, one in parameters.items():
        found[f"requires_grad of {name}"] = (id(one), one.requires_grad)
    for number, group in enumerate(state.optimizer.param_groups):
        for key, value in group.items():
            of_group = f"{key} of the optimizer's group {number}"
            found[of_group] = [*map(id, value)] if key == "params" else _kept(value)
    return found


def _options(state: TrainState) -> list[dict[str, object]]:
    groups = state.optimizer.param_groups
    return [copy.deepcopy({k: v for k, v in one.items() if k != "params"}) for one in groups]


def _kept(option: object) -> object:
    return option.tolist() if isinstance(option, torch.Tensor) else copy.deepcopy(option)


def _differing(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the first few names that are new, gone or of other values."""
    nothing = object()
    names = dict.fromkeys([*before, *after])
    found = [one for one in names if before.get(one, nothing) != after.get(one, nothing)]
    return found if len(found) <= _SHOWN_MAX else [*found[:_SHOWN_MAX], "..."]


def _named(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _described(error: Exception) -> str:
    """Type, text and line of what user code raised."""
    *_, newest = traceback.extract_tb(error.__traceback__)
    text = str(error).strip().partition("\n")[0]
    where = f"{Path(newest.filename).name}:{newest.lineno}"
    return f"{type(error).__name__}{f': {text}' if text else ''} ({where})"
