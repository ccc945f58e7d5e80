"""What the documents for developers say of the code: the afternoon path, a killed rank call by call, rooms and ports."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize

import pytest

from tests.scenarios.harness import ROOT
from tests.test_layout import parsing, tree_of

pytestmark = parsing
PACKAGE = ROOT / "ddp_runner"
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PROTOCOLS = (ROOT / "docs" / "protocols.md").read_text(encoding="utf-8")
PATH_FILES = 12
PATH_LINES_MAX = 2500
# What runs something: of the process list, and the process of a person's command.
PROCESSES = {
    *("supervisor", "follower", "guardian", "zygote", "helpers", "store host", "spare", "saver"),
    *("drill", "page", "trackers", "rank", "loader workers", "shell", "all"),
}
_DRAWN = {"S": "supervisor", "Z": "zygote", "T": "store host", "N": "spare", "O": "other ranks"}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NO_CODE = (
    *(tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.COMMENT, tokenize.ENDMARKER),
)


def section(text, heading):
    """What stands below a heading, up to the next one of its kind."""
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def rows(text):
    """The cells of each row of the tables in ``text``, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    is_rule = [set("".join(cells)) <= set("-") for cells in found]
    return [
        cells
        for number, cells in enumerate(found)
        if not is_rule[number] and not (number + 1 < len(found) and is_rule[number + 1])
    ]


@functools.cache
def defined_in(path):
    """Its functions and classes; a method is ``Class.method``, and a function also ``file.function``."""
    names = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}.{one.name}" for one in node.body if hasattr(one, "name")}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names |= {node.name, f"{path.stem}.{node.name}"}
    return names


@functools.cache
def defined_anywhere():
    return set().union(*(defined_in(path) for path in sorted(PACKAGE.rglob("*.py"))))


def code_lines(path):
    """How many lines hold more than a comment or a docstring."""
    text, docstrings, code = path.read_text(encoding="utf-8"), set(), set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            docstrings |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code |= {*range(token.start[0], token.end[0] + 1)}
    return len(code - docstrings)


def test_the_afternoon_path_can_be_read_in_an_afternoon():
    """Twelve files that exist, each with its question, and no more code than one takes in."""
    path = rows(section(ARCHITECTURE, "The afternoon path"))
    files = [PACKAGE / name.strip("`") for _, name, _ in path]
    assert [int(number) for number, *_ in path] == [*range(1, PATH_FILES + 1)]
    assert len({*files}) == PATH_FILES
    assert all(question.endswith("?") for *_, question in path)
    lines = {str(file.relative_to(PACKAGE)): code_lines(file) for file in files}
    assert sum(lines.values()) <= PATH_LINES_MAX, lines


def calls_of_a_killed_rank():
    """Process or processes, function and file of each row."""
    text = section(PROTOCOLS, "A killed rank, call by call")
    return [
        (who.split(", "), name.strip("`"), file.strip("`")) for who, name, file, _ in rows(text)
    ]


def test_each_function_on_the_way_of_a_killed_rank_is_there():
    """In the file that the table names."""
    for name, file in [call[1:] for call in calls_of_a_killed_rank()]:
        assert name in defined_in(PACKAGE / file)


def test_the_picture_of_a_killed_rank_is_that_of_its_table():
    """It calls all functions of the table and no others, each in a process that the table names."""
    picture = section(PROTOCOLS, "A killed rank, call by call").split("```")[1]
    arrows = re.findall(r"^ *(\w)->>\w: ([^:\n]+)", picture, re.MULTILINE)
    drawn = {(_DRAWN[who], name) for who, names in arrows for name in names.split(", ")}
    known = {(who, name) for all_of, name, _ in calls_of_a_killed_rank() for who in all_of}
    assert drawn - known == set()
    assert {name for _, name in drawn} == {name for _, name in known}


def test_the_map_has_each_room_and_says_which_process_runs_it():
    """A folder of the package is a room, or is named in the row of the one that it is in; so is a feature."""
    table = rows(section(ARCHITECTURE, "Map"))
    rooms = {cells[0].strip("`") for cells in table}
    assert [room for room in rooms if not (PACKAGE / room).is_dir()] == []
    named = {name for cells in table for name in re.findall(r"`(\w+/)`", "".join(cells))}
    folders = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    top = {folder for folder in folders if len(folder.parts) == 1}
    assert {f"{folder}/" for folder in top} - {"on_path/"} <= rooms
    assert {room for room in named if not any(PACKAGE.rglob(room))} == set()
    words = re.sub(r"[-_ ]", "", " ".join(cell for cells in table for cell in cells)).lower()
    features = [path.parent.name for path in PACKAGE.glob("features/*/__init__.py")]
    assert [one for one in features if one.replace("_", "") not in words] == []
    for room, runs_in, *_ in table:
        processes = re.sub(r"`[\w/.]+`: ", "", runs_in).replace(";", ",").split(", ")
        assert {*processes} <= PROCESSES, room


def test_each_port_and_who_implements_it_is_there():
    """The class of a port in its file; that of an implementation anywhere."""
    for port, file, implemented in rows(section(ARCHITECTURE, "Ports")):
        name = re.match(r"`(\w+)`", port)[1]
        assert name in defined_in(PACKAGE / file.strip("`"))
        assert {*re.findall(r"`(\w+)`", implemented)} <= defined_anywhere(), name


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_each_method_that_developers_read_of_is_there(name):
    """``Class.method``, in prose and in blocks of code."""
    text = (ROOT / name).read_text(encoding="utf-8")
    methods = {*re.findall(r"\b[A-Z]\w+\.[a-z_]\w+\b", text)}
    methods = {one for one in methods if not re.search(r"\.(md|py|toml|json)$", one)}
    assert methods
    assert methods - defined_anywhere() == set()


def captured_by(path, owner):
    """The names of the entries that ``capture`` of a class puts into a state."""
    body = next(one for one in tree_of(path).body if getattr(one, "name", "") == owner).body
    capture = next(one for one in body if getattr(one, "name", "") == "capture")
    names = set()
    for node in ast.walk(capture):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
            names |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        for place in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(place, ast.Subscript) and isinstance(place.slice, ast.Constant):
                names.add(place.slice.value)
    return names


def test_each_entry_of_a_checkpoint_is_documented():
    """Those of a task and of a loop, and the four that other functions add."""
    page = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    table = page.split("\n### Other content of a checkpoint\n", 1)[1].split("\n\nEntries", 1)[0]
    named = {name for names, _ in rows(table) for name in re.findall(r"`(\w+)`", names)}
    captured = captured_by(PACKAGE / "training" / "state.py", "TrainState")
    captured |= captured_by(PACKAGE / "training" / "own_loop" / "kept.py", "KeptState")
    assert len(captured) > 25
    assert named - captured == {"start", "local", "versions", "manifest"}
    assert captured - named == set()
