"""The commands ``check`` and ``demo``."""

from __future__ import annotations

from ddp_runner.cli.commands import Row

COMMANDS = {
    "check": Row(
        module="ddp_runner.features.demo.check",
        says="check that your own task is exact under every kind of kill",
        place=70,
    ),
    "demo": Row(
        module="ddp_runner.features.demo.demo",
        says="watch ranks being killed while the weights stay the same",
        place=80,
    ),
}
