"""Turns the per-rank objects into bytes, and writes such bytes back into the same objects.

The program's objects keep their identity, and so do the objects inside them that can be written in place. Never
touches shared memory; never decides when.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_runner.kernel.rules.classify import lacks_memory
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.local_state.in_place import (
    CONSTANT,
    PROTOCOL,
    Merging,
    NotInPlaceError,
    content_of,
    inside_of,
    places_of_content,
    reduced_of,
)

APART_BYTES = 1 << 16  # from this size on, an array is not copied into the pickle
_DEPTH_MAX = 6  # of the attribute path that an error names
_INNER_MAX = 10_000
_ORDER_S = 3.0  # of CPU time, for reading the order of sets: about five million values
_LINE = 64  # numbers after which memory is aligned alike, of whichever type
# Functions and classes that pickles of plain values and arrays name.
_SAFE = {
    ("builtins", name)
    for name in ("set", "frozenset", "bytearray", "complex", "range", "slice", "object")
}
_SAFE |= {("collections", name) for name in ("deque", "OrderedDict", "defaultdict", "Counter")}
_SAFE |= {
    ("copyreg", "_reconstructor"),
    ("copyreg", "__newobj__"),
    ("copyreg", "__newobj_ex__"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("random", "Random"),
    ("types", "SimpleNamespace"),
}
_SAFE |= {
    (f"numpy.{core}.{module}", name)
    for core in ("core", "_core")
    for module, name in (
        ("multiarray", "_reconstruct"),
        ("multiarray", "scalar"),
        ("numeric", "_frombuffer"),
    )
}
_SAFE |= {
    ("numpy.random._pickle", name)
    for name in ("__generator_ctor", "__bit_generator_ctor", "__randomstate_ctor")
}
_SAFE |= {
    (f"numpy.random.{module}", kind)
    for module, kind in (
        ("_pcg64", "PCG64"),
        ("_pcg64", "PCG64DXSM"),
        ("_mt19937", "MT19937"),
        ("_philox", "Philox"),
        ("_sfc64", "SFC64"),
        ("bit_generator", "SeedSequence"),
        ("bit_generator", "__pyx_unpickle_SeedSequence"),
    )
}


class Pickled(NamedTuple):
    """Holds objects as bytes: ``text`` is a pickle, ``buffers`` are views of large arrays, not copies."""

    text: bytes
    buffers: list[memoryview]

    @property
    def size_bytes(self) -> int:
        """The size of all parts in bytes."""
        return len(self.text) + sum(one.nbytes for one in self.buffers)


class KeptLocally:
    """Holds the objects that a rank keeps, by name. ``option``: the name of the user's call, for error lines."""

    def __init__(self, objects: Mapping[str, Any], *, option: str) -> None:
        """Check each object. Raises BadInputError that names an object that cannot be kept."""
        self.objects = dict(objects)
        self.names = tuple(self.objects)
        self._option = option
        self._name_of = {id(one): name for name, one in self.objects.items()}
        # Pickle's table of types does not cover lists, dicts and sets: if one of these is kept, each value is looked up.
        self._is_shared = len(self.objects) > 1 and any(
            type(one) in (dict, list, set) for one in self.objects.values()
        )
        table: dict[type, Callable[[Any], Any]] = {
            **copyreg.dispatch_table,
            Tensor: _reduced_tensor,
            torch.Generator: _reduced_generator,
        }
        kinds = {type(one) for one in self.objects.values()}
        self._table = table | {kind: _by_name(self._name_of, table.get(kind)) for kind in kinds}
        for name, one in self.objects.items():
            self._check(name, one)

    def pickled(self) -> Pickled:
        """Return all objects as they are now. Errors of pickle propagate."""
        buffers: list[memoryview] = []
        contents = {name: content_of(one) for name, one in self.objects.items()}
        return self._dumped(contents, buffers)

    def put_back(self, pickled: Pickled, *, is_foreign: bool = False) -> None:
        """Restore the content of all objects in place.

        ``is_foreign``: from a file. Then only classes of the program and plain values are built. Raises UnpicklingError
        that names a class that may not be built. Errors of the objects' own methods propagate.
        """
        if self._is_as_in(pickled):
            return
        contents = self._loaded(pickled, is_foreign=is_foreign)
        if set(contents) != set(self.names):
            raise pickle.UnpicklingError(f"it is of {', '.join(contents) or 'no objects'}")
        pairs = [(self.objects[name], content) for name, content in contents.items()]
        Merging(self.objects.values()).give_back(pairs)

    def has_reordered(self, pickled: Pickled) -> bool | None:
        """Return True if a set that was restored from ``pickled`` is iterated in another order now.

        Its order follows from all that it has ever held, which no pickle has. None: reading the order takes too long.
        """
        # INVARIANT order-is-named: a set of plain values that is iterated in another order after it was restored is named.
        # Broken if: the order that was pickled is not compared with that of the set as it is now.
        # Guarded by: test_a_set_that_is_iterated_in_another_order_is_named.
        after: set[tuple[Any, ...]] = set()
        contents = {name: content_of(one) for name, one in self.objects.items()}
        now = self._dumped(contents, [], partial(_SetFinder, after, is_shared=self._is_shared))
        after |= {tuple(one) for one in self.objects.values() if isinstance(one, set)}
        if now == pickled or all(len(order) < 2 for order in after):
            return False
        reader = _SetOrders(pickled, self.objects, until_s=time.thread_time() + _ORDER_S)
        try:
            before = reader.read()
        except TimeoutError:
            return None
        found = {frozenset(order) for order in after}
        return any(order not in after and frozenset(order) in found for order in before)

    def _is_as_in(self, pickled: Pickled) -> bool:
        """Return True if the objects are as in ``pickled``: then nothing is written."""
        try:
            return self.pickled() == pickled
        except Exception as error:
            if lacks_memory(error):
                raise
            return (
                False  # the step that is given up has put something into them that cannot be kept
            )

    def inner(self) -> list[Any]:
        """Return the objects and the objects inside them that are restored in place."""
        found: dict[int, Any] = {}
        pending = list(self.objects.values())
        while pending and len(found) < _INNER_MAX:
            one = pending.pop()
            if id(one) in found or isinstance(one, (*CONSTANT, bool, type)):
                continue
            found[id(one)] = one
            pending += [inner for _, inner in inside_of(one)]
        return list(found.values())

    def _dumped(
        self,
        contents: Any,
        buffers: list[memoryview],
        kind: Callable[..., _Pickler] | None = None,
    ) -> Pickled:
        kind = kind or (_SharedPickler if self._is_shared else _Pickler)
        return _dumped_by(kind, contents, self._name_of, self._table, buffers)

    def _loaded(self, pickled: Pickled, *, is_foreign: bool) -> dict[str, Any]:
        known: set[tuple[str, str]] | None = None
        if is_foreign:
            # INVARIANT built-as-known: from a file, only plain values and classes of the program are built.
            # Broken if: any function that a pickle names is called.
            # Guarded by: test_a_file_cannot_have_other_functions_called.
            own = self.pickled()
            tracing = _Loader(own, self.objects, known=None)
            tracing.load()
            known = tracing.used
        found: dict[str, Any] = _Loader(pickled, self.objects, known=known).load()
        return found

    def _check(self, name: str, value: Any) -> None:
        """Raise BadInputError if ``value`` cannot be kept, or restored in place."""
        what, kind = f"{self._option}({name}=...)", type(value).__name__
        if isinstance(value, (*CONSTANT, bool, type)):
            expected = f"is of type {kind}, which cannot be changed in place: put it into a dict or an object"
            raise BadInputError(what, "", expected)
        try:
            own = self._dumped({name: content_of(value)}, [])
            loaded = _Loader(own, self.objects, known=None).load()
            self._try(value, loaded[name])
        except Exception as error:
            if lacks_memory(error):
                raise
            if isinstance(error, NotInPlaceError):
                expected = f"is of type {kind}, which cannot be given back in place: give it state_dict() and load_state_dict()"
            else:
                place = self._culprit(name, value)
                expected = f"cannot be kept: {place} ({type(error).__name__}: {error})"
            raise BadInputError(what, "", expected) from error

    def _try(self, value: Any, content: tuple[str, Any]) -> None:
        """Write ``content`` as it is done later. Only what has the same state afterwards is written in place."""
        way, _ = content
        if way == "object":
            if hasattr(value, "__setstate__"):
                make, given = reduced_of(value)[:2]
                Merging(self.objects.values()).give_back([(make(*given), content)])
        elif way in ("plain", "entries"):
            places_of_content(value, content)  # a set's order would become another one
        else:
            Merging(self.objects.values()).give_back([(value, content)])

    def _culprit(self, name: str, value: Any) -> str:
        """Return the innermost place in ``value`` that cannot be pickled, with its type."""
        place, at = name, value
        for _ in range(_DEPTH_MAX):
            inner = next((one for one in inside_of(at) if not self._can(one[1])), None)
            if inner is None:
                break
            place, at = place + inner[0], inner[1]
        return f"{place} is of type {type(at).__name__}"

    def _can(self, value: Any) -> bool:
        try:
            self._dumped(value, [])
        except Exception as error:
            if lacks_memory(error):
                raise
            return False
        return True


