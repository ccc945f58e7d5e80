"""Settings that do something only with a feature, whose folder may have been deleted."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_runner import installed
from ddp_runner.core.errors import BadInputError
from ddp_runner.core.settings import Settings


def feature_problems(settings: Settings) -> Iterator[BadInputError]:
    """Yield an error for each setting that was asked for, and whose feature is not installed; defaults do without."""
    recovery, spare = settings.recovery, settings.recovery.warm_spare
    drills = recovery.drill_at if recovery.drill_at != type(recovery)().drill_at else None
    display = settings.log.display
    asked: tuple[tuple[str, str, object], ...] = (
        ("recovery.warm_spare", "spare", spare if isinstance(spare, str) else None),
        ("recovery.drill_at", "proof", drills and ",".join(map(str, drills))),
        ("run.inject", "faults", ",".join(settings.run.inject)),
        ("log.trackers", "trackers", ",".join(settings.log.trackers)),
        ("log.display", "display", display if display == "live" else None),
        ("log.page", "page", "true" if settings.log.page else None),
        ("checkpoint.after_save", "after_save", settings.checkpoint.after_save),
    )
    there = installed.names("__init__")
    for key, feature, value in asked:
        if value and feature not in there:
            yield BadInputError(key, str(value), f"the feature {feature} is not installed")
