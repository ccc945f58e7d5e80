"""``page``: serves a live page over the files of runs from a separate process. Needs the extra ``page``."""

from __future__ import annotations

import errno
import secrets
import socket
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from ddp_runner.cli.command import LOG_DIR, Arguments, SmallCommand
from ddp_runner.cli.extras import page_missing
from ddp_runner.core.settings.declaration import Option
from ddp_runner.core.settings.whole_run import LOGS
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.start import COMMAND

_CAN_INJECT = "--page-can-inject"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TOKEN_BYTES = 24
_WAITING_MAX = 128


def _run(asked: Arguments) -> int:
    """Serve the page; the exit code. Raises BadInputError."""
    root = Path(asked.values.get("--log-dir", LOGS)).expanduser()
    if not root.is_dir():
        raise BadInputError("--log-dir", root, "no such folder")
    host = asked.values.get("--host", "127.0.0.1")
    with _listener(asked.values.get("--port", "8080"), host) as listener:
        refuse_if_missing()
        _serve(root, listener, host, can_inject=_CAN_INJECT in asked.switches)
    return ExitCode.DONE


def _serve(root: Path, listener: socket.socket, host: str, *, can_inject: bool) -> None:
    """Print the link, and serve until it is interrupted."""
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", *_LOOPBACK) else host  # noqa: S104 - compared
    shown = f"[{shown}]" if ":" in shown else shown
    is_open = host in _LOOPBACK
    print(f"{root.resolve()} is shown until Ctrl-C at")
    print(f"  http://{shown}:{listener.getsockname()[1]}/?token={token}")
    if is_open:
        print("without the token, users of this machine can watch but not control runs")
    sys.stdout.flush()
    import_module("ddp_runner.features.page.site").serve(
        root, listener, token=token, is_open=is_open, can_inject=can_inject
    )


def refuse_if_missing() -> None:
    """Raise BadInputError where the extra is not installed."""
    if missing := page_missing():
        raise BadInputError("page", "", missing)


def _listener(given: str, host: str) -> socket.socket:
    """A socket that listens there: who comes before the page is ready waits for it."""
    if not given.isdecimal() or not 1 <= int(given) <= 65_535:
        raise BadInputError("--port", given, "must be a whole number from 1 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(given)))
        listener.listen(_WAITING_MAX)
    except socket.gaierror as error:
        listener.close()
        raise BadInputError("--host", host, f"is no address: {error.strerror}") from error
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise BadInputError("--host", host, "is no address of this machine") from error
        raise BadInputError(
            "--port", given, f"cannot be taken on {host}: {error.strerror}"
        ) from error
    return listener


DECLARATION = SmallCommand(
    usage=f"""Usage:  {COMMAND} page [-l DIR] [--port N] [--host ADDRESS]
        {COMMAND} train --page ...

Shows runs in a browser while they train, until Ctrl-C: curves with every fault
and repair, faults, timeline, ranks and their logs, checkpoints, settings. The
printed link lets its holder save, stop and start runs. `train --page` serves
the page together with a run, without a second command.""",
    options=(
        replace(LOG_DIR, says="log folder of a run, or the folder of several [logs]"),
        Option("--port", metavar="N", says="TCP port [8080]"),
        Option(
            "--host",
            metavar="ADDRESS",
            says="address to listen on [127.0.0.1: this machine only]; other machines need the "
            "token of the printed link",
        ),
        Option(_CAN_INJECT, says="allow it to end or stop ranks, to show how they are replaced"),
    ),
    perform=_run,
)
