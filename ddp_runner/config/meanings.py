"""Reads the meaning of each setting, in words, from the text below its field in ``core.settings``."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from ddp_runner.config.fields import sections

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@cache
def meanings() -> Mapping[str, str]:
    """Dotted key -> its meaning, on one line. Reads the source of ``core.settings``, which takes 10 ms.

    So only help and documentation ask for it.
    """
    modules = {owner.__module__ for owner in sections().values()}
    bodies = {
        node.name: node.body
        for module in modules
        for node in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(node, ast.ClassDef)
    }
    return {
        f"{section}.{name}": text
        for section, owner in sections().items()
        for name, text in _texts(bodies[owner.__name__])
    }


def _texts(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Each field that a text follows, with that text."""
    for field, after in pairwise(body):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as text)),
            ):
                yield name, " ".join(text.split())
