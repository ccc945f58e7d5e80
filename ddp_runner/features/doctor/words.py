"""The command ``doctor``."""

from __future__ import annotations

from ddp_runner.cli.commands import Row

COMMANDS = {
    "doctor": Row(
        module="ddp_runner.features.doctor.doctor",
        says="check whether this machine can train, and say what to do if not",
        place=50,
    ),
}
