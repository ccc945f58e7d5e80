"""The command, as a process that an engine's actor has started: it ends when its actor does."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ddp_runner.cli import commands
from ddp_runner.features.machines.letters import ENDPOINT_VARIABLE
from ddp_runner.kernel.system import parent_death


def main(words: Sequence[str]) -> int:
    """Run the command line behind the actor's pid and the descriptor of the endpoint; the exit code."""
    parent_pid, endpoint_fd, *rest = words
    # INVARIANT ends-with-its-actor: a supervisor that an engine has placed ends with what placed it.
    # Broken if: the actor starts it from a thread that ends, or this is not the first thing it does.
    # Guarded by: test_it_begins_with_few_and_ends_with_its_driver.
    parent_death.die_with_parent(int(parent_pid))
    os.set_inheritable(int(endpoint_fd), False)  # for no other process
    os.environ[ENDPOINT_VARIABLE] = endpoint_fd
    return commands.main(rest)
