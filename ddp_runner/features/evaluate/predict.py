"""``predict``: the outputs of a checkpoint's model, in the order of the samples."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from ddp_runner.cli.command import Arguments, SmallCommand
from ddp_runner.core.settings.declaration import Option
from ddp_runner.features.evaluate.evaluate import OPTIONS, Asked
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.start import COMMAND

FORMS = (".pt", ".npy", ".jsonl")
_TO = Option("--to", metavar="FILE", says="file to write: .pt, .npy or .jsonl [predictions.pt]")
_MODULE = "ddp_runner.features.evaluate.over_data"  # by name: it needs torch


def _run(arguments: Arguments) -> int:
    """Compute and write. Raises BadInputError."""
    to = Path(arguments.values.get(_TO.long, "predictions.pt")).expanduser()
    if to.suffix not in FORMS:
        raise BadInputError(_TO.long, to, f"must end in {', '.join(FORMS)}")
    if not to.parent.is_dir():
        raise BadInputError(_TO.long, to, "no such folder")
    if to.is_dir() or not os.access(to.parent, os.W_OK | os.X_OK):
        why = "is a folder" if to.is_dir() else "its folder cannot be written to"
        raise BadInputError(_TO.long, to, why)  # before all is computed
    asked = Asked.by(arguments, whole=True)
    return int(import_module(_MODULE).predict(asked, to=to))


DECLARATION = SmallCommand(
    usage=(
        f"Usage:  {COMMAND} predict [CHECKPOINT] [OPTIONS] [SETTING=VALUE ...]\n"
        "\n"
        "Writes one output for each sample of the task's test data, or of its\n"
        "validation data, in order: the result of the task's predict(model, batch), or\n"
        "of model(inputs) without it. CHECKPOINT is last, best, a step or a path [last]"
    ),
    perform=_run,
    options=(_TO, *OPTIONS),
    takes_rest=True,
)
