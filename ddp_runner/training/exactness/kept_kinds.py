"""Remembers a value of a kind that holds no others: to compare it later, restore it, or make it plain.

Knows numbers, texts, tensors, arrays, memory that is written in place, and random generators. What is put
back is put into the object that is there, where it can be: others may refer to it.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from array import array
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_runner.training.components.tensor_hash import tensor_hash
from ddp_runner.values.generators import (
    generator_kind,
    new_generator,
    read_generator,
    set_generator,
)
from ddp_runner.values.plain import to_plain

_NUMBERS_SEEN = 1_000  # of a tensor, if it is looked at closely
_PLAIN_LEAVES = (type(None), bool, int, float, str, bytes)
GENERATOR, BUFFER, MEMBER = (
    "ddp_runner:generator",
    "ddp_runner:buffer",
    "ddp_runner:member",
)  # their tags in what is plain


class NotPlainError(TypeError):
    """A value that can neither be stored nor sent; its text names the type."""


class GivingBack:
    """Restores several names in one pass: an object with two names stays one, and two objects stay two.

    ``kept``: ids of the objects that were kept. What is put back under another name is not put into them.
    """

    def __init__(self, kept: frozenset[int] = frozenset()) -> None:
        self._kept = kept
        self._given: dict[int, Any] = {}
        self._taken: dict[int, Any] = {}

    def once(self, kept: Kept, live: Any) -> Any:
        """Return the content of ``kept``, in ``live`` unless another name's content belongs there."""
        if kept.ident in self._given:
            return self._given[kept.ident]
        is_anothers = id(live) in self._taken or (id(live) != kept.ident and id(live) in self._kept)
        if is_anothers:  # a step has made one object of two
            live = live.detach().clone() if isinstance(live, Tensor) else None
        given = kept.put_into(live, self)
        self._given[kept.ident] = self._taken[id(given)] = given
        return given


