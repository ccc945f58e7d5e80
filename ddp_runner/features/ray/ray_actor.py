"""The actor that runs a machine's supervisor as its child process; Ray ships this file's code to the machine.

It imports nothing but the standard library and Ray, since it must find out whether this package is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import random
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

_PORTS = (20_000, 30_000)  # above those that Ray takes, below those that the system hands out
_HELD_BYTES_MAX = 1 << 20
_CHUNK_BYTES = 65_536
_QUIET_S = 0.5
_OF_RAY = ("PYTHONBREAKPOINT", "OMP_NUM_THREADS")  # which it sets for its own workers


class NodeActor:
    """Its methods return soon, so that what the driver asks next is never far."""

    def __init__(self) -> None:
        self._incarnation = secrets.token_hex(8)
        self._child: subprocess.Popen[bytes] | None = None
        self._news = threading.Condition()
        self._held: list[tuple[int, bytes]] = []
        self._has_said_all = True
        self._owner = Path()
        self._endpoint_fd = os.memfd_create("endpoint")

    def introduce(self, folder: str, owner: str, start: str) -> dict[str, Any]:
        """Return who this actor is, and in words what is missing here.

        ``folder``: the driver's, "" for this actor's own; ``owner``: the file in it that names the checkpoints'
        owner; ``start``: this package's start.py.
        """
        problem = ""
        folder = folder or str(Path.cwd())
        if not Path(folder).is_dir():
            problem = f"has no folder {folder}: share it, or let a Ray job bring it along"
        spec = importlib.util.find_spec("ddp_runner")
        if not Path(start).is_file() and spec is not None and spec.origin is not None:
            start = str(Path(spec.origin).with_name("start.py"))
        if not Path(start).is_file():
            problem = f"has no {start}: this package must be there"
        self._owner = Path(folder, owner)
        ray = importlib.import_module("ray")
        address = str(ray.util.get_node_ip_address())
        return {
            "incarnation": self._incarnation,
            "machine": ray.get_runtime_context().get_node_id(),
            "host": socket.gethostname(),
            "address": address,
            "port": _free_port(address),
            "folder": folder,
            "start": start,
            "owner": self._read_owner(),
            "problem": problem,
        }

    def move(self, endpoint: bytes) -> None:
        """Have the supervisor look for the coordinator there from now on."""
        os.pwrite(self._endpoint_fd, endpoint, 0)

    def begin(self, command: list[str], folder: str, environment: dict[str, str]) -> None:
        """Start the supervisor. In the main thread: the kernel ends it when the *thread* that did so ends."""
        assert threading.current_thread() is threading.main_thread()
        python = environment.get("DDP_RUNNER_PYTHON") or sys.executable
        start, module, *words = command
        kept = {name: value for name, value in os.environ.items() if name not in _OF_RAY}
        self._child = subprocess.Popen(  # noqa: S603 - the command that the driver was given
            [python, start, module, str(os.getpid()), str(self._endpoint_fd), *words],
            pass_fds=(self._endpoint_fd,),
            cwd=folder,
            env={**kept, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._has_said_all = False
        threading.Thread(target=self._read, args=(self._child,), daemon=True).start()

    def look(self, wait_s: float) -> dict[str, Any]:
        """Return the output since the last call (1: output, 2: errors), the exit code after the end, and the owner."""
        with self._news:
            self._news.wait_for(lambda: self._held or self._has_said_all, wait_s)
            held, self._held = self._held, []
            has_ended = self._has_said_all and not held
        code = None
        if self._child is not None and has_ended:
            code = self._child.wait()  # its output has ended, and so has it, or nearly
        return {"written": held, "code": code, "owner": self._read_owner()}

    def signal(self, number: int) -> None:
        """Pass a signal on."""
        if self._child is not None and self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(signal.Signals(number))

    def _read(self, child: subprocess.Popen[bytes]) -> None:
        """Read the child's streams until both are closed, so that a slow driver does not block its writes."""
        assert child.stdout is not None
        assert child.stderr is not None
        with selectors.DefaultSelector() as open_ones, child.stdout, child.stderr:
            open_ones.register(child.stdout, selectors.EVENT_READ, 1)
            open_ones.register(child.stderr, selectors.EVENT_READ, 2)
            while open_ones.get_map():
                ready = open_ones.select(_QUIET_S)
                if not ready and child.poll() is not None:
                    break  # what it has left behind may hold them open
                for key, _ in ready:
                    chunk = os.read(key.fd, _CHUNK_BYTES)
                    if not chunk:
                        open_ones.unregister(key.fileobj)
                        continue
                    with self._news:
                        self._hold(int(key.data), chunk)
                        self._news.notify_all()
        child.wait()
        with self._news:
            self._has_said_all = True
            self._news.notify_all()

    def _hold(self, stream: int, chunk: bytes) -> None:
        self._held.append((stream, chunk))
        while sum(len(held) for _, held in self._held) > _HELD_BYTES_MAX:
            self._held.pop(0)

    def _read_owner(self) -> str:
        try:
            return self._owner.read_text(encoding="ascii", errors="replace")[:256]
        except OSError:
            return ""


def _free_port(address: str) -> int:
    """Return a free port at ``address``; 0 if none was found."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for _ in range(64):
        port = random.randrange(*_PORTS)  # noqa: S311 - no secret
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((address, port))
            return port
    return 0
