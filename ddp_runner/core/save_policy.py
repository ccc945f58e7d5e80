"""Decides which boundaries are saved: by steps, by time, on request, or for a lost save. No file, no clock."""

from __future__ import annotations

import math
from enum import Enum, auto

from ddp_runner.core.checkpoint_interval import CheckpointInterval, CopyInterval
from ddp_runner.core.settings import CheckpointSettings
from ddp_runner.core.step_schedule import RunLength, last_save_due, saves_to_skip


class Due(Enum):
    """The decision about a save that is due."""

    NOW = auto()
    LATER = auto()  # one is under way: made of a later step
    STILL_LATER = auto()  # as one that came due before it
    LEFT_OUT = auto()  # in the pause after one that failed


class SavePolicy:
    """One rank's. Times are of the monotonic clock; ``is_busy``: a save is under way.

    What a person asks for stays asked until a file, or the disk's refusal, has answered it. Whoever is asked
    votes until a step that counts has shown it to all ranks; from there on it is rank 0's to fulfil.
    ``wanted_step`` is the last such step, also of a request of rank 0's own: every rank keeps it in mind for
    the case that rank 0 dies before the file is there.
    """

    def __init__(
        self, settings: CheckpointSettings, *, now_s: float, copy_age_s: float | None
    ) -> None:
        """``copy_age_s``: of the newest copy in memory that outlives this process; None: there is no such memory."""
        self._settings = settings
        self.saves_by_time = settings.save_every_steps == "auto"
        self._interval = CheckpointInterval(now_s=now_s)
        self._copies = CopyInterval(now_s=now_s)
        self._has_copies = copy_age_s is not None
        # Ranks 0 that die one soon after the other must not put copies off for good.
        self._copies.began(now_s=now_s - (copy_age_s or 0.0))
        self._is_put_off = False
        self._failures = 0  # in a row
        self._skips = 0  # saves that come due and are not tried
        self.wanted_step = 0
        self._asked = self._begun = self._answered = 0  # requests: all, in hand, over

    @property
    def is_asked(self) -> bool:
        """True if a person waits for an answer."""
        return self._asked > self._answered

    @property
    def is_put_off(self) -> bool:
        """True if a save that was due waits for its turn."""
        return self._is_put_off

    @property
    def is_pausing(self) -> bool:
        """True if the newest save has failed, and nobody waits for the next."""
        return self._failures > 0 and not self.is_asked

    @property
    def has_failed(self) -> bool:
        """True if the newest save has failed."""
        return self._failures > 0

    def ask(self) -> None:
        """A person wants the next save: it is tried, however many have failed."""
        self._asked += 1

    def heard(self, step: int, *, is_mine: bool, fulfils: bool) -> None:
        """All ranks know since ``step`` that one of them wants a save; this one ``fulfils`` it, or not."""
        self.wanted_step = step
        if not fulfils:
            self._begun = self._answered = self._asked
        elif not is_mine:
            self.ask()

    def put_off(self) -> None:
        """Save not now but at a later boundary."""
        self._is_put_off = True

    def comes_due(self, *, is_busy: bool) -> Due:
        """A save is due at this boundary."""
        if self._skips and not self.is_asked:
            self._skips -= 1
            self._is_put_off = False  # it is the one left out
            return Due.LEFT_OUT
        if not is_busy:
            return Due.NOW
        was_put_off, self._is_put_off = self._is_put_off, True
        return Due.STILL_LATER if was_put_off else Due.LATER

    def wants_file(self, *, now_s: float, step_s: float, is_busy: bool) -> bool:
        """Return True if a save should follow the next step.

        That is one that was put off, that a person waits for (again, if its save was given up together with
        its state), or whose time has come.
        """
        if self._is_put_off:
            return not is_busy
        if self._asked > self._begun or (self.is_asked and not is_busy):
            return True
        if not self.saves_by_time or not self._interval.is_due(now_s=now_s, step_s=step_s):
            return False
        if not self._skips:
            return True
        self._skips -= 1
        self._interval.began(now_s=now_s)
        return False

    def wants_copy(self, step: int, *, now_s: float, step_s: float, is_busy: bool) -> bool:
        """Return True if a copy in memory should be made once ``step`` steps are committed; a save makes one too."""
        every = self._settings.memory_every
        if every == "auto":
            return not is_busy and self._copies.is_due(now_s=now_s, step_s=step_s)
        return bool(every) and step % every == 0

    def must_make_up(
        self,
        step: int,
        length: RunLength,
        *,
        at_least: int,
        saved_step: int,
        under_way_step: int,
    ) -> bool:
        """Return True if the newest save that was due by ``step`` is on no disk, nor on its way there.

        The rank that wrote it has died, or a repair came before it. One that failed is followed by
        the next that is due after the pause: a repair does not shorten that. ``at_least``: a step that is due in any case.
        """
        due = max(last_save_due(step, length, self._settings), at_least)
        return not self.is_pausing and 0 < due > max(saved_step, under_way_step)

    def take_over(self, *, age_s: float, now_s: float) -> None:
        """Count from the newest file: ranks 0 that die one after the other must not put saves off."""
        if self.saves_by_time:
            self._interval.began(now_s=now_s - age_s)

    def needed_one(self) -> None:
        """A fault has needed a checkpoint."""
        self._interval.faults += 1

    def began(self, *, is_file: bool, now_s: float) -> None:
        """A save is made, for all that were asked for; or a copy alone."""
        self._copies.began(now_s=now_s)
        if is_file:
            self._is_put_off = False
            self._begun = self._asked
            self._interval.began(now_s=now_s)

    def compared(self, compare_s: float, *, is_file: bool) -> None:
        """So long training has waited for the comparison of the replicas, for a save's sake."""
        self._copies.compared(compare_s)
        if is_file:
            self._interval.compared(compare_s)

    def stepped(self, step_s: float, *, beside_file: bool, beside_copy: bool) -> None:
        """A step has taken so long, less what it waited for a save."""
        if not beside_copy:
            self._interval.stepped(step_s, beside_save=beside_file)
        if self._has_copies and not beside_file:
            self._copies.stepped(step_s, beside_save=beside_copy)

    def copied(self, *, blocked_s: float) -> None:
        """A copy alone has ended."""
        self._copies.measured(blocked_s=blocked_s, write_s=math.inf)

    def saved(self, *, blocked_s: float, write_s: float) -> None:
        """There is a file."""
        self._failures = self._skips = 0
        self._answered = self._begun
        self._interval.measured(blocked_s=blocked_s, write_s=write_s)

    def failed(self) -> int:
        """A save was refused. How many that come due are left out."""
        self._failures += 1
        self._skips = saves_to_skip(self._failures)
        self._answered = self._begun
        if not self.is_asked:
            self._is_put_off = False  # it belongs to the pause
        return self._skips

    def news(self, *, now_s: float, step_s: float) -> str:
        """The interval that was chosen, in words, where it is new and no save is due by it; else empty."""
        if not self.saves_by_time or self._interval.is_due(now_s=now_s, step_s=step_s):
            return ""
        return self._interval.news(now_s=now_s, step_s=step_s)
