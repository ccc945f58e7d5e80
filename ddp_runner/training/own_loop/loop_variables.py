"""Looks at the variables of a running loop, for those that change from step to step and are not kept.

A replaced rank runs the program from its top and has them as they were at the start, and a repeated step
changes them once more. Changes nothing, and keeps no batch alive.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ddp_runner.system.code_files import is_users_file
from ddp_runner.training.exactness.held_values import Look, whole_look
from ddp_runner.training.own_loop.carried_names import Carried, Resolved, carried_names
from ddp_runner.training.own_loop.loop_source import loop_at, taker_of, tree_of
from ddp_runner.training.own_loop.static_values import (
    NOTHING,
    attribute_of,
    own_objects,
    within_wrappers,
)
from ddp_runner.values.generators import generator_kind, is_global
from ddp_runner.values.object_graph import CONTAINERS, LEAVES, Walk, attributes_of, is_opaque

_LOOKS_IN_A_ROW = 4  # then at every power of two: what changes now and then shows too
_OBJECTS_MAX = 1_000  # in the value of one name
_LAMBDA = "<lambda>"
_SEEDS = frozenset({"manual_seed", "seed", "set_state", "setstate"})
_HOOKS_GET = 3  # arguments at most, of torch: the module, its inputs, its output
_LEAVES_EARLY = (ast.Return, ast.Raise, ast.Yield, ast.YieldFrom)  # what follows may be left out
_Functions = dict[tuple[str, int], ast.FunctionDef | ast.AsyncFunctionDef]  # by name and first line


def _set_by_heads(tree: ast.Module) -> set[str]:
    """Return the names that nothing but the head of a ``for`` sets, which gives them all of what it takes."""
    nodes = [*ast.walk(tree)]
    heads = [one.target for one in nodes if isinstance(one, ast.For)]
    whole = Counter(one.id for one in heads if isinstance(one, ast.Name))
    names = (one for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
    stored = Counter(one.id for one in names)
    return {name for name, count in whole.items() if count == stored[name]}


class LoopVariables:
    """The variables of one process's loop.

    ``is_kept``: says which objects are kept, and so are no variables. ``functions``: returns those that run between steps.
    ``modules``: the kept ones; an average or a copy of the weights of one is named even if it affects no step. ``epochs``:
    returns the numbers of the epochs of the newest step and of the next one.
    """

    def __init__(
        self,
        *,
        is_kept: Callable[[Any], bool],
        functions: Callable[[], Iterable[Any]] = lambda: (),
        modules: Iterable[nn.Module] = (),
        epochs: Callable[[], Collection[int]] = lambda: (),
    ) -> None:
        self._is_kept = is_kept
        self._epochs = epochs
        self._heads: set[str] = set()  # names that only the heads of loops set
        # Of these, those that had the number of the epoch at each look.
        self._of_epoch: set[str] = set()
        self._modules = list(modules)
        shapes = (Counter(_shapes(module.parameters())) for module in self._modules)
        # By module, how many parameters there are of each shape.
        self._weights = [one for one in shapes if one]
        self._between_steps = functions
        # Of the loop that takes what a generator yields.
        self._around: LoopVariables | None = None
        self._boundaries = 0
        self._candidates: dict[str, Carried] | None = None
        self._cells: dict[str, Any] = {}  # what functions of the program have in their closures
        self._looks: dict[str, Look] = {}
        self._file = ""
        self._functions: dict[str, _Functions] = {}  # of each file of the program that was read

    def is_due(self, *, or_if: bool = False) -> bool:
        """Return True if :meth:`look` must be called now; to be asked once between two steps.

        ``or_if``: others are to be looked at as well.
        """
        self._boundaries += 1
        count = self._boundaries
        is_due = count <= _LOOKS_IN_A_ROW or not count & (count - 1)
        has_some = self._candidates is None or bool(self._candidates) or self._around is not None
        return is_due and (has_some or or_if)

    def look(self, frame: FrameType) -> list[str]:
        """Return the variables of the loop in ``frame`` that have changed since the last look, with their places.

        If ``frame`` is that of a generator, the variables of the loop that calls it are included.
        """
        found = self._look(frame)
        if (around := taker_of(frame)) is not None:
            if self._around is None:
                self._around = LoopVariables(
                    is_kept=self._is_kept, modules=self._modules, epochs=self._epochs
                )
            found += self._around.look(around)
        return found

    def _look(self, frame: FrameType) -> list[str]:
        names = _Names(frame, self._cells)
        if self._candidates is None:
            self._candidates = self._read(frame, names)
            self._file = Path(frame.f_code.co_filename).name
        found: list[Carried] = []
        for name, one in [*self._candidates.items()]:
            value = names.value(name)
            if one.is_result and not self._holds_weights(value):
                self._looks[name] = _same(value)
                continue
            is_fixed = self._is_fixed(value)
            if value is NOTHING or (is_fixed and not one.is_rebound):
                continue
            if not one.counts and self._is_of_epoch(name, value):
                self._looks[name] = _same(value)
                continue
            before = self._looks.get(name)
            is_whole = one.is_whole and not is_fixed
            self._looks[name] = self._look_of(value, is_whole=is_whole)
            if one.counts or (before is not None and not before(value)):
                found.append(one)
                del self._candidates[name], self._looks[name]
        names_found = {one.name for one in found}
        return [
            f"`{one.name}` ({one.file or self._file}:{one.line})"
            for one in found
            if one.name.rpartition(".")[0] not in names_found
        ]

    def _is_of_epoch(self, name: str, value: Any) -> bool:
        """Return True if the name has the number of the epoch, and had it at each look: a new process has it as well.

        Not of a count that the program makes by itself, which is too low in a process that begins amid the run.
        """
        is_number = name in self._heads and type(value) is int and value in self._epochs()
        if is_number and (name in self._of_epoch or name not in self._looks):
            self._of_epoch.add(name)
            return True
        self._of_epoch.discard(name)
        return False

    def _read(self, frame: FrameType, names: _Names) -> dict[str, Carried]:
        """The names that may carry something, by the source of the loop; none where that is not there."""
        path, tree = frame.f_code.co_filename, tree_of(frame)
        loop = None if tree is None else loop_at(tree, frame.f_lineno)
        if tree is None or loop is None:
            return {}
        self._functions[path] = _functions_in(tree)
        self._heads = _set_by_heads(tree)

        def find(name: str) -> Resolved:
            parts = name.split(".")
            owners = (".".join(parts[:count]) for count in range(1, len(parts)))
            value = names.value(name)
            if any(self._is_kept(names.value(one)) for one in owners) or self._is_kept(value):
                return Resolved(is_fixed=True, is_kept=True, is_module=isinstance(value, nn.Module))
            if value is NOTHING:
                getter = names.getter(name)
                found = Resolved() if getter is None else self._function(getter, path)
                return replace(found, is_fixed=False, is_getter=found.function is not None)
            receiver = _receiver(value, name)
            function = value.__func__ if isinstance(value, MethodType) else value
            function = within_wrappers(function)
            if isinstance(function, FunctionType):
                of = function.__qualname__.rpartition(".")[0]
                found = replace(self._function(function, path), receiver=receiver, of=of)
                is_fixed = found.function is not None or self._is_fixed(value)
                return replace(found, is_fixed=is_fixed, is_used_up=not is_fixed)
            elements = own_objects(value)
            is_fixed = self._is_fixed(value)
            kinds = (MethodType, BuiltinMethodType, nn.Module)
            return Resolved(
                is_fixed=is_fixed,
                renewed_by=_renewed_by(value),
                elements=elements,
                is_used_up=isinstance(value, kinds) and not is_fixed,
            )

        hooks = _HookWrites(self._modules, self._source_of)

        def is_new(owner: str, place: object, modules: Collection[str]) -> bool:
            return hooks.write(names.value(owner), place, [*map(names.value, modules)])

        functions = [one for one in self._between_steps() if isinstance(one, FunctionType)]
        return carried_names(
            loop,
            find=find,
            behind={one.__name__: self._function(one, path) for one in functions},
            tree=tree if self._weights else None,
            is_new=is_new,
        )

    def _function(self, function: FunctionType, path: str) -> Resolved:
        """Return what the reading of the loop in ``path`` needs to know about a function."""
        file = function.__code__.co_filename
        if file != path:
            is_foreign = is_users_file(file)
            module = function.__module__ if is_foreign else ""
            found = self._source_of(function) if is_foreign else None
            return Resolved(is_fixed=True, function=found, is_foreign=is_foreign, module=module)
        self._note_closure(function)
        return Resolved(is_fixed=True, function=self._source_of(function))

    def _source_of(self, function: FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        code: CodeType = function.__code__
        if code.co_filename not in self._functions:
            lines = linecache.getlines(code.co_filename, function.__globals__)
            try:
                self._functions[code.co_filename] = _functions_in(ast.parse("".join(lines)))
            except (SyntaxError, ValueError):
                self._functions[code.co_filename] = {}
        return self._functions[code.co_filename].get((code.co_name, code.co_firstlineno))

    def _note_closure(self, function: FunctionType) -> None:
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._cells.setdefault(name, cell)

    def _look_of(self, value: Any, *, is_whole: bool) -> Look:
        """Enough of a value to see whether it has changed: much data is not copied."""
        if not is_whole:
            return _same(value)
        if isinstance(value, nn.Module):
            return self._modules_look(value)
        return whole_look(value, skipped=self._is_kept, closely=True)

    def _modules_look(self, module: nn.Module) -> Look:
        """Return a comparison of its tensors; kept ones, as in a compiled module, do not count."""

        def tensors() -> list[torch.Tensor]:
            found = (*module.parameters(), *module.buffers())
            return [one for one in found if not self._is_kept(one)]

        look = whole_look(tensors(), skipped=self._is_kept, closely=True)
        return lambda now: now is module and look(tensors())

    def _holds_weights(self, value: Any) -> bool:
        """Return True if ``value`` has a tensor or an array for each parameter of a kept module, by their shapes."""
        walk = Walk(inside=self._parts_of_weights, objects_max=_OBJECTS_MAX)
        found = Counter(_shapes(one.value for one in walk.over([("", value)])))
        return any(one <= found for one in self._weights)

    def _parts_of_weights(self, path: str, value: Any) -> list[tuple[str, Any]] | None:
        """Return what ``value`` holds that is not kept; None for a tensor and other values that are not looked into."""
        if isinstance(value, nn.Module):
            inner: Iterable[Any] = value.parameters()
        elif isinstance(value, CONTAINERS):
            inner = value.values() if isinstance(value, dict) else value
        elif type(value) in LEAVES or value is NOTHING or is_opaque(value):
            return None
        else:
            inner = attributes_of(value).values()
        return [(path, one) for one in inner if not self._is_kept(one)]

    def _is_fixed(self, value: Any) -> bool:
        """Return True if ``value`` is no variable. A method is one if it draws from a random generator."""
        if isinstance(value, (MethodType, BuiltinMethodType)):
            return is_global(value.__self__) or not generator_kind(value.__self__)
        kinds = (ModuleType, type, FunctionType, DataLoader, Dataset)
        return isinstance(value, kinds) or self._is_kept(value)


class _HookWrites:
    """The places of dicts and the attributes that forward hooks of ``modules`` write whenever their module runs.

    ``source_of``: returns the source of a function of the program.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        source_of: Callable[[FunctionType], ast.FunctionDef | ast.AsyncFunctionDef | None],
    ) -> None:
        self._source_of = source_of
        self._places: list[tuple[nn.Module, Any, object]] = []  # the module, whose place, and which
        for module in {one for outer in modules for one in outer.modules()}:
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):  # noqa: SLF001 - without a call
                self._read(module, hook)

    def write(self, owner: Any, place: object, modules: Collection[Any]) -> bool:
        """Return True if one of ``modules`` runs a module whose hook writes ``place`` of ``owner``; None: all of a dict."""
        if place is None:
            is_dict = isinstance(owner, dict) and bool(owner)
            return is_dict and all(self.write(owner, one, modules) for one in owner)
        found = [module for module, of, which in self._places if of is owner and which == place]
        return any(one is inner for outer in modules for inner in outer.modules() for one in found)

    def _read(self, module: nn.Module, hook: Any) -> None:
        given: tuple[Any, ...] = ()  # the first arguments, which are known
        if isinstance(hook, partial):
            hook, given = hook.func, hook.args
        if isinstance(hook, MethodType):
            hook, given = hook.__func__, (hook.__self__, *given)
        if not isinstance(hook, FunctionType) or not is_users_file(hook.__code__.co_filename):
            return
        if (source := self._source_of(hook)) is None:
            return
        value, places = _values_in(hook, source, given), [*_always_set(source)]
        if not _uses_arguments_alone(hook, source, value, places):
            return
        for of, key in places:
            owner, place = value(of), key if isinstance(key, str) else value(key)
            if owner is not NOTHING and isinstance(place, (str, int)):
                self._places.append((module, owner, place))


