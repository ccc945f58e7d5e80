"""Finds, in a loop's source, the variables that carry a value which trains from one iteration to the next.

A name counts if an iteration may read it before it assigns it, and if the value is used for more than a
print or a log. Runs nothing, and knows of values only what ``find`` says of a name.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_runner.training.own_loop.loop_source import (
    called,
    calls_steps,
    left_to_defaults,
    place_in,
    plain,
    saved_in,
    taken_from,
    used_behind,
)
from ddp_runner.training.own_loop.static_values import ABOVE

# Methods that put their arguments into their object.
_PUT = "add append appendleft extend extendleft insert push put put_nowait record setdefault update"
# Calls whose result nobody uses: they show, write or switch, and train nothing.
_SHOW = """add_histogram add_image add_scalar add_scalars alive close critical debug display error eval exception
flush info log log_metrics log_scalar log_scalars note plot print refresh save savefig set_description
set_description_str set_postfix set_postfix_str sleep train warning write writerow"""
_MUTATORS, _NEUTRAL = frozenset(_PUT.split()), frozenset(_SHOW.split())
_CONSUMES = frozenset({"next", "pop", "popleft", "popitem"})  # also where the result is only shown
_ITERATES = frozenset({"enumerate", "iter", "list", "next", "reversed", "tuple", "zip"})
_VIEWS = frozenset({"items", "modules", "named_parameters", "parameters", "values"})
_CALL_SPECIAL = frozenset({"bool", "float", "int", "iter", "len", "next"})
_INLINED_MAX = 400  # calls that are followed into their function
_CALLED = "()"  # behind the name of a module, among what is written: it was called
_NOTHING_GIVEN = ast.Call(ast.Constant(None), [], [])
IsNew = Callable[[str, object, Collection[str]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The facts about a name's current value that the reading of the source needs.

    ``is_fixed``: it is no variable, such as a module, a class or a kept object. ``function``: the program's own;
    ``is_foreign``: a function of another file of the program, whose module is ``module``. ``is_kept``: a kept object,
    or something that one holds, so what is written into it trains. ``is_module``: it is kept, and an nn.Module.
    ``renewed_by``: its methods that leave nothing of what it was. ``is_getter``: the function is that of a property,
    which runs where the name is read. ``receiver``: what the function's first parameter is, where that is not what
    the name is an attribute of. ``of``: the class in which it is written. ``elements``: the keys of a list, tuple or dict of the program's own objects.
    ``is_used_up``: a call may change it: a module, or a method that draws from a random generator.
    """

    is_fixed: bool = False
    is_kept: bool = False
    is_module: bool = False
    renewed_by: frozenset[str] = frozenset()
    function: ast.FunctionDef | ast.AsyncFunctionDef | None = None
    is_foreign: bool = False
    is_getter: bool = False
    receiver: str | None = None
    of: str = ""
    module: str = ""
    elements: tuple[int | str, ...] = ()
    is_used_up: bool = False


@dataclass(slots=True, kw_only=True)
class Carried:
    """A name, as ``counter`` or ``self.counter``, and the line where the loop writes or else reads it.

    ``is_whole``: it is used as a whole, not only by its attributes. ``counts``: it comes from enumerate() or
    zip() around the steps, and so begins again in a new process. ``file``: that of the line, if it is not the loop's.
    ``is_result``: it affects no step, but is used for more than a print once the loop has ended, or is saved in it.
    ``is_rebound``: what it names is no variable, such as a loss function, but the loop gives the name to another one.
    """

    name: str
    line: int
    file: str = ""
    is_whole: bool = True
    counts: bool = False
    is_result: bool = False
    is_rebound: bool = False


