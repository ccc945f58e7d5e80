"""The option ``--engine``, and the engine that it can name."""

from __future__ import annotations

from ddp_runner.core.settings.declaration import Option, OptionGroup

ENGINES = {"ray": "ddp_runner.features.ray.ray_driver"}
OPTIONS = (
    Option(
        "--engine",
        metavar="ray",
        group=OptionGroup.MACHINES,
        says="let a Ray cluster place and restart the machines; give only --nnodes with it",
    ),
)
