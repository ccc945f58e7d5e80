"""The store: served in the store host, and a rank's connection to it, made ahead, kept over generations, made again when broken."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import HashStore, Store, TCPStore

from ddp_runner.kernel.group.sockets import Address, connected_since, open_sockets
from ddp_runner.kernel.rules.faults import FaultError

_PROBE_KEYS = ["alive"]
POLL_S = 0.01
_ASIDE_S = 1.0  # for a look beside the kept connection
_Found = TypeVar("_Found")


def serve_store(host: str, port: int, *, listening_descriptor: int, timeout_s: float) -> TCPStore:
    """The store of a launch, in this process, on a socket that listens on ``port`` already."""
    options: dict[str, Any] = {
        "world_size": None,
        "is_master": True,
        "timeout": timedelta(seconds=timeout_s),
        "wait_for_workers": False,
        "master_listen_fd": listening_descriptor,
    }
    try:
        return TCPStore(host, port, **options)
    except NotImplementedError:  # torch 2.6: its libuv takes no socket that was made before
        return TCPStore(host, port, use_libuv=False, **options)


class StoreLink:
    """Connects once in the background, because connecting may be slow.

    torch's client resolves the name of the address that it connects to, 127.0.0.1 included, and
    where the name server does not answer that takes 5 seconds and more (seen: torch 2.13). So it is
    kept off the path of a repair.
    """

    def __init__(self, host: str, port: int, *, timeout_s: float) -> None:
        self.host = host
        self.port = port
        # Where its newest connection leads; empty as long as there is none, and for a store in memory.
        self.addresses: frozenset[Address] = frozenset()
        self.timeout_s = timeout_s
        self._store: Store | None = None
        self._error: RuntimeError | None = None
        self._ahead: threading.Thread | None = None

    def connect_ahead(self) -> None:
        """Start connecting; :meth:`store` waits for it."""
        self._ahead = threading.Thread(target=self._connect, name="store", daemon=True)
        self._ahead.start()

    def store(self, *, given_up: Callable[[], bool]) -> Store:
        """A working connection.

        Raises torch.distributed.DistError when none can be had in time, and ConnectionError as soon
        as ``given_up`` says that nobody wants it any more; an attempt under way serves the next call.
        """
        if self._store is not None and not self._answers():
            self._store = None
        while self._store is None:
            if given_up():
                raise ConnectionError("aborted while reaching the store")
            if self._ahead is None:
                self.connect_ahead()
            assert self._ahead is not None
            self._ahead.join(POLL_S)
            if self._ahead.is_alive():
                continue
            self._ahead = None
            if self._error is not None:
                raise self._error
        return self._store

    def look_aside(self, look: Callable[[Store], _Found | None]) -> _Found | None:
        """Return what ``look`` finds by a connection of its own; None where that fails, or takes a second.

        A thread connects and looks: where the store is stuck, it waits in the place of this one.
        """
        found: list[_Found | None] = []

        def connect() -> None:
            with contextlib.suppress(RuntimeError, FaultError):  # DistError and its kin
                found.append(look(self._connection()))

        try:
            thread = threading.Thread(target=connect, name="store look", daemon=True)
            thread.start()
        except RuntimeError:  # no memory for its stack
            return None
        thread.join(_ASIDE_S)
        return found[0] if found else None

    def _answers(self) -> bool:
        """Make one round trip; return False if the store was replaced, or an abort has shut the connection."""
        assert self._store is not None
        try:
            self._store.check(_PROBE_KEYS)
        except RuntimeError:  # DistError and its kin
            return False
        return True

    def _connect(self) -> None:
        """Thread: connect, or keep the reason why not for whoever waits."""
        self._error = None
        try:
            self._store = self._connected()
        except RuntimeError as error:  # DistError and its kin
            self._error = error

    def _connected(self) -> Store:
        if self.port == 0:
            return HashStore()
        before = frozenset(open_sockets().values())
        store = self._connection()
        # Of the name's addresses, the one that was reached; asked of the kernel, not of a name server.
        self.addresses = connected_since(before, port=self.port)
        return store

    def _connection(self) -> TCPStore:
        return TCPStore(
            self.host,
            self.port,
            world_size=None,
            is_master=False,
            timeout=timedelta(seconds=self.timeout_s),
        )
