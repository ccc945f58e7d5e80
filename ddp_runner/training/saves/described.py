"""Describes a checkpoint for people and tools, beyond its state, and holds its task's description."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ddp_runner import config
from ddp_runner.core.monitor import Monitor
from ddp_runner.core.run_stages import StageOfFile, StagePlace
from ddp_runner.core.settings import JsonValue, Settings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.secrets import holds_secret
from ddp_runner.observe.tracker_position import position_path, read_position
from ddp_runner.system.launch_folder import at_launch
from ddp_runner.training.state import TrainState
from ddp_runner.training.task import Describes, Task

_NONE: Mapping[str, JsonValue] = MappingProxyType({})
_CHARACTERS_MAX = 20_000  # it stands in every manifest


def about_file(
    state: TrainState,
    *,
    loss: float,
    settings: Mapping[str, JsonValue],
    monitor: Monitor | None = None,
    place: StagePlace | None = None,
    trackers: Mapping[str, JsonValue] = _NONE,
) -> dict[str, JsonValue]:
    """Return the facts that people and tools want to know about a file without reading it.

    ``loss``: of the last step. ``settings``: without secrets. ``monitor``: the figure that the best is
    judged by. Values that are no numbers are left out. ``place``: the stage, by which a run of stages knows where it resumes.
    ``trackers``: of :func:`tracker_ids`.
    """
    shown: dict[str, object] = {n: value for n, value in settings.items() if n != "stage"}
    found: dict[str, JsonValue] = {"settings": shown}
    if place is not None:
        found["stage"] = StageOfFile.of(place).to_record()
    if state.tokens is not None and math.isfinite(state.tokens):
        found["tokens"] = state.tokens
    if math.isfinite(loss):
        found["loss"] = loss
    figures = {name: one for name, one in state.figures.items() if math.isfinite(one)}
    found |= {"figures": {**figures}} if figures else {}
    if monitor is not None and state.best.of == monitor.words:
        found["best"] = {"step": state.best.step, "value": state.best.value}
    return found | ({"trackers": {**trackers}} if trackers else {})


def tracker_ids(settings: Settings) -> dict[str, JsonValue]:
    """Return each tracker's id and link for this run, as far as they are known."""
    found: dict[str, JsonValue] = {}
    for name in settings.log.trackers:
        kept = read_position(position_path(at_launch(settings.run.log_dir), name)).get("kept")
        if isinstance(kept, Mapping) and kept.get("id"):
            found[name] = {"id": str(kept["id"]), "link": str(kept.get("link", ""))}
    return found


def described(task: Task, settings: Settings) -> dict[str, Any]:
    """Key -> plain value; empty where the task says nothing. Raises BadInputError for what is no plain value."""
    if not isinstance(task, Describes):
        return {}
    given: object = task.describe()
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise _refused(settings, "its describe() must give a dict of names and plain values")
    found = {}
    for name, value in given.items():
        try:
            text = json.dumps(value, allow_nan=False, sort_keys=True)
        except (TypeError, ValueError) as error:
            kind = type(value).__name__
            what = f"its describe() gives for {name!r} a {kind}, which is no plain value ({error})"
            raise _refused(settings, what) from error
        if len(text) > _CHARACTERS_MAX:
            what = f"its describe() gives for {name!r} {len(text):,} characters: give a hash of it"
            raise _refused(settings, what)
        if holds_secret(name, value):
            what = f"its describe() gives {name!r}, the name of a secret: no checkpoint may hold it"
            raise _refused(settings, what)
        found[config.described_key(name)] = json.loads(text)
    return found


def _refused(settings: Settings, what: str) -> BadInputError:
    return BadInputError("--task", settings.run.task, what)