def _uses_arguments_alone(
    hook: FunctionType,
    source: ast.FunctionDef | ast.AsyncFunctionDef,
    value: Callable[[ast.AST], Any],
    places: Iterable[tuple[ast.expr, ast.expr | str]],
) -> bool:
    """Return True if ``hook`` reads nothing but torch's arguments: else it may write what an earlier step has left."""
    parts = [one for place in places for one in place if isinstance(one, ast.expr)]
    names_of_places = {id(one) for part in parts for one in ast.walk(part)}
    for one in (inner for statement in source.body for inner in ast.walk(statement)):
        if not isinstance(one, ast.Name) or not isinstance(one.ctx, ast.Load):
            continue
        found = value(one)
        is_own = found is NOTHING and (
            one.id in hook.__code__.co_varnames or hasattr(builtins, one.id)
        )
        is_fixed = isinstance(found, (ModuleType, type)) or inspect.isbuiltin(found)
        if not (is_own or is_fixed or id(one) in names_of_places):
            return False
    return True


def _always_set(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[ast.expr, ast.expr | str]]:
    """Yield the places that each call of ``function`` sets: of what, and the key or the attribute."""
    for statement in function.body:
        value = statement.value if isinstance(statement, (ast.Expr, ast.Return)) else None
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            for key in _set_by_call(value, value.func.attr):
                yield value.func.value, key
        if any(isinstance(one, _LEAVES_EARLY) for one in ast.walk(statement)):
            return
        for target in statement.targets if isinstance(statement, ast.Assign) else ():
            if isinstance(target, ast.Attribute):
                yield target.value, target.attr
            elif isinstance(target, ast.Subscript):
                yield target.value, target.slice


