"""Chooses the name of a run, and the folders that follow from the name. Reads and writes no file.

The name is that of ``--name``, else the task's. The run's files are in ``logs/NAME`` and
``checkpoints/NAME``, unless a folder is given: that one is then used exactly.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from ddp_runner.config.fields import BUILT_IN_TASKS, known_fields
from ddp_runner.core.settings.whole_run import FOLDERS, LATEST
from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddp_runner.config.sources import Origin

TEST = "test"  # what every --test is called: it begins afresh, whatever is there
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
STRENGTH: Mapping[Origin, int] = {
    "default": 0,
    "preset": 1,
    "file": 2,
    "environment": 3,
    "command line": 4,
}


HANDED_OVER = "ddp_runner_handed_over"  # the module of tasks that no other module has by their name


def at_home(path: str | Path) -> Path:
    """Return ``path`` with the home folder in the place of a leading ``~``. An unknown user's stays as it is."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - raises nothing


def name_of_task(task: str) -> str:
    """Return the default name for a run of ``task`` (as in ``--task``); always a legal name."""
    head, _, own = task.rpartition(":") if ":" in task else (task, "", "")
    word = PurePath(head).stem if head.endswith(".py") else head.rpartition(".")[2]
    if word in ("__main__", HANDED_OVER):
        word = own
    name = _UNSAFE.sub("_", word).strip("._-")[:100] or "task"
    return f"{name}_task" if name in (TEST, LATEST) else name


def is_name(text: str) -> bool:
    """Return True if ``text`` can be the name of a run, and so of its folders."""
    return bool(_NAME.fullmatch(text)) and text != LATEST


def name_the_run(values: dict[str, object], origin: dict[str, Origin]) -> None:
    """Fill in the name and the folders that it gives. Raises BadInputError for an unusable name.

    A smoke test (``--test``) keeps apart from real runs, below whatever folder it is given, and
    begins afresh; not so where the command line names the run or the folder.
    """
    is_test = bool(values.get("run.test", False))
    asked = origin["run.name"] != "default"
    if asked:
        _check(str(values["run.name"]), is_test=is_test)
    keeps_apart = is_test and origin["run.name"] != "command line"
    if keeps_apart:
        values["run.name"] = TEST
    elif not asked:
        values["run.name"] = name_of_task(str(values.get("run.task", BUILT_IN_TASKS[0])))
    name = str(values["run.name"])
    _expand(values)
    for key, root in FOLDERS:
        folder = PurePath(str(values.get(key, known_fields()[key].default)))
        if origin[key] == "command line":
            continue
        # A config.yaml that a run has written names both; a name that is given later wins.
        is_of_a_name = folder.parent == PurePath(root)
        is_later = STRENGTH[origin["run.name"]] > STRENGTH[origin[key]]
        if origin[key] in ("default", "preset") or (is_of_a_name and is_later):
            values[key] = str(PurePath(root, name))
        elif keeps_apart and folder.name != TEST:
            values[key] = str(folder / TEST)
        else:
            continue
        origin[key] = "preset"
    if keeps_apart and "command line" not in (origin["run.checkpoint_dir"], origin["run.resume"]):
        values["run.resume"], origin["run.resume"] = "none", "preset"


def _expand(values: dict[str, object]) -> None:
    """Replace a leading ``~`` of the folders, which no shell does behind an equals sign or in a file.

    Raises BadInputError for the home folder of nobody.
    """
    for key in (*dict(FOLDERS), "checkpoint.rescue_dir"):
        if isinstance(given := values.get(key), str):
            values[key] = found = os.path.expanduser(given)  # noqa: PTH111 - "" stays ""
            if found.startswith("~"):
                option = f"--{key.rpartition('.')[2].replace('_', '-')}"
                raise BadInputError(option, given, "no user of this machine has that name")


def _check(name: str, *, is_test: bool) -> None:
    shown = name or "''"
    if name == LATEST or (name == TEST and not is_test):
        whose = "the newest run" if name == LATEST else "--test"
        raise BadInputError("--name", name, f"is taken by {whose}; give another name")
    if not is_name(name):
        raise BadInputError(
            "--name",
            shown,
            "must be letters, digits, dots, dashes and underscores, at most 100, and begin with a letter or"
            " digit",
        )
