"""Who is hung, told from the progress board alone. Slow is not hung: deadlines follow the run's pace.

A rank that waits in a collective waits for somebody else, so it is never hung by itself: either
another rank is late, or all wait, and then the collective is stuck. Ranks that are late together are
more likely on a machine that stood still than hung, so they are given more time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_runner.core.phases import Phase
from ddp_runner.core.settings import RecoverySettings

STEPS_TO_SETTLE = 3  # of a process, before its own pace is believed
# Per hang verdict in a row without progress, and for ranks that are late together: the pause may be
# a real one.
PATIENCE_FACTOR = 4.0
PATIENT_VERDICTS_MAX = 2  # whose factors add up: what is longer than that is no pause any more
# Of a deadline: who has stayed so long while another one is late may stand still too.
NEARLY_LATE = 0.5
_UNWATCHED = frozenset({Phase.IDLE, Phase.STARTUP, Phase.FORMING, Phase.FINISHED})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLook:
    """One look at a rank that is in the generation.

    ``stopped``: the operating system says so (SIGSTOP); then no phase excuses it. ``steps_here``:
    done by this very process.
    """

    rank: int
    phase: Phase
    age_s: float
    steps_here: int
    stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """``slowest_step_s`` of the recent steps; ``verdicts_in_a_row`` without a commit in between."""

    slowest_step_s: float
    verdicts_in_a_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """``ranks`` are hung; with none, the collective is stuck on all of them alike."""

    ranks: tuple[int, ...]
    waited_s: float


def phase_deadline_s(look: RankLook, pace: Pace, settings: RecoverySettings) -> float:
    """How long the rank may stay in its phase."""
    if look.phase is Phase.EVALUATE:
        return settings.evaluation_timeout_s
    if look.phase in (Phase.CHECKPOINT, Phase.COMPARE):  # as much to read, for both
        return settings.checkpoint_timeout_s
    if look.steps_here < STEPS_TO_SETTLE:
        return settings.first_step_timeout_s
    return _usual_deadline_s(pace, settings)


def late_ranks(
    looks: Sequence[RankLook], pace: Pace, settings: RecoverySettings
) -> tuple[int, ...]:
    """Who lets the others wait too long, with those that nearly do: a pause begins for no two at once."""
    shares = {
        look.rank: look.age_s / phase_deadline_s(look, pace, settings)
        for look in looks
        if look.phase is not Phase.REDUCE and look.phase not in _UNWATCHED
    }
    if max(shares.values(), default=0.0) <= 1.0:
        return ()
    return tuple(rank for rank, share in shares.items() if share > NEARLY_LATE)


def longest_phase_s(settings: RecoverySettings) -> float:
    """The longest that a rank may let the others wait, whatever the run's pace."""
    return max(
        settings.first_step_timeout_s,
        settings.evaluation_timeout_s,
        settings.checkpoint_timeout_s,
    )


def find_hung(
    looks: Sequence[RankLook], pace: Pace, settings: RecoverySettings
) -> HangVerdict | None:
    """The verdict on a generation whose ranks are all training, or None.

    The age of a rank that was late with others, and is no longer, begins anew then: they do not wake
    up at one moment (:class:`SharedPauses`).

    It never names all of several ranks: one is left, and with it the state. Told to leave its
    generation, that one does, or is found then.
    """
    stopped = [look for look in looks if look.stopped and look.age_s > settings.hang_min_s]
    if stopped:
        return _verdict(stopped, looks)
    over_s = {look.rank: look.age_s - phase_deadline_s(look, pace, settings) for look in looks}
    together = late_ranks(looks, pace, settings)
    late = [look for look in looks if look.rank in together and over_s[look.rank] > 0]
    if late:
        alone = len(together) == 1 < len(looks)
        grace_s = 0.0 if alone else (PATIENCE_FACTOR - 1) * _usual_deadline_s(pace, settings)
        is_due = any(over_s[look.rank] > grace_s for look in late)
        return _verdict(late, looks) if is_due else None
    if looks and all(look.phase is Phase.REDUCE for look in looks):
        youngest = min(looks, key=lambda look: look.age_s)
        if over_s[youngest.rank] > 0:
            return HangVerdict(ranks=(), waited_s=youngest.age_s)
    return None


class SharedPauses:
    """Remembers which ranks were late together: the last one to wake up gets its time anew."""

    def __init__(self) -> None:
        self._together: tuple[int, ...] = ()

    def observe(self, late: tuple[int, ...]) -> int | None:
        """The rank, if any, whose time begins anew now; ``late`` is of :func:`late_ranks`."""
        left = len(late) == 1 and late[0] in self._together
        self._together = late if len(late) > 1 else ()
        return late[0] if left else None


def _usual_deadline_s(pace: Pace, settings: RecoverySettings) -> float:
    usual_s = max(settings.hang_min_s, settings.hang_factor * pace.slowest_step_s)
    return usual_s * PATIENCE_FACTOR ** min(pace.verdicts_in_a_row, PATIENT_VERDICTS_MAX)


def _verdict(hung: Sequence[RankLook], looks: Sequence[RankLook]) -> HangVerdict:
    named = [look.rank for look in hung]
    if len(hung) == len(looks) > 1:
        # Who is half through an update cannot hand its state on.
        spared = min(hung, key=lambda look: (look.phase is Phase.OPTIMIZER, look.age_s))
        named.remove(spared.rank)
    return HangVerdict(ranks=tuple(named), waited_s=max(look.age_s for look in hung))
