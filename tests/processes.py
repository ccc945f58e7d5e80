"""Real rank processes for tests: forked in milliseconds, talked to by pipes, gone with the test.

They are forks of one server per test process, which is a fork of tests.ready: it has torch imported and
no thread. The test process itself may have threads by now, and must not be forked. The server and all it
forked die with the test process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ddp_runner.kernel.system import parent_death
from tests import ready
from tests.huge_pages import use_huge_pages

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 120.0  # a hang; a slow machine has its time
RANKS_MAX = 8
_PACKET_BYTES_MAX = 128 * 1024
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # A TCPStore looks its peer up in the DNS at each connect; a lost packet would cost 5 s.
    "RES_OPTIONS": "timeout:1 attempts:1",
}
# The first optimizer of a process imports torch._dynamo, which takes a second.
_PRELOADED = ("pytest", "torch._dynamo", "torch.distributed", "ddp_runner.training.trainer")


def poll(check, *, timeout_s=DEADLINE_S, what="the condition", every_s=0.002):
    """Wait until ``check`` returns something true, and return it."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        is_last = (
            time.monotonic() >= deadline_s
        )  # asked before the look: this process may be held up
        value = check()
        if value:
            return value
        assert not is_last, f"{what} did not come within {timeout_s:g} s"
        time.sleep(every_s)


def poll_settled(value, *, what, still_s=0.2):
    """Wait until ``value()`` is true and has not changed for a while."""
    newest, since_s = None, 0.0

    def settled():
        nonlocal newest, since_s
        now_s = time.monotonic()
        seen = value()
        if seen != newest:
            newest, since_s = seen, now_s
        return seen and now_s - since_s >= still_s

    poll(settled, what=what)


def open_files_in(folder):
    """What this process has open below ``folder``; other descriptors are other tests' matter."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since it was listed
            found.append(descriptor.readlink())
    return [path for path in found if path.is_relative_to(folder)]


# Connection.send would pass tensors on as shared memory, which ends with the rank that sent them.
def _send(connection: Connection, value: Any) -> None:
    connection.send_bytes(pickle.dumps(value))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


class Member:
    """What a function that runs as a rank is given: who it is, and its line to the test."""

    def __init__(self, connection: Connection, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._connection = connection

    def say(self, value: Any) -> None:
        """Send ``value`` to the test."""
        _send(self._connection, ("said", value))

    def hear(self, *, timeout_s: float = DEADLINE_S) -> Any:
        """What the test says next."""
        if not self._connection.poll(timeout_s):
            raise AssertionError(f"rank {self.rank} heard nothing for {timeout_s:g} s")
        return _receive(self._connection)


class RankProcess:
    """One rank, seen from the test."""

    def __init__(self, rank: int, pid: int, connection: Connection) -> None:
        self.rank = rank
        self.pid = pid
        self.connection = connection

    def say(self, value: Any) -> None:
        """Send ``value`` to the rank."""
        _send(self.connection, value)

    def hear(self, *, timeout_s: float = DEADLINE_S) -> Any:
        """What the rank says next; fails with its traceback if it raised instead."""
        kind, value = self._receive(timeout_s)
        assert kind == "said", f"rank {self.rank} returned {value!r} instead of saying something"
        return value

    def result(self, *, timeout_s: float = DEADLINE_S) -> Any:
        """What its function returns."""
        kind, value = self._receive(timeout_s)
        assert kind == "returned", f"rank {self.rank} said {value!r} instead of returning"
        return value

    def hear_any(self, *, timeout_s: float = DEADLINE_S) -> Any:
        """What it says or returns next, whichever comes."""
        return self._receive(timeout_s)[1]

    def signal(self, number: int) -> None:
        """Signal it. Its pid is nobody else's, for it is reaped only when the test is over."""
        os.kill(self.pid, number)

    def _receive(self, timeout_s: float) -> tuple[str, Any]:
        if not self.connection.poll(timeout_s):
            raise AssertionError(f"nothing came from rank {self.rank} within {timeout_s:g} s")
        try:
            kind, value = _receive(self.connection)
        except EOFError:
            raise AssertionError(
                f"rank {self.rank} ended without a word; written last:\n{_server().output()}"
            ) from None
        assert kind != "raised", f"rank {self.rank} raised\n{value}"
        return kind, value


@contextlib.contextmanager
def ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any
) -> Iterator[list[RankProcess]]:
    """Run ``function(member, *arguments)`` in ``world_size`` processes; they end with the block.

    ``function`` must be importable by its module and name; arguments and results are pickled.
    """
    server = _server()
    processes = server.fork(function, world_size, arguments)
    try:
        yield processes
    finally:
        for process in processes:
            process.signal(signal.SIGKILL)
        server.reap([process.pid for process in processes])
        for process in processes:
            process.connection.close()


