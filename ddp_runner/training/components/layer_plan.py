"""Decides which layers are trained from which step on: a function of the step, equal on all ranks.

Sets ``requires_grad`` of parameters; callers wrap the model in DDP again and change the optimizer.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ddp_runner.checkpoint.entry_names import bare_name
from ddp_runner.core.settings import OptimSettings
from ddp_runner.core.step_schedule import steps_of
from ddp_runner.kernel.rules.errors import BadInputError

TRAIN, UNFREEZE = "optim.train_layers", "optim.unfreeze"
FULL = "full"
_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unfreezing:
    """``names``: of parameters, trained from ``step`` on; ``words``: as the user wrote it."""

    step: int
    words: str
    names: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """``first``: names of the parameters that are trained from the first step on; None: as the task made them."""

    first: frozenset[str] | None = None
    later: tuple[_Unfreezing, ...] = ()

    def later_names(self) -> frozenset[str]:
        """Return the names of the parameters that are trained from a later step on."""
        return frozenset().union(*(one.names for one in self.later))

    def begin(self, model: nn.Module) -> None:
        """Freeze what is not trained at first. Before optimizer and DDP see the model."""
        if self.first is None:
            return
        for name, parameter in _named(model).items():
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(name in self.first)

    def unfreeze(self, model: nn.Module, *, step: int) -> str:
        """Train what is due at ``step``, or was before it; what that is, in words, empty where nothing changes."""
        due = [one for one in self.later if one.step <= step]
        if not due:
            return ""
        parameters, words = _named(model), []
        for one in due:
            frozen = [name for name in one.names if not parameters[name].requires_grad]
            if frozen:
                words.append(one.words)
                for name in frozen:
                    parameters[name].requires_grad_(True)
        if not words:
            return ""
        return f"{', '.join(words)} trained from step {step:,} on: {trained_words(model)}"


def layer_plan(
    model: nn.Module,
    settings: OptimSettings,
    *,
    groups: Mapping[str, Sequence[str]],
    total_steps: int,
) -> LayerPlan:
    """Return the plan of ``settings`` for ``model``. ``groups``: the task's names -> patterns of module names.

    Raises BadInputError for a group or pattern that the model does not have.
    """
    names = list(_named(model))
    first = None
    if settings.train_layers != FULL:
        words = _split(settings.train_layers)
        chosen = [_matching(TRAIN, one, names, groups) for one in words]
        first = frozenset().union(*chosen)
        if not first:
            raise BadInputError(TRAIN, settings.train_layers, "names nothing: full trains all")
    later = tuple(_unfreezings(settings.unfreeze, names, groups, total_steps=total_steps))
    return LayerPlan(first=first, later=later)


def _unfreezings(
    text: str, names: Sequence[str], groups: Mapping[str, Sequence[str]], *, total_steps: int
) -> Iterable[_Unfreezing]:
    for word in _split(text):
        what, step = _what_and_step(word, total_steps=total_steps)
        yield _Unfreezing(step=step, words=what, names=_matching(UNFREEZE, what, names, groups))


def _what_and_step(word: str, *, total_steps: int) -> tuple[str, int]:
    """The two parts of one unfreezing. Raises BadInputError where it is none."""
    what, at, when = word.rpartition("@")
    try:
        number = float(when)
    except ValueError:
        number = -1.0
    is_step = number >= 1 and number.is_integer()
    if not (what and at and (0 < number < 1 or is_step)):
        expected = "must be LAYERS@STEP or LAYERS@SHARE of the run, as in encoder@1000,head@0.5"
        raise BadInputError(UNFREEZE, word, expected)
    return what, max(1, steps_of(number, of=total_steps))


def in_steps(text: str, *, total_steps: int) -> str:
    """``optim.unfreeze`` with a step in the place of each share: ``encoder@1000,head@500``."""
    parts = [_what_and_step(word, total_steps=total_steps) for word in _split(text)]
    return ",".join(f"{what}@{step}" for what, step in parts)


def trained_words(model: nn.Module) -> str:
    """Return the number of parameters that require a gradient, in words."""
    every = [(one.numel(), one.requires_grad) for one in model.parameters()]
    trained, total = sum(n for n, is_trained in every if is_trained), sum(n for n, _ in every)
    return f"{trained:,} of {total:,} parameters"


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _matching(
    option: str, word: str, names: Sequence[str], groups: Mapping[str, Sequence[str]]
) -> frozenset[str]:
    """The parameters of a group, or of a pattern of module or parameter names."""
    chosen = groups.get(word, [word])
    patterns = [chosen] if isinstance(chosen, str) else list(chosen)
    found = frozenset(
        name
        for name in names
        for pattern in patterns
        if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
    )
    if not found:
        known = [*groups, *_module_names(names)]
        near = difflib.get_close_matches(word, known, n=_NAMES_SHOWN, cutoff=0.0)
        kind = "matches no parameter of the model" if word not in groups else "is an empty group"
        raise BadInputError(option, word, f"{kind}; the nearest names are {', '.join(near)}")
    return found


def _module_names(names: Iterable[str]) -> list[str]:
    """Return the names of the modules that have parameters; numbered modules share one entry."""
    paths = {name.rpartition(".")[0] for name in names}
    parents = {path.partition(".")[0] for path in paths}
    every = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path) for path in paths | parents if path}
    return sorted(every)


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {bare_name(model, name): one for name, one in model.named_parameters()}
