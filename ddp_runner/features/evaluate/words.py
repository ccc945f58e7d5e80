"""The commands ``evaluate`` (also ``test``) and ``predict``."""

from __future__ import annotations

from ddp_runner.cli.commands import Row

COMMANDS = {
    "evaluate": Row(
        module="ddp_runner.features.evaluate.evaluate",
        says="compute loss and metrics of a checkpoint",
        place=32,
        aliases=("test", "validate"),
    ),
    "predict": Row(
        module="ddp_runner.features.evaluate.predict",
        says="write the outputs of a checkpoint's model to a file",
        place=34,
    ),
}