def carried_names(
    loop: ast.For | ast.While,
    *,
    find: Callable[[str], Resolved],
    behind: Mapping[str, Resolved] | None = None,
    tree: ast.AST | None = None,
    is_new: IsNew | None = None,
) -> dict[str, Carried]:
    """Return the names that ``loop`` carries over its iterations and that affect training; ``find``: what a name is now.

    ``is_new``: whether hooks write a place of an object whenever modules are called, given the object's name, the key or
    attribute (None: all that a dict has), and the names of the modules.
    ``behind``: functions, by name, that are called without arguments at the end of some iterations. With the ``tree``
    of the loop's file, other names that the loop carries are returned too, as results, if they are used behind it.
    """
    reading, own = _Reading(find, is_new), _Scope()
    written: set[str] = set()
    if isinstance(loop, ast.For):
        reading.take_head(loop, written)
    else:
        reading.reads(loop.test, written, own)
    written = reading.body(loop.body, written, own, frozenset())
    for name, resolved in (behind or {}).items():
        if resolved.function is not None:
            reading.inline(name, resolved, ast.Call(ast.Name(name), [], []), set(written), own)
    found = reading.carried()
    return found if tree is None else reading.results(tree, loop, written) | found


@dataclass(slots=True)
class _Scope:
    """The names of a function as they are called here: local ones are prefixed with its name."""

    prefix: str = ""
    own: frozenset[str] = frozenset()
    # What some of them are called here: the first parameter of a method, and one that is left to its default.
    known: Mapping[str, str] = field(default_factory=dict)
    also: dict[str, str] = field(default_factory=dict)  # names given to what has another name
    module: str = ""  # in which the other names are, if it is not the loop's
    above: str = ""  # what super() is here

    def text(self, name: str) -> str:
        if name in self.known or name in self.also:
            return self.known.get(name) or self.also[name]
        if name in self.own:
            return f"{self.prefix}::{name}"
        return f"{self.module}.{name}" if self.module else name


