"""``docs``: shows the documentation as a site, or builds it. Only in a checkout, which has the pages."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

from ddp_runner.cli.command import Arguments, SmallCommand
from ddp_runner.core.settings.declaration import Option
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.start import COMMAND, IS_CHECKOUT, PACKAGE_PARENT


def _run(asked: Arguments) -> int:
    """Show or build the pages; the exit code. Raises BadInputError."""
    if not IS_CHECKOUT:
        raise BadInputError("docs", "", "needs a checkout: the pages are not installed")
    port = asked.values.get("--port", "8000")
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise BadInputError("--port", port, "must be a whole number from 1 to 65535")
    configuration = str(Path(PACKAGE_PARENT, "mkdocs.yml"))
    if folder := asked.values.get("--build"):
        site = str(Path(folder).absolute())
        command = ["build", "--strict", "--clean", "-f", configuration, "-d", site]
    else:
        command = ["serve", "-f", configuration, "-a", f"127.0.0.1:{port}"]
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")  # about a version that is not asked for
    try:
        import_module("mkdocs.__main__").cli(command)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "mkdocs":
            raise
        raise BadInputError("docs", "", "needs the extra 'docs': pip install '.[docs]'") from error
    except SystemExit as end:  # how that command line returns
        return ExitCode.DONE if not end.code else ExitCode.FAILED
    return ExitCode.DONE


DECLARATION = SmallCommand(
    usage=f"""Usage:  {COMMAND} docs [--port N] [--build DIR]

Shows the documentation at http://127.0.0.1:8000 until Ctrl-C.""",
    options=(
        Option("--port", metavar="N", says="TCP port on this machine"),
        Option(
            "--build",
            metavar="DIR",
            says="write the pages into this folder instead; a warning, such as a broken link, "
            "exits with 1",
        ),
    ),
    perform=_run,
)
