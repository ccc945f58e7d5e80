"""Whether machines reach each other at ports that nobody has agreed on, as gloo and NCCL need it."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from typing import cast

TRY_S = 3.0
LOOPBACK = "127.0.0.1"
OWN_ADDRESS_S = 2.0  # for a connection that never leaves the machine
_NO_INTERFACE = (errno.ENETUNREACH, errno.EADDRNOTAVAIL)
_WAITING_MAX = 4096  # machines that try a bell before their connections are taken off


def why_unreachable(address: str) -> str:
    """Return why this machine cannot connect to its own ``address``, and the cure; empty where it can.

    A machine reaches each of its addresses over the loopback interface. Takes 4 s at most.
    """
    error = _failure_at(address)
    if error is None:
        return ""
    over_loopback = error if address == LOOPBACK else _failure_at(LOOPBACK)
    if over_loopback is not None and over_loopback.errno in _NO_INTERFACE:
        cure = "the loopback interface is down: run `ip link set lo up`, or give the sandbox one"
    else:
        cure = "allow connections from this machine to itself (firewall, sandbox)"
    return f"cannot be reached from this machine itself ({error.strerror or error}); {cure}"


def _failure_at(address: str) -> OSError | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with (
            socket.create_server((address, 0), family=family) as server,
            socket.create_connection(server.getsockname()[:2], timeout=OWN_ADDRESS_S),
        ):
            return None
    except OSError as error:
        return error


class Bell:
    """A port of ``address`` that others try. The system answers: nothing is read or sent."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self.address, self.port = address, 0
        with contextlib.suppress(OSError):  # then nobody reaches it, which is so
            self._socket.bind((address, 0))
            self._socket.listen(_WAITING_MAX)
            self.port = int(self._socket.getsockname()[1])
        self._socket.setblocking(False)

    def forget(self) -> None:
        """Make room for those who try it next."""
        with contextlib.suppress(OSError):  # BlockingIOError: nobody is left
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        """Nobody is to try it any more."""
        self._socket.close()


class Trial:
    """Tries the bells of other machines, all at once, in a thread. ``where``: address and port, by number."""

    def __init__(self, where: Mapping[int, tuple[str, int]]) -> None:
        self._where = dict(where)
        self._reached: set[int] = set()
        self._thread = threading.Thread(target=self._try_all, daemon=True)
        self._thread.start()

    @property
    def reached(self) -> frozenset[int] | None:
        """The numbers of those that were reached; None while some are still tried."""
        return None if self._thread.is_alive() else frozenset(self._reached)

    def _try_all(self) -> None:
        give_up_s = time.monotonic() + TRY_S
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as tried:
            for number, (address, port) in self._where.items():
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                with contextlib.suppress(OSError):
                    one = tried.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    one.setblocking(False)
                    one.connect_ex((address, port))  # the outcome is asked for when it is there
                    selector.register(one, selectors.EVENT_WRITE, number)
            while selector.get_map() and (left_s := give_up_s - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    selector.unregister(key.fileobj)
                    with contextlib.suppress(OSError):  # it was refused
                        cast("socket.socket", key.fileobj).getpeername()
                        self._reached.add(key.data)
