"""The state of a metric object, of one rank's samples, and how the states of all ranks become one.

An object has ``reset()``, ``update(...)`` and ``compute()``. Its state is what ``update`` changes of its tensors and
numbers, its own and those of the modules and metric objects in it: the changes of all ranks are summed. An object
that declares its states by torchmetrics' protocol (``_reductions``: each state with the function that puts those of
all ranks together) has these states, and sums, largest and smallest values and lists of samples are put together as
it says. Nothing is imported for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.training.exactness.kept_kinds import Kept
from ddp_runner.training.exactness.values import kept_of
from ddp_runner.values.object_graph import Walk, attributes_of

METHODS = ("reset", "update", "compute")
Sum = Tensor | int | float
Parts = list[Tensor]  # of a state that is not summed: one rank's tensor, or its list of them
State = Sum | Parts
Form = list[Any]  # of a state: its type and, of a tensor, its shape; plain
_OF_PARTS = "parts"  # the type of a state of which each rank has its own part
_PUT_TOGETHER = ("max", "min", "cat")  # how the names of torchmetrics' functions end


class NotSummableError(TypeError):
    """A metric keeps what cannot be summed over ranks; its text names it."""


class MetricState:
    """The state of one object, since :meth:`begin`."""

    def __init__(self, of: Any) -> None:
        self._of = of
        self._before: dict[str, Sum] = {}
        self._others: dict[str, Kept] = {}

    def begin(self) -> None:
        """Reset the object, and remember what it then has."""
        self._of.reset()
        self._before, self._others = {}, {}
        for path, value, reduction in self._attributes():
            if _is_put_together(reduction):
                continue
            if _is_summed(value):
                self._before[path] = value.clone() if isinstance(value, Tensor) else value
            else:
                self._others[path] = kept_of(value, skipped=_is_metric)

    def changes(self) -> dict[str, State]:
        """Return what updates have added, by path; for an unsummed state all of it. Raises NotSummableError."""
        found: dict[str, State] = {}
        for path, value, reduction in self._attributes():
            if _is_put_together(reduction):
                found[path] = _parts_of(path, value)
                continue
            before = self._before.get(path)
            if _is_summed(value):
                if before is None or _is_other(before, value):
                    found[path] = value - _begin_of(before, like=value)
                continue
            kept = self._others.get(path)
            if kept is None or not kept.is_in(value):
                raise NotSummableError(
                    f"{path}, which update() changes, is {kind_of(value)}: only tensors and numbers that add up"
                    " can be summed over ranks"
                )
        return found

    def take(self, of_all: Mapping[str, Sum | list[Parts]]) -> None:
        """Have the object hold the state of all ranks: sums, beside what :meth:`begin` has found, or each one's part."""
        owners = _owners(self._of)
        for one in owners.values():
            if (
                getattr(one, "_update_count", 1) == 0
            ):  # torchmetrics would warn that nothing is there
                one._update_count = 1  # noqa: SLF001
        for path, value in of_all.items():
            owner, _, key = path.rpartition(".")
            one = owners[owner]
            if isinstance(value, list):
                parts = [part for of_rank in value for part in of_rank]
                if not isinstance(getattr(one, key), list):  # else compute() takes them all
                    reduce = one._reductions[key]  # noqa: SLF001 - by which it declares it
                    parts = reduce(torch.stack(parts))
                setattr(one, key, parts)
                continue
            setattr(one, key, value + _begin_of(self._before.get(path), like=value))

    def _attributes(self) -> Iterator[tuple[str, Any, Callable[..., Any] | None]]:
        """Path, value and, where the object declares it, how those of all ranks are put together."""
        for owner, one in _owners(self._of).items():
            prefix = f"{owner}." if owner else ""
            declared = getattr(one, "_reductions", None)
            if isinstance(declared, Mapping):
                for key, reduction in declared.items():
                    yield f"{prefix}{key}", getattr(one, key), reduction
                continue
            for key, value in attributes_of(one).items():
                yield f"{prefix}{key}", value, None
            if isinstance(one, nn.Module):
                for key, buffer in one.named_buffers(recurse=False):
                    yield f"{prefix}{key}", buffer, None


def prepare(of: Any) -> None:
    """Have an object that sums over ranks by itself, as torchmetrics does, leave that to its owner.

    Raises NotSummableError for one with a state that depends on how samples are shared out, such as a mean of means.
    """
    for one in _owners(of).values():
        declared = getattr(one, "_reductions", None)
        for key, reduction in declared.items() if isinstance(declared, Mapping) else ():
            _refuse_unknown(key, reduction)
        if hasattr(one, "sync_on_compute"):
            one.sync_on_compute = False
            one._to_sync = False  # noqa: SLF001 - which it has read the other into


def form_of(value: State) -> Form:
    """Return a plain description of a state, for other ranks."""
    if isinstance(value, list):
        return [_OF_PARTS, [form_of(one) for one in value]]
    if isinstance(value, Tensor):
        return [str(value.dtype).removeprefix("torch."), list(value.shape)]
    return [type(value).__name__]


