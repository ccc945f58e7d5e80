"""What a metric object holds of one rank's samples, and how that of all ranks comes together: it is summed.

An object has ``reset()``, ``update(...)`` and ``compute()``. Its state is what ``update`` changes of its tensors and
numbers, its own and those of the modules and metric objects in it; of an object that names its states itself
(``_reductions``, as torchmetrics has it) those. Nothing is imported for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.training.exactness.kept_kinds import Kept
from ddp_runner.training.exactness.values import kept_of

METHODS = ("reset", "update", "compute")
_OF_MODULES = frozenset(vars(nn.Module()))
Sum = Tensor | int | float
Form = list[Any]  # of a state: its type and, of a tensor, its shape; plain


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
        for path, value in self._attributes():
            if _is_summed(value):
                self._before[path] = value.clone() if isinstance(value, Tensor) else value
            else:
                self._others[path] = kept_of(value, skipped=_is_metric)

    def changes(self) -> dict[str, Sum]:
        """What updates have added, by path. Raises NotSummableError."""
        found: dict[str, Sum] = {}
        for path, value in self._attributes():
            before = self._before.get(path)
            if _is_summed(value):
                if before is None or _is_other(before, value):
                    found[path] = value - _begin_of(before, like=value)
                continue
            kept = self._others.get(path)
            if kept is None or not kept.is_in(value):
                raise NotSummableError(
                    f"{path}, which update() changes, is {_kind(value)}: only tensors and numbers that add up"
                    " can be summed over ranks"
                )
        return found

    def take(self, sums: Mapping[str, Sum]) -> None:
        """Have the object hold these sums over all ranks, beside what :meth:`begin` has found."""
        owners = _owners(self._of)
        for path, value in sums.items():
            owner, _, key = path.rpartition(".")
            setattr(owners[owner], key, value + _begin_of(self._before.get(path), like=value))

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        for owner, one in _owners(self._of).items():
            prefix = f"{owner}." if owner else ""
            declared = getattr(one, "_reductions", None)
            if isinstance(declared, Mapping):
                for key in declared:
                    yield f"{prefix}{key}", getattr(one, key)
                continue
            for key, value in vars(one).items():
                if not (isinstance(one, nn.Module) and key in _OF_MODULES):
                    yield f"{prefix}{key}", value
            if isinstance(one, nn.Module):
                for key, buffer in one.named_buffers(recurse=False):
                    yield f"{prefix}{key}", buffer


def prepare(of: Any) -> None:
    """Have an object that sums over ranks by itself, as torchmetrics does, leave that to its owner.

    Raises NotSummableError for one that says of its states that they are not to be summed.
    """
    for one in _owners(of).values():
        declared = getattr(one, "_reductions", None)
        for key, reduction in declared.items() if isinstance(declared, Mapping) else ():
            _refuse_other_than_sum(key, reduction)
        if hasattr(one, "sync_on_compute"):
            one.sync_on_compute = False
            one._to_sync = False  # noqa: SLF001 - which it has read the other into


def form_of(value: Sum) -> Form:
    """What a state is, for other ranks: plain."""
    if isinstance(value, Tensor):
        return [str(value.dtype).removeprefix("torch."), list(value.shape)]
    return [type(value).__name__]


def joined_form(forms: Sequence[Form]) -> Form:
    """The form of the sum of states of these forms. Raises NotSummableError where they do not add up."""
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
    """Whether a state of that form is summed in whole numbers."""
    return form == ["int"] or (
        len(form) == 2 and not getattr(torch, str(form[0])).is_floating_point
    )


def flat(value: Sum | None, form: Form, *, device: torch.device) -> Tensor:
    """A state as numbers in a row, in the type in which it is summed; None: nothing was added."""
    kind = torch.int64 if is_whole(form) else torch.float64
    if value is None:
        size = torch.Size(form[1]).numel() if len(form) == 2 else 1
        return torch.zeros(size, dtype=kind, device=device)
    return torch.as_tensor(value).detach().to(device=device, dtype=kind).reshape(-1)


def unflat(numbers: Tensor, form: Form) -> Sum:
    """The state that stands in such a row."""
    if len(form) == 1:
        number: int | float = numbers.item()
        return number
    return numbers.to(getattr(torch, form[0])).reshape(form[1])


def _is_metric(value: object) -> bool:
    return not isinstance(value, type) and all(callable(getattr(value, m, None)) for m in METHODS)


def _owners(of: Any) -> dict[str, Any]:
    """The object, and the modules and metric objects in it, by path."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    pending: list[tuple[str, Any]] = [("", of)]
    while pending:
        path, one = pending.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        found[path] = one
        prefix = f"{path}." if path else ""
        if isinstance(one, nn.Module):
            pending += [(f"{prefix}{name}", child) for name, child in one.named_children()]
        for key, value in vars(one).items():
            inner = value.values() if isinstance(value, dict) else value
            if _is_metric(value):
                pending.append((f"{prefix}{key}", value))
            elif isinstance(value, (dict, list, tuple)) and key not in _OF_MODULES:
                pending += [
                    (f"{prefix}{key}[{n}]", x) for n, x in enumerate(inner) if _is_metric(x)
                ]
    return found


def _is_summed(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dtype is not torch.bool and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_other(before: Sum, value: Sum) -> bool:
    if isinstance(before, Tensor) and isinstance(value, Tensor):
        return before.shape != value.shape or not torch.equal(before.to(value), value)
    return type(before) is not type(value) or bool(before != value)


def _begin_of(before: Sum | None, *, like: Sum) -> Any:
    """What there was before updates of a state that is now ``like`` this."""
    if before is None or isinstance(before, Tensor) != isinstance(like, Tensor):
        return 0 if before is None or isinstance(before, Tensor) else before
    if isinstance(before, Tensor) and isinstance(like, Tensor):
        return before.to(like.device)
    return before


def _refuse_other_than_sum(key: str, reduction: object) -> None:
    name = str(getattr(reduction, "__name__", reduction))
    if not name.endswith("sum"):
        raise NotSummableError(
            f"{key} is to be put together by {name}: only states that are summed can be"
        )


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
