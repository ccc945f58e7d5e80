"""Finds hung ranks from the progress board alone. Slow is not hung: deadlines follow the run's pace.

A rank that waits in a collective waits for another rank, so it is never hung by itself: either
another rank is late, or all wait. If all wait, the hung rank is the one whose device has completed fewer
sums than the others', where that is visible (its host waits in the same place as the others'); otherwise
the collective is stuck. Ranks that are late together are more likely on a machine that paused than hung,
so they get more time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ddp_runner.core.limits import RecoveryLimits
from ddp_runner.core.phases import Phase

STEPS_TO_SETTLE = 3  # of a process, before its own pace is believed
# Per hang verdict in a row without progress, and for ranks that are late together: the pause may be
# a real one.
PATIENCE_FACTOR = 4.0
PATIENT_VERDICTS_MAX = 2  # whose factors add up: what is longer than that is no pause any more
# Of a deadline: who has stayed so long while another one is late may stand still too.
NEARLY_LATE = 0.5
# Of a deadline, over a phase that lasted so long and then went on by itself.
LONG_PHASE_FACTOR = 3.0
LONG_PHASE_STEPS = 1000  # for which it is remembered: what is slow now and then is so again
LONG_PHASE_S = 0.3  # shorter ones are below most deadlines, and the pace has them soon
LONG_PHASES_KEPT = 1000
# Of a deadline in the first steps of a process: over the longest phase of those before it, and at least.
FIRST_FACTOR = 10.0
FIRST_LEAST = 5.0  # of ``hang_min_s``
# Of a deadline, over the longest comparison of replicas so far: the same bytes are read each time.
COMPARISON_FACTOR = 10.0
STOPS_UNSEEN_S = 0.5  # of a phase's age: until then nobody asks the system, which costs a call
_OWN_WORK = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER})
_MAY_BE_LONG = _OWN_WORK | {Phase.DATA}
_UNWATCHED = frozenset({Phase.IDLE, Phase.STARTUP, Phase.FORMING, Phase.FINISHED})


Place = tuple[int, int, Phase, int]  # rank, step, phase and sample


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLook:
    """One look at a rank that is in the generation.

    ``stopped``: the operating system says so (SIGSTOP); then no phase excuses it. ``stopped_s``: for
    how long, at the least; a phase may have lasted long before. ``steps_here``: done by this very
    process. ``device_sums``: grows with each sum over ranks that its device comes to; 0: nobody knows.
    ``sample``: that it loads itself, inside the user's dataset; 0: none.
    """

    rank: int
    phase: Phase
    age_s: float
    steps_here: int
    stopped: bool = False
    stopped_s: float = 0.0
    device_sums: int = 0
    step: int = 0
    sample: int = 0

    @property
    def place(self) -> Place:
        """The rank's position, to recognise a rank that stops there again."""
        return self.rank, self.step, self.phase, self.sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """``slowest_step_s`` of the recent steps; ``verdicts_in_a_row`` without a commit in between.

    ``longest_phase_s``: of phases that are rare and long (:class:`LongPhases`). ``first_s``: in the
    first steps of a process (:class:`FirstSteps`). ``comparison_s``: the longest comparison of replicas
    (:class:`Comparisons`); None: there was none. ``loading_s``: that loader workers have for a batch. ``doubted``:
    the places at which a rank was called hung (:class:`LongPhases`).
    """

    slowest_step_s: float
    verdicts_in_a_row: int
    longest_phase_s: float = 0.0
    first_s: float | None = None
    comparison_s: float | None = None
    loading_s: float = 0.0
    doubted: frozenset[Place] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class HangVerdict:
    """``ranks`` are hung; with none, the collective is stuck on all of them alike.

    ``by_device``: their processes wait like all others; it is their devices that do not come.
    """

    ranks: tuple[int, ...]
    waited_s: float
    by_device: bool = False


def phase_deadline_s(look: RankLook, pace: Pace, settings: RecoveryLimits) -> float:
    """Return how long the rank may stay in its phase, in seconds."""
    if look.phase is Phase.EVALUATE:
        return settings.evaluation_timeout_s
    if look.phase in (Phase.COMPILE, Phase.DATA_BEGIN):
        return settings.first_step_timeout_s
    if look.phase is Phase.COMPARE and pace.comparison_s is not None:
        known_s = max(
            _deadline_of_own_work_s(look, pace, settings), COMPARISON_FACTOR * pace.comparison_s
        )
        return min(known_s, settings.checkpoint_timeout_s)
    if look.phase in (Phase.CHECKPOINT, Phase.COMPARE, Phase.PROFILE):  # as much to read or write
        return settings.checkpoint_timeout_s
    return _deadline_of_own_work_s(look, pace, settings)


def shortest_deadline_s(pace: Pace, settings: RecoveryLimits) -> float:
    """Return the shortest deadline of any phase and rank now: a younger phase cannot be late."""
    return min(
        _usual_deadline_s(pace, settings),
        settings.first_step_timeout_s,
        settings.evaluation_timeout_s,
        settings.checkpoint_timeout_s,
    )


