"""``run`` for a program whose loop calls ``ddp_runner.attach()``: found by its text, planned as a Task is."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.core.script import LoopPlan

if TYPE_CHECKING:
    from ddp_runner.core.launch_plan import LaunchPlan
    from ddp_runner.core.script import ScriptPlan

_ATTACHES = re.compile(
    rb"\bddp_runner\.attach\s*\(|\bfrom\s+ddp_runner\s+import\s+[^\n]*\battach\b"
)


def attaches(script: ScriptPlan) -> bool:
    """Whether the program's own file calls ``ddp_runner.attach()``, as far as its text says."""
    return not script.is_program and bool(_ATTACHES.search(_source(script)))


def with_loop(plan: LaunchPlan, script: ScriptPlan) -> LaunchPlan:
    """``plan`` for a program whose loop attaches."""
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