class _Pickler(pickle.Pickler):
    """Pickles by a table of types, which C code looks up; all other types as usual."""

    def __init__(
        self,
        out: io.BytesIO,
        names: Mapping[int, str],
        is_small: Callable[[Any], bool],
        table: Mapping[type, Callable[[Any], Any]],
    ) -> None:
        super().__init__(out, protocol=PROTOCOL, buffer_callback=is_small)
        self._names = names
        self.dispatch_table = table


def _dumped_by(
    kind: Callable[..., _Pickler],
    contents: Any,
    names: Mapping[int, str],
    table: Mapping[type, Callable[[Any], Any]],
    buffers: list[memoryview],
) -> Pickled:
    out = io.BytesIO()

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < APART_BYTES:
            return True
        buffers.append(raw)
        return False

    kind(out, names, is_small, table).dump(contents)
    return Pickled(out.getvalue(), buffers)


def handed_over(value: Any, *, is_anothers: Callable[[Any], bool] | None = None) -> Pickled:
    """Return a value as bytes for another process of the program, with tensors laid out as they are.

    ``is_anothers``: for each object in ``value``, whether something else holds it too. Raises PicklingError for one: of
    one object two would be made. What pickle raises passes.
    """
    table: dict[type, Callable[[Any], Any]] = {
        **copyreg.dispatch_table,
        Tensor: _reduced_as_laid,
        torch.Generator: _reduced_generator,
    }
    kind = partial(_LonePickler, is_anothers) if is_anothers is not None else _Pickler
    return _dumped_by(kind, value, {}, table, [])