def _set_by_call(call: ast.Call, method: str) -> Iterator[ast.expr]:
    """Yield the keys of a dict that a call of its method sets."""
    if method == "__setitem__":
        yield from call.args[:1]
    elif method == "update":
        yield from (ast.Constant(one.arg) for one in call.keywords if one.arg)
        for one in call.args:
            if isinstance(one, ast.Dict):
                yield from (key for key in one.keys if key is not None)


def _values_in(
    function: FunctionType, source: ast.AST, given: tuple[Any, ...]
) -> Callable[[ast.AST], Any]:
    """Return what gives the value that an expression of names and attributes has in ``function``; it calls nothing.

    Of what the function sets itself it knows nothing, and of its parameters the first ones, which are ``given``, and
    those behind the arguments of a hook, by their defaults.
    """
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    own = dict.fromkeys(code.co_varnames, NOTHING) | dict(zip(code.co_varnames, given))  # noqa: B905 - the first
    defaults = function.__defaults__ or ()
    first_default = max(code.co_argcount - len(defaults), 0)
    for at in range(max(first_default, len(given) + _HOOKS_GET), code.co_argcount):
        own[code.co_varnames[at]] = defaults[at - first_default]
    for one in ast.walk(source):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            own[one.id] = NOTHING

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Attribute):
            return attribute_of(value(node.value), node.attr)
        name = node.id if isinstance(node, ast.Name) else ""
        if name in own:
            return own[name]
        return _content(cells[name]) if name in cells else function.__globals__.get(name, NOTHING)

    return value