class Kept:
    """A value as it was; here, one of which only the object itself is known."""

    ident = 0  # of the object that was kept; 0: nobody knows whether it is the same one
    number = 0  # of an object that has several names in one record

    def __init__(self, value: Any) -> None:
        self._value = value

    def is_in(self, value: Any) -> bool:
        """Return True if ``value`` is equal to the kept one."""
        return value is self._value

    def is_wholly_in(self, value: Any) -> bool:
        """The same, where a look may take longer."""
        return self.is_in(value)

    def given_back(self, live: Any, giving: GivingBack | None = None) -> Any:
        """Return the kept value, in the object ``live`` if it can hold it. Raises NotPlainError if it is unknown."""
        if giving is None or not self.ident:
            return self.put_into(live, giving)
        return giving.once(self, live)

    def put_into(self, live: Any, giving: GivingBack | None) -> Any:  # noqa: ARG002 - others do that
        """Return the value like :meth:`given_back`, without regard to its other names."""
        return self._value

    def parts(self) -> Iterable[Kept]:
        """Return the kept values inside this one."""
        return ()

    def plain(self) -> Any:
        """Return a plain form for a file and the wire. Raises NotPlainError."""
        kind = type(self._value)
        raise NotPlainError(f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."))

    def digest(self) -> Any:
        """Return a digest that two equal values share, in any process. Raises NotPlainError."""
        return repr(self.plain())


class Leaf(Kept):
    """A number, a text: it cannot be changed, only replaced."""

    def is_in(self, value: Any) -> bool:
        """See :meth:`Kept.is_in`."""
        if value is self._value:
            return True
        if type(value) is not type(self._value):
            return False
        return bool(value == self._value) or _are_nan(value, self._value)

    def plain(self) -> Any:
        """See :meth:`Kept.plain`."""
        if type(self._value) in _PLAIN_LEAVES:
            return self._value
        if isinstance(self._value, np.generic):
            return to_plain(self._value)
        return super().plain()


class Member(Kept):
    """A member of an enum, which is known by its value."""

    def put_into(self, live: Any, giving: GivingBack | None) -> Any:  # noqa: ARG002 - holds no others
        """See :meth:`Kept.put_into`; the class is that of the live member."""
        if isinstance(self._value, Enum):
            return self._value
        if not isinstance(live, Enum):
            raise NotPlainError("an enum that is not there yet")
        return type(live)(self._value)

    def plain(self) -> Any:
        """See :meth:`Kept.plain`."""
        value = self._value.value if isinstance(self._value, Enum) else self._value
        return {MEMBER: Leaf(value).plain()} if type(value) in _PLAIN_LEAVES else super().plain()


class Seen(Kept):
    """A tensor of which torch's count of its changes is known, not what it holds.

    ``closely``: some of its numbers are compared too, because torch does not count what is written through ``.data``.
    """

    def __init__(self, tensor: Tensor, *, closely: bool = False) -> None:
        self._some = _some_of(tensor) if closely else ""
        self.of: Callable[[], Tensor | None] = weakref.ref(tensor)
        self._version = tensor._version  # noqa: SLF001 - as autograd
        self._at = (tensor.data_ptr(), tensor.shape, tensor.dtype)

    def is_in(self, value: Any) -> bool:
        """See :meth:`Kept.is_in`."""
        original = self.of()
        if value is not original or original is None or original._version != self._version:  # noqa: SLF001
            return False
        if self._at != (original.data_ptr(), original.shape, original.dtype):
            return False
        return not self._some or self._some == _some_of(original)

    def put_into(self, live: Any, giving: GivingBack | None) -> Any:  # noqa: ARG002 - holds no others
        """See :meth:`Kept.put_into`."""
        if self.is_in(live):
            return live
        raise NotPlainError("a tensor that was not kept")

    def plain(self) -> Any:
        """See :meth:`Kept.plain`."""
        raise NotPlainError("a tensor that was not kept")


def _some_of(tensor: Tensor) -> str:
    """Return a hash of at most some thousand of its numbers."""
    flat = tensor.detach().reshape(-1)
    return tensor_hash(flat[:: max(1, flat.numel() // _NUMBERS_SEEN)])


class TensorCopy(Kept):
    """A tensor and what it held. ``on_host``: the copy lies in host memory."""

    content: Tensor

    def __init__(self, tensor: Tensor, *, on_host: bool, before: Kept | None) -> None:
        self.seen = Seen(tensor)
        own = tensor.detach()
        room = before.content if isinstance(before, TensorCopy) else None
        if room is not None and layout(room) == layout(own) and not on_host:
            self.content = room.copy_(own)
        else:
            self.content = own.to("cpu", copy=True) if on_host else own.clone()

    def is_in(self, value: Any) -> bool:
        """See :meth:`Kept.is_in`: bits are compared."""
        return _is_same_tensor(value, self.content)

    def put_into(self, live: Any, giving: GivingBack | None) -> Any:  # noqa: ARG002 - holds no others
        """See :meth:`Kept.put_into`: writes into the original tensor, if that is still there."""
        original = self.seen.of()
        into = live if original is None else original
        if isinstance(into, Tensor) and layout(into)[:2] == layout(self.content)[:2]:
            with torch.no_grad():
                into.detach().copy_(self.content)
            return into
        device = live.device if isinstance(live, Tensor) else self.content.device
        return self.content.to(device, copy=True)

    def plain(self) -> Any:
        """See :meth:`Kept.plain`."""
        return self.content

    def digest(self) -> Any:
        """See :meth:`Kept.digest`."""
        return (str(layout(self.content)[:2]), tensor_hash(self.content))


class Received(TensorCopy):
    """A tensor of another process."""

    def __init__(self, content: Tensor) -> None:
        self.seen = _Nowhere()  # type: ignore[assignment]
        self.content = content


class _Nowhere:
    """A placeholder for a tensor that this process has never had."""

    def of(self) -> None:
        return None

    def is_in(self, value: Any) -> bool:  # noqa: ARG002
        """See :meth:`Kept.is_in`."""
        return False


class Array(Kept):
    """An array of numpy's, without objects in it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        super().__init__(array.copy())

    def is_in(self, value: Any) -> bool:
        """See :meth:`Kept.is_in`."""
        is_alike = type(value) is type(self._value) and self._fits(value)
        return is_alike and same_bits(value, self._value)

    def _fits(self, value: Any) -> bool:
        if not isinstance(value, np.ndarray) or value.dtype != self._value.dtype:
            return False
        return bool(value.shape == self._value.shape)

    def put_into(self, live: Any, giving: GivingBack | None) -> Any:  # noqa: ARG002
        """See :meth:`Kept.put_into`."""
        if self._fits(live) and live.flags.writeable:
            np.copyto(live, self._value)
            return live
        return self._value.copy()

    def plain(self) -> Any:
        """See :meth:`Kept.plain`."""
        if self._value.dtype.hasobject:
            return super().plain()
        return to_plain(np.asarray(self._value))


def same_bits(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Return True if two arrays of one shape and type have the same bits, so that NaN equals itself."""
    if one.flags.c_contiguous and other.flags.c_contiguous and not one.dtype.hasobject:
        raw = one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8)
        return bool(np.array_equal(*raw))
    return one.tobytes() == other.tobytes()


class Buffer(Kept):
    """Memory that is written in place: a bytearray, an array of Python's, a value of C."""

    def __init__(self, kind: type, code: str, content: bytes) -> None:
        super().__init__(content)
        self._kind = kind
        self._code = code  # an array's letter for its numbers' type

    @classmethod
    def of(cls, value: Any) -> Buffer:
        """``value`` as it is now."""
        code = value.typecode if isinstance(value, array) else ""
        return cls(type(value), code, bytes(memoryview(value)))

    @classmethod
    def from_plain(cls, packed: Any) -> Buffer:
        """The inverse of what :meth:`plain` has packed."""
        kind, code, content = packed
        return cls({"array": array, "bytearray": bytearray}.get(kind, object), code, bytes(content))

    def is_in(self, value: Any) -> bool:
        """See :meth:`Kept.is_in`."""
        is_alike = type(value) is self._kind and getattr(value, "typecode", "") == self._code
        return is_alike and bytes(memoryview(value)) == self._value

    def put_into(self, live: Any, giving: GivingBack | None) -> Any:  # noqa: ARG002
        """See :meth:`Kept.put_into`."""
        if isinstance(live, C_VALUES) and ctypes.sizeof(live) == len(self._value):
            ctypes.memmove(ctypes.addressof(live), self._value, len(self._value))
            return live
        if not issubclass(self._kind, (array, bytearray)):
            raise NotPlainError("a value of C that is not there yet")
        new: Any = array(self._code, self._value) if self._code else bytearray(self._value)
        if isinstance(live, (array, bytearray)) and getattr(live, "typecode", "") == self._code:
            live[:] = new
            return live
        return new

    def plain(self) -> Any:
        """See :meth:`Kept.plain`."""
        known = next((k for k in (array, bytearray) if issubclass(self._kind, k)), None)
        return {BUFFER: ("" if known is None else known.__name__, self._code, self._value)}


C_VALUES = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)  # noqa: SLF001 - c_int and the like


def has_pointers(kind: Any) -> bool:
    """Return True if a ctypes type holds addresses, which mean nothing in another process."""
    code = getattr(kind, "_type_", None)
    if issubclass(kind, ctypes.Structure):
        return any(has_pointers(field[1]) for field in getattr(kind, "_fields_", ()))
    return has_pointers(code) if isinstance(code, type) else code is None or code in "zZPO"


class GeneratorState(Kept):
    """The state of a random generator. ``kind``: a key of ``GENERATOR_TYPES``; ``own``: a user's class."""

    def __init__(self, kind: str, state: Any, own: str = "") -> None:
        self._kind = kind
        self._state = state
        self._own = own

    @classmethod
    def of(cls, kind: str, value: Any) -> GeneratorState:
        """Return the current state of ``value``."""
        is_own = type(value).__module__.partition(".")[0] not in ("random", "numpy", "torch")
        return cls(kind, read_generator(kind, value), type(value).__qualname__ if is_own else "")

    def is_in(self, value: Any) -> bool:
        """See :meth:`Kept.is_in`."""
        if generator_kind(value) != self._kind:
            return False
        return repr_of_state(read_generator(self._kind, value)) == repr_of_state(self._state)

    def put_into(self, live: Any, giving: GivingBack | None) -> Any:  # noqa: ARG002 - holds no others
        """See :meth:`Kept.put_into`."""
        is_there = generator_kind(live) == self._kind
        if not is_there and self._own:
            raise NotPlainError(f"{self._own} that is not there yet")
        generator = live if is_there else new_generator(self._kind, self._state)
        set_generator(self._kind, generator, self._state)
        return generator

    def plain(self) -> Any:
        """See :meth:`Kept.plain`."""
        return {GENERATOR: (self._kind, to_plain(self._state), self._own)}

    def digest(self) -> Any:
        """See :meth:`Kept.digest`."""
        return (self._kind, repr_of_state(self._state))


def layout(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Return the properties that two tensors must share so that one can be copied into the other."""
    return tensor.shape, tensor.dtype, tensor.device


def _is_same_tensor(value: Any, content: Tensor) -> bool:
    """Return True if the bits are equal: NaN equals itself."""
    if not isinstance(value, Tensor) or layout(value)[:2] != layout(content)[:2]:
        return False
    own = value.detach().to(content.device)
    # equal() says no where there is a NaN.
    return torch.equal(own, content) or tensor_hash(own) == tensor_hash(content)


def _are_nan(one: Any, other: Any) -> bool:
    return isinstance(one, float) and math.isnan(one) and math.isnan(other)


def repr_of_state(state: Any) -> str:
    """A generator's state as a text that equal states have alike."""
    if isinstance(state, Tensor):
        return tensor_hash(state)
    if isinstance(state, dict):
        return repr([(key, repr_of_state(value)) for key, value in sorted(state.items())])
    if isinstance(state, (list, tuple)):
        return repr([repr_of_state(one) for one in state])
    if isinstance(state, np.ndarray):
        return state.tobytes().hex()
    return repr(state)
