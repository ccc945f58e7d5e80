"""The page's process beside a run, which starts it by name: one run's folder, and it ends with the supervisor."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ddp_runner.system import parent_death

_NICE = 10  # ranks come first


def main(words: Sequence[str]) -> int:
    """``LOG_DIR PORT PARENT_PID CAN_INJECT``; the token is the line on standard input."""
    folder, port, parent, can_inject = words
    parent_death.die_with_parent(int(parent))
    parent_death.set_process_name("ddp:page")
    os.nice(_NICE)
    token = sys.stdin.readline().strip()
    if not token:
        return 1  # who would have said it is gone
    import_module("ddp_runner.cli.live_page.site").serve(
        Path(folder),
        host="127.0.0.1",
        port=int(port),
        token=token,
        is_open=True,
        can_inject=bool(int(can_inject)),
    )
    return 0
