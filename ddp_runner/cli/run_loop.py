"""``run`` for a program whose loop calls ``ddp_runner.attach()``: found by its text, planned as a Task is."""

from __future__ import annotations

import ast
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.config import refuse_for_loops
from ddp_runner.core.injection import refuse_of_loops
from ddp_runner.core.script import LoopPlan

if TYPE_CHECKING:
    from ddp_runner.core.launch_plan import LaunchPlan
    from ddp_runner.core.script import ScriptPlan


def attaches(script: ScriptPlan) -> bool:
    """Whether the program's own file calls ``ddp_runner.attach()``, as far as its text says."""
    return not script.is_program and calls_attach(_source(script))


def calls_attach(source: bytes) -> bool:
    """Whether a call in a Python file goes to ``attach`` of this package, by the names that it imports."""
    if b"attach" not in source:
        return False
    packages, functions, called = set(), set(), []
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a module after -m; its ranks say so
        return False
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                packages |= {one.asname or "ddp_runner" for one in names if _is_of_package(one)}
            case ast.ImportFrom(module="ddp_runner", names=names):
                functions |= {one.asname or one.name for one in names if one.name == "attach"}
            case ast.Call(func=called_one):
                called.append(called_one)
    for one in called:
        match one:
            case ast.Name(id=name) if name in functions:
                return True
            case ast.Attribute(value=ast.Name(id=name), attr="attach") if name in packages:
                return True
    return False


def _is_of_package(imported: ast.alias) -> bool:
    """``import ddp_runner.x`` binds the package too, but for ``import ddp_runner.x as y``."""
    is_within = imported.name.startswith("ddp_runner.") and imported.asname is None
    return imported.name == "ddp_runner" or is_within


def with_loop(plan: LaunchPlan, script: ScriptPlan) -> LaunchPlan:
    """``plan`` for a program whose loop attaches. Raises BadInputError for settings of tasks alone."""
    refuse_for_loops(plan.settings)
    refuse_of_loops(plan.settings.run.inject, world_size=plan.world_size)
    # A spare or a drill would have to run the program.
    recovery = replace(plan.settings.recovery, warm_spare=False, drill_at=None)
    return replace(
        plan,
        settings=replace(plan.settings, recovery=recovery),
        loop=LoopPlan(
            path=script.path,
            module=script.module,
            arguments=script.arguments,
            source=b"" if script.module else _source(script),
            preload=script.preload,
        ),
    )


def _source(script: ScriptPlan) -> bytes:
    if not script.module:
        return Path(script.path).read_bytes()
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(script.module)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{script.module}.__main__")
    except (ImportError, ValueError):
        found = None
    finally:
        del sys.path[0]
    origin = None if found is None else found.origin
    return Path(origin).read_bytes() if origin and origin.endswith(".py") else b""