def joined_form(forms: Sequence[Form]) -> Form:
    """The form of the states of all ranks as one, by rank. Raises NotSummableError where they do not add up."""
    if forms[0][0] == _OF_PARTS:
        return [_OF_PARTS, [form[1] for form in forms]]
    shapes = {str(form[1:]) for form in forms}
    if len(shapes) > 1:
        raise NotSummableError(f"it has other shapes on other ranks: {', '.join(sorted(shapes))}")
    if len(forms[0]) == 1:
        return ["float"] if ["float"] in forms else ["int"]
    kind = getattr(torch, forms[0][0])
    for form in forms[1:]:
        kind = torch.promote_types(kind, getattr(torch, form[0]))
    return [str(kind).removeprefix("torch."), forms[0][1]]


def is_whole(form: Form) -> bool:
    """Return True if a state of that joined form is summed in whole numbers."""
    if form[0] == _OF_PARTS:
        return all(is_whole(one) for of_rank in form[1] for one in of_rank)
    return form == ["int"] or (
        len(form) == 2 and not getattr(torch, str(form[0])).is_floating_point
    )


def flat(value: State | None, form: Form, *, rank: int, device: torch.device) -> Tensor:
    """A state as numbers in a row, in the type in which it is summed; None: nothing was added.

    Of parts each rank has a place of its own in the row, which is 0 on all others.
    """
    kind = torch.int64 if is_whole(form) else torch.float64
    if form[0] == _OF_PARTS:
        row = torch.zeros(sum(_numbers(form)), dtype=kind, device=device)
        places = iter(torch.split(row, _numbers(form)))
        own = iter(value if isinstance(value, list) else ())
        for of_rank, forms in enumerate(form[1]):
            for place in (next(places) for _ in forms):
                if of_rank == rank:
                    place.copy_(next(own).detach().reshape(-1))
        return row
    if value is None:
        return torch.zeros(_numbers(form)[0], dtype=kind, device=device)
    return torch.as_tensor(value).detach().to(device=device, dtype=kind).reshape(-1)


def unflat(numbers: Tensor, form: Form) -> Sum | list[Parts]:
    """The state that is in such a row; of parts each rank's."""
    if form[0] == _OF_PARTS:
        places = iter(torch.split(numbers, _numbers(form)))
        return [[_shaped(next(places), one) for one in of_rank] for of_rank in form[1]]
    if len(form) == 1:
        number: int | float = numbers.item()
        return number
    return _shaped(numbers, form)


def _shaped(numbers: Tensor, form: Form) -> Tensor:
    return numbers.to(getattr(torch, form[0])).reshape(form[1])


def _numbers(form: Form) -> list[int]:
    """Return the number of elements of a state; of parts, for each one."""
    if form[0] == _OF_PARTS:
        return [number for of_rank in form[1] for one in of_rank for number in _numbers(one)]
    return [torch.Size(form[1]).numel() if len(form) == 2 else 1]


def _is_metric(value: object) -> bool:
    return not isinstance(value, type) and all(callable(getattr(value, m, None)) for m in METHODS)


def _owners(of: Any) -> dict[str, Any]:
    """The object, and the modules and metric objects in it, by path."""
    return {path: one for path, one, _ in _WALK.over([("", of)])}


def _inside(path: str, one: Any) -> Iterator[tuple[str, Any]]:
    """The modules and metric objects that an object holds, also those in its lists and dicts."""
    prefix = f"{path}." if path else ""
    if isinstance(one, nn.Module):
        for name, child in one.named_children():
            yield f"{prefix}{name}", child
    for key, value in attributes_of(one).items():
        if _is_metric(value):
            yield f"{prefix}{key}", value
        elif isinstance(value, (dict, list, tuple)):
            inner = value.values() if isinstance(value, dict) else value
            for number, entry in enumerate(inner):
                if _is_metric(entry):
                    yield f"{prefix}{key}[{number}]", entry


_WALK = Walk(inside=_inside, breadth_first=True)


def _is_summed(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dtype is not torch.bool and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_other(before: Sum, value: Sum) -> bool:
    if isinstance(before, Tensor) and isinstance(value, Tensor):
        return before.shape != value.shape or not torch.equal(before.to(value), value)
    return type(before) is not type(value) or bool(before != value)


def _begin_of(before: Sum | None, *, like: Sum) -> Any:
    """Return the value before updates of a state that is now ``like`` this."""
    if before is None or isinstance(before, Tensor) != isinstance(like, Tensor):
        return 0 if before is None or isinstance(before, Tensor) else before
    if isinstance(before, Tensor) and isinstance(like, Tensor):
        return before.to(like.device)
    return before


def _name_of(reduction: object) -> str:
    return str(getattr(reduction, "__name__", reduction))


def _is_put_together(reduction: object) -> bool:
    """Return True if the object itself joins the states of all ranks, instead of summing them."""
    return reduction is not None and _name_of(reduction).endswith(_PUT_TOGETHER)


def _parts_of(path: str, value: Any) -> Parts:
    parts = [value] if isinstance(value, Tensor) else value
    if not isinstance(parts, list) or not all(isinstance(one, Tensor) for one in parts):
        raise NotSummableError(f"{path} is {kind_of(value)}, no tensor or list of tensors")
    if any(one.is_complex() for one in parts):
        raise NotSummableError(f"{path} has complex numbers")
    return parts


def _refuse_unknown(key: str, reduction: object) -> None:
    name = _name_of(reduction)
    if not name.endswith(("sum", *_PUT_TOGETHER)):
        raise NotSummableError(
            f"{key} is to be put together by {name}: only states that are summed, the largest or smallest of"
            " all, or one list of all (sum, max, min, cat) can be"
        )


def kind_of(value: object) -> str:
    """Its type, for a sentence: ``a list``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
