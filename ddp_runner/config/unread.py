"""Finds the chosen settings that the task does not read, so that they change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_runner.config.fields import BUILT_IN_TASKS, known_fields
from ddp_runner.config.usual import is_usual

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddp_runner.core.settings import Settings


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
