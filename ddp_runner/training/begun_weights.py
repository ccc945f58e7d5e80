"""The whole weights of a checkpoint that leaves out what its run has begun with, for who has no run. Trains nothing.

Nothing is built for them: files that may have them are read, and the SHA-256 in the checkpoint decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ddp_runner import config
from ddp_runner.checkpoint.catalog import FINAL
from ddp_runner.checkpoint.hub import fetched
from ddp_runner.checkpoint.weights import StoredWeights, read_weights
from ddp_runner.core.errors import BadInputError
from ddp_runner.core.hub import is_of_hub
from ddp_runner.core.settings import Settings
from ddp_runner.training.components.start_weights import filled
from ddp_runner.training.task_import import load_task
from ddp_runner.values.generators import seed_all

_OPTION = "--init-from"
_SHOWN_MAX = 300
_CURE = (
    "give what it has begun with by --init-from PATH, or take the run's final.pt, which is whole"
)
Source = tuple[str, Callable[[], Mapping[str, Any]]]


def whole_weights(path: Path, *, average: bool, init_from: str = "") -> tuple[dict[str, Any], str]:
    """The model's weights in ``path``, and where those are from that it leaves out; "" where it is whole.

    ``init_from``: what its run has begun with, where that is not where it was. Raises BadInputError where what is left out is nowhere.
    """
    found = read_weights(path, average=average)
    if not found.start:
        return dict(found.weights), ""
    wrong: dict[str, str] = {}
    for words, source in _sources(path, found, init_from):
        try:
            weights = filled(found.weights, found.start, source())
        except BadInputError as error:
            wrong[words] = first_line(error)
            continue
        if weights is not None:
            return weights, words
        wrong[words] = "other weights"
    reasons = "; ".join(f"{words}: {why}" for words, why in wrong.items())
    count = sum(name not in found.weights for name in found.start["hashes"])
    expected = (
        f"leaves out {count} weights that its run has begun with (checkpoint.only_trained), which are not to be"
        f" had{reasons and f' ({reasons})'}: {_CURE}"
    )
    raise BadInputError("checkpoint", path, expected)


def built_model(settings: Settings, *, with_data: bool) -> nn.Module:
    """The task's model as a rank builds it; ``with_data``: behind its datasets, which many need not."""
    seed_all(settings.run.seed)
    task = load_task(settings)
    if with_data:
        task.build_datasets()
        seed_all(settings.run.seed)
    return task.build_model()


def first_line(error: Exception) -> str:
    """What an error says, for a line of a message."""
    said = str(error)
    if isinstance(error, BadInputError) and error.option == _OPTION:  # who asks names it
        said = error.expected
    return (said.strip() or type(error).__name__).splitlines()[0][:_SHOWN_MAX]


def _sources(path: Path, found: StoredWeights, init_from: str) -> Iterator[Source]:
    """What may have the missing weights, in words, and how to read it."""
    final = path.parent / FINAL
    if final.is_file():
        yield str(final), lambda: read_weights(final).weights
    named = init_from or str(found.start.get("init_from") or "")
    if named:
        yield f"--init-from {named}", lambda: _named(named).weights


def _named(init_from: str) -> StoredWeights:
    path, average = config.init_from_path(init_from)
    if is_of_hub(init_from):
        path, average = fetched(init_from), False
    return read_weights(path, average=average)
