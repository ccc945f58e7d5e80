"""Limits the rank's wait for a batch, and checks the workers meanwhile. Never receives one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SLICE_S = 0.5  # between two looks while there is nothing to receive
STOPPED_S = 2.0  # a worker that is stopped for so long is not waited for any longer
_PAUSE_S = 1.0  # a slice that took so much longer: the rank itself did not run


class PoolError(Exception):
    """The workers can deliver no more. ``worker`` is a number, or -1 if none is to blame."""

    def __init__(self, message: str, *, worker: int) -> None:
        super().__init__(message)
        self.worker = worker


class WorkerDiedError(PoolError):
    """A worker ended, by a signal or by itself."""


class FilesUsedUpError(PoolError):
    """Raised if no batch could be handed over: each of its tensors needs an open file, and none is left."""


class BatchLateError(PoolError):
    """The next batch did not come in time; ``worker`` is the one that owes it."""


class Patience(Protocol):
    """Decides how long a receiver waits."""

    def slice_s(self) -> float:
        """Return the seconds to wait before the next :meth:`look`."""
        ...

    def look(self) -> None:
        """A slice went by. Raises :class:`BatchLateError` once it is enough."""
        ...


class Endless:
    """Lets a thread receive without a deadline: another one keeps the time."""

    def slice_s(self) -> float:
        """See :meth:`Patience.slice_s`."""
        return SLICE_S

    def look(self) -> None:
        """Do nothing: the wait has no limit."""


class Wait:
    """Limits one wait of the rank's main thread for the workers ``pids`` to ``timeout_s``.

    ``on_wait`` is called at each look, for what shows that the rank is alive; what it raises ends
    the wait.
    """

    def __init__(
        self, timeout_s: float, *, pids: Sequence[int], on_wait: Callable[[], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._pids = pids
        self._on_wait = on_wait
        self._looked_s = time.monotonic()
        self._deadline_s = self._looked_s + timeout_s
        self._stopped_since_s: dict[int, float] = {}

    def slice_s(self) -> float:
        """See :meth:`Patience.slice_s`; the last slice ends at the deadline."""
        return min(max(self._deadline_s - time.monotonic(), 0.0), SLICE_S)

    def look(self) -> None:
        """See :meth:`Patience.look`. Time in which the whole job was stopped does not count."""
        now_s = time.monotonic()
        paused_s = now_s - self._looked_s - SLICE_S
        self._looked_s = now_s
        if paused_s > _PAUSE_S:
            self._deadline_s += paused_s
            self._stopped_since_s.clear()
        self._on_wait()
        self._notice_stopped(now_s)
        if now_s >= self._deadline_s:
            raise BatchLateError(f"no batch within {self._timeout_s:g} s", worker=-1)

    def _notice_stopped(self, now_s: float) -> None:
        for number, pid in enumerate(self._pids):
            if not _is_stopped(pid):
                self._stopped_since_s.pop(number, None)
                continue
            since_s = self._stopped_since_s.setdefault(number, now_s)
            if now_s - since_s >= STOPPED_S - SLICE_S:
                raise BatchLateError(f"stopped for {STOPPED_S:g} s", worker=number)


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
