"""Finds the source of the loop that runs in a frame, and what a step's block in it sets after its update. Runs nothing."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Collection, Iterator
from types import FrameType

from ddp_runner.system.code_files import is_users_file


def tree_of(frame: FrameType) -> ast.Module | None:
    """Return the source of the file whose code runs in ``frame``; None where it is not there."""
    try:
        return ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except (SyntaxError, ValueError):
        return None


def loop_at(tree: ast.AST, line: int) -> ast.For | ast.While | None:
    """The innermost loop whose head, or for ``while`` whose body, has ``line``."""
    found: ast.For | ast.While | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.For):
            last = node.iter.end_lineno or node.lineno
        elif isinstance(node, ast.While):
            last = node.end_lineno or node.lineno
        else:
            continue
        if node.lineno <= line <= last and (found is None or node.lineno >= found.lineno):
            found = node
    return found


def taker_of(frame: FrameType) -> FrameType | None:
    """Return the frame of the program that takes what the generator in ``frame`` yields; None if it is no generator."""
    if not frame.f_code.co_flags & inspect.CO_GENERATOR:
        return None
    taker = frame.f_back
    while taker is not None and not is_users_file(taker.f_code.co_filename):
        taker = taker.f_back
    return taker


def sets_late(frame: FrameType | None) -> bool:
    """Return True if the loop that asks for a batch in ``frame`` reads after a step what its body sets only after the update.

    A generator's loop may give the batch to another one, which counts as well.
    """
    if frame is None:
        return False
    tree = tree_of(frame)
    loop = None if tree is None else loop_at(tree, frame.f_lineno)
    is_late = tree is not None and loop is not None and bool(late_names(tree, loop))
    return is_late or sets_late(taker_of(frame))


# INVARIANT bound-where-read: what a loop reads after a step's block has been set there, at its first step too.
# Broken if: the first body of a launch, which ends at the update, is for nothing in a loop that sets it after the update.
# Guarded by: test_what_is_set_behind_the_update_is_there_behind_the_block.
def late_names(tree: ast.AST, loop: ast.For | ast.While) -> set[str]:
    """Return the names that a step's block sets after its update, and that ``loop`` reads after that block.

    By the source alone, so that all ranks find the same. A call of a function counts as the update if the function
    of that name in ``tree`` makes it; if nothing in the block is known to make it, each call may.
    """
    updating = _updating_functions(tree)
    found: set[str] = set()
    for block in ast.walk(loop):
        if not isinstance(block, ast.With) or not any(map(_is_block, block.items)):
            continue
        statements = [
            one for part in block.body for one in ast.walk(part) if isinstance(one, ast.stmt)
        ]
        # The innermost ones: a compound statement has the calls of those within it.
        simple = [one for one in statements if not hasattr(one, "body")]
        updates = [one for one in simple if _makes_update(one, updating)]
        updates = updates or [one for one in simple if _calls_in(one)]
        first = min(map(_place, updates), default=(block.end_lineno or block.lineno, 0))
        early = {name for one in statements if _place(one) < first for name in _stored_in(one)}
        late = {name for one in statements if _place(one) >= first for name in _stored_in(one)}
        read = {
            ast.unparse(one)
            for part in loop.body
            for one in ast.walk(part)
            if isinstance(one, (ast.Name, ast.Attribute))
            and isinstance(one.ctx, ast.Load)
            and one.lineno > (block.end_lineno or block.lineno)
        }
        found |= (late - early) & read
    return found


def _is_block(item: ast.withitem) -> bool:
    """Return True for ``run.step()``, and for ``accelerator.accumulate(model)``, which begins and ends a step too."""
    call = item.context_expr
    if not isinstance(call, ast.Call):
        return False
    is_bare = not call.args and not call.keywords
    return called(call) == "accumulate" or (is_bare and called(call) == "step")


def _place(statement: ast.stmt) -> tuple[int, int]:
    return statement.lineno, statement.col_offset


def _calls_in(node: ast.AST) -> list[ast.Call]:
    return [one for one in ast.walk(node) if isinstance(one, ast.Call)]


def _makes_update(node: ast.AST, updating: Collection[str]) -> bool:
    return any(called(one) == "step" or called(one) in updating for one in _calls_in(node))


def _stored_in(statement: ast.stmt) -> set[str]:
    """Return the names and attributes that a simple statement, or the head of a compound one, sets."""
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)):
        parts: list[ast.AST] = [statement]
    elif isinstance(statement, (ast.For, ast.With)):
        parts = [statement.target] if isinstance(statement, ast.For) else [*statement.items]
    else:
        parts = []
    nodes = (one for part in parts for one in ast.walk(part))
    is_place = (ast.Name, ast.Attribute)
    return {
        ast.unparse(one)
        for one in nodes
        if isinstance(one, is_place) and isinstance(one.ctx, ast.Store)
    }


def _updating_functions(tree: ast.AST) -> set[str]:
    """Return the names of the functions and methods of ``tree`` that make an update, also by others of them."""
    functions = [
        one for one in ast.walk(tree) if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    found: set[str] = set()
    while True:
        more = {
            one.name
            for one in functions
            if one.name not in found and any(_makes_update(part, found) for part in one.body)
        }
        if not more:
            return found
        found |= more


def left_to_defaults(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
    call: ast.Call,
    *,
    name: str,
    is_method: bool,
) -> dict[str, str]:
    """Return the parameters that ``call`` leaves to defaults which may change, and what these are called: all calls share them."""
    if any(isinstance(one, ast.Starred) for one in call.args):
        return {}
    of, given = function.args, {one.arg for one in call.keywords}
    in_order = [*of.posonlyargs, *of.args]
    first = len(in_order) - len(of.defaults)
    left = [*zip(in_order[first:], of.defaults, strict=True)]
    taken = {one.arg for one in in_order[: len(call.args) + is_method]} | given
    left += [
        (one, value) for one, value in zip(of.kwonlyargs, of.kw_defaults, strict=True) if value
    ]
    return {
        one.arg: f"{name}.{one.arg}"
        for one, value in left
        if one.arg not in taken and not isinstance(value, ast.Constant)
    }


def plain(node: ast.AST) -> ast.AST:
    """Return ``x`` for ``globals()['x']``, and ``a.x`` for ``getattr(a, 'x')``."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):
        key = node.slice
        is_global = called(node.value) == "globals"
        if is_global and isinstance(key, ast.Constant) and isinstance(key.value, str):
            return ast.copy_location(ast.Name(key.value, node.ctx), node)
    if isinstance(node, ast.Call) and called(node) == "getattr" and len(node.args) > 1:
        key = node.args[1]
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            return ast.copy_location(ast.Attribute(node.args[0], key.value, ast.Load()), node)
    return node