def results(processes: Sequence[RankProcess], *, timeout_s: float = DEADLINE_S) -> list[Any]:
    """What every rank's function returned, by rank; the first that raises fails the test."""
    waiting = {process.connection: process for process in processes}
    found: dict[int, Any] = {}
    deadline_s = time.monotonic() + timeout_s
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
        left = [process.rank for process in waiting.values()]
        assert ready, f"ranks {left} did not return within {timeout_s:g} s"
        for connection in ready:
            process = waiting.pop(connection)  # type: ignore[call-overload]
            found[process.rank] = process.result(timeout_s=0)
    return [found[process.rank] for process in processes]


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Run ``function(member, *arguments)`` on every rank of a world and return all results."""
    with ranks(function, world_size, *arguments) as processes:
        return results(processes)


def host_store(member: Member) -> None:
    """As a rank's function: say the port of a TCPStore on loopback, and serve it to the end."""
    from torch._C._distributed_c10d import TCPStore

    limit = timedelta(seconds=DEADLINE_S)
    store = TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
    member.say(store.port)
    signal.pause()


@contextlib.contextmanager
def hosted_store() -> Iterator[int]:
    """A TCPStore in a process of its own, for the length of the block; gives its loopback port."""
    with ranks(host_store, 1) as (host,):
        yield host.hear()


class _Server:
    """The test process's end of the forking server."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = mine
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        self._process = ready.shared().start(
            ["-m", "tests.processes"],
            cwd=ROOT,
            output=self._output,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(ROOT)},
            program_stdin=theirs.fileno(),
        )
        theirs.close()
        assert self._answer(timeout_s=250.0) == "ready"

    def fork(
        self, function: Callable[..., Any], world_size: int, arguments: Sequence[Any]
    ) -> list[RankProcess]:
        """Fork a process for each rank."""
        assert world_size <= RANKS_MAX
        pairs = [socket.socketpair() for _ in range(world_size)]
        request = ("fork", function.__module__, function.__qualname__, pickle.dumps(arguments))
        theirs = [their.fileno() for _, their in pairs]
        socket.send_fds(self._socket, [pickle.dumps(request)], theirs)
        pids = self._answer()
        for _, their in pairs:
            their.close()
        return [
            RankProcess(rank, pid, Connection(mine.detach()))
            for rank, (pid, (mine, _)) in enumerate(zip(pids, pairs, strict=True))
        ]

    def reap(self, pids: list[int]) -> list[int]:
        """Wait for processes that end; their exit codes, negative for a signal."""
        self._socket.send(pickle.dumps(("reap", pids)))
        codes: list[int] = self._answer()
        return codes

    def output(self) -> str:
        """The end of what the server and its forks wrote."""
        self._output.seek(0)
        return self._output.read()[-4000:].decode(errors="replace")

    def close(self) -> None:
        """End the server; everything that it forked ends with it."""
        self._socket.close()
        self._process.wait(timeout=10)
        self._output.close()

    def _answer(self, *, timeout_s: float = DEADLINE_S) -> Any:
        self._socket.settimeout(timeout_s)
        packet = self._socket.recv(_PACKET_BYTES_MAX)
        assert packet, f"the forking server ended; it wrote:\n{self.output()}"
        return pickle.loads(packet)


_running: list[_Server] = []


def _server() -> _Server:
    if not _running:
        _running.append(_Server())
        atexit.register(_running[0].close)
    return _running[0]


def _serve(connection: socket.socket) -> None:
    """In the server: fork and reap on request, until the test process hangs up."""
    connection.send(pickle.dumps("ready"))
    while True:
        packet, descriptors, _, _ = socket.recv_fds(connection, _PACKET_BYTES_MAX, RANKS_MAX)
        if not packet:
            return
        verb, *request = pickle.loads(packet)
        if verb == "fork":
            _import_ahead(request[0])
            connection.send(pickle.dumps(_fork_all(connection, request, descriptors)))
        else:
            statuses = [os.waitpid(pid, 0)[1] for pid in request[0]]
            connection.send(
                pickle.dumps([os.waitstatus_to_exitcode(status) for status in statuses])
            )


def _import_ahead(module: str) -> None:
    """Once for all that will be forked with it; what cannot be imported here, each fork reports."""
    if module not in sys.modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
        gc.freeze()


def _fork_all(
    connection: socket.socket, request: Sequence[Any], descriptors: Sequence[int]
) -> list[int]:
    server_pid = os.getpid()
    pids = []
    for rank, descriptor in enumerate(descriptors):
        pid = os.fork()
        if pid == 0:
            parent_death.die_with_parent(server_pid)
            connection.close()
            for other in descriptors:
                if other != descriptor:
                    os.close(other)
            line = Connection(descriptor)
            _run(Member(line, rank=rank, world_size=len(descriptors)), line, *request)
        pids.append(pid)
    for descriptor in descriptors:
        os.close(descriptor)
    return pids


def _run(member: Member, connection: Connection, module: str, name: str, arguments: bytes) -> None:
    """In a rank's process: run the function, send what it returns or raises, end."""
    status = 1
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        answer = ("returned", function(member, *pickle.loads(arguments)))
        status = 0
    except BaseException:  # noqa: BLE001 - reported to the test, which fails with it
        answer = ("raised", traceback.format_exc())
    try:
        _send(connection, answer)
    finally:
        os._exit(status)


def _main() -> None:
    # The test process's end is standard input, whose number a rank's files must not get.
    connection = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    for name in _PRELOADED:
        importlib.import_module(name)
    # Imported by its name: classes pickled by the test process belong to that module.
    own = importlib.import_module("tests.processes")
    gc.collect()
    gc.freeze()
    use_huge_pages()
    own._serve(connection)


if __name__ == "__main__":
    _main()
