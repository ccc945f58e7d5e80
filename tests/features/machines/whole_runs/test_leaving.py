"""Machines that leave, cannot begin, or come again while their old link still counts."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import threading

import pytest

from tests.features.machines.whole_runs.conftest import free_port
from tests.features.machines.whole_runs.test_two_nodes import SLOW
from tests.ready import ZYGOTES
from tests.scenarios.harness import WORKLOAD, ended, poll


def test_signals_to_another_machine_reach_the_run(nodes):
    """SIGUSR2 saves and goes on, SIGQUIT ends everything as it is, as they do on one machine."""
    nodes.ranks = 1
    words = (SLOW, "save_every_steps=1000", "save_interval=0")
    first, second = nodes.start(0, *words), nodes.start(1, *words)
    first.wait_for_step(5)
    second.signal(signal.SIGUSR2)
    first.wait_for_checkpoint(6)
    saved = len(list(first.checkpoints.glob("step_*.pt")))
    first.wait_for_step(first.committed() + 5)
    assert len(list(first.checkpoints.glob("step_*.pt"))) == saved == 1
    second.signal(signal.SIGQUIT)
    assert ended(first, second) == (1, 1), first.console + second.console
    for run in (first, second):
        assert "SIGQUIT on node 1" in run.console
    assert len(list(first.checkpoints.glob("step_*.pt"))) == 1


def test_of_machines_that_leave_together_only_those_that_may_go(nodes):
    """Three of 2:3: one may leave; that the second was asked to stop as well ends the run, saved."""
    few = (SLOW, "max_steps=400", "--rdzv-conf", "last_call_timeout=30")
    first, second, third = (nodes.start(number, *few, nnodes="2:3", ranks=1) for number in range(3))
    first.wait_for_step(5)
    second.signal(signal.SIGTERM)
    third.signal(signal.SIGTERM)
    codes = [*ended(first, second, third)]
    assert codes == [75, 75, 75], first.console + second.console + third.console
    leave = ["this node leaves" in run.console for run in (second, third)]
    assert sorted(leave) == [False, True], second.console + third.console
    newest = max(int(path.stem.removeprefix("step_")) for path in first.checkpoints.glob("*.pt"))
    assert newest == first.summary()["steps"] >= 5


def test_a_machine_that_can_start_no_ranks_ends_and_says_why(nodes):
    """Its zygote ends whenever it imports the task; the coordinator waits for another one in its place."""
    task = nodes.folder / "task.py"
    task.write_text(
        "import os\n"
        "if 'BREAKS' in os.environ:\n    os._exit(7)\n"
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('workload', {str(WORKLOAD)!r})\n"
        "workload = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(workload)\n"
        "class PacedTask(workload.PacedTask):\n    pass\n"
    )
    words = (SLOW, "max_steps=20")
    how = {"task": f"{task}:PacedTask", "ranks": 1}
    first = nodes.start(0, *words, **how)
    broken = nodes.start(1, *words, variables={"BREAKS": "1", ZYGOTES: "3"}, **how)
    assert broken.wait() == 1, broken.console
    assert "no ranks can be started" in broken.console
    poll(lambda: "node 1: no ranks can be started" in first.console, what="the reason")
    second = nodes.start(1, *words, **how)
    assert ended(first, second) == (0, 0), first.console + second.console
    assert first.summary()["steps"] == 20


class Way:
    """Carries bytes between connections to its port and ``to_port``, until :meth:`stall`."""

    def __init__(self, to_port):
        self.port, self._to_port = free_port(), to_port
        self._door = socket.create_server(("127.0.0.1", self.port))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._open = []
        self._has_ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stall(self):
        """What is connected now stays so, and carries nothing any more; others are carried."""
        with self._lock:
            for one in self._open:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(one)

    def _run(self):
        while not self._has_ended.is_set():
            with self._lock:
                for key, _ in self._selector.select(0.02):
                    self._turn(key)

    def _turn(self, key):
        if key.fileobj is self._door:
            near, _ = self._door.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self._to_port))
            except ConnectionRefusedError:  # the coordinator is not there yet
                near.close()
                return
            self._open += [near, far]
            self._selector.register(near, selectors.EVENT_READ, far)
            self._selector.register(far, selectors.EVENT_READ, near)
            return
        content = b""
        with contextlib.suppress(OSError):
            content = key.fileobj.recv(65536)
        if content:
            with contextlib.suppress(OSError):
                key.data.sendall(content)
            return
        for one in (key.fileobj, key.data):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(one)
            one.close()

    def close(self):
        self._has_ended.set()
        self._thread.join()
        for one in (*self._open, self._door):
            one.close()


@pytest.fixture
def way(nodes):
    made = Way(nodes.port)
    yield made
    nodes.end()
    made.close()


def test_a_stall_of_the_old_link_alone_costs_a_repair(nodes, way, one_machine):
    """The machine dials again at once; while its silent link still counts it is asked to wait."""
    nodes.ranks = 1
    words = (SLOW, "recovery.node_silent_s=4")
    first = nodes.start(0, *words)
    second = nodes.start(1, *words, "--rdzv-endpoint", f"127.0.0.1:{way.port}")
    first.wait_for_step(10)
    way.stall()
    assert ended(first, second) == (0, 0), first.console + second.console
    faults = first.summary()["faults"]
    assert [(fault["kind"], fault["steps_lost"]) for fault in faults] == [("node_lost", 0)]
    assert second.console.count("this is node 1") == 2
    assert (first.summary()["exact"], first.digest) == (True, one_machine(2))