def taken_over(pickled: Pickled, *, like: Any, moved: Mapping[str, str] | None = None) -> Any:
    """Return the value of :func:`handed_over`, built only from what a file may have built, or what ``like`` consists of.

    ``moved``: what stands here in the place of a device there. Raises UnpicklingError, naming the class, for one that may
    not be built.
    """
    tracing = _Loader(handed_over(like), {}, known=None)
    tracing.load()
    return _Loader(pickled, {}, known=tracing.used, moved=moved or {}).load()


def _reduced_as_laid(value: Tensor) -> Any:
    """With the same strides, from the same place in a line of memory: kernels may go by both."""
    is_plain = value.layout is torch.strided and not value.is_meta
    if not is_plain or value.is_conj() or value.is_neg():
        return reduced_of(value)
    own, lead = value.detach(), value.storage_offset() % _LINE
    shape, strides = tuple(own.shape), own.stride()
    extent = lead + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    line = own.as_strided((extent if own.numel() else 0,), (1,), own.storage_offset() - lead)
    raw = line.cpu().view(torch.uint8).numpy()
    kind = str(own.dtype).removeprefix("torch.")
    return _tensor_as_laid, (
        raw,
        kind,
        (shape, strides, lead),
        str(own.device),
        value.requires_grad,
    )


