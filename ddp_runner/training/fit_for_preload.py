"""Whether a task's data can be preloaded at all, as far as it says so. Looks at no sample."""

from __future__ import annotations

from ddp_runner.core.errors import BadInputError
from ddp_runner.core.settings import Settings
from ddp_runner.training.task import Datasets

OPTION = "data.preload"
TRAINING, VALIDATION = "training", "validation"


def refuse_unfit(settings: Settings, datasets: Datasets, *, is_stream: bool) -> None:
    """Raise BadInputError for data that cannot be preloaded."""
    if not settings.data.preload:
        return
    if is_stream:
        expected = (
            "needs data with an index: what an iterable dataset gives is not known ahead; leave it out, or"
            " give the samples by __getitem__"
        )
        raise BadInputError(OPTION, "true", expected)
    given = [(TRAINING, datasets.train)]
    given += [(VALIDATION, dataset) for dataset in datasets.validation_sets.values()]
    for what, dataset in given:
        if getattr(dataset, "deterministic", False):
            continue
        raise BadInputError(
            OPTION,
            "true",
            f"needs samples that are the same each time, and the {what} data does not say that they are: set"
            " deterministic = True on the dataset where it draws no random numbers, or leave it out",
        )