@dataclass(slots=True)
class _Reading:
    find: Callable[[str], Resolved]
    is_new: IsNew | None
    exposed: dict[str, Carried] = field(default_factory=dict)
    fixed: dict[str, Carried] = field(default_factory=dict)  # what is read and is no variable
    edges: dict[str, set[str]] = field(default_factory=dict)
    sinks: set[str] = field(default_factory=set)
    writes: dict[str, tuple[int, str]] = field(default_factory=dict)  # line and file
    file: str = ""  # of the function that is being read, if it is not the loop's
    inlined: list[str] = field(default_factory=list)  # functions that are being read
    inlined_count: int = 0
    # Dicts of which hooks have written all.
    renewed: dict[str, Carried] = field(default_factory=dict)
    of_kept: set[str] = field(default_factory=set)  # what a kept object holds, under another name

    def carried(self) -> dict[str, Carried]:
        reached, pending = set(self.sinks), list(self.sinks)
        sources: dict[str, set[str]] = {}
        for source, targets in self.edges.items():
            for target in targets:
                sources.setdefault(target, set()).add(source)
        while pending:
            for source in sources.get(pending.pop(), ()):
                if source not in reached:
                    reached.add(source)
                    pending.append(source)
        found = {}
        written = {name: self.renewed[name] for name in self.renewed.keys() & self.writes.keys()}
        for name, one in (written | self.exposed).items():
            if name in reached and "::" not in name:
                one.line, one.file = self.writes.get(name, (one.line, one.file))
                found[name] = one
        for name in self.fixed.keys() & self.writes.keys() - found.keys():
            one = self.fixed[name]
            one.line, one.file = self.writes[name]
            found[name] = one
        return found

    def results(
        self, tree: ast.AST, loop: ast.For | ast.While, written: Collection[str]
    ) -> dict[str, Carried]:
        """Return the names that some iterations leave as they are, and that are used behind ``loop`` or saved in it.

        ``written``: what each iteration writes. A name that is saved counts only if an iteration reads it first.
        """
        behind, saved = used_behind(tree, loop), saved_in(tree)
        found = {}
        for name in (*self.exposed, *self.writes):
            known, parts = self.exposed.get(name), {*name.split(".")}
            is_carried = name not in written if known is None else known.is_whole
            if "::" in name or not is_carried or self.find(name).is_fixed:
                continue
            if parts & behind or (known is not None and parts & saved):
                read = (0, "") if known is None else (known.line, known.file)
                line, file = self.writes.get(name, read)
                found[name] = Carried(name=name, line=line, file=file, is_result=True)
        return found

    def take_head(self, loop: ast.For, written: set[str]) -> None:
        call = loop.iter
        names = (
            [call.func.id] if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else []
        )
        if names in (["enumerate"], ["zip"]) and isinstance(loop.target, ast.Tuple):
            assert isinstance(call, ast.Call), "it has a name"
            for place, target in enumerate(loop.target.elts):
                is_batch = place == 1 if names == ["enumerate"] else calls_steps(call, place)
                if isinstance(target, ast.Name) and not is_batch:
                    self.exposed[target.id] = Carried(name=target.id, line=loop.lineno, counts=True)
        written |= _names_in(loop.target)

    # Expressions.

    def reads(  # noqa: C901, PLR0911, PLR0912 - a row for each kind
        self, node: ast.AST | None, written: set[str], scope: _Scope
    ) -> set[str]:
        """The names that ``node`` reads; what it reads before it was written is noted."""
        if node is None:
            return set()
        node = plain(node)
        if each := self._by_key(node, scope):
            return self._all([*each, place_in(node)], written, scope)
        if isinstance(node, ast.Name):
            return self._read(scope.text(node.id), node, written)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, written, scope)
        if isinstance(node, ast.Call):
            return self._call(node, written, scope)
        if isinstance(node, ast.Subscript):
            if self._is_new_place(node, written, scope):
                return set()
            taken = self._special(node.value, "__getitem__", written, scope)
            return taken | self._all(ast.iter_child_nodes(node), written, scope)
        if isinstance(node, ast.NamedExpr):
            found = self.reads(node.value, written, scope)
            self._write(scope.text(node.target.id), node, found, written)
            return found
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            inner = written | {n for one in node.generators for n in _names_in(one.target)}
            found = set()
            for one in node.generators:
                found |= self.reads(one.iter, written, scope)
                for test in one.ifs:
                    found |= self.reads(test, inner, scope)
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            scopes = [one for of in node.generators for one in self._each_element(of, scope)]
            for part, at in itertools.product(parts, [scope, *scopes]):
                found |= self.reads(part, inner, at)
            return found
        if isinstance(node, ast.Lambda):
            arguments = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
            return self.reads(node.body, written | arguments, scope)
        return self._all(ast.iter_child_nodes(node), written, scope)

    def _all(self, nodes: Iterable[ast.AST | None], written: set[str], scope: _Scope) -> set[str]:
        found: set[str] = set()
        for node in nodes:
            found |= self.reads(node, written, scope)
        return found

    def _read(
        self, name: str, node: ast.AST, written: set[str], *, is_whole: bool = True
    ) -> set[str]:
        line = getattr(node, "lineno", 0)
        if self._is_fixed(name, line, written):
            return set()
        if not _heads(name) & written:
            one = Carried(name=name, line=line, file=self.file, is_whole=False)
            is_new = self._is_new(name, None, written)
            known = (self.renewed if is_new else self.exposed).setdefault(name, one)
            known.is_whole = known.is_whole or is_whole
        return {name}

    def _is_fixed(self, name: str, line: int, written: set[str]) -> bool:
        """Return True if what ``name`` names is no variable; it is noted, since the loop may rebind the name."""
        if not self.find(name).is_fixed:
            return False
        owner = name.rpartition(".")[0]
        is_in_kept = bool(owner) and self.find(owner).is_kept
        if "::" not in name and not is_in_kept and not _heads(name) & written:
            one = Carried(name=name, line=line, file=self.file, is_whole=False, is_rebound=True)
            self.fixed.setdefault(name, one)
        return True

    def _attribute(self, node: ast.Attribute, written: set[str], scope: _Scope) -> set[str]:
        name = self._dotted(node, scope)
        if name is None:
            return self.reads(node.value, written, scope)
        owner = name.rpartition(".")[0]
        if self._is_new(owner, node.attr, written) or self._is_fixed(name, node.lineno, written):
            return set()
        resolved = self.find(name)
        if resolved.is_getter and self.inlined_count < _INLINED_MAX:
            return self.inline(name, resolved, _NOTHING_GIVEN, written, scope)
        found = self._read(name, node, written)
        if found and not self.find(owner).is_fixed:
            self._read(owner, node, written, is_whole=False)
        return found | {owner}

    def _within_call(
        self, node: ast.Call, values: list[ast.expr], written: set[str], scope: _Scope
    ) -> set[str]:
        """Read the functions that a call of another library's may call; what their results come from."""
        found: set[str] = set()
        for one in node.args[:1] if called(node) in _CALL_SPECIAL else ():
            found |= self._special(one, f"__{called(node)}__", written, scope)
        for one in values:
            found |= self._function_at(self._dotted(one, scope), written, scope)
        partial = self._dotted(node.func, scope)
        return found | self._function_at(f"{partial}.func" if partial else None, written, scope)

    def _function_at(self, name: str | None, written: set[str], scope: _Scope) -> set[str]:
        """Read the function of the program's with this name, if it is one; what its result comes from."""
        resolved = self.find(name) if name else Resolved()
        if not name or resolved.function is None or self.inlined_count >= _INLINED_MAX:
            return set()
        return self.inline(name, resolved, _NOTHING_GIVEN, written, scope)

    def _special(self, node: ast.AST, method: str, written: set[str], scope: _Scope) -> set[str]:
        """Read the method that Python's own syntax calls, of an object of the program's; what its result comes from."""
        name = self._dotted(node, scope)
        return self._function_at(f"{name}.{method}" if name else None, written, scope)

    def _is_new_place(self, node: ast.Subscript, written: set[str], scope: _Scope) -> bool:
        owner, place = self._dotted(node.value, scope), node.slice
        return isinstance(place, ast.Constant) and self._is_new(owner, place.value, written)

    # INVARIANT hooks-write-first: what a loop reads of a forward hook is of the same step. Broken if: a place
    # counts as new before the module was called, or though the hook may leave it as it is, or writes what depends on it.
    # Guarded by: test_what_forward_hooks_write_is_carried_only_where_it_may_be_old.
    def _is_new(self, owner: str | None, place: object, written: set[str]) -> bool:
        """Return True if modules that were called before have hooks that write this place of ``owner``."""
        modules = {one.removesuffix(_CALLED) for one in written if one.endswith(_CALLED)}
        return bool(
            owner and modules and self.is_new is not None and self.is_new(owner, place, modules)
        )

    def _call(self, node: ast.Call, written: set[str], scope: _Scope) -> set[str]:
        values = [*node.args, *(one.value for one in node.keywords)]
        found = self._all(values, written, scope)
        name, resolved = self._called_function(self._dotted(node.func, scope))
        if name and resolved.is_module:
            written.add(f"{name}{_CALLED}")
        if name and resolved.function is not None:
            self._is_fixed(name, node.lineno, written)
        if resolved.is_foreign and called(node) not in _NEUTRAL | _MUTATORS:
            self.sinks |= found
        if name and resolved.function is not None and self.inlined_count < _INLINED_MAX:
            return found | self.inline(name, resolved, node, written, scope)
        found |= self._within_call(node, values, written, scope)
        owner = (
            self._dotted(node.func.value, scope) if isinstance(node.func, ast.Attribute) else None
        )
        if owner and called(node) in self.find(owner).renewed_by:
            self._write(owner, node, found, written)
        if name and resolved.is_used_up:
            found |= self._read(name, node, written)
        if isinstance(node.func, ast.Attribute):
            of = self.reads(node.func.value, written, scope)
            if not of and node.func.attr.endswith("_"):
                self.sinks |= found
            if owner and of and (node.func.attr in _MUTATORS or node.func.attr.endswith("_")):
                self._mutate(owner, node, found)
            return found | of
        return found | self.reads(node.func, written, scope)

    def _called_function(self, name: str | None) -> tuple[str | None, Resolved]:
        """Return the function that a call of ``name`` runs, and its name: an object's is a method of its class."""
        resolved = self.find(name) if name else Resolved()
        if not name or resolved.is_fixed:
            return name, resolved
        for method in ("__call__", "forward"):  # the latter of an nn.Module
            found = self.find(f"{name}.{method}")
            if found.function is not None:
                return f"{name}.{method}", found
        return name, resolved

    def inline(
        self,
        name: str,
        resolved: Resolved,
        node: ast.Call,
        written: set[str],
        scope: _Scope,
    ) -> set[str]:
        """Read the body of a function of the program as if it were here; what its result comes from."""
        function, module = resolved.function, resolved.module
        assert function is not None, "there is one to read"
        prefix = f"{module}:{function.name}:{function.lineno}"
        result = f"{prefix}::return"
        if result in self.inlined:
            return {result}
        shared = {
            n
            for one in ast.walk(function)
            if isinstance(one, (ast.Global, ast.Nonlocal))
            for n in one.names
        }
        parameters = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        every = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
        stored = {
            one.id
            for one in ast.walk(function)
            if isinstance(one, ast.Name) and isinstance(one.ctx, (ast.Store, ast.Del))
        }
        owner = self._receiver(name, resolved)
        is_method = bool(owner) and bool(parameters)
        known = left_to_defaults(function, node, name=name, is_method=is_method)
        if is_method:
            known[parameters[0]] = owner
        own = frozenset((every | stored) - shared)
        above = f"{owner}.{ABOVE}{resolved.of}" if is_method and "." not in resolved.of else ""
        known |= self._passed(node, parameters[is_method:], stored, scope)
        inner = _Scope(prefix=prefix, own=own, known=known, module=module, above=above)
        for parameter, value in zip(parameters[is_method:], node.args, strict=False):
            self._flow(self.reads(value, written, scope), inner.text(parameter))
        rest = [one.arg for one in (function.args.kwarg,) if one is not None]
        for keyword in node.keywords:
            # One that no parameter has the name of is in the function's **rest, and nowhere else.
            of_it = [keyword.arg] if keyword.arg in every else rest
            targets = of_it if keyword.arg else every
            self._flow(self.reads(keyword.value, written, scope), *map(inner.text, targets))
        self.inlined.append(result)
        self.inlined_count += 1
        around, self.file = self.file, f"{module.rpartition('.')[2]}.py" if module else ""
        self.body(
            function.body, written | {f"{prefix}::{one}" for one in every}, inner, frozenset()
        )
        self.file = around
        self.inlined.pop()
        return {result}

    def _passed(
        self, node: ast.Call, parameters: list[str], stored: set[str], scope: _Scope
    ) -> dict[str, str]:
        """Return the parameters that stay what ``node`` passes by a name, and that name: both are one object."""
        if any(isinstance(one, ast.Starred) for one in node.args):
            return {}
        pairs = [*zip(parameters, node.args, strict=False)]
        pairs += [(one.arg, one.value) for one in node.keywords if one.arg]
        named = ((one, self._dotted(value, scope)) for one, value in pairs if one not in stored)
        return {one: name for one, name in named if name}

    def _receiver(self, name: str, resolved: Resolved) -> str:
        """Return what a function's first parameter is called here; nothing where it is no method, or a kept object's."""
        if resolved.receiver is not None:
            is_kept = bool(resolved.receiver) and self.find(resolved.receiver).is_kept
            return "" if is_kept else resolved.receiver
        owner = name.rpartition(".")[0]
        before, is_above, _ = owner.rpartition(f".{ABOVE}")
        owner = before if is_above else owner
        return "" if owner and self.find(owner).is_fixed else owner

    # Statements. ``under``: the names that decide whether they are reached.

    def body(
        self, statements: list[ast.stmt], written: set[str], scope: _Scope, under: frozenset[str]
    ) -> set[str]:
        """Read statements in order; the names that are written behind them in any case."""
        for one in statements:
            written = self._statement(one, written, scope, under)
        return written

    def _statement(  # noqa: C901, PLR0912 - a row for each kind
        self, node: ast.stmt, written: set[str], scope: _Scope, under: frozenset[str]
    ) -> set[str]:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            self._assignment(node, written, scope, under)
        elif isinstance(node, ast.Expr):
            self._expression(node, written, scope, under)
        elif isinstance(node, ast.If):
            inner = under | self.reads(node.test, written, scope)
            if any(isinstance(one, (ast.Continue, ast.Break)) for one in ast.walk(node)):
                self.sinks |= inner
            branches = [
                self.body(branch, set(written), scope, inner) for branch in (node.body, node.orelse)
            ]
            written = branches[0] & branches[1]
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._for(node, written, scope, under)
        elif isinstance(node, ast.While):
            inner = under | self.reads(node.test, written, scope)
            self.body(node.body, set(written), scope, inner)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                found = self.reads(item.context_expr, written, scope)
                found |= self._special(item.context_expr, "__enter__", written, scope)
                if found:
                    self.sinks |= found | under
                if item.optional_vars is not None:
                    self._assign(item.optional_vars, found | under, written, scope)
            written = self.body(node.body, written, scope, under)
        elif isinstance(node, ast.Try):
            behind = self.body([*node.body, *node.orelse], set(written), scope, under)
            for handler in node.handlers:
                behind &= self.body(handler.body, set(written), scope, under)
            written = self.body(node.finalbody, behind, scope, under)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            self._write(scope.text(node.name), node, {scope.text(one) for one in names}, written)
        elif isinstance(node, ast.Return) and scope.prefix:
            found = self.reads(node.value, written, scope) | under
            self._flow(found, f"{scope.prefix}::return")
        elif isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass, ast.Global, ast.Nonlocal)):
            written |= {
                one.asname or one.name
                for one in getattr(node, "names", ())
                if isinstance(one, ast.alias)
            }
        else:
            self.sinks |= self._all(ast.iter_child_nodes(node), written, scope) | under
        return written

    def _for(
        self,
        node: ast.For | ast.AsyncFor,
        written: set[str],
        scope: _Scope,
        under: frozenset[str],
    ) -> None:
        found = self.reads(node.iter, written, scope)
        found |= self._special(node.iter, "__iter__", written, scope)
        for inner in self._each_element(node, scope):
            self.body(node.body, set(written), inner, under | found)
        inside = set(written)
        self._assign(node.target, found | under, inside, scope)
        self._name_kept(node.target, node.iter, scope)
        self.body(node.body, inside, scope, under | found)
        self.body(node.orelse, set(written), scope, under)

    def _each_element(
        self, of: ast.For | ast.AsyncFor | ast.comprehension, scope: _Scope
    ) -> Iterator[_Scope]:
        """Yield a scope for each object of the program's that the target may name."""
        for name, value in taken_from(of.target, of.iter):
            owner = self._dotted(value, scope)
            for key in self.find(owner).elements if owner else ():
                yield replace(scope, known={**scope.known, name: f"{owner}.{key}"})

    def _assignment(
        self,
        node: ast.Assign | ast.AnnAssign | ast.AugAssign,
        written: set[str],
        scope: _Scope,
        under: frozenset[str],
    ) -> None:
        found = self.reads(node.value, written, scope) | under
        if isinstance(node, ast.AugAssign):
            found |= self.reads(node.target, written, scope)
            if isinstance(node.target, ast.Name) and self._is_of_kept(node.target, scope):
                self.sinks |= found  # a tensor is changed in its place
            self._assign(node.target, found, written, scope)
            return
        same = self._dotted(node.value, scope) if node.value else None
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            self._assign(target, found, written, scope)
            self._name_kept(target, node.value, scope)
            if same and isinstance(target, ast.Name):
                scope.also[target.id] = same

    def _expression(
        self, node: ast.Expr, written: set[str], scope: _Scope, under: frozenset[str]
    ) -> None:
        call = node.value
        each = [ast.Expr(one) for one in self._by_key(call, scope)]
        for one in each:
            self._expression(one, written, scope, under)
        if each:
            return
        found = self.reads(call, written, scope)
        if not isinstance(call, ast.Call):
            if not isinstance(call, ast.Constant):
                self.sinks |= found | under
            return
        name = called(call)
        dotted = self._dotted(call.func, scope)
        if dotted and self.find(dotted).function is not None:
            # Of its own body each statement has been read, and its arguments go where that says, or are sinks.
            if under and self._has_effect(self.find(dotted).function):
                self.sinks |= under
            return
        calls = {called(one) for one in ast.walk(call) if isinstance(one, ast.Call)}
        if name in _NEUTRAL and not calls & _CONSUMES:
            return
        owner = (
            self._dotted(call.func.value, scope) if isinstance(call.func, ast.Attribute) else None
        )
        if name in _MUTATORS and owner and not self.find(owner).is_fixed:
            self._flow(under, owner)
            return
        self.sinks |= found | under

    def _has_effect(self, function: ast.AST | None) -> bool:
        """Return True if a call of the function may do more than show something."""
        assert function is not None, "it was found"
        calls = {called(one) for one in ast.walk(function) if isinstance(one, ast.Call)}
        return bool(calls & {"backward", "step", "stop"}) or any(
            isinstance(one, (ast.Global, ast.Nonlocal)) for one in ast.walk(function)
        )

    def _assign(
        self, target: ast.AST, found: set[str] | frozenset[str], written: set[str], scope: _Scope
    ) -> None:
        parts = self._by_key(target, scope)
        if isinstance(target, (ast.Tuple, ast.List, ast.Starred)):
            parts = [target.value] if isinstance(target, ast.Starred) else [*target.elts]
        for one in parts:
            self._assign(one, found, written, scope)
        if parts:
            return
        if isinstance(target := plain(target), ast.Subscript):
            owner = self._dotted(target.value, scope)
            index = self.reads(target.slice, written, scope)
            self.reads(target.value, written, scope)
            if self._is_of_kept(target.value, scope):
                self.sinks |= found | index
            if owner:
                self._mutate(owner, target, set(found) | index)
        else:
            if isinstance(target, ast.Attribute) and self._is_of_kept(target.value, scope):
                self.sinks |= found
            if isinstance(target, ast.Name):
                scope.also.pop(target.id, None)
            name = self._dotted(target, scope)
            if name is not None:
                self._write(name, target, set(found), written)

    def _name_kept(self, target: ast.AST, value: ast.AST | None, scope: _Scope) -> None:
        """Note that ``target`` is another name for something that a kept object holds, as ``group`` of its groups."""
        if value is not None and self._is_of_kept(value, scope):
            self.of_kept |= {scope.text(one) for one in _names_in(target)}

    def _is_of_kept(self, node: ast.AST, scope: _Scope) -> bool:
        """Return True for a kept object, and for what is reached from one by attributes, places and iteration."""
        while not isinstance(node, ast.Name):
            dotted = self._dotted(node, scope)
            if dotted and self.find(dotted).is_kept:
                return True
            if isinstance(node, (ast.Attribute, ast.Subscript)):
                node = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr not in _VIEWS:
                    return False
                node = node.func.value
            elif isinstance(node, ast.Call) and called(node) in _ITERATES:
                return any(self._is_of_kept(one, scope) for one in node.args)
            else:
                return False
        name = scope.text(node.id)
        return name in self.of_kept or self.find(name).is_kept

    def _dotted(self, node: ast.AST, scope: _Scope) -> str | None:
        """``a.b.c`` of such an expression, also of ``a["b"].c`` for objects of the program's; None of another one."""
        node = plain(node)
        if isinstance(node, ast.Name):
            return scope.text(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._dotted(node.value, scope)
            return f"{owner}.{node.attr}" if owner else None
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner, key = self._dotted(node.value, scope), node.slice.value
            is_one = bool(owner) and key in self.find(owner or "").elements
            return f"{owner}.{key!s}" if is_one else None
        is_above = isinstance(node, ast.Call) and called(node) == "super" and not node.args
        return scope.above or None if is_above else None

    def _by_key(self, node: ast.AST, scope: _Scope) -> list[Any]:
        """Return ``node`` for each object that ``a[key]`` in it may be, if only the run knows the key."""
        place = place_in(node)
        if place is None or isinstance(place.slice, ast.Constant):
            return []
        owner = self._dotted(place.value, scope)
        each = [(key, copy.deepcopy(node)) for key in (self.find(owner).elements if owner else ())]
        for key, one in each:
            if (at := place_in(one)) is not None:
                at.slice = ast.copy_location(ast.Constant(key), place)
        return [one for _, one in each]

    def _write(self, name: str, node: ast.AST, found: set[str], written: set[str]) -> None:
        self.writes[name] = (getattr(node, "lineno", 0), self.file)
        written.add(name)
        self._flow(found, name)

    def _mutate(self, name: str, node: ast.AST, found: set[str]) -> None:
        self.writes.setdefault(name, (getattr(node, "lineno", 0), self.file))
        self._flow(found, name)

    def _flow(self, found: Iterable[str], *targets: str) -> None:
        for source in found:
            self.edges.setdefault(source, set()).update(targets)


def _heads(name: str) -> set[str]:
    """Return ``a``, ``a.b`` and ``a.b.c`` of the last."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}


def _names_in(target: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
