"""The command ``run``: any script that torchrun starts, supervised."""

from __future__ import annotations

from ddp_runner.cli.commands import Row

COMMANDS = {
    "run": Row(
        module="ddp_runner.features.script.run_command",
        says="any script that torchrun starts, supervised: run train.py ARGS",
        place=20,
    )
}
