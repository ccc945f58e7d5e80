"""Checks that a file's content fits the training state: structure, names, shapes, types, values.

A file may be of another model, of a future version, or made by hand: nothing of it is
used before it was checked here. Changes nothing but room for buffers that are filled late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ddp_runner.checkpoint.codec import check_state_dict
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.components.buffers import persistent_buffers
from ddp_runner.training.components.several_optimizers import entries_of
from ddp_runner.training.state import TrainState

_LISTED_MAX = 3
_NOT_NEGATIVE = ("committed_step", "samples")
_LOOKED_AT_APART = ("model", "optimizer")
_OF_THE_TASK = ("stream",)  # whose dataset may put what it likes there


def check_weights(
    weights: Mapping[str, Any],
    state: TrainState,
    *,
    option: str,
    value: str,
    relaid: Iterable[str] = (),
) -> None:
    """Raise BadInputError where ``weights`` are not those of the model, by names, shapes and types.

    ``relaid``: the buffers whose shapes and types steps change: those of the file hold.
    """
    state.buffers.make_room({k: v for k, v in weights.items() if isinstance(v, Tensor)}, relaid)
    differences = check_state_dict(weights, state.weights())
    if differences:
        raise BadInputError(option, value, f"holds another model: {_listed(differences)}")


def check_values(weights: Mapping[str, Any], state: TrainState, *, option: str, value: str) -> None:
    """Raise BadInputError where a parameter is not finite: what begins so can only stay so."""
    parameters = {name for name, _ in state.named_parameters()}
    broken = [name for name in parameters & weights.keys() if not _is_finite(weights[name])]
    if broken:
        what = "a value that is not finite (NaN or infinity) in"
        raise BadInputError(option, value, f"holds {what} {_listed(sorted(broken))}")


def misfit(saved: Mapping[str, Any], state: TrainState) -> str:
    """Return the parts of a captured state that cannot be used here, in words; empty if it all can.

    ``model`` is for :func:`check_weights`. Parts that an earlier version did not write are no misfit.
    """
    state.take_flags(saved)
    own = state.capture()
    parts = {name: value for name, value in own.items() if name not in _LOOKED_AT_APART}
    parts.update({name: {} for name in _OF_THE_TASK if name in parts})
    missing = [name for name in ("model", "optimizer", "counters") if name not in saved]
    if missing:
        return f"it lacks {_listed(missing)}"
    wrong = [*_differing(saved, parts, where=""), *_odd_counters(saved["counters"])]
    if not wrong:
        wrong = list(_differing_optimizer(saved, state))
    return _listed(wrong)


def _differing(found: Any, like: Any, *, where: str) -> Iterator[str]:
    """Yield the differences in structure between ``found`` and ``like``, in their common entries."""
    if isinstance(like, Mapping):
        if not isinstance(found, Mapping):
            yield f"{where} is {_kind(found)} instead of a dict"
            return
        for key, value in like.items():
            if key in found:
                yield from _differing(found[key], value, where=f"{where}.{key}" if where else key)
    elif like is not None and found is not None and not _is_alike(found, like):
        yield f"{where} is {_kind(found)} instead of {_kind(like)}"


def _is_alike(found: Any, like: Any) -> bool:
    if isinstance(like, (list, tuple)):
        return isinstance(found, (list, tuple))
    if isinstance(like, float):
        return isinstance(found, (int, float)) and not isinstance(found, bool)
    return isinstance(found, type(like)) and isinstance(found, bool) is isinstance(like, bool)


def _odd_counters(counters: Any) -> Iterator[str]:
    for name in _NOT_NEGATIVE:
        value = counters.get(name) if isinstance(counters, Mapping) else None
        if isinstance(value, int) and value < 0:
            yield f"counters.{name} is {value}"


def _differing_optimizer(captured: Mapping[str, Any], state: TrainState) -> Iterator[str]:
    """The optimizer of torch looks at how many parameters there are, not at what it has for each."""
    found = captured["optimizer"]
    entries = found.get("state") if isinstance(found, Mapping) else None
    groups = found.get("param_groups") if isinstance(found, Mapping) else None
    if not isinstance(entries, Mapping) or not isinstance(groups, list):
        yield f"optimizer is {_kind(found)}, which is none of an optimizer's states"
        return
    try:
        fitted = state.optimizer_state_of(captured)
    except (ValueError, KeyError, TypeError) as error:
        yield f"{error}"
        return
    names = {id(parameter): name for name, parameter in state.named_parameters()}
    entries, groups = fitted["state"], fitted["param_groups"]
    for saved, own in zip(groups, state.optimizer.param_groups, strict=False):
        for index, parameter in zip(saved["params"], own["params"], strict=False):
            for key, value in dict(entries.get(index, {})).items():
                if not isinstance(value, Tensor):
                    continue
                is_count = not value.dim() and value.is_floating_point()
                is_like_it = _is_shaped(value, parameter) and value.dtype == parameter.dtype
                if not (is_count or is_like_it):
                    yield f"{key} of {names[id(parameter)]} is {_kind(value)}"


def _is_shaped(value: Tensor, parameter: Tensor) -> bool:
    """Return True if it has the parameter's shape, or only that of its rows or columns, as Adafactor's state."""
    pairs = zip(value.shape, parameter.shape, strict=False)
    return value.dim() == parameter.dim() and all(own in (1, size) for own, size in pairs)


def not_finite(state: TrainState) -> list[str]:
    """Names of what holds NaN, or infinities that are no buffer's: masks are made of those."""
    buffers = persistent_buffers(state.model).keys()
    own = state.weights()
    values = [(name, one, name in buffers) for name, one in own.items()]
    for name, parameter in state.named_parameters():
        for entry in entries_of(state.optimizer, parameter):
            values += [(f"{name} ({key})", one, False) for key, one in entry.items()]
    if state.ema is not None:
        average = state.ema.state_dict()
        values += [(f"{name} (average)", one, False) for name, one in average["parameters"].items()]
        values += [(f"{name} (average)", one, True) for name, one in average["buffers"].items()]
    return [name for name, one, is_buffer in values if not _is_finite(one, may_be_mask=is_buffer)]


def warn_of_values(state: TrainState, warn: Callable[[str], None]) -> None:
    """Name what of a state that was loaded is not finite."""
    broken = not_finite(state)
    if broken:
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        warn(
            "what was loaded holds values that are not finite (NaN or infinity) in "
            f"{', '.join(broken[:3])}{more}"
        )


def _is_finite(value: Any, *, may_be_mask: bool = False) -> bool:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    return not bool(value.isnan().any()) if may_be_mask else bool(value.isfinite().all())


def _kind(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    size = "x".join(map(str, value.shape)) or "scalar"
    return f"{str(value.dtype).removeprefix('torch.')} {size}"


def _listed(parts: list[str]) -> str:
    return "; ".join(parts[:_LISTED_MAX]) + ("; ..." if len(parts) > _LISTED_MAX else "")
