"""Judges by their values which settings are defaults, and finds chosen ones that the task does not read."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from ddp_runner.config.fields import BUILT_IN_TASKS, known_fields
from ddp_runner.config.presets import CADENCES, PRESETS, RECIPES
from ddp_runner.config.run_names import TEST, name_of_task
from ddp_runner.core.settings.whole_run import FOLDERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddp_runner.core.settings import Settings


def is_usual(key: str, values: Mapping[str, object]) -> bool:
    """Return True if ``key`` has a value that some device gives it by default, given the other ``values``.

    ``values`` are by dotted key, as a run's files have them. A run does not record its devices' preset, so a value
    that any preset gives counts as usual.
    """
    value = values[key]
    return any(_plain(value) == _plain(usual) for usual in _usual(key, values))


def _usual(key: str, values: Mapping[str, object]) -> Iterator[object]:
    task, is_test = str(values.get("run.task", "")), bool(values.get("run.test"))
    if (spec := known_fields().get(key)) is not None:
        yield spec.default
    laid = [values for name, values in PRESETS.items() if is_test or not name.endswith(TEST)]
    laid += [of_task[task] for of_task in RECIPES.values() if task in of_task]
    yield from (each[key] for each in laid if key in each)
    name = TEST if is_test else name_of_task(task)
    if key == "run.name":
        yield name
    other = values.get(dict(CADENCES).get(key, ""))
    if isinstance(other, int) and other > 0:
        yield 0  # steps were chosen
    folders = dict(FOLDERS)
    if key in folders:
        yield str(PurePath(folders[key], str(values.get("run.name", name))))
    if key == "run.resume" and is_test:
        yield "none"


def _plain(value: object) -> object:
    """A file has lists for tuples."""
    return list(value) if isinstance(value, tuple) else value


def unread_settings(
    settings: Settings, origins: Mapping[str, str], *, is_given_all: bool
) -> tuple[str, ...]:
    """The keys, in the order of the settings. ``is_given_all``: the task is a user's and gets all of them."""
    task = settings.run.task
    if task not in BUILT_IN_TASKS and is_given_all:
        return ()
    return tuple(
        key
        for key, spec in known_fields().items()
        if spec.read_by and task not in spec.read_by and _is_chosen(key, settings, origins)
    )


def unread_warning(
    settings: Settings, origins: Mapping[str, str], *, is_given_all: bool
) -> tuple[str, ...]:
    """A line that names them; none where there are none."""
    keys = unread_settings(settings, origins, is_given_all=is_given_all)
    if not keys:
        return ()
    has = "it has no effect" if len(keys) == 1 else "they have no effect"
    is_of_synthetic = all(known_fields()[key].read_by == ("synthetic",) for key in keys)
    other = "; task=synthetic does" if is_of_synthetic else ""
    return (f"the task {settings.run.task} does not read {', '.join(keys)}: {has}{other}",)


def _is_chosen(key: str, settings: Settings, origins: Mapping[str, str]) -> bool:
    """Not so of a config.yaml that a run has written, which has every setting: nobody chose what is usual."""
    origin = origins.get(key, "default")
    if origin != "file":
        return origin in ("environment", "command line")
    section, _, name = key.partition(".")
    value = getattr(getattr(settings, section), name)
    tasks = (settings.run.task, *BUILT_IN_TASKS)  # that run may have been another task's
    return not any(is_usual(key, {"run.task": task, key: value}) for task in tasks)
