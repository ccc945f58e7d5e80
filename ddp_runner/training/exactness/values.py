"""What an attribute holds, remembered: compared with what it holds later, put back, made plain.

Knows tensors, numbers, texts, arrays, random generators, and lists, tuples, sets, deques and dicts of
such. Of anything else it knows which object it is. What is put back is put into the objects that
are there, where it can be: others may refer to them.
"""

from __future__ import annotations

import math
import random
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ddp_runner.data.stream_state import from_plain, to_plain
from ddp_runner.training.components.tensor_hash import tensor_hash

ENTRIES_MAX = 100_000  # of one list or dict; one with more is known by its length only
_LEAVES = (type(None), bool, int, float, complex, str, bytes)
_PLAIN_LEAVES = (type(None), bool, int, float, str, bytes)
_GENERATOR, _SET, _DEQUE = "ddp_runner:generator", "ddp_runner:set", "ddp_runner:deque"
_BYTES = "ddp_runner:bytearray"
_PAIRS, _STATEFUL = "ddp_runner:pairs", "ddp_runner:state_dict"


class NotPlainError(TypeError):
    """A value that can neither be stored nor sent; its text names the type."""


class Kept:
    """A value as it was; here, one of which only the object itself is known."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def is_in(self, value: Any) -> bool:
        """Whether ``value`` is what was kept."""
        return value is self._value

    def given_back(self, live: Any) -> Any:  # noqa: ARG002 - others put it in there
        """What was kept, in the object ``live`` where that can hold it. Raises NotPlainError if it is unknown."""
        return self._value

    def plain(self) -> Any:
        """For a file and the wire. Raises NotPlainError."""
        kind = type(self._value)
        raise NotPlainError(f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."))

    def digest(self) -> Any:
        """What two equal values have alike, in any process. Raises NotPlainError."""
        return repr(self.plain())


class _Leaf(Kept):
    """A number, a text: it cannot be changed, only replaced."""

    def is_in(self, value: Any) -> bool:
        if value is self._value:
            return True
        if type(value) is not type(self._value):
            return False
        return bool(value == self._value) or _are_nan(value, self._value)

    def plain(self) -> Any:
        if type(self._value) in _PLAIN_LEAVES:
            return self._value
        if isinstance(self._value, np.generic):
            return to_plain(self._value)
        return super().plain()


class _Seen(Kept):
    """A tensor of which torch's count of its changes is known, not what it holds."""

    def __init__(self, tensor: Tensor) -> None:
        self.of: Callable[[], Tensor | None] = weakref.ref(tensor)
        self._version = tensor._version  # noqa: SLF001 - as autograd
        self._at = (tensor.data_ptr(), tensor.shape, tensor.dtype)

    def is_in(self, value: Any) -> bool:
        original = self.of()
        if value is not original or original is None or original._version != self._version:  # noqa: SLF001
            return False
        return self._at == (original.data_ptr(), original.shape, original.dtype)

    def given_back(self, live: Any) -> Any:
        if self.is_in(live):
            return live
        raise NotPlainError("a tensor that was not kept")

    def plain(self) -> Any:
        raise NotPlainError("a tensor that was not kept")


class TensorCopy(Kept):
    """A tensor and what it held. ``on_host``: the copy lies in host memory."""

    content: Tensor

    def __init__(self, tensor: Tensor, *, on_host: bool, before: Kept | None) -> None:
        self.seen = _Seen(tensor)
        own = tensor.detach()
        room = before.content if isinstance(before, TensorCopy) else None
        if room is not None and _layout(room) == _layout(own) and not on_host:
            self.content = room.copy_(own)
        else:
            self.content = own.to("cpu", copy=True) if on_host else own.clone()

    def is_in(self, value: Any) -> bool:
        """As :class:`Kept`: by the bits."""
        return _is_same_tensor(value, self.content)

    def given_back(self, live: Any) -> Any:
        """As :class:`Kept`: in the tensor that it was of, if that is still there."""
        original = self.seen.of()
        into = live if original is None else original
        if isinstance(into, Tensor) and _layout(into)[:2] == _layout(self.content)[:2]:
            with torch.no_grad():
                into.detach().copy_(self.content)
            return into
        device = live.device if isinstance(live, Tensor) else self.content.device
        return self.content.to(device, copy=True)

    def plain(self) -> Any:
        """As :class:`Kept`."""
        return self.content

    def digest(self) -> Any:
        """As :class:`Kept`."""
        return (str(_layout(self.content)[:2]), tensor_hash(self.content))


