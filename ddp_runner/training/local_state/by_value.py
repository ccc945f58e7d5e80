"""Turns the per-rank objects into bytes, and writes such bytes back into the same objects.

The program's objects keep their identity, and so do the objects inside them that can be written in place. Never
touches shared memory; never decides when.
"""

from __future__ import annotations

import copyreg
import io
import operator
import pickle
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ddp_runner.kernel.rules.classify import lacks_memory
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.values.generators import generator_kind, read_generator, set_generator

APART_BYTES = 1 << 16  # from this size on, an array is not copied into the pickle
_PROTOCOL = 5
_DEPTH_MAX = 6  # of the attribute path that an error names
_ENTRIES_MAX = 1_000  # of a list whose entries are written in place
_INNER_MAX = 10_000
_LINE = 64  # numbers after which memory is aligned alike, of whichever type
_CONSTANT = (int, float, complex, str, bytes, tuple, frozenset, type(None))
_PLAIN = (dict, list, deque, set, bytearray)
_ENTRIES = (OrderedDict, dict, list, deque, set)  # the more special class first
_ATOMS = {int, float, complex, str, bytes, bool, type(None)}
# Pickle names these; it does not copy them.
_OF_PROGRAM = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_NEW = (copyreg.__newobj__, copyreg.__newobj_ex__, copyreg._reconstructor)  # type: ignore[attr-defined] # noqa: SLF001
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
        contents = {name: _content(one) for name, one in self.objects.items()}
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
        _Merging(self.objects.values()).give_back(pairs)

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
            if id(one) in found or isinstance(one, (*_CONSTANT, bool, type)):
                continue
            found[id(one)] = one
            pending += [inner for _, inner in _inside(one)]
        return list(found.values())

    def _dumped(self, contents: Any, buffers: list[memoryview]) -> Pickled:
        kind = _SharedPickler if self._is_shared else _Pickler
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
        if isinstance(value, (*_CONSTANT, bool, type)):
            expected = f"is of type {kind}, which cannot be changed in place: put it into a dict or an object"
            raise BadInputError(what, "", expected)
        try:
            own = self._dumped({name: _content(value)}, [])
            loaded = _Loader(own, self.objects, known=None).load()
            self._try(value, loaded[name])
        except Exception as error:
            if lacks_memory(error):
                raise
            if isinstance(error, _NotInPlaceError):
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
                make, given = _reduced(value)[:2]
                _Merging(self.objects.values()).give_back([(make(*given), content)])
        elif way in ("plain", "entries"):
            _places_of_content(value, content)  # a set's order would become another one
        else:
            _Merging(self.objects.values()).give_back([(value, content)])

    def _culprit(self, name: str, value: Any) -> str:
        """Return the innermost place in ``value`` that cannot be pickled, with its type."""
        place, at = name, value
        for _ in range(_DEPTH_MAX):
            inner = next((one for one in _inside(at) if not self._can(one[1])), None)
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


class _NotInPlaceError(TypeError):
    """Raised for an object that cannot take the content of another one."""


class _Pickler(pickle.Pickler):
    """Pickles by a table of types, which C code looks up; all other types as usual."""

    def __init__(
        self,
        out: io.BytesIO,
        names: Mapping[int, str],
        is_small: Callable[[Any], bool],
        table: Mapping[type, Callable[[Any], Any]],
    ) -> None:
        super().__init__(out, protocol=_PROTOCOL, buffer_callback=is_small)
        self._names = names
        self.dispatch_table = table