def _deadline_of_own_work_s(look: RankLook, pace: Pace, settings: RecoveryLimits) -> float:
    is_loading = look.phase is Phase.DATA
    if look.place in pace.doubted:  # what is slow there once more was no hang
        return max(_usual_deadline_s(pace, settings), settings.first_step_timeout_s)
    if look.steps_here >= STEPS_TO_SETTLE:
        usual_s = _usual_deadline_s(pace, settings)
        return max(usual_s, pace.loading_s) if is_loading and look.sample else usual_s
    if is_loading:  # it may skip to where it was: the further that is, the longer
        return settings.first_step_timeout_s
    return _first_deadline_s(pace, settings)


def late_ranks(looks: Sequence[RankLook], pace: Pace, settings: RecoveryLimits) -> tuple[int, ...]:
    """Return the ranks that exceed their deadline and those that nearly do: no pause hits two at the same moment."""
    shares = {
        look.rank: look.age_s / phase_deadline_s(look, pace, settings)
        for look in looks
        if look.phase is not Phase.REDUCE and look.phase not in _UNWATCHED
    }
    if max(shares.values(), default=0.0) <= 1.0:
        return ()
    return tuple(rank for rank, share in shares.items() if share > NEARLY_LATE)


def longest_phase_s(settings: RecoveryLimits) -> float:
    """The longest that a rank may let the others wait, whatever the run's pace."""
    return max(
        settings.first_step_timeout_s,
        settings.evaluation_timeout_s,
        settings.checkpoint_timeout_s,
    )


def find_hung(
    looks: Sequence[RankLook], pace: Pace, settings: RecoveryLimits
) -> HangVerdict | None:
    """The verdict on a generation whose ranks are all training, or None.

    The age of a rank that was late with others, and is no longer, begins again then: they do not wake
    up at one moment (:class:`SharedPauses`).

    It never names all of several ranks: one is left, and with it the state. Told to leave its
    generation, that one does, or is found then.
    """
    stopped = [look for look in looks if _has_stood(look, settings)]
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
        # A new communicator may take its time with the first collective of a new process.
        youngest_s = min(look.age_s for look in looks)
        if youngest_s > max(phase_deadline_s(look, pace, settings) for look in looks):
            behind = behind_on_device(looks)
            return HangVerdict(ranks=behind, waited_s=youngest_s, by_device=bool(behind))
    return None


def behind_on_device(looks: Sequence[RankLook]) -> tuple[int, ...]:
    """Return the ranks, among ranks that all wait, whose devices have completed the fewest sums; usually one.

    Only the minimum is certain: such a rank waits for nobody, since all others have reached the last sum that
    it has entered, while a rank between may wait for it. Empty if the devices show no difference.
    """
    least = min(look.device_sums for look in looks)
    behind = tuple(look.rank for look in looks if look.device_sums == least)
    return behind if least > 0 and len(behind) < len(looks) else ()


class SharedPauses:
    """Remembers which ranks were late together: the last one to wake up gets its full time again."""

    def __init__(self) -> None:
        self._together: tuple[int, ...] = ()

    def observe(self, late: tuple[int, ...]) -> int | None:
        """The rank, if any, whose time begins again now; ``late`` is of :func:`late_ranks`."""
        left = len(late) == 1 and late[0] in self._together
        self._together = late if len(late) > 1 else ()
        return late[0] if left else None


class LongPhases:
    """Remembers how long ranks stayed in a phase of their own work and then continued by themselves.

    The pace comes from the steps that a reading happens to see, which a slow one among many fast ones is
    seldom. A rank whose step was called hung before and then went well was no hang: it is never forgotten.
    """

    def __init__(self) -> None:
        self._now: dict[int, tuple[int, int, int, float]] = {}  # process, since when, step, age
        self._ended: deque[tuple[int, float]] = deque(maxlen=LONG_PHASES_KEPT)
        self._paused: dict[int, int] = {}  # since when, of a phase that a pause has lengthened
        self._doubted: set[int] = set()
        self.doubted_places: frozenset[Place] = frozenset()
        self._outlasted_s = 0.0

    def observe(self, look: RankLook, *, process: int, since_ns: int, step: int) -> None:
        """One look at a rank that trains; ``since_ns`` distinguishes one phase of it from the next."""
        before = self._now.pop(look.rank, None)
        if before is not None and before[0] == process and before[1] != since_ns:
            self._note(before[2], before[3])
        if look.stopped:
            self._paused[look.rank] = since_ns
        works = look.phase in _MAY_BE_LONG and since_ns != self._paused.get(look.rank)
        if works and look.age_s >= LONG_PHASE_S:
            self._now[look.rank] = process, since_ns, step, look.age_s

    @property
    def open_ranks(self) -> Collection[int]:
        """The ranks that were in a long phase at their newest reading; the next reading may end it."""
        return self._now.keys()

    def excuse(self, late: tuple[int, ...]) -> None:
        """Ranks that are late together are more likely paused than at work; ``late``: :func:`late_ranks`."""
        for rank in late if len(late) > 1 else ():
            if rank in self._now:
                self._paused[rank] = self._now.pop(rank)[1]

    def doubt(self, look: RankLook) -> None:
        """Note that a rank was called hung at a place: if it finishes that place after all, it was slow.

        A rank that reaches the place again has the time of a first step.
        """
        self._doubted.add(look.step)
        self.doubted_places |= {look.place}

    def forget_open(self) -> None:
        """The ranks leave their phases for a repair, not by themselves."""
        self._now.clear()

    def longest_s(self, step: int) -> float:
        """The longest one to reckon with at ``step``."""
        recent = [lasted_s for at, lasted_s in self._ended if at > step - LONG_PHASE_STEPS]
        return max(self._outlasted_s, *recent, 0.0)

    def _note(self, step: int, lasted_s: float) -> None:
        self._ended.append((step, lasted_s))
        if step in self._doubted:
            self._outlasted_s = max(self._outlasted_s, lasted_s)