def _reduced_tensor(value: Tensor) -> Any:
    if value.layout is not torch.strided or value.is_meta:
        return reduced_of(value)
    own = value.detach()
    shape, kind = tuple(own.shape), str(own.dtype).removeprefix("torch.")
    raw = own.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _tensor, (raw, kind, shape, str(own.device), value.requires_grad)


def _reduced_generator(value: torch.Generator) -> Any:
    return _generator, (value.get_state().numpy(), str(value.device))


def _by_name(
    names: Mapping[int, str], otherwise: Callable[[Any], Any] | None
) -> Callable[[Any], Any]:
    """Return the reducer for a kept object's type: it pickles a kept object inside another one by its name."""

    def by_name(value: Any) -> Any:
        name = names.get(id(value))
        if name is not None:
            return _live, (name,)
        return reduced_of(value) if otherwise is None else otherwise(value)

    return by_name


class _SharedPickler(_Pickler):
    """Pickles like :class:`_Pickler`, and also looks up each list and dict."""

    def persistent_id(self, value: Any) -> str | None:
        return self._names.get(id(value))


class _LonePickler(_Pickler):
    """Pickles objects that nothing else holds."""

    def __init__(self, is_anothers: Callable[[Any], bool], *parts: Any) -> None:
        super().__init__(*parts)
        self._is_anothers = is_anothers

    def persistent_id(self, value: Any) -> None:
        if self._is_anothers(value):
            raise pickle.PicklingError(f"{type(value).__name__}, which something else holds, too")


class _SetFinder(_Pickler):
    """Pickles alike, and puts the order of the items of each set of plain values into ``found``."""

    def __init__(self, found: set[tuple[Any, ...]], *parts: Any, is_shared: bool) -> None:
        super().__init__(*parts)
        self._found = found
        self._is_shared = is_shared

    def persistent_id(self, value: Any) -> str | None:
        if type(value) in (set, frozenset) and all(isinstance(item, CONSTANT) for item in value):
            self._found.add(tuple(value))
        return self._names.get(id(value)) if self._is_shared else None


class _Named:
    """Finds what a pickle names: kept objects, classes and functions."""

    _kept: Mapping[str, Any]

    def persistent_load(self, name: Any) -> Any:
        return self._kept[name]

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _live.__name__:
            return self._kept.__getitem__
        return super().find_class(module, name)  # type: ignore[misc]


