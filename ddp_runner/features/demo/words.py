"""The commands ``check`` and ``demo``."""

from __future__ import annotations

from ddp_runner.cli.commands import Row

COMMANDS = {
    "check": Row(
        module="ddp_runner.features.demo.check",
        says="is your own task exact under every kill? a table of what holds",
        place=70,
    ),
    "demo": Row(
        module="ddp_runner.features.demo.demo",
        says="watch ranks being killed, and the weights come out the same",
        place=80,
    ),
}