class _Received(TensorCopy):
    """A tensor of another process."""

    def __init__(self, content: Tensor) -> None:
        self.seen = _Nowhere()  # type: ignore[assignment]
        self.content = content


class _Nowhere:
    """In the place of a tensor that this process has never had."""

    def of(self) -> None:
        return None

    def is_in(self, value: Any) -> bool:  # noqa: ARG002
        return False


class _Array(Kept):
    def __init__(self, array: Any) -> None:
        super().__init__(array.copy())

    def is_in(self, value: Any) -> bool:
        if type(value) is not np.ndarray or value.dtype != self._value.dtype:
            return False
        is_alike = value.shape == self._value.shape and value.tobytes() == self._value.tobytes()
        return bool(is_alike)

    def given_back(self, live: Any) -> Any:
        fits = type(live) is np.ndarray and live.dtype == self._value.dtype
        if fits and live.shape == self._value.shape and live.flags.writeable:
            np.copyto(live, self._value)
            return live
        return self._value.copy()

    def plain(self) -> Any:
        if self._value.dtype.hasobject:
            return super().plain()
        return to_plain(self._value)


class _Bytes(Kept):
    """A bytearray, whose content may change in place."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)

    def is_in(self, value: Any) -> bool:
        return type(value) is bytearray and value == self._value

    def given_back(self, live: Any) -> Any:
        if type(live) is not bytearray:
            return bytearray(self._value)
        live[:] = self._value
        return live

    def plain(self) -> Any:
        return {_BYTES: self._value}


class _GeneratorState(Kept):
    """Where a random generator stands. ``kind``: a key of ``_GENERATORS``."""

    def __init__(self, kind: str, state: Any) -> None:
        self._kind = kind
        self._state = state

    def is_in(self, value: Any) -> bool:
        if _generator_kind(value) != self._kind:
            return False
        return _repr_of_state(_GENERATORS[self._kind][0](value)) == _repr_of_state(self._state)

    def given_back(self, live: Any) -> Any:
        _, give, make = _GENERATORS[self._kind]
        generator = live if _generator_kind(live) == self._kind else make(self._state)
        give(generator, self._state)
        return generator

    def plain(self) -> Any:
        return {_GENERATOR: (self._kind, to_plain(self._state))}

    def digest(self) -> Any:
        return (self._kind, _repr_of_state(self._state))


class _Sequence(Kept):
    """A list, tuple, set or deque."""

    def __init__(self, kind: type, items: list[Kept], *, maxlen: int | None = None) -> None:
        self._kind = kind
        self.items = items
        self._maxlen = maxlen

    def is_in(self, value: Any) -> bool:
        if type(value) is not self._kind:
            return False
        there = _ordered(value)
        if len(there) != len(self.items):
            return False
        return all(kept.is_in(one) for kept, one in zip(self.items, there, strict=True))

    def given_back(self, live: Any) -> Any:
        is_alike = type(live) is self._kind or isinstance(live, tuple)
        there: list[Any] = _ordered(live) if is_alike else []
        there += [None] * (len(self.items) - len(there))
        items = [kept.given_back(one) for kept, one in zip(self.items, there, strict=False)]
        if type(live) is self._kind and isinstance(live, (list, deque, set)):
            live.clear()
            (live.update if isinstance(live, set) else live.extend)(items)
            return live
        if isinstance(live, tuple) and [*map(id, live)] == [*map(id, items)]:
            return live  # put back in what it holds
        if isinstance(live, tuple) and hasattr(live, "_fields") and issubclass(self._kind, tuple):
            return type(live)(*items)
        if self._kind is deque:
            return deque(items, self._maxlen)
        return self._kind(*items) if hasattr(self._kind, "_fields") else self._kind(items)

    def plain(self) -> Any:
        items = [kept.plain() for kept in self.items]
        if self._kind is deque:
            return {_DEQUE: (items, self._maxlen)}
        if self._kind in (set, frozenset):
            return {_SET: (self._kind.__name__, items)}
        return tuple(items) if issubclass(self._kind, tuple) else items

    def digest(self) -> Any:
        parts = [kept.digest() for kept in self.items]
        return sorted(map(repr, parts)) if self._kind in (set, frozenset) else parts


class _Dict(Kept):
    def __init__(self, kind: type, items: dict[Any, Kept]) -> None:
        self._kind = kind
        self.items = items

    def is_in(self, value: Any) -> bool:
        if type(value) is not self._kind or not isinstance(value, dict):
            return False
        if list(value) != list(self.items):
            return False
        return all(kept.is_in(value[key]) for key, kept in self.items.items())

    def given_back(self, live: Any) -> Any:
        if not isinstance(live, dict):
            live = {} if self._kind is dict else self._kind()
        items = {key: kept.given_back(live.get(key)) for key, kept in self.items.items()}
        live.clear()
        live.update(items)
        return live

    def plain(self) -> Any:
        return {_PAIRS: [(kept_of(k).plain(), kept.plain()) for k, kept in self.items.items()]}

    def digest(self) -> Any:
        return [(repr(key), kept.digest()) for key, kept in self.items.items()]


class _Stateful(Kept):
    """An object with ``state_dict`` and ``load_state_dict``, as an optimizer of the task's own."""

    def __init__(self, state: Kept) -> None:
        self.state = state

    def is_in(self, value: Any) -> bool:
        return is_stateful(value) and self.state.is_in(value.state_dict())

    def given_back(self, live: Any) -> Any:
        if not is_stateful(live):
            raise NotPlainError("an object that is not there yet")
        # Not put back in what it gives: one that empties itself before it loads would find nothing there.
        live.load_state_dict(_on_devices_of(live.state_dict(), self.state.given_back(None)))
        return live

    def plain(self) -> Any:
        return {_STATEFUL: self.state.plain()}

    def digest(self) -> Any:
        return self.state.digest()


