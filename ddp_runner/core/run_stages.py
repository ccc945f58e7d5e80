"""A run of several stages: the place of settings in it, its beginning and its resumption. Reads no file.

A stage ends as a run does, and the next one begins as a run with ``--init-from`` does, with ranks that are
new processes; only the counts of steps, samples and tokens continue. So a process knows one stage alone, and a
replacement learns which by the settings that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddp_runner.kernel.rules.errors import BadInputError

PREVIOUS, BEST, SCRATCH = "previous", "best", "scratch"
AVERAGE = ":ema"
_OPTION = "--stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """The stage that settings belong to. ``names``: all stages, in order.

    ``first_step``: the number of steps of the earlier stages. ``first_generation``: the first generation in which
    this launch may train the stage. ``begins_with``: ``previous`` or ``best``, possibly with ``:ema``; empty if
    ``run.init_from`` names the weights. ``best_is_used``: by the next stage. ``digests``: one for each stage, of the
    settings that determine its steps.
    """

    names: tuple[str, ...]
    number: int
    first_step: int = 0
    first_generation: int = 1
    begins_with: str = ""
    best_is_used: bool = False
    digests: tuple[str, ...] = ()

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StagePlace:
        """Return the place that ``asdict()`` and JSON have made ``record`` of. Raises ValueError for any other."""
        try:
            lists = {key: tuple(record[key]) for key in ("names", "digests")}
            return cls(**{**record, **lists})
        except (KeyError, TypeError) as error:
            raise ValueError(record) from error

    @property
    def name(self) -> str:
        """The name of this stage."""
        return self.names[self.number]

    @property
    def before(self) -> str:
        """The name of the stage before; empty for the first."""
        return self.names[self.number - 1] if self.number else ""

    @property
    def is_last(self) -> bool:
        """True if the run ends with this stage."""
        return self.number == len(self.names) - 1

    @property
    def data_key(self) -> str:
        """The key for facts about samples, which hold only for this stage with these settings."""
        return " ".join([self.name, *self.digests[self.number : self.number + 1]])

    @property
    def title(self) -> str:
        """The stage as people read it: ``tune (2 of 3)``."""
        return f"{self.name} ({self.number + 1} of {len(self.names)})"


def uses_best(place: StagePlace | None, *, load_best_at_end: bool) -> bool:
    """Return whether the best state of a run, or of its stage, is used later."""
    return load_best_at_end or (place is not None and place.best_is_used)


def steps_before(place: StagePlace | None) -> int:
    """Return the number of steps of the earlier stages; 0 without stages."""
    return 0 if place is None else place.first_step


def refused_line(place: StagePlace, line: str, *, has_trained: bool) -> str:
    """Return the error line for a stage that cannot be trained. ``has_trained``: this launch has been training."""
    whose = f"stage {place.name}: "
    said = line if line.startswith(whose) else f"{whose}{line}"
    if not has_trained:
        return said
    return f"{said}; correct the stage and run the same command again to resume with it"


def is_first_generation(generation: int, place: StagePlace | None) -> bool:
    """Return whether no earlier generation of this launch has trained the stage, or the run if it has no stages."""
    return generation == (1 if place is None else place.first_generation)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOfFile:
    """The stage of a checkpoint. ``names`` and ``digests``: of the stages up to that one, in order."""

    number: int
    first_step: int
    names: tuple[str, ...]
    digests: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of its stage."""
        return self.names[self.number]

    @classmethod
    def of(cls, place: StagePlace) -> StageOfFile:
        """Return the record for a checkpoint that is written in ``place``."""
        until = place.number + 1
        return cls(
            number=place.number,
            first_step=place.first_step,
            names=place.names[:until],
            digests=place.digests[:until],
        )

    def to_record(self) -> dict[str, object]:
        """Plain values, with the name for people."""
        values = asdict(self)
        return {"name": self.name, **values, "names": [*self.names], "digests": [*self.digests]}

    @classmethod
    def from_about(cls, about: Mapping[str, object]) -> StageOfFile | None:
        """Return the stage that a manifest names; None if its run has no stages."""
        record = about.get("stage")
        if not isinstance(record, Mapping):
            return None
        number, first_step = record.get("number"), record.get("first_step")
        names, digests = record.get("names"), record.get("digests", [])
        if not isinstance(number, int) or not isinstance(first_step, int):
            return None
        if not isinstance(names, Sequence) or not isinstance(digests, Sequence):
            return None
        if not 0 <= number < len(names):
            return None
        return cls(
            number=number,
            first_step=first_step,
            names=tuple(map(str, names)),
            digests=tuple(map(str, digests)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint in the run's folder, or the one that is resumed by name. ``where``: its path."""

    step: int
    stage: StageOfFile | None
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The stage that a launch trains, and the number of steps of the stages before it."""

    number: int
    first_step: int = 0


def begin_at(
    names: Sequence[str],
    *,
    wanted: str,
    resume: str,
    found: Sequence[Found],
    alone: Sequence[bool],
) -> Begin:
    """Return the stage at which a launch begins. Raises BadInputError if it cannot begin.

    ``wanted``: the requested stage, one of ``names``; empty for none. ``found``: the checkpoints, newest first, or the
    one that ``resume`` names; for a fresh start those that it may begin with. ``alone``: for each stage, whether
    it needs no checkpoint of the one before.
    """
    asked = names.index(wanted) if wanted else None
    newest = found[0] if found and resume != "none" else None
    if newest is None:
        return _begun(names, asked or 0, found=found, alone=alone)
    stage = newest.stage
    if stage is None:
        expected = (
            f"{newest.where} is of a run without stages: take another --name, or start fresh with"
            " --resume none"
        )
        raise BadInputError("--resume", resume, expected)
    refuse_other_list(names, stage, where=newest.where, resume=resume)
    if asked is not None and asked > stage.number:
        return _begun(names, asked, found=found, alone=alone)
    return Begin(number=stage.number, first_step=stage.first_step)


def refuse_other_list(names: Sequence[str], stage: StageOfFile, *, where: str, resume: str) -> None:
    """Raise BadInputError where the stages up to that of a checkpoint are others by now."""
    until = stage.number + 1
    if tuple(names[:until]) == stage.names[:until]:
        return
    expected = (
        f"{where} is of stage {stage.name}, after the stages {', '.join(stage.names[:until])}, and the stages"
        f" are {', '.join(names)} now: give those up to {stage.name} as they were, take another --name, or"
        " start fresh with --resume none"
    )
    raise BadInputError("--resume", resume, expected)


def changed_stages(place: StagePlace, stage: StageOfFile) -> tuple[str, ...]:
    """Names of the stages that are over and were made with other settings than are given now."""
    pairs = zip(place.digests, stage.digests, strict=False)
    return tuple(
        place.names[number]
        for number, (now, then) in enumerate(pairs)
        if number < place.number and now != then
    )


def stage_to_enter(place: StagePlace, found: Found | None) -> StageOfFile | None:
    """Return the other stage that the newest sound checkpoint is of; None if this stage resumes, or begins with it."""
    if found is None or found.stage is None:
        return None
    stage = found.stage
    if stage.number == place.number and stage.first_step == place.first_step:
        return None
    if begins_with(place, found):
        return None
    return stage


def begins_with(place: StagePlace, found: Found) -> bool:
    """Return whether the stage begins with this checkpoint of an earlier one."""
    stage = found.stage
    return stage is not None and stage.number < place.number and found.step == place.first_step


def _begun(
    names: Sequence[str], number: int, *, found: Sequence[Found], alone: Sequence[bool]
) -> Begin:
    """Begin a stage with the newest checkpoint of the one before, or count on from an earlier one."""
    if number == 0:
        return Begin(number=0)
    before = names[number - 1]
    for one in found:
        if one.stage is not None and one.stage.name == before:
            refuse_other_list(names, one.stage, where=one.where, resume="auto")
            return Begin(number=number, first_step=one.step)
    if alone[number]:
        earlier = [one.step for one in found if one.stage is not None and one.stage.number < number]
        return Begin(number=number, first_step=max(earlier, default=0))
    expected = (
        f"begins with what stage {before} has made, of which there is no checkpoint: begin without"
        f" {_OPTION}, or give the stage init_from: PATH"
    )
    raise BadInputError(_OPTION, names[number], expected)
