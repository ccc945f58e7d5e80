"""The command ``report``."""

from __future__ import annotations

from ddp_runner.cli.commands import Row

COMMANDS = {
    "report": Row(
        module="ddp_runner.features.report.run_report",
        says="summarize a run",
        place=40,
    ),
}