def kept_of(
    value: Any,
    *,
    before: Kept | None = None,
    with_contents: bool = True,
    on_host: bool = False,
    skipped: Callable[[Any], bool] = lambda _: False,
) -> Kept:
    """``value`` as it is now. ``before``: what was kept of it, whose memory may be used again.

    Without contents a tensor is known by torch's count of its changes. What is ``skipped`` is known
    as the object that it is.
    """
    return _Keeping(with_contents, on_host, skipped).keep(value, before)


class _Keeping:
    """One pass over a value."""

    def __init__(self, with_contents: bool, on_host: bool, skipped: Callable[[Any], bool]) -> None:
        self._with_contents = with_contents
        self._on_host = on_host
        self._skipped = skipped
        self._open: set[int] = set()  # the containers that are being looked into

    def keep(self, value: Any, before: Kept | None) -> Kept:
        if type(value) in _LEAVES or isinstance(value, np.generic):
            return _Leaf(value)
        if self._skipped(value) or id(value) in self._open:  # which holds itself
            return Kept(value)
        for kind, keep in self._WAYS:
            if isinstance(value, kind):
                self._open.add(id(value))
                kept = keep(self, value, before)
                self._open.discard(id(value))
                return kept
        if name := _generator_kind(value):
            return _GeneratorState(name, _GENERATORS[name][0](value))
        if is_stateful(value):
            old = before.state if isinstance(before, _Stateful) else None
            return _Stateful(self.keep(value.state_dict(), old))
        return Kept(value)

    def _tensor(self, value: Tensor, before: Kept | None) -> Kept:
        if value.layout is not torch.strided or value.is_meta:
            return Kept(value)
        if not self._with_contents:
            return _Seen(value)
        return TensorCopy(value, on_host=self._on_host, before=before)

    def _array(self, value: Any, _: Kept | None) -> Kept:
        return _Array(value)

    def _bytes(self, value: Any, _: Kept | None) -> Kept:
        return _Bytes(bytes(value))

    def _sequence(self, value: Any, before: Kept | None) -> Kept:
        if len(value) > ENTRIES_MAX:
            return Kept(value)
        had: list[Any] = before.items[: len(value)] if isinstance(before, _Sequence) else []
        had += [None] * (len(value) - len(had))
        items = [self.keep(one, old) for one, old in zip(_ordered(value), had, strict=True)]
        return _Sequence(type(value), items, maxlen=getattr(value, "maxlen", None))

    def _dict(self, value: dict[Any, Any], before: Kept | None) -> Kept:
        if len(value) > ENTRIES_MAX:
            return Kept(value)
        known = before.items if isinstance(before, _Dict) else {}
        items = {key: self.keep(one, known.get(key)) for key, one in value.items()}
        return _Dict(type(value), items)

    _WAYS: ClassVar[list[tuple[Any, Callable[..., Kept]]]] = [
        (Tensor, _tensor),
        (np.ndarray, _array),
        (bytearray, _bytes),
        ((list, tuple, set, frozenset, deque), _sequence),
        (dict, _dict),
    ]


