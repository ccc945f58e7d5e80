"""Finding the task that ``--task`` names, and saying what is wrong with it."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from ddp_runner.core.settings import RunSettings, Settings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.system.launch_folder import begin_here
from ddp_runner.training.starting.task_import import import_task_module, load_task
from ddp_runner.training.task import Task

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("clean_imports")

TASK_SOURCE = """
    class Mine:
        def __init__(self, width=1, depth=2):
            self.width, self.depth = width, depth
        def build_model(self): ...
        def build_datasets(self): ...
        def loss(self, model, batch): ...
"""


def write(folder: Path, source: str, name: str = "my_task.py") -> Path:
    file = folder / name
    file.write_text(textwrap.dedent(source))
    return file


def settings(task: object, **arguments: object) -> Settings:
    return Settings(run=RunSettings(task=str(task)), task=arguments)


def error_of(task: object, **arguments: object) -> BadInputError:
    with pytest.raises(BadInputError) as caught:
        load_task(settings(task, **arguments))
    return caught.value


def test_file_with_one_task_needs_no_name(tmp_path):
    """The only class of a file that has a task's methods is the task."""
    file = write(tmp_path, "class Helper: pass\n" + textwrap.dedent(TASK_SOURCE))
    task = load_task(settings(file))
    assert type(task).__name__ == "Mine"
    assert isinstance(task, Task)


def test_task_arguments_reach_the_constructor(tmp_path):
    """``task.x=…`` becomes the keyword argument x."""
    task = load_task(settings(write(tmp_path, TASK_SOURCE), width=7))
    assert (task.width, task.depth) == (7, 2)


TYPED = """
    from pathlib import Path
    from typing import Literal, Optional, Sequence, Union
    class Mine:
        def __init__(self, whole: int = 1, real: float = 0.1, flag: bool = False, text: str = "",
                     sizes: tuple[int, ...] = (), names: Sequence[str] = (), where: Path = Path(),
                     maybe: Optional[int] = None, mode: Literal["a", "b"] = "a", odd: int = None,
                     either: Union[int, str] = 1, options: dict[str, int] = {}, own: "Nothing" = "x"):
            pass
        def build_model(self): ...
        def build_datasets(self): ...
        def loss(self, model, batch): ...
"""
GUESSED = """
    class Mine:
        def __init__(self, hidden=64, rate=0.1, flag=False, mode="auto", scale=None, free=object()):
            pass
        def build_model(self): ...
        def build_datasets(self): ...
        def loss(self, model, batch): ...
"""


@pytest.mark.parametrize(
    ("name", "wrong", "fits", "expected"),
    [
        ("whole", ["abc", 1.5, True, None, [1]], [3, -1], "a whole number"),
        ("real", ["1e-3x", False, None], [1, 0.5], "a number"),
        ("flag", ["maybe", 1, None], [True], "true or false"),
        ("text", [5, True, None, ["a"]], ["", "5"], "text"),
        ("sizes", [3, "3", ["a"], {}], [[], [1, 2]], "a list"),
        ("names", ["abc", [1]], [["a"]], "a list"),
        ("where", [3], ["x/y"], "a path"),
        ("maybe", ["abc"], [None, 3], "a whole number or null"),
        ("mode", ["c", 1], ["b"], "one of a, b"),
        ("odd", ["abc"], [None, 3], "a whole number"),
        ("either", [1.5], ["x", 2], "a whole number or text"),
        ("options", [3], [{"a": 1}], "a mapping"),
    ],
)
def test_arguments_are_checked_against_annotations(tmp_path, name, wrong, fits, expected):
    """One line that names the argument, its value and what it takes; before anything is built.

    Also where the annotation of another argument names what is not there.
    """
    as_objects = textwrap.dedent(TYPED)
    as_text = "from __future__ import annotations\n" + as_objects
    for number, source in enumerate((as_objects, as_text)):
        file = write(tmp_path, source, f"typed_{number}.py")
        for value in fits:
            load_task(settings(file, **{name: value}))
        for value in wrong:
            error = error_of(file, **{name: value})
            assert error.option == f"task.{name}"
            assert error.expected.startswith(f"{file} takes {expected}")


@pytest.mark.parametrize(
    ("name", "wrong", "fits"),
    [
        ("hidden", ["abc", True, [64]], [128, 0.5, None]),
        ("rate", ["abc", False], [1, None]),
        ("flag", ["abc", 2], [True]),
        ("mode", [], ["b", 5, None]),
        ("scale", [], ["abc", 5, [1]]),
        ("free", [], ["abc", 5]),
    ],
)
def test_without_annotations_only_what_can_hardly_be_meant_is_refused(tmp_path, name, wrong, fits):
    """A default is a hint: a number for a number, but a whole one may stand for any."""
    file = write(tmp_path, GUESSED)
    for value in fits:
        load_task(settings(file, **{name: value}))
    for value in wrong:
        error = error_of(file, **{name: value})
        assert error.option == f"task.{name}"
        assert ", as its default " in error.expected


