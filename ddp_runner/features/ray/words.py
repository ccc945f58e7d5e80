"""The engine that ``--engine`` can name."""

from __future__ import annotations

ENGINES = {"ray": "ddp_runner.features.ray.ray_driver"}