class FirstSteps:
    """Measures the longest phase of own work in the first steps of a process that completed them.

    Compilation, lazy loading and autotuning make the first steps of each new process slow. The length is
    as the readings have seen it; a phase that fell between two of them counts as nothing.
    """

    def __init__(self) -> None:
        self.longest_s: float | None = None  # no process has got through them yet
        self._now: dict[int, tuple[int, float]] = {}  # process, longest so far

    @property
    def open_ranks(self) -> Collection[int]:
        """The ranks that had not completed their first steps at their newest reading."""
        return self._now.keys()

    def observe(self, look: RankLook, *, process: int) -> None:
        """One look at a rank that trains."""
        known, seen_s = self._now.pop(look.rank, (process, 0.0))
        if known != process:
            seen_s = 0.0
        if look.steps_here >= STEPS_TO_SETTLE:
            self.longest_s = max(self.longest_s or 0.0, seen_s)
            return
        if look.phase in _OWN_WORK:
            seen_s = max(seen_s, look.age_s)
        self._now[look.rank] = process, seen_s


class Comparisons:
    """Measures how long training has waited for a comparison of replicas at most, from the ranks' counters."""

    def __init__(self) -> None:
        self.longest_s: float | None = None  # there was none yet
        self._counted_ns: dict[int, int] = {}

    def counted_ns(self, rank: int) -> int:
        """Return the rank's counter at its newest reading, in nanoseconds."""
        return self._counted_ns.get(rank, 0)

    def observe(self, rank: int, counted_ns: int) -> None:
        """``counted_ns``: of all comparisons of this rank so far. It begins at 0 with its process."""
        more_ns = counted_ns - self._counted_ns.get(rank, 0)
        self._counted_ns[rank] = counted_ns
        if more_ns > 0:
            self.longest_s = max(self.longest_s or 0.0, more_ns / 1e9)

    def forget(self) -> None:
        """Forget the longest time, since later comparisons have another size; the ranks' counters stay."""
        self.longest_s = None


def _has_stood(look: RankLook, settings: RecoveryLimits) -> bool:
    """Return whether a rank has been stopped for too long; a phase's first moments do not count."""
    since_s = look.stopped_s + STOPS_UNSEEN_S
    return look.stopped and min(look.age_s, since_s) > settings.stopped_max_s


def _first_deadline_s(pace: Pace, settings: RecoveryLimits) -> float:
    if pace.first_s is None:
        return settings.first_step_timeout_s
    first_s = max(FIRST_LEAST * settings.hang_min_s, FIRST_FACTOR * pace.first_s)
    patience = PATIENCE_FACTOR ** min(pace.verdicts_in_a_row, PATIENT_VERDICTS_MAX)
    learnt_s = max(first_s * patience, _usual_deadline_s(pace, settings))
    return min(settings.first_step_timeout_s, learnt_s)


def _usual_deadline_s(pace: Pace, settings: RecoveryLimits) -> float:
    usual_s = max(
        settings.hang_min_s,
        settings.hang_factor * pace.slowest_step_s,
        LONG_PHASE_FACTOR * pace.longest_phase_s,
    )
    return usual_s * PATIENCE_FACTOR ** min(pace.verdicts_in_a_row, PATIENT_VERDICTS_MAX)


def _verdict(hung: Sequence[RankLook], looks: Sequence[RankLook]) -> HangVerdict:
    named = [look.rank for look in hung]
    if len(hung) == len(looks) > 1:
        # Who is half through an update cannot hand its state on.
        spared = min(hung, key=lambda look: (look.phase is Phase.OPTIMIZER, look.age_s))
        named.remove(spared.rank)
    return HangVerdict(ranks=tuple(named), waited_s=max(look.age_s for look in hung))