def test_relative_path_is_from_the_working_directory(tmp_path, monkeypatch):
    """FILE.py may be relative, as on any command line."""
    write(tmp_path, TASK_SOURCE)
    monkeypatch.chdir(tmp_path)
    begin_here()
    assert type(load_task(settings("my_task.py:Mine"))).__name__ == "Mine"


@pytest.mark.parametrize("name", ["Mine", "make", "ready"])
def test_name_is_a_class_a_factory_or_an_instance(tmp_path, name):
    """All three ways to name a task give a ready one."""
    source = (
        textwrap.dedent(TASK_SOURCE) + "def make(width=3): return Mine(width)\nready = Mine(4)\n"
    )
    file = write(tmp_path, source)
    assert type(load_task(settings(f"{file}:{name}"))).__name__ == "Mine"


def test_class_marked_takes_settings_gets_all_settings(tmp_path):
    """The marker of the built-in tasks works for anybody's."""
    source = """
        class Mine:
            takes_settings = True
            def __init__(self, settings): self.seed = settings.run.seed
            def build_model(self): ...
            def build_datasets(self): ...
            def loss(self, model, batch): ...
    """
    file = write(tmp_path, source)
    assert load_task(settings(file)).seed == RunSettings().seed
    assert error_of(file, width=1).option == "task.width"


def test_class_that_inherits_the_protocol_is_found(tmp_path):
    """Writing ``class Mine(Task)`` is not punished."""
    source = "from ddp_runner.training.task import Task" + TASK_SOURCE.replace(
        "class Mine", "class Mine(Task)"
    ).replace("\n    ", "\n")
    assert load_task(settings(write(tmp_path, source), depth=9)).depth == 9


def test_module_and_name(tmp_path, monkeypatch):
    """``module:NAME`` imports an installed module by its dotted name."""
    (tmp_path / "loading_pkg").mkdir()
    write(tmp_path / "loading_pkg", "", "__init__.py")
    write(tmp_path / "loading_pkg", TASK_SOURCE, "mine.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_task(settings("loading_pkg.mine:Mine", width=5)).width == 5


@pytest.mark.parametrize(("name", "kind"), [("bytes", "BytesTask"), ("synthetic", "SyntheticTask")])
def test_built_in_tasks_are_found_by_name(name, kind):
    """The built-in names need no file."""
    assert type(load_task(settings(name))).__name__ == kind


def test_built_in_task_refuses_task_arguments():
    """A ``task.*`` argument that nobody reads is an error, not a silence."""
    error = error_of("synthetic", width=1)
    assert error.option == "task.width"


def test_neighbours_import_and_classes_pickle(tmp_path):
    """The file's folder is importable, and its classes pickle by reference."""
    write(tmp_path, "SCALE = 11\n", "loading_neighbour.py")
    file = write(tmp_path, "from loading_neighbour import SCALE\n" + textwrap.dedent(TASK_SOURCE))
    task = load_task(settings(file))
    assert sys.modules[type(task).__module__].SCALE == 11
    assert pickle.loads(pickle.dumps(task)).width == task.width


def test_module_is_imported_once_and_under_one_name(tmp_path):
    """A forked rank finds what the zygote imported; two files of one name stay apart."""
    file = write(tmp_path, "import sys\nsys.loading_runs = getattr(sys, 'loading_runs', 0) + 1\n")
    (tmp_path / "other").mkdir()
    other = write(tmp_path / "other", TASK_SOURCE)
    try:
        assert import_task_module(str(file)) is import_task_module(f"{file}:Mine")
        assert sys.loading_runs == 1
    finally:
        del sys.loading_runs
    assert import_task_module(str(other)).__name__ != import_task_module(str(file)).__name__


def test_importing_the_loader_imports_no_built_in_task():
    """``training`` stands below ``tasks``: a built-in task is imported only when it is named."""
    code = (
        "import sys; import ddp_runner.training.starting.task_import; "
        "print([m for m in sys.modules if m.startswith('ddp_runner.tasks')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("\n\nx = (\n", "SyntaxError"),
        ("import no_such_thing_at_all\n", "ModuleNotFoundError: No module named 'no_such_thing"),
        ("\nx = 1 / 0\n", "ZeroDivisionError: division by zero (line 2)"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 (line 2)"),
    ],
)
def test_file_that_fails_to_import_is_reported_with_its_line(tmp_path, source, words):
    """The error says what was raised and where; the traceback stays in its cause."""
    path_before = list(sys.path)
    error = error_of(write(tmp_path, source))
    assert error.option == "--task"
    assert words in error.expected
    assert "line" in error.expected
    assert error.__cause__ is not None
    assert sys.path == path_before
    assert not [m for m in sys.modules if m.startswith("ddp_runner_task_my_task")]


def test_a_neighbour_hidden_by_an_installed_module_is_named(tmp_path):
    """The task's folder is searched last; the message says why the wrong module was found."""
    write(tmp_path, "X = 1\n", "colorsys.py")
    error = error_of(write(tmp_path, "from colorsys import X\n"))
    assert "cannot import name 'X' from 'colorsys'" in error.expected
    assert error.expected.endswith("colorsys.py hides the colorsys beside the task: rename yours")


def test_error_inside_a_neighbour_names_the_line_of_the_file(tmp_path):
    """The user sees the line of the file that was asked for; the cause has the rest."""
    write(tmp_path, "def explode():\n    raise KeyError('gone')\n", "loading_neighbour2.py")
    file = write(tmp_path, "import loading_neighbour2\nloading_neighbour2.explode()\n")
    assert "KeyError: 'gone' (line 2)" in error_of(file).expected


def test_syntax_error_of_a_neighbour_names_the_neighbour(tmp_path):
    """A syntax error is where it is, not where it was imported."""
    write(tmp_path, "\nx = = 1\n", "loading_neighbour3.py")
    error = error_of(write(tmp_path, "import loading_neighbour3\n"))
    assert "loading_neighbour3.py line 2" in error.expected


def test_module_that_fails_to_import_is_reported_with_its_file(tmp_path, monkeypatch):
    """A missing import inside a module is not mistaken for the module itself being missing."""
    write(tmp_path, "\nimport no_such_thing_at_all\n", "loading_broken.py")
    monkeypatch.syspath_prepend(tmp_path)
    error = error_of("loading_broken:Mine")
    assert "ModuleNotFoundError: No module named 'no_such_thing_at_all'" in error.expected
    assert "(loading_broken.py line 2)" in error.expected


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("byts", "did you mean bytes?"),
        ("no/such/file.py", "no such file"),
        ("no_such_module_at_all:Mine", "no module 'no_such_module_at_all' on the path"),
        ("no spec:at all", "FILE.py[:NAME] or module:NAME"),
        ("json:Mine", "there is no 'Mine' in it"),
        ("json:__doc__", "neither a task nor callable"),
        ("json:JSONDecoder", "the task lacks build_model, build_datasets, loss"),
        ("", "bytes, synthetic, FILE.py"),
    ],
)
def test_unusable_name_says_what_would_be_right(task, words):
    """Each wrong form of ``--task`` gets its own line."""
    error = error_of(task)
    assert error.option == "--task"
    assert words in error.expected


