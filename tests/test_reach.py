"""Many machines that try each other's ports at once."""

from __future__ import annotations

import contextlib
import socket
import threading

from ddp_runner.system import reach
from ddp_runner.system.reach import Bell, Trial
from tests.processes import poll


def test_many_machines_are_tried_at_once_by_one_thread(monkeypatch):
    """Those that answer are reached; one that refuses and those that say nothing are not, in one wait."""
    monkeypatch.setattr(reach, "TRY_S", 0.5)
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)  # has room for one, which is never taken off
        stack.enter_context(socket.create_connection(silent.getsockname()))
        closed = stack.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))  # and listens for nobody
        bell = Bell("127.0.0.1")
        stack.callback(bell.close)
        where = dict.fromkeys(range(200), (bell.address, bell.port))
        where |= dict.fromkeys(range(200, 250), silent.getsockname())
        where[300] = closed.getsockname()
        before = threading.active_count()
        trial = Trial(where)
        assert trial.reached is None
        assert threading.active_count() == before + 1
        poll(lambda: trial.reached is not None, what="the end of the trial")
        assert trial.reached == frozenset(range(200))
