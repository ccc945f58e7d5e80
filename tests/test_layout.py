"""How the package is laid out: what imports what, also inside functions, and what files are called.

The import contracts in ``pyproject.toml`` say which room may import which; these look at single files.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ddp_runner"
LINES_MAX = 700
WORDS_MAX = 12
FOLDER_FILES_MAX = 20

# Imports of our own inside functions: a command is loaded when it is asked for, torch when it is needed,
# rich when a display is drawn. One more than this wants a reason beside it, and a larger number here.
FUNCTION_IMPORTS_MAX = 19


def _module(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


# To parse all takes seconds: one test process has every test that does so.
parsing = pytest.mark.xdist_group("parsing")
pytestmark = parsing


@functools.cache
def tree_of(path):
    """The syntax of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def trees():
    """Each module's syntax: not while tests are collected, which each test process does."""
    return {name: tree_of(path) for name, path in MODULES.items()}


def _is_for_types(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _imports(node, *, inside=False):
    """Each import of ours as (module, is inside a function); what only type checkers read is left out."""
    for child in ast.iter_child_nodes(node):
        if _is_for_types(child):
            continue
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        if isinstance(child, ast.ImportFrom) and child.module and child.level == 0:
            for name in child.names:
                longer = f"{child.module}.{name.name}"
                yield (longer if longer in MODULES else child.module), inside
        elif isinstance(child, ast.Import):
            for name in child.names:
                yield name.name, inside
        else:
            yield from _imports(child, inside=inside or is_function)


def _ours(name):
    return [
        (one, inside) for one, inside in _imports(trees()[name]) if one in MODULES and one != name
    ]


def test_no_module_imports_itself_by_way_of_others():
    """Nor inside functions: what imports in a circle is one thing in two files."""
    graph = {name: {one for one, _ in _ours(name)} for name in MODULES}
    # A package's own names load on first use; each module of it imports the package before itself.
    graph = {
        name: {one for one in ones if not name.startswith(f"{one}.")}
        for name, ones in graph.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_imports_inside_functions_are_counted():
    """Each has its reason; there are no more of them than are known."""
    found = [f"{name}: {one}" for name in MODULES for one, inside in _ours(name) if inside]
    assert len(found) == FUNCTION_IMPORTS_MAX, "\n".join(found)


def test_files_stay_short_enough_to_be_read():
    """In lines."""
    lengths = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: n for name, n in lengths.items() if n > LINES_MAX} == {}


def test_folders_stay_small_enough_to_be_taken_in():
    """Modules in each, ``__init__`` among them."""
    counts = Counter(path.parent for path in MODULES.values())
    assert {folder.name: n for folder, n in counts.items() if n > FOLDER_FILES_MAX} == {}


# What carries a pure rule out may have its name; beside those, who fills in a protocol has that of it.
# A feature's files are called by where they run (see ARCHITECTURE.md).
PURE = ("core", "features.machines.rules", "kernel.rules")
SAME_MEANING = {"runtime", "drill", "last_save", "words", "parent", "child", "rules"}


def test_a_file_name_means_one_thing():
    """Within all rooms, but for those that belong together."""
    by_name = {}
    for name, path in MODULES.items():
        if path.stem != "__init__":
            by_name.setdefault(path.stem, []).append(name)
    twice = {
        stem: names
        for stem, names in by_name.items()
        if len(names) > 1
        and not any(f"ddp_runner.{rules}.{stem}" in names for rules in PURE)
        and stem not in SAME_MEANING
    }
    assert twice == {}


def test_each_file_says_first_what_it_is_for():
    """In one sentence."""
    for name, tree in trees().items():
        first = (ast.get_docstring(tree) or "").partition("\n")[0]
        assert first.endswith("."), f"{name}: {first!r}"


def test_the_name_of_a_test_has_at_most_twelve_words():
    """It is read in lists of hundreds; what it leaves out stands in its docstring."""
    names = [
        name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in re.findall(
            r"^ *def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    assert len(names) > 3000
    assert [name for name in names if len(name.removeprefix("test_").split("_")) > WORDS_MAX] == []
