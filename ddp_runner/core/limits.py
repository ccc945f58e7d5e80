"""The limits of repairs: how long the run waits for a process, and how often it tries again. What a user sets, as a port."""

from __future__ import annotations

from typing import Protocol


class RecoveryLimits(Protocol):
    """Limits how much is repaired before the run gives up; all times are in seconds."""

    @property
    def max_restarts(self) -> int:
        """Repairs within ``restart_window_s``; with one more the run gives up."""
        ...

    @property
    def restart_window_s(self) -> float:
        """The time over which repairs and a rank's faults are counted."""
        ...

    @property
    def no_progress_generations(self) -> int:
        """Repairs in a row with one cause, without a step between, after which the run gives up."""
        ...

    @property
    def min_ranks(self) -> int:
        """Ranks with which the run goes on when others keep failing; 0: only with all."""
        ...

    @property
    def slot_failures_max(self) -> int:
        """Faults within ``restart_window_s`` after which a rank is given up."""
        ...

    @property
    def regrow_after(self) -> float:
        """Seconds until a rank that was given up is tried again; 0: never."""
        ...

    @property
    def backoff_first_s(self) -> float:
        """The wait before the first repair of a cause."""
        ...

    @property
    def backoff_max_s(self) -> float:
        """The longest wait before a repair."""
        ...

    @property
    def startup_timeout_s(self) -> float:
        """The longest time for a process to start."""
        ...

    @property
    def form_timeout_s(self) -> float:
        """The longest time for the ranks to form a group and agree on the state."""
        ...

    @property
    def warm_spare(self) -> bool | str:
        """Whether a process is kept ready that becomes the next lost rank, and what it prepares."""
        ...

    @property
    def hang_min_s(self) -> float:
        """The shortest time without progress after which a rank may be called hung."""
        ...

    @property
    def hang_factor(self) -> float:
        """A rank is hung after so many times the slowest recent step."""
        ...

    @property
    def first_step_timeout_s(self) -> float:
        """The longest time for each of the first steps of a process."""
        ...

    @property
    def evaluation_timeout_s(self) -> float:
        """The longest time without progress in an evaluation."""
        ...

    @property
    def checkpoint_timeout_s(self) -> float:
        """The longest time for a save that training waits for."""
        ...

    @property
    def stop_timeout_s(self) -> float:
        """The longest time to finish the step and save once the run was asked to stop."""
        ...

    @property
    def require_exact(self) -> bool:
        """Whether a run ends once it is not exact."""
        ...

    @property
    def stopped_max_s(self) -> float:
        """Seconds that the system may hold a process stopped."""
        ...