def _dumped_by(
    kind: type[_Pickler],
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


def handed_over(value: Any) -> Pickled:
    """Return a value as bytes for another process of the program, with tensors laid out as they are.

    What pickle raises passes.
    """
    table: dict[type, Callable[[Any], Any]] = {
        **copyreg.dispatch_table,
        Tensor: _reduced_as_laid,
        torch.Generator: _reduced_generator,
    }
    return _dumped_by(_Pickler, value, {}, table, [])


def taken_over(pickled: Pickled, *, like: Any) -> Any:
    """Return the value of :func:`handed_over`, built only from what a file may have built, or what ``like`` consists of.

    Raises UnpicklingError, naming the class, for one that may not be built.
    """
    tracing = _Loader(handed_over(like), {}, known=None)
    tracing.load()
    return _Loader(pickled, {}, known=tracing.used).load()


def _reduced_as_laid(value: Tensor) -> Any:
    """With the same strides, from the same place in a line of memory: kernels may go by both."""
    is_plain = value.layout is torch.strided and not value.is_meta
    if not is_plain or value.is_conj() or value.is_neg():
        return _reduced(value)
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
        return _reduced(value)
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

    def reduced(value: Any) -> Any:
        name = names.get(id(value))
        if name is not None:
            return _live, (name,)
        return _reduced(value) if otherwise is None else otherwise(value)

    return reduced


def _reduced(value: Any) -> Any:
    return value.__reduce_ex__(_PROTOCOL)


class _SharedPickler(_Pickler):
    """Pickles like :class:`_Pickler`, and also looks up each list and dict."""

    def persistent_id(self, value: Any) -> str | None:
        return self._names.get(id(value))


class _Loader(pickle.Unpickler):
    """Loads pickles. ``known``: further names that they may use; None: any. ``used``: the names that they used."""

    def __init__(
        self,
        pickled: Pickled,
        live: Mapping[str, Any],
        *,
        known: set[tuple[str, str]] | None,
    ) -> None:
        super().__init__(io.BytesIO(pickled.text), buffers=pickled.buffers)
        self._kept = live
        self._known = known
        self.used: set[tuple[str, str]] = set()

    def persistent_load(self, name: Any) -> Any:
        return self._kept[name]

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _live.__name__:
            return self._kept.__getitem__
        self.used.add((module, name))
        if self._known is not None and module != __name__ and (module, name) not in self._known:
            _refuse_foreign(module, name)
        return super().find_class(module, name)


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
        raise pickle.UnpicklingError(f"a checkpoint may not build {module}.{name}")


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


def _generator(state: Any, device: str) -> torch.Generator:
    found = torch.Generator(device=device)
    found.set_state(torch.from_numpy(np.array(state)))
    return found


def _content(value: Any) -> tuple[str, Any]:
    """Return the way in which ``value`` is restored, and its content; never the object itself."""
    if isinstance(value, (np.ndarray, Tensor, *_PLAIN)):
        return _content_of_plain(value)
    if _has_state(value):
        return "state_dict", value.state_dict()
    if kind := generator_kind(value):
        return "generator", (kind, read_generator(kind, value))
    reduced = _reduced(value)
    is_made_empty = reduced[0] in _NEW or (reduced[0] is type(value) and not reduced[1])
    if isinstance(reduced, str) or not is_made_empty:
        raise _NotInPlaceError
    state = reduced[2] if len(reduced) > 2 else None
    # A copy: the pickle must not hold the object's own dict as another one.
    return "object", dict(state) if type(state) is dict else state


def _content_of_plain(value: Any) -> tuple[str, Any]:
    """Return the same for arrays, tensors, lists, dicts and the like, and their subclasses."""
    if _has_state(value):
        return "state_dict", value.state_dict()
    if type(value) is np.ndarray:
        return "array", value.view()
    if type(value) is Tensor:
        return "tensor", value.detach()
    if type(value) in _PLAIN:
        return "plain", value.copy()
    if isinstance(value, (dict, list, set, deque)):
        base = _base_of(value)
        entries = list(base.items(value) if issubclass(base, dict) else base.__iter__(value))
        return "entries", (entries, dict(getattr(value, "__dict__", {})), _slots_of(value))
    raise _NotInPlaceError


def _has_state(value: Any) -> bool:
    names = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(
        callable(getattr(type(value), name, None)) for name in names
    )


class _Merging:
    """Writes loaded content into the program's objects: each live object takes the content of one loaded object.

    The step that is given up may have made two names one object. First each loaded object is matched with the live one at its place. Then everything is written, and each reference
    to a loaded object that was matched becomes one to its live object. So what was one object is one object again.
    """

    def __init__(self, kept: Iterable[Any]) -> None:
        """``kept``: the objects that are written separately, even if another object holds them."""
        # id of a loaded object -> the object that stands for it
        self._final: dict[int, Any] = {id(one): one for one in kept}
        self._taken = set(self._final)  # ids of live objects that stand for a loaded one
        self._matched: list[tuple[Any, Any]] = []  # live, loaded
        self._own: list[Any] = []  # loaded objects that stand for themselves
        self._held: list[Any] = []  # so that no id is reused

    def give_back(self, pairs: Iterable[tuple[Any, tuple[str, Any]]]) -> None:
        """Write each content, as :func:`_content` has returned it, into its live object."""
        pairs = list(pairs)
        self._held.append(pairs)
        places: deque[tuple[Any, Any]] = deque()
        for live, content in pairs:
            places += _places_of_content(live, content)
        self._match(places)
        self._write_numbers(pairs)
        for live, content in pairs:
            self._write_content(live, content)
        for live, new in self._matched:
            self._write(live, new)
        self._settle()

    def _match(self, places: deque[tuple[Any, Any]]) -> None:
        """Match the objects at the same places, those nearest to a kept object first."""
        while places:
            live, new = places.popleft()
            if type(live) is not type(new) or live is new or id(new) in self._final:
                continue
            if isinstance(new, tuple):
                places += zip(live, new, strict=False)
            elif id(live) not in self._taken and _can_take(live, new):
                self._final[id(new)] = live
                self._taken.add(id(live))
                self._matched.append((live, new))
                places += _places(live, new)

    def _write_numbers(self, pairs: list[tuple[Any, tuple[str, Any]]]) -> None:
        """Write all arrays and tensors; then leave out those whose memory has taken other content: views."""
        inner = [pair for pair in self._matched if isinstance(pair[0], (np.ndarray, Tensor))]
        outer = [(live, held) for live, (way, held) in pairs if way in ("array", "tensor")]
        for live, new in (*inner, *outer):
            _write_numbers(live, new)
        for live, new in inner:
            if not _is_same(live, new):
                self._final[id(new)] = new
                self._own.append(new)

    def _write_content(self, live: Any, content: tuple[str, Any]) -> None:
        way, held = content
        if way == "state_dict":
            live.load_state_dict(self._settled(held))
        elif way == "generator":
            set_generator(held[0], live, held[1])
        elif way == "entries":
            entries, attributes, *slots = held
            self._fill_entries(live, entries)
            self._fill_attributes(live, attributes, *slots)
        elif way == "object":
            if hasattr(live, "__setstate__"):
                if held is not None:
                    live.__setstate__(self._settled(held))
            else:
                attributes, slots = held if isinstance(held, tuple) else (held, None)
                self._fill_attributes(live, attributes or {}, slots or {})
        else:
            self._write(live, held)

    def _settled(self, loaded: Any) -> Any:
        """Return ``loaded``, with references to the live objects in it."""
        found = self._of(loaded)
        self._settle()
        return found

    def _settle(self) -> None:
        """Let loaded objects that stand for themselves refer to the live ones."""
        while self._own:
            new = self._own.pop()
            self._write(new, new)

    def _of(self, new: Any) -> Any:
        """Return the object that stands for ``new`` from now on."""
        if type(new) in _ATOMS:
            return new
        if id(new) in self._final:
            return self._final[id(new)]
        found = new
        if type(new) is frozenset or isinstance(new, tuple):
            inner = [self._of(one) for one in new]
            if any(one is not old for one, old in zip(inner, new, strict=True)):
                kind: Any = type(new)
                found = frozenset(inner) if kind is frozenset else tuple.__new__(kind, inner)
        else:
            self._own.append(new)
        self._held.append(new)
        self._final[id(new)] = found
        return found

    def _write(self, live: Any, new: Any) -> None:
        """Write ``new`` into ``live``, which may be the same object."""
        if isinstance(live, (Tensor, *_OF_PROGRAM)):
            return  # tensors are written already
        if isinstance(live, np.ndarray):
            self._fill_objects(live)
        elif live is not new and (kind := generator_kind(live)):
            set_generator(kind, live, read_generator(kind, new))
        elif live is not new and isinstance(live, nn.Module):
            live.load_state_dict(new.state_dict())
        elif isinstance(live, bytearray):
            if live != new:
                live[:] = new
        else:
            base = _base_of(live)
            if base is not None:
                entries = base.items(new) if issubclass(base, dict) else base.__iter__(new)
                self._fill_entries(live, list(entries))
            if type(live) is not base:
                self._fill_attributes(live, getattr(new, "__dict__", {}), _slots_of(new))

    def _fill_objects(self, live: Any) -> None:
        """Let an array of objects refer to the live ones."""
        if live.dtype == object and live.flags.writeable:
            for place in np.ndindex(live.shape):
                found = self._of(live[place])
                if found is not live[place]:
                    live[place] = found

    def _fill_entries(self, live: Any, entries: list[Any]) -> None:
        """Replace the entries of a dict, list, set or deque, by the methods of that class and not of a subclass."""
        base: Any = _base_of(live)
        if issubclass(base, dict):
            entries = [(self._of(key), self._of(one)) for key, one in entries]
            flat = [part for pair in entries for part in pair]
            if _are_same([part for pair in base.items(live) for part in pair], flat):
                return
            base.clear(live)
            for key, one in entries:
                base.__setitem__(live, key, one)
            return
        entries = [self._of(one) for one in entries]
        if issubclass(base, set):
            if not _is_same_set(list(base.__iter__(live)), entries):
                base.clear(live)
                base.update(live, entries)
        elif not _are_same(list(base.__iter__(live)), entries):
            base.clear(live)
            base.extend(live, entries)

    def _fill_attributes(
        self, live: Any, attributes: Mapping[str, Any], slots: Mapping[str, Any] | None = None
    ) -> None:
        """Replace the attributes. ``slots``: of ``__slots__``; None: unknown, they stay."""
        if hasattr(live, "__dict__"):
            self._fill_entries(vars(live), list(attributes.items()))
        if slots is None:
            return
        for name in _slots_of(live):
            if name not in slots:
                object.__delattr__(live, name)
        for name, one in slots.items():
            found = self._of(one)
            if getattr(live, name, _OF_PROGRAM) is not found:
                object.__setattr__(live, name, found)


def _places_of_content(live: Any, content: tuple[str, Any]) -> list[tuple[Any, Any]]:
    """Return what is at the same places in ``live`` and in ``content``. Raises _NotInPlaceError if one cannot take it."""
    way, held = content
    if way in ("array", "tensor", "plain"):
        if type(live) is not type(held) or not _can_take(live, held):
            raise _NotInPlaceError(f"{type(live).__name__} of another shape or type")
        return _places(live, held)
    if way == "entries" and isinstance(live, dict):
        entries, attributes, *_ = held
        found = [(dict.get(live, key), one) for key, one in entries]
        return found + _places(getattr(live, "__dict__", {}), attributes)
    if way == "object" and not hasattr(live, "__setstate__"):
        attributes, slots = held if isinstance(held, tuple) else (held, None)
        return [
            *_places(getattr(live, "__dict__", {}), attributes or {}),
            *_places(_slots_of(live), slots or {}),
        ]
    return []


def _places(live: Any, new: Any) -> list[tuple[Any, Any]]:
    """Return what is at the same places in two objects of one type."""
    if type(live) is dict:
        return [(live[key], one) for key, one in new.items() if key in live]
    if type(live) is list:
        return list(zip(live, new, strict=False)) if len(new) <= _ENTRIES_MAX else []
    if isinstance(live, nn.Module):
        return [
            *zip(live.parameters(), new.parameters(), strict=False),
            *zip(live.buffers(), new.buffers(), strict=False),
        ]
    return _places(vars(live), vars(new)) if _is_plain_object(live) else []


def _can_take(live: Any, new: Any) -> bool:
    """Return True if ``live`` can take the content of ``new``, which is of the same type."""
    if isinstance(live, Tensor):
        names = ("shape", "dtype", "device", "layout", "requires_grad")
        return all(getattr(live, name) == getattr(new, name) for name in names)
    if isinstance(live, np.ndarray):
        is_plain = type(live) is np.ndarray and live.flags.writeable
        return bool(is_plain and live.shape == new.shape and live.dtype == new.dtype)
    if type(live) is deque:
        return bool(live.maxlen == new.maxlen)
    if generator_kind(live):
        bits = [type(getattr(one, "bit_generator", None)) for one in (live, new)]
        return bits[0] is bits[1] and bool(getattr(live, "device", 0) == getattr(new, "device", 0))
    return isinstance(live, nn.Module) or type(live) in _PLAIN or _is_plain_object(live)


def _write_numbers(live: Any, new: Any) -> None:
    if isinstance(live, Tensor):
        with torch.no_grad():
            live.detach().copy_(new.detach())
    else:
        np.copyto(live, new)


def _is_same(live: Any, new: Any) -> bool:
    """Return True if arrays or tensors of one shape and type have the same bits."""
    if isinstance(live, np.ndarray):
        return bool(live.tobytes() == new.tobytes())
    if live.layout is not torch.strided or live.is_meta:
        return True
    pair = [one.detach().contiguous().reshape(-1).view(torch.uint8) for one in (live, new)]
    return torch.equal(*pair)


def _are_same(present: list[Any], wanted: list[Any]) -> bool:
    return len(present) == len(wanted) and all(map(operator.is_, present, wanted))


def _is_same_set(live: list[Any], wanted: list[Any]) -> bool:
    """Return True if a set has not changed since ``wanted`` was pickled, also not in its order."""
    if _are_same(live, wanted):
        return True
    if not all(isinstance(one, (*_CONSTANT, bool)) for one in wanted):
        return False
    # Pickle builds new sets, in another order than that of a set that has become smaller. So does this.
    built: set[Any] = set()
    for one in live:
        built.add(one)
    return [(type(one), one) for one in built] == [(type(one), one) for one in wanted]


def _base_of(value: Any) -> Any:
    """Return the class whose methods read and write the entries of ``value``; None for what has no entries."""
    return next((one for one in _ENTRIES if isinstance(value, one)), None)


def _slots_of(value: Any) -> dict[str, Any]:
    """Return the values of ``__slots__`` that are set."""
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined] # noqa: SLF001
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _is_plain_object(value: Any) -> bool:
    """Return True if ``value`` has no content but its attributes."""
    kind: Any = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type)
        and not hasattr(kind, "__setstate__")
        and kind.__reduce__ is object.__reduce__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and not any("__slots__" in vars(one) and vars(one)["__slots__"] for one in kind.__mro__)
        and not isinstance(value, (dict, list, set, deque))
    )


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects inside ``value``, each with its path from there."""
    entries: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        entries = ((f"[{key!r}]", one) for key, one in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        entries = ((f"[{number}]", one) for number, one in enumerate(list(value)))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        entries = ((f".{key}", one) for key, one in list(vars(value).items()))
    yield from entries
