"""What a rank does with the group of a generation that it leaves, where even that lacks memory."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path

from ddp_runner.kernel.group.group import _leave_broken


def test_a_rank_without_memory_for_a_thread_leaves_all_the_same():
    """What broke the generation is reported, not that; its peers are freed at once."""
    mine, theirs = socket.socketpair()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, stack_bytes = resource.getrlimit(resource.RLIMIT_AS), threading.stack_size(2**28)
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**25, before[1]))
    try:
        _leave_broken([mine])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        threading.stack_size(stack_bytes)
    with theirs:
        theirs.settimeout(5)
        assert theirs.recv(1) == b""
        assert mine.fileno() == -1
    assert "leave" not in [thread.name for thread in threading.enumerate()]


ENDING = """
from ddp_runner.kernel.group import group


class Connection:
    def shutdown(self, how): ...

    def close(self):
        print("all is freed")


group._leave_broken([Connection()])
"""


def test_a_program_that_ends_while_a_group_is_freed_waits():
    """A thread that the interpreter's end interrupts within gloo's destructor would abort the process."""
    command = [sys.executable, "-c", ENDING]
    ended = subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE, text=True)
    assert ended.stdout == "all is freed\n"
