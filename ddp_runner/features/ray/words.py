"""The option ``--engine``, and the engine that it can name."""

from __future__ import annotations

from ddp_runner.core.settings.declaration import Option, OptionGroup

ENGINES = {"ray": "ddp_runner.features.ray.ray_driver"}
OPTIONS = (
    Option(
        "--engine",
        metavar="ray",
        group=OptionGroup.MACHINES,
        says="have Ray's cluster place and restart the machines; only --nnodes is given then",
    ),
)