def called(node: ast.Call) -> str:
    """Return the last part of the name that is called, as ``step`` of ``optimizer.step()``."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def taken_from(target: ast.AST, taken: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield each name that ``for target in taken`` gives, and the list, tuple or dict whose values it gets."""
    kind = ""
    values: list[ast.AST] = [taken]
    if isinstance(taken, ast.Call):
        kind, values = called(taken), [*taken.args]
        if kind in {"items", "values"} and isinstance(taken.func, ast.Attribute):
            values = [taken.func.value]
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    targets = targets[1:] if kind in {"enumerate", "items"} else targets
    if kind in {"", "enumerate", "items", "reversed", "values", "zip"}:
        for one, value in zip(targets, values, strict=False):
            if isinstance(one, ast.Name):
                yield one.id, value


def place_in(node: ast.AST) -> ast.Subscript | None:
    """Return ``a[key]`` of ``a[key].b.c()``."""
    at = node
    while isinstance(at, (ast.Attribute, ast.Call)):
        at = at.func if isinstance(at, ast.Call) else at.value
    return at if at is not node and isinstance(at, ast.Subscript) else None


def used_behind(tree: ast.AST, loop: ast.For | ast.While) -> set[str]:
    """Return the names that the loop's function reads behind it, and attributes that the program reads elsewhere."""
    first, last = loop.lineno, loop.end_lineno or loop.lineno
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    around: list[ast.AST] = [
        one
        for one in ast.walk(tree)
        if isinstance(one, kinds) and one.lineno < first and last <= (one.end_lineno or 0)
    ]
    loads, stores = _Lines(), _Lines()
    pending: list[ast.AST] = [*ast.iter_child_nodes((around or [tree])[-1])]
    while pending:
        one = pending.pop()
        if isinstance(one, ast.Name) and one.lineno > last:
            (loads if isinstance(one.ctx, ast.Load) else stores).note(one.id, one.lineno)
        if not isinstance(one, kinds):
            pending += ast.iter_child_nodes(one)
    attributes = {
        one.attr
        for one in ast.walk(tree)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Load)
        if not first <= one.lineno <= last
    }
    return attributes | {name for name in loads if loads[name] <= stores.get(name, loads[name])}


class _Lines(dict[str, int]):
    """The first line of each name."""

    def note(self, name: str, line: int) -> None:
        self[name] = min(line, self.get(name, line))


def saved_in(tree: ast.AST) -> set[str]:
    """Return the names and attributes in calls that save something."""
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)]
    inside = [one for call in calls if called(call).startswith("save") for one in ast.walk(call)]
    names = {one.id for one in inside if isinstance(one, ast.Name)}
    return names | {one.attr for one in inside if isinstance(one, ast.Attribute)}


def calls_steps(call: ast.Call, place: int) -> bool:
    """Return True if the argument at this place asks the run for its steps."""
    if place >= len(call.args):
        return False
    return any(
        isinstance(one, ast.Attribute) and one.attr == "steps" for one in ast.walk(call.args[place])
    )
