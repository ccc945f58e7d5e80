"""Finds the checkpoint with the weights that a stage begins with. Never imports torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.checkpoint.manifest import checkpoint_name
from ddp_runner.core.run_stages import AVERAGE, BEST
from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddp_runner.core.settings import Settings


def with_start_weights(settings: Settings, *, path_of: Callable[[str], Path] = Path) -> Settings:
    """The same where ``run.init_from`` names what the stage begins with. Raises BadInputError where there is none.

    ``path_of``: the folder of a name, in a process that runs code of the user's.
    """
    place = settings.stage
    if place is None or not place.begins_with:
        return settings
    folder = Path(settings.run.checkpoint_dir)
    path = folder / checkpoint_name(place.first_step)
    average = AVERAGE if place.begins_with.endswith(AVERAGE) else ""
    if place.begins_with.removesuffix(AVERAGE) == BEST:
        best = Catalog(path_of(str(folder))).best(place.before)
        if best is None:
            expected = f"no checkpoint of stage {place.before} in {folder} has a loss to be judged by: take previous"
            raise BadInputError(f"stage {place.name}: init_from", BEST, expected)
        path = folder / best.path.name
    return replace(settings, run=replace(settings.run, init_from=f"{path}{average}"))
