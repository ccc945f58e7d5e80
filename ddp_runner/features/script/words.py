"""The command ``run``: supervise any script that torchrun can start."""

from __future__ import annotations

from ddp_runner.cli.commands import Row

COMMANDS = {
    "run": Row(
        module="ddp_runner.features.script.run_command",
        says="run any script that torchrun can start, supervised: run train.py ARGS",
        place=20,
    )
}
