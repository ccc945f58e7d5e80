"""Keeps the process of a role: starts one where that is due, ends one that is stopped, late or silent. Waits for none.

What a role has of its own (why one is wanted, what is said of its end) is a policy that has a keeper.
"""

from __future__ import annotations

import enum
import math
from typing import Generic, Protocol, TypeVar

from ddp_runner.kernel.rules.helper_roles import Role, Tries

BLINK_S = 1.0  # between two looks, which are a tick apart: this process did not run


class Kept(Protocol):
    """The process of a role, from the request to its end."""

    @property
    def pid(self) -> int | None:
        """The process id; None while it is unknown."""

    @property
    def since_s(self) -> float:
        """The time since which it runs, as far as is known."""

    @property
    def is_ready(self) -> bool:
        """True once the process has reported that it is ready."""


ProcessT = TypeVar("ProcessT", bound=Kept)
SpecT_contra = TypeVar("SpecT_contra", contravariant=True)


class Host(Protocol[ProcessT, SpecT_contra]):
    """Starts and signals processes of roles."""

    @property
    def can_fork(self) -> bool:
        """True if a process can be started at once."""

    def helper(self, role: Role) -> ProcessT | None:
        """The process of a role; None where there is none."""

    def start_helper(self, role: Role, spec: SpecT_contra, *inherited: int) -> ProcessT:
        """Start one for a role that has none. May raise OSError."""

    def kill(self, helper: ProcessT | None) -> None:
        """SIGKILL it, if it is there; its end follows."""

    def helper_stopped_s(self, helper: ProcessT | None, now_s: float) -> float:
        """Return how long it has been seen stopped without a break; 0.0 if it is not stopped now."""


class Stuck(enum.Enum):
    """Why a process is ended."""

    STOPPED = "stopped"
    LATE = "late"
    SILENT = "silent"


class Awake:
    """Knows since when this process runs: what nobody could do while it did not is held against nobody."""

    def __init__(self) -> None:
        self._looked_at_s = self._since_s = 0.0

    def look(self, now_s: float) -> None:
        """Note the time; called at each tick."""
        if now_s - self._looked_at_s > BLINK_S:
            self._since_s = now_s
        self._looked_at_s = now_s

    def has_passed(self, limit_s: float, since_s: float, now_s: float) -> bool:
        """Return True if this process has run for longer than ``limit_s`` since ``since_s``."""
        return now_s > max(since_s, self._since_s) + limit_s


class Keeper(Generic[ProcessT, SpecT_contra]):
    """Keeps the process of one role running. ``stopped_max_s``: one that is stopped for longer is ended."""

    def __init__(
        self, role: Role, host: Host[ProcessT, SpecT_contra], *, stopped_max_s: float = math.inf
    ) -> None:
        self.role = role
        self.tries = Tries()
        self.began_s = 0.0  # the newest was asked for
        self.heard_s = 0.0  # of it, or it was asked for
        self._host = host
        self._stopped_max_s = stopped_max_s
        self._killed: ProcessT | None = None
        self._awake = Awake()

    @property
    def process(self) -> ProcessT | None:
        """The process, also while it is still owed by the zygote; None if there is none."""
        return self._host.helper(self.role)

    def is_due(self, now_s: float) -> bool:
        """Return True if a process that is wanted may be started now."""
        is_free = self.process is None and self._host.can_fork
        return is_free and self.tries.allow(self.role, now_s)

    @property
    def is_given_up(self) -> bool:
        """True if no further process is started."""
        return self.tries.failures >= self.role.tries

    def give_up(self) -> None:
        """Have none follow."""
        self.tries.failures = int(self.role.tries)

    def start(self, now_s: float, spec: SpecT_contra, *inherited: int) -> ProcessT:
        """Start one; it must be due. May raise OSError."""
        self.began_s = self.heard_s = now_s
        return self._host.start_helper(self.role, spec, *inherited)

    def heard(self, now_s: float) -> None:
        """Note that the process has done its work."""
        self.heard_s = now_s
        self.tries.was_of_use()

    def look(self, now_s: float) -> Stuck | None:
        """End a process that does not do its work; returns why, once for each."""
        self._awake.look(now_s)
        process = self.process
        stuck = None if process is None else self._why_stuck(process, now_s)
        if stuck is None or process is self._killed:
            return None
        self.kill()
        return stuck

    def kill(self) -> None:
        """End its process, if its pid is known; its end follows."""
        process = self.process
        if process is not None and process.pid is not None:
            self._killed = process
            self._host.kill(process)

    def ended(self, now_s: float) -> None:
        """Note an unexpected end or a failed start: another process is due after a while."""
        self.tries.ended(self.role, now_s, lived_s=now_s - self.began_s)

    def refused(self, now_s: float) -> None:
        """Note that there was no room for a process."""
        self.tries.refused(self.role, now_s)

    def _why_stuck(self, process: ProcessT, now_s: float) -> Stuck | None:
        if process.pid is None:
            return None
        if self._host.helper_stopped_s(process, now_s) > self._stopped_max_s:
            return Stuck.STOPPED
        if not process.is_ready and self._awake.has_passed(
            self.role.ready_s, process.since_s, now_s
        ):
            return Stuck.LATE
        if self._awake.has_passed(self.role.silent_s, self.heard_s, now_s):
            return Stuck.SILENT
        return None