def test_folder_is_not_a_file(tmp_path):
    """A folder whose name ends in .py is still a folder."""
    (tmp_path / "x.py").mkdir()
    assert "that is a folder" in error_of(tmp_path / "x.py").expected


def test_several_tasks_are_named(tmp_path):
    """The user is asked to choose, and the choices are named."""
    source = textwrap.dedent(TASK_SOURCE) + "class Other(Mine): pass\nAlias = Other\n"
    file = write(tmp_path, source)
    assert "add :NAME of Mine, Other" in error_of(file).expected
    assert type(load_task(settings(f"{file}:Other"))).__name__ == "Other"


def test_no_task_in_the_file(tmp_path):
    """An imported task is not the file's own."""
    write(tmp_path, TASK_SOURCE, "loading_elsewhere.py")
    error = error_of(write(tmp_path, "from loading_elsewhere import Mine\n"))
    assert "no class in this file has all of build_model, build_datasets, loss" in error.expected


def test_unknown_name_lists_those_that_exist(tmp_path):
    """A misspelt NAME shows the right ones."""
    assert "it has Mine" in error_of(f"{write(tmp_path, TASK_SOURCE)}:Mien").expected


def test_unknown_argument_names_the_known_ones(tmp_path):
    """A misspelt task argument never reaches the user's code."""
    error = error_of(write(tmp_path, TASK_SOURCE), widht=3)
    assert (error.option, error.value) == ("task.widht", 3)
    assert "it takes width, depth; did you mean width?" in error.expected


def test_missing_argument_is_named(tmp_path):
    """What the constructor needs is said in the words of the command line."""
    source = TASK_SOURCE.replace("width=1", "width")
    assert "also needs task.width=VALUE" in error_of(write(tmp_path, source)).expected


def test_ready_instance_takes_no_arguments(tmp_path):
    """Arguments for something already made would be lost, so they are refused."""
    file = write(tmp_path, textwrap.dedent(TASK_SOURCE) + "ready = Mine()\n")
    assert error_of(f"{file}:ready", width=3).option == "task.width"


def test_constructor_that_raises_is_reported_with_its_line(tmp_path):
    """A constructor's error is for the user to correct; its traceback stays in the cause."""
    file = write(tmp_path, TASK_SOURCE.replace("self.width, self.depth = width, depth", "int('x')"))
    error = error_of(file)
    assert "making it raised ValueError: invalid literal" in error.expected
    assert "(line 4)" in error.expected
    assert isinstance(error.__cause__, ValueError)


def test_constructor_may_refuse_its_input_itself(tmp_path):
    """A task's own BadInputError passes as it is."""
    source = "from ddp_runner.kernel.rules.errors import BadInputError\n" + textwrap.dedent(
        TASK_SOURCE
    ).replace(
        "self.width, self.depth = width, depth",
        "raise BadInputError('task.width', width, 'must be even')",
    )
    assert error_of(write(tmp_path, source)).expected == "must be even"