class _SetOrders(_Named, pickle._Unpickler):  # noqa: SLF001 - the one whose steps can be replaced
    """Reads a pickle that was loaded before, for the order of the items of each of its sets. Takes long for a large one.

    ``until_s``: of time.thread_time(); reading raises TimeoutError once it is past.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)  # noqa: SLF001

    def __init__(self, pickled: Pickled, live: Mapping[str, Any], *, until_s: float) -> None:
        super().__init__(io.BytesIO(pickled.text), buffers=pickled.buffers)
        self._kept = live
        self._until_s = until_s
        self._orders: dict[int, tuple[set[Any], list[Any]]] = {}  # the sets live as long as this
        self._frozen: list[list[Any]] = []

    def read(self) -> set[tuple[Any, ...]]:
        """Return the items of each set of plain values, in order."""
        contents = self.load()
        orders = [*self._frozen, *(order for _, order in self._orders.values())]
        orders += [
            held[0]
            for name, (way, held) in contents.items()
            if way == "entries" and isinstance(self._kept[name], set)
        ]
        return {tuple(one) for one in orders if all(isinstance(item, CONSTANT) for item in one)}

    def _note_items(self: Any) -> None:
        items, found = self.pop_mark(), self.stack[-1]
        for item in items:
            found.add(item)
        if type(found) is set:
            self._orders.setdefault(id(found), (found, []))[1].extend(items)

    def _note_frozen(self: Any) -> None:
        items = self.pop_mark()
        self._frozen.append(items)
        self.append(frozenset(items))

    def _look_at_clock(self: Any) -> None:
        if time.thread_time() > self._until_s:
            raise TimeoutError
        self.load_frame()

    dispatch[pickle.ADDITEMS[0]] = _note_items
    dispatch[pickle.FROZENSET[0]] = _note_frozen
    dispatch[pickle.FRAME[0]] = _look_at_clock  # each 64 KiB


class _Loader(_Named, pickle.Unpickler):
    """Loads pickles. ``known``: further names that they may use; None: any. ``used``: the names that they used.

    ``moved``: see :func:`taken_over`.
    """

    def __init__(
        self,
        pickled: Pickled,
        live: Mapping[str, Any],
        *,
        known: set[tuple[str, str]] | None,
        moved: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(io.BytesIO(pickled.text), buffers=pickled.buffers)
        self._kept = live
        self._known = known
        self._moved = moved
        self.used: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _live.__name__:
            return super().find_class(module, name)
        self.used.add((module, name))
        if self._known is not None and module != __name__ and (module, name) not in self._known:
            _refuse_foreign(module, name)
        found = super().find_class(module, name)
        return partial(_on_our_device, found, self._moved) if found in _ON_DEVICES else found


def _refuse_foreign(module: str, name: str) -> None:
    """Raise UnpicklingError unless the name is of a plain value or of a class that the program has imported."""
    if (module, name) in _SAFE:
        return
    first = module.partition(".")[0]
    is_programs = first not in sys.stdlib_module_names and first not in (
        "torch",
        "numpy",
        "ddp_runner",
    )
    found = getattr(sys.modules.get(module), name, None)
    if not is_programs or not isinstance(found, type):
        raise pickle.UnpicklingError(f"a file may not build {module}.{name}")


def _live(name: str) -> Any:
    """Stand for a kept object inside another one; the loader replaces this function."""
    raise pickle.UnpicklingError(f"{name} is not kept here")


def _tensor(
    raw: Any, kind: str, shape: tuple[int, ...], device: str, requires_grad: bool
) -> Tensor:
    own = np.array(raw, dtype=np.uint8)  # a writable copy: pickled buffers may be read-only
    flat = torch.from_numpy(own).view(getattr(torch, kind)) if own.size else torch.empty(0)
    found = flat.to(getattr(torch, kind)).reshape(shape)
    found = found if device == "cpu" else found.to(device)
    return found.requires_grad_(requires_grad)


def _tensor_as_laid(
    raw: Any,
    kind: str,
    laid: tuple[tuple[int, ...], tuple[int, ...], int],
    device: str,
    requires_grad: bool,
) -> Tensor:
    shape, strides, lead = laid
    read, dtype = np.array(raw, dtype=np.uint8), getattr(torch, kind)
    line = torch.from_numpy(read).view(dtype) if read.size else torch.empty(0, dtype=dtype)
    # Not numpy's memory: torch's begins at a multiple of what kernels look at.
    line = line.clone() if device == "cpu" else line.to(device)
    return line.as_strided(shape, strides, lead if line.numel() else 0).requires_grad_(
        requires_grad
    )


def _on_our_device(make: Callable[..., Any], moved: Mapping[str, str], *given: Any) -> Any:
    return make(*(moved.get(one, one) if isinstance(one, str) else one for one in given))


def _generator(state: Any, device: str) -> torch.Generator:
    found = torch.Generator(device=device)
    found.set_state(torch.from_numpy(np.array(state)))
    return found


_ON_DEVICES = (_tensor_as_laid, _generator)  # of what is given to these, a text names the device
