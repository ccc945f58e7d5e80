"""Assignments of all sources become one ``Settings``, with the origin of each value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ddp_runner.config.fields import (
    BUILT_IN_TASKS,
    STAGES,
    TASK_SECTION,
    FieldSpec,
    find_key,
    known_fields,
    sections,
    whose_value,
)
from ddp_runner.config.foreign_values import RunFacts, in_our_values, is_fact, note_on, untrue
from ddp_runner.config.presets import CADENCES, PRESETS, RECIPES, WORKERS
from ddp_runner.config.run_names import STRENGTH, name_the_run
from ddp_runner.config.sources import (
    Assignment,
    Origin,
    from_command_line,
    from_environment,
    from_file,
    from_mapping,
)
from ddp_runner.config.stage_list import (
    GivenStage,
    end_by_its_own,
    given_stages,
    in_stage,
)
from ddp_runner.core.run_stages import StagePlace
from ddp_runner.core.settings import Settings
from ddp_runner.core.settings.declaration import TEXTS, legal
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.secrets import HIDDEN

if TYPE_CHECKING:
    from pathlib import Path

_NO_VARIABLES: Mapping[str, str] = {}


class SettingsError(BadInputError):
    """Several settings are wrong; ``problems`` holds one error each, ``str`` a line each."""

    def __init__(self, problems: Sequence[BadInputError]) -> None:
        first = problems[0]
        super().__init__(first.option, first.value, first.expected)
        self.problems = tuple(problems)
        self.args = ("\n".join(str(problem) for problem in problems),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Settings that are each legal. ``origin`` says, by dotted key, which source set the value.

    ``notes`` are lines for people about names that other trainers use. ``facts``: what was given beside settings,
    and says what the run is. ``stages``: for each stage the same with what is its own; empty without stages.
    """

    settings: Settings
    origin: Mapping[str, Origin]
    notes: tuple[str, ...] = ()
    facts: tuple[Assignment, ...] = ()
    stages: tuple[Resolved, ...] = ()

    def refuse_untrue(self, facts: RunFacts) -> None:
        """Raise BadInputError, or SettingsError, for what was given and is not so of the run."""
        raise_problems(untrue(self.facts, facts))


def raise_problems(problems: Sequence[BadInputError]) -> None:
    """Raise what was found: nothing, the one problem, or a SettingsError of all."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise SettingsError(problems)


def resolve(
    *,
    files: Sequence[Path] = (),
    environment: Mapping[str, str] = _NO_VARIABLES,
    command_line: Mapping[str, object] | Sequence[tuple[str, str]] = (),
    preset: str | None = None,
) -> Resolved:
    """Lay a built-in task's recipe, preset, files (in order), environment and command line over the defaults.

    Reads the files and nothing else. Raises BadInputError, or SettingsError when several values
    are wrong. Relations between settings are checked by :func:`check_relations`.
    """
    below: list[Assignment] = [
        Assignment(written=key, name=key, value=value, origin="preset")
        for key, value in (PRESETS[preset] if preset is not None else {}).items()
    ]
    for path in files:
        below.extend(from_file(path))
    above = [*from_environment(environment), *from_command_line(command_line)]
    return _resolved(below, above, preset=preset)


def _resolved(
    below: Sequence[Assignment], above: Sequence[Assignment], *, preset: str | None
) -> Resolved:
    """Resolve the whole run and each stage; a stage's own settings rank between ``below`` and ``above``."""
    lists = [one for one in (*below, *above) if one.name == STAGES]
    stages = given_stages(lists[-1]) if lists else ()
    below, above = ([one for one in part if one.name != STAGES] for part in (below, above))
    whole = _laid([*below, *above], preset=preset)
    if not stages:
        return whole
    laid = [
        _laid([*below, *stage.assignments, *above], preset=preset, stage=stage) for stage in stages
    ]
    run = laid[0].settings.run  # without a name it is called as the first task
    found = [
        replace(one, settings=in_stage(one.settings, stages, number, of_run=run))
        for number, one in enumerate(laid)
    ]
    folders = {name: getattr(run, name) for name in ("name", "log_dir", "checkpoint_dir")}
    settings = replace(
        whole.settings,
        run=replace(whole.settings.run, **folders),
        stages=tuple(stage.written for stage in stages),
    )
    return replace(
        whole,
        settings=settings,
        stages=tuple(found),
        notes=tuple(dict.fromkeys(note for one in (whole, *found) for note in one.notes)),
    )


def _laid(
    assignments: Sequence[Assignment], *, preset: str | None, stage: GivenStage | None = None
) -> Resolved:
    values, origin = _merge(assignments)
    _lay_recipe(values, origin, preset=preset)
    _choose_cadence(values, origin)
    _choose_workers(values, origin)
    if stage is not None:
        end_by_its_own(stage, values, origin)
    name_the_run(values, origin)
    return Resolved(
        settings=build_settings(values),
        origin=origin,
        notes=tuple(note for given in assignments if (note := note_on(given))),
        facts=tuple(given for given in assignments if is_fact(given.name)),
    )


def from_flat(config: Mapping[str, object], *, preset: str | None = None) -> Settings:
    """Settings of the Python API's dict: flat names, dotted names or nested sections.

    What says what the run is, is passed over: :func:`refuse_untrue` holds it against the run. Raises BadInputError or SettingsError as :func:`resolve` does.
    """
    below = list(
        from_mapping(PRESETS[preset] if preset is not None else {}, prefix="", origin="preset")
    )
    given = list(from_mapping(config, prefix="", origin="command line"))
    return _resolved([*below, *given], (), preset=preset).settings


def refuse_untrue(config: Mapping[str, object], facts: RunFacts) -> None:
    """Raise BadInputError, or SettingsError, for what such a dict says of the run and is not so."""
    raise_problems(untrue(from_mapping(config, prefix="", origin="command line"), facts))