def from_wire(plain: Any) -> Kept:
    """The inverse of :meth:`Kept.plain`, to be given back to what is there."""
    if isinstance(plain, Tensor):
        return _Received(plain)
    if type(plain) in (list, tuple):
        return _Sequence(type(plain), [from_wire(one) for one in plain])
    if type(plain) is dict:
        ((tag, packed),) = plain.items()
        return _UNPACKERS[tag](packed) if tag in _UNPACKERS else _from_numpy(from_plain(plain))
    return _Leaf(plain)


def _from_numpy(value: Any) -> Kept:
    return _Array(value) if type(value) is np.ndarray else _Leaf(value)


_UNPACKERS: dict[str, Callable[[Any], Kept]] = {
    _PAIRS: lambda packed: _Dict(
        dict, {from_wire(key).given_back(None): from_wire(one) for key, one in packed}
    ),
    _GENERATOR: lambda packed: _GeneratorState(str(packed[0]), from_plain(packed[1])),
    _DEQUE: lambda packed: _Sequence(
        deque, [from_wire(one) for one in packed[0]], maxlen=packed[1]
    ),
    _SET: lambda packed: _Sequence(
        frozenset if packed[0] == "frozenset" else set, [from_wire(one) for one in packed[1]]
    ),
    _STATEFUL: lambda packed: _Stateful(from_wire(packed)),
    _BYTES: lambda packed: _Bytes(bytes(packed)),
}


def is_stateful(value: Any) -> bool:
    """Whether it gives and takes a state by itself; a module is looked into instead."""
    has_both = all(
        callable(getattr(type(value), f"{verb}state_dict", None)) for verb in ("", "load_")
    )
    return has_both and not isinstance(value, (torch.nn.Module, type))


def _ordered(values: Any) -> list[Any]:
    """A set's entries in an order that equal sets have alike, as far as there is one."""
    if isinstance(values, (set, frozenset)):
        return sorted(values, key=repr)
    return list(values)


def _layout(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _is_same_tensor(value: Any, content: Tensor) -> bool:
    """By their bits: NaN is like itself."""
    if not isinstance(value, Tensor) or _layout(value)[:2] != _layout(content)[:2]:
        return False
    own = value.detach().to(content.device)
    # equal() says no where there is a NaN.
    return torch.equal(own, content) or tensor_hash(own) == tensor_hash(content)


def _are_nan(one: Any, other: Any) -> bool:
    return isinstance(one, float) and math.isnan(one) and math.isnan(other)


def _on_devices_of(live: Any, value: Any) -> Any:
    """``value``, with tensors on the devices of those in ``live``: what was sent comes in host memory."""
    if isinstance(value, Tensor):
        return value.to(live.device) if isinstance(live, Tensor) else value
    if isinstance(value, dict) and isinstance(live, dict):
        value.update({k: _on_devices_of(live[k], value[k]) for k in value.keys() & live.keys()})
    elif isinstance(value, list) and isinstance(live, list):
        value[: len(live)] = map(_on_devices_of, live, value)
    return value


def _repr_of_state(state: Any) -> str:
    """A generator's state as a text that equal states have alike."""
    if isinstance(state, Tensor):
        return tensor_hash(state)
    if isinstance(state, dict):
        return repr([(key, _repr_of_state(value)) for key, value in sorted(state.items())])
    if isinstance(state, (list, tuple)):
        return repr([_repr_of_state(one) for one in state])
    if isinstance(state, np.ndarray):
        return state.tobytes().hex()
    return repr(state)


def _generator_kind(value: Any) -> str:
    """Empty for what is no generator."""
    return next((name for name, kind in _GENERATOR_TYPES.items() if type(value) is kind), "")


def _set_numpy_state(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


def _numpy_generator(state: Any) -> Any:
    return np.random.Generator(getattr(np.random, state["bit_generator"])())


_GENERATOR_TYPES: dict[str, type] = {
    "torch": torch.Generator,
    "random": random.Random,
    "numpy": np.random.Generator,
    "numpy.RandomState": np.random.RandomState,
}
# How to read, set and make each.
_GENERATORS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], None], Any]] = {
    "torch": (
        lambda generator: generator.get_state(),
        lambda generator, state: generator.set_state(state),
        lambda _: torch.Generator(),
    ),
    "random": (
        lambda generator: generator.getstate(),
        lambda generator, state: generator.setstate(state),
        lambda _: random.Random(),  # noqa: S311 - no secrets
    ),
    "numpy": (
        lambda generator: generator.bit_generator.state,
        _set_numpy_state,
        _numpy_generator,
    ),
    "numpy.RandomState": (
        lambda generator: generator.get_state(),
        lambda generator, state: generator.set_state(state),
        lambda _: np.random.RandomState(),
    ),
}
