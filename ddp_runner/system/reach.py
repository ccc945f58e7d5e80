"""Whether machines reach each other at ports that nobody has agreed on, as gloo and NCCL need it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping

TRY_S = 3.0


class Bell:
    """A port of ``address`` that others try. The system answers: nothing is read or sent."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self.address, self.port = address, 0
        with contextlib.suppress(OSError):  # then nobody reaches it, which is so
            self._socket.bind((address, 0))
            self._socket.listen(128)
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
    """Tries the bells of other machines, each in a thread. ``where``: address and port, by number."""

    def __init__(self, where: Mapping[int, tuple[str, int]]) -> None:
        self._reached: set[int] = set()
        self._threads = [
            threading.Thread(target=self._try, args=(number, place), daemon=True)
            for number, place in where.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def reached(self) -> frozenset[int] | None:
        """The numbers of those that were reached; None while some are still tried."""
        if any(thread.is_alive() for thread in self._threads):
            return None
        return frozenset(self._reached)

    def _try(self, number: int, place: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            socket.create_connection(place, timeout=TRY_S).close()
            self._reached.add(number)
