"""The stages that a file lists: what each may have of its own, and its settings. Reads no file."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddp_runner.config.fields import TASK_SECTION, find_key, known_fields
from ddp_runner.config.foreign_values import in_our_values
from ddp_runner.config.sources import Assignment, from_mapping
from ddp_runner.config.suggest import nearest
from ddp_runner.core.run_stages import AVERAGE, BEST, PREVIOUS, SCRATCH, StagePlace
from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from ddp_runner.config.sources import Origin
    from ddp_runner.core.settings import RunSettings, Settings

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,49}")
_INIT = "init_from"
_ENDS = ("run.epochs", "run.max_steps")
_BEGINS = (PREVIOUS, BEST, SCRATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenStage:
    """One entry of the list. ``written``: as it stands there; ``init_from``: None where it says nothing."""

    name: str
    assignments: tuple[Assignment, ...]
    written: Mapping[str, Any]
    init_from: str | None


def given_stages(newest: Assignment) -> tuple[GivenStage, ...]:
    """Return the stages of the newest list. Raises BadInputError for the first thing that is wrong."""
    entries = () if newest.value is None else newest.value
    if not isinstance(entries, (list, tuple)):
        expected = "must be a list in a file, one entry for each stage: - {name: first, epochs: 1}"
        raise BadInputError(newest.written, _short(entries), expected)
    if not entries:
        expected = "has no stages: list some, or leave the line out for a run without them"
        raise BadInputError(newest.written, "", expected)
    stages = tuple(
        _given(newest, number, entry, is_first=number == 0) for number, entry in enumerate(entries)
    )
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise BadInputError(
                newest.written, name, "two stages have this name: give each its own"
            )
    return stages


def end_by_its_own(
    stage: GivenStage, values: dict[str, object], origin: Mapping[str, Origin]
) -> None:
    """A stage that ends by epochs has no steps of the run's; who types steps has them in every stage."""
    own = {one.name for one in stage.assignments}
    if "run.max_steps" not in own and origin["run.max_steps"] not in (
        "environment",
        "command line",
    ):
        values["run.max_steps"] = 0


def in_stage(
    settings: Settings, stages: Sequence[GivenStage], number: int, *, of_run: RunSettings
) -> Settings:
    """The settings of one stage, which has the name and the folders ``of_run``."""
    stage = stages[number]
    run = replace(
        settings.run,
        name=of_run.name,
        log_dir=of_run.log_dir,
        checkpoint_dir=of_run.checkpoint_dir,
        resume=of_run.resume,
        stage=of_run.stage,
    )
    begins_with = ""
    if number:
        word = stage.init_from or PREVIOUS
        is_word = word.removesuffix(AVERAGE) in (PREVIOUS, BEST)
        begins_with = word if is_word else ""
        run = replace(run, init_from="" if is_word else word)
    following = stages[number + 1].init_from if number + 1 < len(stages) else None
    return replace(
        settings,
        run=run,
        stages=tuple(one.written for one in stages),
        stage=StagePlace(
            names=tuple(one.name for one in stages),
            number=number,
            begins_with=begins_with,
            best_is_used=(following or "").removesuffix(AVERAGE) == BEST,
        ),
    )


def own_settings(entries: object) -> list[tuple[str, dict[str, object]]]:
    """Return for each stage of a file's list its name and its own values by dotted key.

    The result is for people: nothing is refused, and what cannot be parsed is returned as it is written.
    """
    found = []
    for number, entry in enumerate(entries if isinstance(entries, (list, tuple)) else ()):
        if isinstance(entry, Mapping):
            begins_with = {_INIT: entry.get(_INIT) or PREVIOUS} if number else {}
            own = {str(key): value for key, value in entry.items() if key != "name"}
            found.append((str(entry.get("name", number + 1)), _keyed(begins_with | own)))
    return found


def _keyed(own: Mapping[str, object]) -> dict[str, object]:
    begins_with = {_INIT: own[_INIT]} if own.get(_INIT) else {}
    rest = {key: value for key, value in own.items() if key != _INIT}
    try:
        given = list(from_mapping(rest, prefix="", origin="file"))
    except BadInputError:
        return begins_with | rest
    found = dict(begins_with)
    for one in given:
        key, value = one.name, one.value
        with contextlib.suppress(BadInputError, ValueError, OverflowError):
            known = _own(one)
            key, value = known.name, known.value
            if spec := known_fields().get(key):
                value = spec.parse(value)
        found[key] = value
    return found


def _given(newest: Assignment, number: int, entry: object, *, is_first: bool) -> GivenStage:
    where = f"{newest.written}: stage {number + 1}"
    if not isinstance(entry, Mapping):
        raise BadInputError(where, _short(entry), "must have lines such as 'name: first'")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = "must have a name, of letters, digits, dots, dashes and underscores"
        raise BadInputError(where, "" if name is None else _short(name), expected)
    where = f"{newest.written}: stage {name}: "
    init_from = entry.get(_INIT)
    if init_from in (f"{SCRATCH}_{name}", f"{SCRATCH}-{name}"):  # as pipelines name it
        init_from = SCRATCH
    if init_from is not None:
        _check_init(where, init_from, is_first=is_first)
    own = {key: value for key, value in entry.items() if key not in ("name", _INIT)}
    found = [_own(one) for one in from_mapping(own, prefix=where, origin=newest.origin)]
    if not any(one.name in _ENDS and _is_above_0(one.value) for one in found):
        expected = "needs an end: give it max_steps or epochs above 0"
        raise BadInputError(where.removesuffix(": "), "", expected)
    if init_from is not None and is_first:
        written = f"{where}{_INIT}"
        found.append(
            Assignment(written=written, name="run.init_from", value=init_from, origin=newest.origin)
        )
    return GivenStage(name=name, assignments=tuple(found), written=dict(entry), init_from=init_from)


def _own(given: Assignment) -> Assignment:
    """The same under its dotted key. Raises BadInputError for what no stage may have of its own."""
    ours = in_our_values(given)
    specs = known_fields()
    key = find_key(given.written, given.name, list(specs))
    if key.startswith(f"{TASK_SECTION}.") or specs[key].per_stage:
        return replace(given if ours is None else ours, name=key)
    what = f"{key} belongs to the run and is the same in all stages"
    raise BadInputError(given.written, "", f"{what}: write it outside of the list")


def _is_above_0(value: object) -> bool:
    """Return True if ``value`` ends a stage; one that is no number passes, and is refused later."""
    try:
        return value is not None and float(str(value)) > 0
    except ValueError:
        return True


def _check_init(where: str, value: object, *, is_first: bool) -> None:
    written = f"{where}{_INIT}"
    if not isinstance(value, str) or not value:
        expected = "must be previous, best, scratch or the path of weights"
        raise BadInputError(written, _short(value), expected)
    if is_first and value.removesuffix(AVERAGE) in (PREVIOUS, BEST):
        expected = "needs an earlier stage, and this is the first: give scratch, or a path"
        raise BadInputError(written, value, expected)
    word = value.removesuffix(AVERAGE)
    if not set("/.") & set(word) and word not in _BEGINS and (near := nearest(word, _BEGINS)):
        expected = f"did you mean {near}? A file of that name is written ./{word}"
        raise BadInputError(written, value, expected)


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
