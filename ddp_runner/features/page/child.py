"""The page's process beside a run, which starts it by name: one run's folder, and it ends with the supervisor."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ddp_runner.kernel.system import parent_death

_NICE = 10  # ranks come first


def main(words: Sequence[str]) -> int:
    """``LOG_DIR DESCRIPTOR PARENT_PID CAN_INJECT``: what it listens on; the token is the line on standard input."""
    folder, descriptor, parent, can_inject = words
    parent_death.die_with_parent(int(parent))
    parent_death.set_process_name("ddp:page")
    os.nice(_NICE)
    token = sys.stdin.readline().strip()
    if not token:
        return 1  # who would have said it is gone
    listener = socket.socket(fileno=int(descriptor))
    import_module("ddp_runner.features.page.site").serve(
        Path(folder),
        listener,
        token=token,
        is_open=True,
        can_inject=bool(int(can_inject)),
    )
    return 0