class _Names:
    """The names in a frame now, with their values. Holds these as long as it lives."""

    def __init__(self, frame: FrameType, cells: Mapping[str, Any]) -> None:
        is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
        self._own = dict(frame.f_locals)
        self._globals, self._cells = frame.f_globals, cells
        if (
            is_function
        ):  # before Python 3.13 it is a copy, which would hold the batch for as long as the frame
            clear = getattr(frame.f_locals, "clear", None)
            if type(frame.f_locals) is dict and clear is not None:
                clear()

    def value(self, name: str) -> Any:
        """Return the value of ``a`` or ``a.b``, without a call of the program's code."""
        first, *more = name.split(".")
        value = self._first(first)
        for one in more:
            if value is NOTHING:
                break
            value = attribute_of(value, one)
        return value

    def getter(self, name: str) -> FunctionType | None:
        """Return the function of a property that ``a.b`` reads."""
        owner, _, attribute = name.rpartition(".")
        value = self.value(owner) if owner else NOTHING
        found = inspect.getattr_static(type(value), attribute, None)
        function = getattr(found, "fget", None) if isinstance(found, property) else None
        return function if isinstance(function, FunctionType) else None

    def _first(self, name: str) -> Any:
        for names in (self._own, self._globals):
            if name in names:
                return names[name]
        if name in self._cells:
            return _content(self._cells[name])
        module = sys.modules.get(name)  # of a function of another file of the program
        file = getattr(module, "__dict__", {}).get("__file__")
        return module if isinstance(file, str) and is_users_file(file) else NOTHING


