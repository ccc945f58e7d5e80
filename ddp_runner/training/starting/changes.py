"""Compares a launch's recipe with that of the checkpoint it resumes from. Refuses nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddp_runner.checkpoint.store import Loaded
from ddp_runner.config.identity import DIGEST, RATE_KEYS, TOTAL_STEPS, value_before
from ddp_runner.core.settings import OptimSettings, Settings
from ddp_runner.kernel.step.runtime import Runtime
from ddp_runner.kernel.wire.events import TuningChanged
from ddp_runner.training.components.layer_plan import in_steps
from ddp_runner.training.components.lr_schedule import (
    decay_begin,
    learning_rate,
    schedule_end,
    warmup_end,
)
from ddp_runner.training.components.tuning import Tuning, searches_at_first
from ddp_runner.training.state import TrainState

CHANGES_KEPT = 100  # of the newest, in state and manifest
_PROBES = 64  # steps at which two schedules are held against each other, beside their corners
_RATES = {f"optim.{name}" for name in RATE_KEYS}
_UNFREEZE = "optim.unfreeze"
_FIRST_RATES = {f"optim.{name}": getattr(OptimSettings(), name) for name in RATE_KEYS}


def changes_since(
    loaded: Loaded, state: TrainState, *, recipe: Mapping[str, Any]
) -> tuple[str, ...]:
    """A line for each thing that is computed otherwise from the step of ``loaded`` on.

    ``recipe`` is this launch's (``config.identity``), ``state`` what it has restored. Empty where no
    step is left, or none was computed before.
    """
    step, first, old = state.committed_step, state.first_step, loaded.manifest.recipe
    if not 0 < state.own_step < recipe[TOTAL_STEPS]:
        return ()
    lines = dict(_changed_values(old, recipe, step=step, first=first)) if old else {}
    if not old:  # of a version that wrote none: what else the file says
        before = {"torch": loaded.manifest.versions.get("torch", recipe["torch"])}
        lines = dict(_changed_values(before, {"torch": recipe["torch"]}, step=step, first=first))
    kept = {"optim.ema_decay": _average(loaded.state, state)}
    kept["precision"] = _scaler(loaded.state, state)
    kept["the order of the parameters"] = _parameters(loaded.state, state)
    for key, what in kept.items():
        if what:
            lines[key] = f"{lines[key]}: {what}" if key in lines else f"{what} at step {step}"
    return tuple(lines.values())


def note_changes(loaded: Loaded, state: TrainState, *, recipe: Mapping[str, Any]) -> None:
    """Have ``state``, just restored from ``loaded``, keep what changes from here on."""
    news = changes_since(loaded, state, recipe=recipe)
    state.changes = (*state.changes, *news)[-CHANGES_KEPT:]


def report_changes(runtime: Runtime, state: TrainState, *, known: Sequence[str]) -> None:
    """Report what was changed, as reasons why the run is not exact; ``known`` lines were logged before."""
    for line in state.changes:
        is_news = line not in known
        if is_news:
            runtime.logger.info(f"changed: {line}")
        runtime.report(
            TuningChanged(
                rank=runtime.rank_info.rank,
                step=state.committed_step,
                action=line if is_news else "",
                inexact_reason=line,
                fault_free=True,
            )
        )


def tuning_of_changed(
    tuning: Tuning, settings: Settings, loaded: Loaded, *, recipe: Mapping[str, Any]
) -> Tuning:
    """``tuning`` of a file, without what was learnt for settings that are others now."""
    old = loaded.manifest.recipe
    changed = {key for key in old if key in recipe and old[key] != recipe[key]}
    if "data.micro_batch_size" in changed:
        tuning = replace(tuning, micro_batch_size=int(recipe["data.micro_batch_size"]))
    if any(key.startswith("run.compile") for key in changed):
        tuning = replace(tuning, may_compile=True)
    ddp = settings.ddp
    if ddp.find_unused_parameters != "auto" or ddp.static_graph:  # else the file knows more
        wanted = searches_at_first(ddp) or tuning.found_unused
        tuning = replace(tuning, find_unused_parameters=wanted and not tuning.must_not_search)
    return tuning


def _changed_values(
    old: Mapping[str, Any], new: Mapping[str, Any], *, step: int, first: int
) -> list[tuple[str, str]]:
    """Key and line of each difference; of those that act through the rate only where it differs.

    ``first``: the step that schedules count from.
    """
    rates = _RATES | {TOTAL_STEPS}
    if "optim.schedule" in old:  # of a version that had fewer settings of it
        old = {**_FIRST_RATES, **old}
    pairs: list[tuple[str, Any, Any]] = []
    since = ""  # where steps that are over had other rates, too
    if rates <= old.keys():
        since = _since(_first_other(old, {**old, TOTAL_STEPS: new[TOTAL_STEPS]}), step, first)
    # Of another length alone the steps to come have the rates of a run that has it from the start.
    has_others = rates <= old.keys() and any(old[key] != new[key] for key in _RATES)
    if since or (has_others and not _same_rates(old, new, step=step - first)):
        pairs = [(key, old[key], new[key]) for key in new if key in _RATES]
        if old["optim.warmup_steps"] == new["optim.warmup_steps"]:  # at most half of the run
            pairs.append(("end of the warm-up", _warmup_end(old), _warmup_end(new)))
        if "constant" not in (old["optim.schedule"], new["optim.schedule"]):
            pairs.append(("end of the schedule", _schedule_end(old), _schedule_end(new)))
    lines = [
        (key, _line(key, before, after, step=step) + (since if key.startswith("end of") else ""))
        for key, before, after in pairs
        if before != after
    ]
    others = [(key, value_before(old, new, key), new[key]) for key in new if key not in rates]
    if old.get(_UNFREEZE) == new.get(_UNFREEZE) and TOTAL_STEPS in old:
        others.append(("unfreezing", _unfreezing(old), _unfreezing(new)))
    return lines + [
        (key, _line(key, before, after, step=step))
        for key, before, after in others
        if before != after
    ]


def _unfreezing(recipe: Mapping[str, Any]) -> str:
    """When layers are unfrozen, as steps."""
    return in_steps(str(recipe.get(_UNFREEZE, "")), total_steps=int(recipe[TOTAL_STEPS]))


# INVARIANT length-from-the-start: a run that is made longer or shorter is exact only where each step has the
# rate that it has in a run of that length from step 0 on.
# Broken if: two lengths are compared from the step of the resume on.
# Guarded by: test_a_longer_run_says_what_the_steps_that_are_over_had.
def _first_other(old: Mapping[str, Any], new: Mapping[str, Any]) -> int | None:
    """The first step whose rate is another one, of the steps that both runs have; None: there is none."""
    end = min(int(old[TOTAL_STEPS]), int(new[TOTAL_STEPS]))
    corners = [0, *_corners(old), *_corners(new)]
    # Between two corners two schedules are the same, or differ from the first step or its next on.
    probes = {corner + aside for corner in corners for aside in (-1, 0, 1, 2)}
    others = (
        one for one in sorted(probes) if 0 <= one < end and _rate(old, one) != _rate(new, one)
    )
    return next(others, None)


def _since(other: int | None, step: int, first: int) -> str:
    if other is None or first + other >= step:
        return ""
    return f", where steps from {first + other} on had the rates of the length before"


def _warmup_end(recipe: Mapping[str, Any]) -> int:
    return warmup_end(_settings(recipe), total_steps=int(recipe[TOTAL_STEPS]))


def _corners(recipe: Mapping[str, Any]) -> tuple[int, ...]:
    """The steps at which a schedule bends."""
    begin = decay_begin(_settings(recipe), total_steps=int(recipe[TOTAL_STEPS]))
    return _warmup_end(recipe), begin, _schedule_end(recipe)


def _schedule_end(recipe: Mapping[str, Any]) -> int:
    return schedule_end(_settings(recipe), total_steps=int(recipe[TOTAL_STEPS]))


def _same_rates(old: Mapping[str, Any], new: Mapping[str, Any], *, step: int) -> bool:
    """Return True if no step from ``step`` on has another learning rate."""
    end = int(new[TOTAL_STEPS])
    corners = [corner for recipe in (old, new) for corner in _corners(recipe)]
    probes = {step + (end - step) * number // _PROBES for number in range(_PROBES)}
    probes |= {corner + aside for corner in corners for aside in (-1, 0, 1)}
    return all(_rate(old, one) == _rate(new, one) for one in probes if step <= one < end)


def _rate(recipe: Mapping[str, Any], step: int) -> float:
    total_steps = int(recipe[TOTAL_STEPS])
    return learning_rate(step, total_steps=total_steps, settings=_settings(recipe))


def _settings(recipe: Mapping[str, Any]) -> OptimSettings:
    return OptimSettings(**{name: recipe[f"optim.{name}"] for name in RATE_KEYS})


def _line(key: str, before: object, after: object, *, step: int) -> str:
    if str(after).startswith(DIGEST):  # nobody reads one: the manifest has both
        return f"{key} was edited at step {step}"
    return f"{key} {_shown(before)} -> {_shown(after)} at step {step}"


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def _average(saved: Mapping[str, Any], state: TrainState) -> str:
    had, has = "ema" in saved, state.ema is not None
    if had == has:
        return ""
    return "the file's average (EMA) is dropped" if had else "an average (EMA) begins again"


def _scaler(saved: Mapping[str, Any], state: TrainState) -> str:
    had, has = bool(saved["scaler"]), state.precision.scaler.is_enabled()
    if had == has:
        return ""
    return "the file's loss scale is dropped" if had else "the loss scale begins again"


def _parameters(saved: Mapping[str, Any], state: TrainState) -> str:
    """Sums over all of them, as the gradient's norm, have other last bits in another order."""
    names = state.capture()["optimizer_names"]
    has_moved = saved.get("optimizer_names", names) != names
    return "the model's parameters come in another order" if has_moved else ""
