"""The command ``page``."""

from __future__ import annotations

from ddp_runner.cli.commands import Row

COMMANDS = {
    "page": Row(
        module="ddp_runner.features.page.page",
        says="watch runs in a browser while they train",
        place=110,
    ),
}
