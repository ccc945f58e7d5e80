"""Judges by their values which settings are defaults. Apart, since reports of old runs ask too."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from ddp_runner.config.fields import known_fields
from ddp_runner.config.presets import CADENCES, PRESETS, RECIPES
from ddp_runner.config.run_names import TEST, name_of_task
from ddp_runner.core.settings.whole_run import FOLDERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


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