def origins_of(config: Mapping[str, object]) -> Mapping[str, Origin]:
    """Return the origin of each setting, by dotted key, for a dict that :func:`from_flat` takes."""
    given = from_mapping(config, prefix="", origin="command line")
    return _merge(one for one in given if one.name != STAGES)[1]


def _merge(assignments: Iterable[Assignment]) -> tuple[dict[str, object], dict[str, Origin]]:
    """The last assignment of each key wins; a list given twice by one source grows."""
    specs = known_fields()
    values: dict[str, object] = {}
    origin: dict[str, Origin] = dict.fromkeys(specs, "default")
    problems: list[BadInputError] = []
    for written in assignments:
        try:
            given = in_our_values(written)
            if given is None:
                continue
            key = find_key(given.written, given.name, list(specs))
            value = _legal_value(given, specs.get(key))
        except BadInputError as problem:
            problems.append(problem)
            continue
        earlier = values.get(key)
        if isinstance(earlier, tuple) and isinstance(value, tuple) and specs[key].written is TEXTS:
            value = earlier + value if origin[key] == given.origin else value
        values[key], origin[key] = value, given.origin
    problems += [
        BadInputError(key, "", f"is hidden in that file ({HIDDEN}); give it again, as {key}=VALUE")
        for key, value in values.items()
        if key.startswith(f"{TASK_SECTION}.") and _holds_hidden(value)
    ]
    raise_problems(problems)
    return values, origin


def _holds_hidden(value: object) -> bool:
    """Return True if ``value`` holds the placeholder that a settings file has in place of a secret."""
    if isinstance(value, Mapping):
        return any(_holds_hidden(item) for item in value.values())
    return value == HIDDEN


def _legal_value(given: Assignment, spec: FieldSpec | None) -> object:
    if spec is None:
        if not _is_json(given.value):
            raise BadInputError(
                given.written,
                given.value,
                "must be text, a finite number, true, false or null, or a list or mapping of these",
            )
        return given.value
    try:
        return spec.parse(given.value)
    except (ValueError, OverflowError):
        shown, other = _shown(given.value), whose_value(given.name, given.value)
        raise BadInputError(given.written, shown, f"must be {spec.expected()}{other}") from None


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if value == "":
        return "''"
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def _is_json(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_json(item) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (str, int))


def _lay_recipe(
    values: dict[str, object], origin: dict[str, Origin], *, preset: str | None
) -> None:
    """Fill in what the built-in task states, where nobody has said anything.

    Its step count, which wins over epochs, gives way to whoever asks for epochs.
    """
    task = str(values.get("run.task", BUILT_IN_TASKS[0]))
    for key, value in RECIPES.get(preset or "", {}).get(task, {}).items():
        is_chosen = key == "run.max_steps" and origin["run.epochs"] != "default"
        if origin[key] == "default" and not is_chosen:
            values[key], origin[key] = value, "preset"


def _choose_cadence(values: dict[str, object], origin: dict[str, Origin]) -> None:
    """Epochs or steps, whichever a later source has chosen; one source that gives both has both."""
    for epochs, steps in CADENCES:
        by_steps = values.get(steps, 0)
        if isinstance(by_steps, int) and by_steps > 0 and values.get(epochs, 1) != 0:
            off = {epochs: 0, steps: known_fields()[steps].default}
            _weaker_is_off(values, origin, off)


def _choose_workers(values: dict[str, object], origin: dict[str, Origin]) -> None:
    """Choose between workers per rank and per machine by the strength of their sources, as above."""
    each, total = WORKERS
    if values.get(total) is not None:
        _weaker_is_off(values, origin, {each: known_fields()[each].default, total: None})


def _weaker_is_off(
    values: dict[str, object], origin: dict[str, Origin], off: Mapping[str, object]
) -> None:
    """Give the one of two settings that the weaker source has chosen its value of ``off``."""
    weaker, stronger = sorted(off, key=lambda key: STRENGTH[origin[key]])
    if STRENGTH[origin[weaker]] < STRENGTH[origin[stronger]]:
        values[weaker], origin[weaker] = off[weaker], "preset"


def build_settings(values: Mapping[str, object]) -> Settings:
    """Settings of dotted keys. Raises BadInputError for a value that ``Settings`` refuses."""
    nested: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    return validate_record(nested)


def validate_record(record: Mapping[str, object]) -> Settings:
    """Settings of nested plain values. Raises BadInputError, or SettingsError for several wrong values."""
    problems: list[BadInputError] = []
    found: dict[str, Any] = {}
    hints = {field.name: field.type for field in fields(Settings)}
    for name, given in record.items():
        owner = sections().get(name)
        try:
            if owner is not None and isinstance(given, Mapping):
                problems += _wrong_in(name, given)
                found[name] = given if problems else owner(**given)
            elif name == "stage" and isinstance(given, Mapping):
                found[name] = StagePlace.from_record(given)
            else:
                found[name] = legal(hints[name], given)
        except KeyError:
            problems.append(BadInputError(name, "", "unknown setting"))
        except ValueError:
            problems.append(BadInputError(name, "", "must be plain values"))
    raise_problems(problems)
    return Settings(**found)


def _wrong_in(section: str, values: Mapping[str, object]) -> Iterator[BadInputError]:
    """Yield an error for each value of a section that is no setting, or is not legal."""
    for name, value in values.items():
        key = f"{section}.{name}"
        spec = known_fields().get(key)
        if spec is None:
            yield BadInputError(key, "", "unknown setting")
            continue
        try:
            legal(spec.hint, value)
        except (ValueError, OverflowError):
            yield BadInputError(key, _shown(value), f"must be {spec.expected()}")
