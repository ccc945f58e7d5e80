"""Stages of a run: whether each can be trained, and in which one this launch begins. Changes nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.checkpoint.stage_weights import with_start_weights
from ddp_runner.cli.hardware.devices import with_backend
from ddp_runner.config import SettingsError, check_relations, stage_digest
from ddp_runner.config.suggest import nearest
from ddp_runner.core.profile import parse_profile, refuse_beyond_end
from ddp_runner.core.run_stages import AVERAGE, Begin, Found, StageOfFile, begin_at
from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddp_runner.checkpoint.catalog import Entry
    from ddp_runner.config import Resolved
    from ddp_runner.core.launch_plan import LaunchPlan
    from ddp_runner.core.modes import ModeChoice
    from ddp_runner.core.settings import Settings

_OPTION = "--stage"


def checked(resolved: Resolved) -> tuple[tuple[Settings, ...], tuple[str, ...]]:
    """The settings of each stage, or of the run without stages, and notes for people. Raises BadInputError."""
    if not resolved.stages:
        if resolved.settings.run.stage:
            expected = "this run has no stages: list some as stages in a file, or leave it out"
            raise BadInputError(_OPTION, resolved.settings.run.stage, expected)
        return (resolved.settings,), check_relations(resolved.settings)
    _refuse_unknown(resolved.settings)
    stages: list[Settings] = []
    notes: dict[str, tuple[str, ...]] = {}
    for one in resolved.stages:
        settings = one.settings
        assert settings.stage is not None, "of a stage"
        try:
            _refuse_with_stages(settings)
            notes[settings.stage.name] = check_relations(settings)
        except BadInputError as error:
            raise _named(error, settings.stage.name) from error
        stages.append(settings)
    for before, after in pairwise(stages):
        _refuse_no_average(before, after)
    _refuse_profile_beyond(stages)
    digests = tuple(map(stage_digest, stages))
    placed = [_placed(one, digests) for one in stages]
    return tuple(placed), _whose(notes)


def _whose(notes: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the notes about stages, each with its stage's name unless it holds for all."""
    lines = [
        note if all(note in every for every in notes.values()) else f"stage {name}: {note}"
        for name, found in notes.items()
        for note in found
    ]
    return tuple(dict.fromkeys(lines))


def in_mode(resolved: Resolved, choice: ModeChoice) -> Resolved:
    """The same with the backend that was found, in all stages."""
    return replace(
        resolved,
        settings=with_backend(resolved.settings, choice),
        stages=tuple(
            replace(one, settings=with_backend(one.settings, choice)) for one in resolved.stages
        ),
    )


def at_its_begin(stages: tuple[Settings, ...]) -> Settings:
    """The settings of the stage in which this launch begins. Raises BadInputError where there is none."""
    settings = stages[0]
    place, run = settings.stage, settings.run
    if place is None:
        return settings
    begin = begin_at(
        place.names,
        wanted=run.stage,
        resume=run.resume,
        found=_found(Path(run.checkpoint_dir), resume=run.resume),
        alone=[one.stage is not None and not one.stage.begins_with for one in stages],
    )
    return _begun(stages[begin.number], begin)


def alone(plan: LaunchPlan) -> LaunchPlan:
    """Return the plan to train this stage from its beginning as a run without stages, for trials."""
    if plan.settings.stage is None:
        return plan
    settings = with_start_weights(plan.settings)
    run = replace(settings.run, resume="none", stage="")
    settings = replace(settings, run=run, stages=(), stage=None)
    return replace(plan, settings=settings, stages=(), written=None)


def refuse_stages(settings: Settings, what: str) -> None:
    """Raise BadInputError where there are stages: ``what`` knows none."""
    if settings.stages:
        raise BadInputError("stages", "", f"{what}: leave them out, or run each by itself")


def _begun(settings: Settings, begin: Begin) -> Settings:
    assert settings.stage is not None, "of a stage"
    return replace(settings, stage=replace(settings.stage, first_step=begin.first_step))


def _placed(settings: Settings, digests: tuple[str, ...]) -> Settings:
    assert settings.stage is not None, "of a stage"
    return replace(settings, stage=replace(settings.stage, digests=digests))


def _refuse_unknown(settings: Settings) -> None:
    names, wanted = [str(one["name"]) for one in settings.stages], settings.run.stage
    if wanted and wanted not in names:
        near = nearest(wanted, names)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(names)}"
        raise BadInputError(_OPTION, wanted, f"no such stage; {hint}")


def _refuse_no_average(before: Settings, after: Settings) -> None:
    assert before.stage is not None, "of a stage"
    assert after.stage is not None, "of a stage"
    begins_with = after.stage.begins_with
    if begins_with.endswith(AVERAGE) and not before.optim.ema_decay:
        expected = (
            f"stage {before.stage.name} keeps no average: give it ema_decay, or leave out {AVERAGE}"
        )
        raise BadInputError(f"stage {after.stage.name}: init_from", begins_with, expected)


def _refuse_profile_beyond(stages: Sequence[Settings]) -> None:
    """Refuse a profile beyond the sum of the stages' steps, if every stage ends by its steps and not its epochs."""
    steps = [one.run.max_steps for one in stages]
    if all(steps):
        text = stages[0].log.profile
        refuse_beyond_end(parse_profile(text), text=text, total_steps=sum(steps))


def _refuse_with_stages(settings: Settings) -> None:
    if settings.data.preload:
        expected = "cannot be combined with stages, whose data differ: leave it out"
        raise BadInputError("data.preload", "true", expected)
    if settings.checkpoint.only_trained:
        expected = (
            "cannot be combined with stages, which start from each other's weights: leave it out"
        )
        raise BadInputError("checkpoint.only_trained", "true", expected)


def _named(error: BadInputError, stage: str) -> BadInputError:
    """The same, which says of which stage it is."""
    problems = error.problems if isinstance(error, SettingsError) else (error,)
    found = [
        BadInputError(f"stage {stage}: {one.option}", one.value, one.expected) for one in problems
    ]
    return found[0] if len(found) == 1 else SettingsError(found)


def _found(folder: Path, *, resume: str) -> list[Found]:
    """Return the checkpoints that a launch may resume from, or begin with; unreadable manifests are left out."""
    catalog = Catalog(folder)
    try:
        entries: Sequence[Entry] = catalog.resolve("auto" if resume == "none" else resume)
    except OSError:
        return []  # which the claim of the folder says
    return [
        Found(
            step=entry.step,
            stage=StageOfFile.from_about(entry.manifest.about),
            where=str(entry.path),
        )
        for entry in entries
        if entry.manifest is not None and entry.problem is None
    ]
