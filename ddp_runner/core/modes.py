"""Chooses how a run uses its devices: one rank, one rank over all of them, or one rank each. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ddp_runner.core.launch_plan import names_a_gpu_twice
from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddp_runner.core.settings import Settings

OPTION = "run.mode"


class Mode(Enum):
    """The value is the word of the setting."""

    SINGLE = "single"
    DATA_PARALLEL = "data_parallel"
    DISTRIBUTED = "distributed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """The backend through which ranks on several GPUs communicate: nccl, gloo or "" for none; ``found`` says why."""

    backend: str
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeChoice:
    """``backend``: of the group, where that is another one than without the choice; else ""."""

    mode: Mode
    reason: str
    backend: str = ""

    @property
    def words(self) -> str:
        """The mode and its reason, as people read them."""
        return f"{self.mode.value}: {self.reason}"


def asks_for_collectives(settings: Settings, *, devices: int, is_on_gpu: bool) -> bool:
    """Return whether the choice of mode depends on the backends that the ranks could use."""
    return settings.run.mode == "auto" and is_on_gpu and devices > 1 and not _is_said(settings)


def choose_mode(
    settings: Settings,
    *,
    devices: int,
    is_on_gpu: bool,
    collectives: Collectives | None = None,
    machines: int = 1,
) -> ModeChoice:
    """Return the mode of a run that could use ``devices`` devices. Raises BadInputError for a contradiction.

    ``collectives``: needed if :func:`asks_for_collectives` says so.
    """
    asked = settings.run.mode
    raise_first(mode_problems(settings))
    if asked in ("single", "data_parallel") and machines > 1:
        expected = "is for one machine: leave out --nnodes, and NNODES, or take distributed"
        raise BadInputError(OPTION, asked, expected)
    what = _named(devices, is_on_gpu=is_on_gpu)
    if asked != "auto":
        reason = {
            "single": f"as asked, one rank on {'a GPU' if is_on_gpu else 'the CPU'}",
            "data_parallel": f"as asked, one rank over {what}",
        }.get(asked, f"as asked, {what if is_on_gpu else _ranks(devices)}")
        return ModeChoice(mode=Mode(asked), reason=reason)
    if collectives is not None:
        return _by_collectives(settings, collectives, what=what)
    if devices == 1 and machines == 1:
        return ModeChoice(
            mode=Mode.SINGLE, reason=f"there is {what}{'' if is_on_gpu else ' alone'}"
        )
    reason = what if is_on_gpu else f"no GPU, {_ranks(devices)}"
    if is_on_gpu and settings.ddp.backend != "auto":
        reason = f"{what}, ddp.backend={settings.ddp.backend}"
    if machines > 1:
        reason = f"{machines} machines"
    return ModeChoice(mode=Mode.DISTRIBUTED, reason=reason)


def _by_collectives(settings: Settings, collectives: Collectives, *, what: str) -> ModeChoice:
    """Choose one rank per GPU if the ranks can communicate, and another mode if not."""
    if collectives.backend:
        backend = "" if collectives.backend == "nccl" else collectives.backend
        reason = f"{what}, {collectives.found}"
        return ModeChoice(mode=Mode.DISTRIBUTED, reason=reason, backend=backend)
    obstacles = over_devices_problems(settings)
    if not obstacles:
        reason = f"{what}, and {collectives.found}"
        return ModeChoice(mode=Mode.DATA_PARALLEL, reason=reason, backend="gloo")
    reason = f"{collectives.found}, and {obstacles[0].option} is not for data_parallel"
    return ModeChoice(mode=Mode.SINGLE, reason=reason, backend="gloo")


def mode_problems(settings: Settings) -> list[BadInputError]:
    """Return the settings that contradict the requested mode."""
    run = settings.run
    if run.mode == "data_parallel":
        return over_devices_problems(settings)
    if run.mode != "single":
        return []
    problems = []
    if len(run.gpus) > 1:
        expected = f"is one rank on one GPU: give one, or {OPTION}=distributed"
        problems.append(BadInputError("--gpus", _comma(run.gpus), f"{OPTION}=single {expected}"))
    elif isinstance(run.nproc_per_node, int) and run.nproc_per_node > 1:
        expected = f"{OPTION}=single is one rank: leave it out, or take {OPTION}=distributed"
        problems.append(BadInputError("--nproc-per-node", run.nproc_per_node, expected))
    return problems


def over_devices_problems(settings: Settings) -> list[BadInputError]:
    """Return the settings that one rank over several devices cannot honour."""
    run, cure = settings.run, f"or take {OPTION}=distributed"
    problems = []
    if names_a_gpu_twice(run.gpus):
        expected = f"must name each GPU once for {OPTION}=data_parallel, {cure}"
        problems.append(BadInputError("--gpus", _comma(run.gpus), expected))
    if run.compile:
        expected = f"is not for {OPTION}=data_parallel, whose copies it does not know: leave it out, {cure}"
        problems.append(BadInputError("run.compile", "true", expected))
    if settings.ddp.sync_batchnorm:
        expected = f"is over ranks, and {OPTION}=data_parallel is one rank: leave it out, {cure}"
        problems.append(BadInputError("ddp.sync_batchnorm", "true", expected))
    return problems


def raise_first(problems: Sequence[BadInputError]) -> None:
    """Raise it, if there is one."""
    if problems:
        raise problems[0]


def refuse_of_processes(settings: Settings, *, world_size: int) -> None:
    """Raise BadInputError where ranks were made by others, and the mode is another one."""
    mode = settings.run.mode
    if mode == "data_parallel" or (mode == "single" and world_size > 1):
        expected = "is for ranks that this command starts itself: take auto or distributed here"
        raise BadInputError(OPTION, mode, expected)


def _is_said(settings: Settings) -> bool:
    """Return whether the user has chosen how the ranks communicate."""
    return settings.ddp.backend != "auto" or names_a_gpu_twice(settings.run.gpus)


def _named(devices: int, *, is_on_gpu: bool) -> str:
    if is_on_gpu:
        return "one GPU" if devices == 1 else f"{devices} GPUs"
    return "the CPU" if devices == 1 else f"{devices} parts of the CPU"


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'} on the CPU"


def _comma(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in numbers)
