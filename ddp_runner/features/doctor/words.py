"""The command ``doctor``."""

from __future__ import annotations

from ddp_runner.cli.commands import Row

COMMANDS = {
    "doctor": Row(
        module="ddp_runner.features.doctor.doctor",
        says="can this machine train, and if not, what to do",
        place=50,
    ),
}
