"""``run`` for a program whose loop calls ``ddp_runner.attach()``: found by its text, planned as a Task is."""

from __future__ import annotations

import ast
import pkgutil
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.config import refuse_for_loops
from ddp_runner.core.injection import refuse_of_loops
from ddp_runner.core.launch_plan import LoopPlan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddp_runner.core.launch_plan import LaunchPlan
    from ddp_runner.features.script.rules import ScriptPlan


_ATTACHING = "ddp_runner.integrations."


def attaches(script: ScriptPlan) -> bool:
    """Return whether the program's own file calls ``ddp_runner.attach()``, or imports what does, as far as its text says.

    With ``--in-place`` its Trainer calls it.
    """
    return script.in_place or (not script.is_program and calls_attach(source_of(script)))


def calls_attach(source: bytes) -> bool:
    """Return whether a Python file calls ``attach`` of this package, by the names that it imports.

    A module of ``ddp_runner.integrations`` calls it where it is imported.
    """
    if b"attach" not in source and b"integrations" not in source:
        return False
    packages: set[str] = set()
    functions: set[str] = set()
    called: list[ast.expr] = []
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a module after -m; its ranks say so
        return False
    nodes = list(ast.walk(tree))
    if any(_is_of_integrations(node) for node in nodes):
        return True
    for node in nodes:
        match node:
            case ast.Import(names=names):
                packages |= {one.asname or "ddp_runner" for one in names if _is_of_package(one)}
            case ast.ImportFrom(module="ddp_runner", names=names):
                functions |= {one.asname or one.name for one in names if one.name == "attach"}
            case ast.Call(func=called_one):
                called.append(called_one)
    return any(_is_call_of(one, functions=functions, packages=packages) for one in called)


def _is_call_of(called: ast.expr, *, functions: set[str], packages: set[str]) -> bool:
    match called:
        case ast.Name(id=name):
            return name in functions
        case ast.Attribute(value=ast.Name(id=name), attr="attach"):
            return name in packages
    return False


def _is_of_integrations(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(one.name.startswith(_ATTACHING) for one in names)
        case ast.ImportFrom(module=str(module)):
            return f"{module}.".startswith(_ATTACHING)
    return False


def _is_of_package(imported: ast.alias) -> bool:
    """``import ddp_runner.x`` binds the package too, but for ``import ddp_runner.x as y``."""
    is_within = imported.name.startswith("ddp_runner.") and imported.asname is None
    return imported.name == "ddp_runner" or is_within


def with_loop(plan: LaunchPlan, script: ScriptPlan) -> LaunchPlan:
    """``plan`` for a program whose loop attaches. Raises BadInputError for settings of tasks alone."""
    refuse_for_loops(plan.settings)
    refuse_of_loops(plan.settings.run.inject, world_size=plan.world_size)
    # A spare would have to run the program.
    recovery = replace(plan.settings.recovery, warm_spare=False)
    return replace(
        plan,
        settings=replace(plan.settings, recovery=recovery),
        loop=LoopPlan(
            path=script.path,
            module=script.module,
            arguments=script.arguments,
            source=b"" if script.module else source_of(script),
            preload=script.preload,
            in_place=script.in_place,
        ),
    )


def source_of(script: ScriptPlan) -> bytes:
    """The text of the program's own file; empty where a module has none that is known."""
    if not script.module:
        return Path(script.path).read_bytes()
    found = _found(script.module)
    if found is not None and found.submodule_search_locations is not None:
        found = _found(f"{script.module}.__main__")
    return _text(found)


def may_be_run(module: str) -> bool:
    """Return whether ``python -m`` may find the module from here; a parent's import may change that."""
    above = module.rpartition(".")[0]
    return _found(module) is not None or b"__path__" in (_text(_found(above)) if above else b"")


def _text(found: ModuleSpec | None) -> bytes:
    origin = None if found is None else found.origin
    return Path(origin).read_bytes() if origin and origin.endswith(".py") else b""


def _found(module: str) -> ModuleSpec | None:
    """Return the module that python would find, by files alone: parents are user code, and are not imported."""
    names = module.split(".")
    sys.path.insert(0, str(Path.cwd()))
    try:
        each = (finder.find_spec(names[0], None) for finder in sys.meta_path)
        found = next((one for one in each if one is not None), None)
        for number in range(2, len(names) + 1):
            folders = None if found is None else found.submodule_search_locations
            found = _found_in(folders or (), ".".join(names[:number]))
    except (ImportError, ValueError):
        return None
    finally:
        del sys.path[0]
    return found


def _found_in(folders: Iterable[str], module: str) -> ModuleSpec | None:
    parts = ModuleSpec(module, None, is_package=True)  # of a package without a file of its own
    assert parts.submodule_search_locations is not None
    for folder in folders:
        importer = pkgutil.get_importer(folder)
        found = None if importer is None else importer.find_spec(module, None)
        if found is not None and found.loader is not None:
            return found
        parts.submodule_search_locations += (found and found.submodule_search_locations) or ()
    return parts if parts.submodule_search_locations else None
