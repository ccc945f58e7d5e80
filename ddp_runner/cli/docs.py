"""``docs``: shows the documentation as a site, or builds it. Only in a checkout, which has the pages."""

from __future__ import annotations

import os
import socket
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
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")  # about a version that is not asked for
    try:
        builder = import_module("mkdocs.__main__").cli
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "mkdocs":
            raise
        raise BadInputError("docs", "", "needs the extra 'docs': pip install '.[docs]'") from error
    configuration = str(Path(PACKAGE_PARENT, "mkdocs.yml"))
    if (folder := asked.values.get("--build")) is not None:
        command = ["build", "--strict", "-f", configuration, "-d", str(_empty_folder(folder))]
    else:
        _refuse_taken(port)
        command = ["serve", "-f", configuration, "-a", f"127.0.0.1:{port}"]
    try:
        builder(command)
    except SystemExit as end:  # how that command line returns
        return ExitCode.DONE if not end.code else ExitCode.FAILED
    return ExitCode.DONE


def _empty_folder(given: str) -> Path:
    """Return the folder, which is there and empty: the builder deletes all that it finds in it. Raises BadInputError."""
    folder = Path(given).absolute()
    expected = "must be a new or an empty folder"
    try:
        if not given or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
            raise BadInputError("--build", given, expected)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError("--build", given, f"{expected}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInputError("--build", given, f"{expected} that can be written to")
    return folder


def _refuse_taken(port: str) -> None:
    """Raise BadInputError if another program listens there, before the pages are built, which takes long."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", int(port)))
        except OSError as error:
            raise BadInputError("--port", port, f"cannot be taken: {error.strerror}") from error


DECLARATION = SmallCommand(
    usage=f"""Usage:  {COMMAND} docs [--port N] [--build DIR]

Shows the documentation at http://127.0.0.1:8000 until Ctrl-C.""",
    options=(
        Option("--port", metavar="N", says="TCP port on this machine"),
        Option(
            "--build",
            metavar="DIR",
            says="write the pages into this new or empty folder instead; a warning, such as a "
            "broken link, exits with 1",
        ),
    ),
    perform=_run,
)
