"""Gives a model that was just built the weights of ``--init-from``, and says what of them fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_runner import config
from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.checkpoint.entry_names import load_bare_state, read_under
from ddp_runner.checkpoint.hub import fetched
from ddp_runner.checkpoint.manifest import stage_name
from ddp_runner.checkpoint.weights import read_weights
from ddp_runner.core.hub import is_of_hub
from ddp_runner.core.run_stages import BEST
from ddp_runner.core.settings import Settings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.system.launch_folder import at_launch
from ddp_runner.training.components.start_weights import filled, place_of
from ddp_runner.training.starting.fitting import check_values, check_weights
from ddp_runner.training.state import TrainState

_OPTION = "--init-from"
_NAMED_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The entries of a file that go into a model, in the model's types.

    ``taken``: the entries to load, by the model's names. ``tied``: the number of names that the file lacks but
    whose weights it has under another name. ``mismatched``: descriptions with both shapes. ``converted``: the
    number of entries with another type of number.
    """

    taken: Mapping[str, Any]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    tied: int = 0
    converted: int = 0

    @property
    def loaded(self) -> list[str]:
        """The names of the tensors that are taken."""
        return [name for name, one in self.taken.items() if isinstance(one, Tensor)]


def begin_with(settings: Settings, state: TrainState) -> None:
    """Give a model that was just built the weights of ``--init-from``, where that is asked for.

    What a file of a run with ``checkpoint.only_trained`` leaves out is the model's already, or BadInputError
    is raised. ``state.begun_with`` then says in lines what was loaded.
    """
    value = settings.run.init_from
    if not value:
        return
    path, average = config.init_from_path(value)
    if is_of_hub(value):
        path, average = fetched(value), False
    found, own = read_weights(at_launch(path), average=average), state.weights()
    weights: dict[str, Any] | None = dict(found.weights)
    if found.start:
        weights = filled(found.weights, found.start, own)
    if weights is None:
        expected = (
            "leaves out the start weights that its run never changed (checkpoint.only_trained), which the"
            " task's build_model() does not create: use that run's final.pt, which is complete"
        )
        raise BadInputError(_OPTION, value, expected)
    weights, renamed = read_under(weights, own)
    tensors = {name: one for name, one in weights.items() if isinstance(one, Tensor)}
    state.buffers.make_room(tensors, ())
    own = state.weights()
    is_strict = settings.run.init_strict
    fitted = fit(weights, own, narrows=not is_strict)
    if is_strict:
        _refuse_misfit(fitted, weights, state, value=value)
    elif not fitted.loaded:
        raise BadInputError(_OPTION, value, _fits_nowhere(weights, own))
    check_values(fitted.taken, state, option=_OPTION, value=value)
    load_bare_state(state.model, {**own, **fitted.taken})
    state.buffers.keep()
    taken = found.checkpoint
    has_other_name = taken is not None and taken.path.name != path.name
    shown = f"{value} ({taken.path.name})" if taken is not None and has_other_name else value
    state.begun_with = (*table(shown, fitted), *([renamed] if renamed else []))
    if taken is not None and path.name == BEST:
        gone = Catalog(taken.path.parent).best_is_gone(taken, stage_name(taken.manifest))
        state.changes = (f"{_OPTION} {value}: {gone}",) if gone else ()


def fit(found: Mapping[str, Any], own: Mapping[str, Any], *, narrows: bool) -> Fitted:
    """Compare a file's entries with a model's, by name, shape and type.

    A type of number that holds every value of the file's is converted to, as bf16 to float32; any other
    floating one only where it ``narrows``. A weight that the file has under a name to which it is tied in the
    model counts as there.
    """
    taken: dict[str, Any] = {}
    missing, mismatched, converted, tied = [], [], 0, 0
    by_place = {place_of(own[name]): name for name in found if name in own}
    for name, wanted in own.items():
        source = name
        if name not in found:
            place = place_of(wanted)
            if place is None or place not in by_place:
                missing.append(name)
                continue
            source = by_place[place]
        one = found[source]
        if not isinstance(wanted, Tensor) or not isinstance(one, Tensor):
            if isinstance(wanted, Tensor) is isinstance(one, Tensor):
                taken[name] = one  # a module's extra state
            else:
                mismatched.append(f"{name} {_kind(one)}, the model has {_kind(wanted)}")
            continue
        if one.shape != wanted.shape or not _converts(one, wanted, narrows=narrows):
            mismatched.append(f"{name} {_kind(one)}, the model has {_kind(wanted)}")
            continue
        converted += one.dtype != wanted.dtype
        tied += source != name
        taken[name] = one.to(wanted.dtype)
    return Fitted(
        taken=taken,
        missing=tuple(missing),
        unexpected=tuple(name for name in found if name not in own),
        mismatched=tuple(mismatched),
        tied=tied,
        converted=converted,
    )


def table(value: str, fitted: Fitted) -> list[str]:
    """Return lines on what was loaded of ``--init-from VALUE``, one for each sort."""
    loaded = fitted.loaded
    lines = [value, f"loaded {_counted(loaded)}"]
    if fitted.tied:
        lines[-1] += f"; {fitted.tied} by a name to which they are tied"
    if fitted.converted:
        lines[-1] += f"; {fitted.converted} converted to the model's type"
    sorts = {
        "missing": fitted.missing,
        "unexpected": fitted.unexpected,
        "mismatched": fitted.mismatched,
    }
    return [*lines, *(f"{sort} {_counted(names)}" for sort, names in sorts.items())]


def _counted(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _NAMED_MAX else ""
    return f"{len(names)}{': ' if names else ''}{', '.join(names[:_NAMED_MAX])}{more}"


def _refuse_misfit(
    fitted: Fitted, weights: Mapping[str, Any], state: TrainState, *, value: str
) -> None:
    """Raise BadInputError for what is missing, too much or different, and say how to load the rest."""
    try:
        check_weights({**weights, **fitted.taken}, state, option=_OPTION, value=value)
    except BadInputError as error:
        if not fitted.loaded:
            raise
        cure = f"run.init_strict=false loads the {len(fitted.loaded)} that fit"
        raise BadInputError(_OPTION, value, f"{error.expected}; {cure}") from error


def _fits_nowhere(found: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    return (
        f"has no weight that fits the model: it has {_counted(list(found))}; the model has"
        f" {_counted(list(own))}"
    )


def _converts(one: Tensor, wanted: Tensor, *, narrows: bool) -> bool:
    if one.is_meta or one.layout is not torch.strided or wanted.layout is not torch.strided:
        return one.dtype == wanted.dtype and one.layout is wanted.layout and not one.is_meta
    if one.dtype == wanted.dtype:
        return True
    if not (one.is_floating_point() and wanted.is_floating_point()):
        return False
    return narrows or torch.promote_types(one.dtype, wanted.dtype) == wanted.dtype


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    size = "x".join(map(str, value.shape)) or "scalar"
    return f"{size} ({str(value.dtype).removeprefix('torch.')})"
