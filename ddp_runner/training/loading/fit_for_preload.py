"""Refuses a task's data that cannot be preloaded because of its kind. Reads no sample."""

from __future__ import annotations

from ddp_runner.core.settings import Settings
from ddp_runner.kernel.rules.errors import BadInputError

OPTION = "data.preload"
TRAINING, VALIDATION = "training", "validation"


def refuse_unfit(settings: Settings, *, is_stream: bool) -> None:
    """Raise BadInputError for data that cannot be preloaded."""
    if not settings.data.preload:
        return
    if is_stream:
        expected = (
            "needs data with an index: what an iterable dataset gives is not known ahead; leave it out, or"
            " give the samples by __getitem__"
        )
        raise BadInputError(OPTION, "true", expected)
