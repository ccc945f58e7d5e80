"""The size of the house, as counts that may only fall: doors between rooms, shards, long functions, wide ones.

A count that has fallen is to be written down here, lower; one that has risen wants a change of the code.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict

import pytest

from tests.test_layout import MODULES, parsing, trees

pytestmark = parsing
SHARD_LINES = 120
LONG_LINES = 60
WIDE_PARAMETERS = 9

# The lowest layer: below the kernel stand the start of a process, and where features are found.
KERNEL = ("kernel", "start", "installed")

# Rooms that are to know nothing of the other: how many imports still do.
NEVER = {
    ("supervisor", "observe"): 24,
    ("rank", "observe"): 1,
    ("training", "observe"): 9,
    ("supervisor", "config"): 3,
    ("cli", "supervisor"): 1,
}

COUNTS = {
    "imports by the kernel of what is outside it": 0,
    "files with one importer and under 120 lines": 12,
    "functions of more than 60 lines": 1,
    "functions of nine parameters or more": 3,
    "files": 573,
}


@functools.cache
def _arrows():
    """Each import of one of our modules by another, for types or not, once a pair."""
    found = set()
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                named = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                longer = [f"{node.module}.{one.name}" for one in node.names]
                named = [one if one in MODULES else node.module for one in longer]
            else:
                continue
            found |= {(name, one) for one in named if one in MODULES and one != name}
    return found


def _is_in(module, *places):
    short = module.removeprefix("ddp_runner.")
    return any(short == place or short.startswith(f"{place}.") for place in places)


def _measured():
    importers = defaultdict(set)
    for source, target in _arrows():
        importers[target].add(source)
    functions = [
        node
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    lengths = {name: path.read_text().count("\n") for name, path in MODULES.items()}
    return {
        "imports by the kernel of what is outside it": sum(
            _is_in(source, *KERNEL) and not _is_in(target, *KERNEL) for source, target in _arrows()
        ),
        "files with one importer and under 120 lines": sum(
            len(who) == 1 and lengths[name] < SHARD_LINES and MODULES[name].stem != "__init__"
            for name, who in importers.items()
        ),
        "functions of more than 60 lines": sum(
            node.end_lineno - node.lineno + 1 > LONG_LINES for node in functions
        ),
        "functions of nine parameters or more": sum(
            len(node.args.args) + len(node.args.kwonlyargs) >= WIDE_PARAMETERS for node in functions
        ),
        "files": len(MODULES),
    }


def test_the_counts_of_the_house_are_those_that_are_known():
    """None has risen; one that has fallen is written down."""
    assert _measured() == COUNTS


@pytest.mark.parametrize(("source", "target"), NEVER, ids=" to ".join)
def test_no_new_door_leads_where_none_is_wanted(source, target):
    """From room to room, by imports."""
    doors = sorted(
        pair
        for pair in _arrows()
        if _is_in(pair[0], source) and _is_in(pair[1], target) and not _is_in(pair[0], target)
    )
    assert len(doors) == NEVER[source, target], "\n".join(map(" -> ".join, doors))


@pytest.mark.parametrize("place", KERNEL)
def test_each_place_of_the_kernel_is_there(place):
    """A name that nothing has would count nothing."""
    assert any(_is_in(name, place) for name in MODULES)