def _content(cell: Any) -> Any:
    """Return what a variable of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned to it yet
        return NOTHING


def _functions_in(tree: ast.AST) -> _Functions:
    """Return the functions of a file; a lambda counts as a function that returns its value, if it is alone in its line."""
    nodes = [*ast.walk(tree)]
    lambdas = [one for one in nodes if isinstance(one, ast.Lambda)]
    in_line = Counter(one.lineno for one in lambdas)
    alone = {
        (_LAMBDA, one.lineno): ast.FunctionDef(
            name=_LAMBDA,
            args=one.args,
            body=[ast.copy_location(ast.Return(one.body), one.body)],
            decorator_list=[],
            lineno=one.lineno,
        )
        for one in lambdas
        if in_line[one.lineno] == 1
    }
    return alone | {
        (one.name, min([one.lineno, *(d.lineno for d in one.decorator_list)])): one
        for one in nodes
        if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def _receiver(value: Any, name: str) -> str | None:
    """Return what a function's first parameter is, if that is not what ``name`` is an attribute of."""
    if not isinstance(value, MethodType):
        return ""
    owner = name.rpartition(".")[0]
    if not owner:
        return f"{name}.__self__"
    return owner if isinstance(value.__self__, type) else None


def _shapes(values: Iterable[Any]) -> Iterator[tuple[int, ...]]:
    """Yield the shape of each tensor and array of several elements."""
    for one in values:
        if isinstance(one, (torch.Tensor, np.ndarray)) and math.prod(one.shape) > 1:
            yield tuple(one.shape)


def _renewed_by(value: Any) -> frozenset[str]:
    """Return the methods of a container or a random generator that leave nothing of what it was."""
    if type(value) in CONTAINERS:
        return frozenset({"clear"})
    return _SEEDS if generator_kind(value) else frozenset()


def _same(value: Any) -> Look:
    if isinstance(value, MethodType):  # of which each reading gives another object
        return lambda now: isinstance(now, MethodType) and now == value
    return lambda now: now is value
