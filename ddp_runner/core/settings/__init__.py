"""Every setting of a run, in one place: name, type, legal range, default, meaning, and all else that is true of it.

The defaults here are those of every task; ``config`` lays what a built-in task or a device has of its own, files,
environment and command line over them, and checks how settings fit together. ``None`` means "off", never
"default". The text below each field is its meaning: ``--help-settings`` and the documentation show it as it
stands. The notes in its annotation (``declaration``) are all that help, resume, stages and machines know of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from ddp_runner.core.run_stages import StagePlace
from ddp_runner.core.settings.declaration import FREE, Section
from ddp_runner.core.settings.operation import (
    CheckpointSettings,
    DdpSettings,
    LogSettings,
    MemorySettings,
)
from ddp_runner.core.settings.recipe import DataSettings, ModelSettings, OptimSettings
from ddp_runner.core.settings.recovery import RecoverySettings
from ddp_runner.core.settings.whole_run import RunSettings

__all__ = [
    "CheckpointSettings",
    "DataSettings",
    "DdpSettings",
    "JsonValue",
    "LogSettings",
    "MemorySettings",
    "ModelSettings",
    "OptimSettings",
    "RecoverySettings",
    "RunSettings",
    "Settings",
]

JsonValue = str | int | float | bool | None | list[object] | dict[str, object]
Free = Annotated[Mapping[str, JsonValue], FREE]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Section):
    """A run's settings, resolved; ``task``: arguments of a user's own; ``stage``: which of ``stages`` they are of."""

    run: RunSettings = field(default_factory=RunSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    ddp: DdpSettings = field(default_factory=DdpSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)
    recovery: RecoverySettings = field(default_factory=RecoverySettings)
    task: Free = field(default_factory=dict)
    stages: tuple[Free, ...] = ()
    stage: StagePlace | None = None
