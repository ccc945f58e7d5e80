"""Looks at the board and at /proc, keeps the run's pace, and asks core who is hung."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from ddp_runner.kernel.parent.rank_handle import RankHandle
from ddp_runner.kernel.parent.world import World
from ddp_runner.kernel.rules.hang_detection import (
    LONG_PHASE_S,
    STEPS_TO_SETTLE,
    STOPS_UNSEEN_S,
    Comparisons,
    FirstSteps,
    HangVerdict,
    LongPhases,
    Pace,
    RankLook,
    SharedPauses,
    find_hung,
    late_ranks,
    phase_deadline_s,
    shortest_deadline_s,
)
from ddp_runner.kernel.rules.lifecycle import RankState
from ddp_runner.kernel.rules.limits import RecoveryLimits
from ddp_runner.kernel.rules.phases import Phase
from ddp_runner.kernel.system.clock import Clock
from ddp_runner.kernel.wire.board import Cell

PACE_STEPS = 50
IN_TIME_SHARE = 0.9  # of the shortest deadline
YOUNG_NS = int(0.9e9 * min(LONG_PHASE_S, STOPS_UNSEEN_S))  # of a phase that no look remembers
STRAGGLER_STEPS = 20  # a window
PAUSE_S = 1.0  # between two looks, which are a tick apart: this process did not run
LOOKS_APART_S = 0.3  # three ticks: no pause, however short the deadline
OLD_NEWS_S = 1.0  # twice the time from one look of another machine to the next
WORK_SIGN_S = 2.0  # a rank that moves state to another one shows it more often


class ProgressWatch:
    """Owned by the supervisor's loop; one look a tick."""

    def __init__(
        self, settings: RecoveryLimits, *, loading_s: float, world: World, clock: Clock
    ) -> None:
        self._settings = settings
        self._loading_s = loading_s
        self._world = world
        self._clock = clock
        self._step_s: deque[float] = deque(maxlen=PACE_STEPS)
        self._seen_step = -1
        self._best_step = -1
        self._verdicts_in_a_row = 0
        self._looked_at_ns = self._awake_since_ns = self._clock.monotonic_ns()
        self._pauses = SharedPauses()
        self._long_phases = LongPhases()
        self._first_steps = FirstSteps()
        self._comparisons = Comparisons()
        self._counted_since_ns: dict[int, int] = {}  # ranks that were the last of a shared pause
        self._finished = 0  # ranks
        self._own: dict[int, tuple[int, int]] = {}
        self._straggler_watch = StragglerWatch()

    def look(self, handles: list[RankHandle]) -> HangVerdict | None:
        """The verdict on a world whose ranks train, or have finished, or None."""
        self._notice_pauses()
        self._keep_pace()
        counts = self._world.counts
        finished = counts.present_in(RankState.FINISHED, RankState.ENDED)
        self._notice_finished(finished)
        if counts.present_in(RankState.TRAINING) + finished != len(handles):
            self._pauses.observe(())
            self._long_phases.forget_open()
            return None
        # INVARIANT all-where-one-is-late: leaving ranks out changes no verdict and no pace. Broken if: a
        # rank is left out that could be late, or whose look would be remembered.
        # Guarded by: test_looking_at_few_decides_as_looking_at_all.
        few = None if finished else self._who_needs_a_look(handles)
        if few is None:
            return self._look_at_all([handle for handle in handles if not handle.has_finished])
        self._observe(few)
        self._pauses.observe(())
        return None

    def _who_needs_a_look(
        self, handles: list[RankHandle]
    ) -> list[tuple[RankHandle, RankLook]] | None:
        """Ranks that a look may teach something, with it; None: one may be late, so look at all.

        A rank that has just entered its phase, and is past its first steps, is as it was.
        """
        if self._first_steps.longest_s is None:
            return None
        now_ns, awake_ns = self._clock.monotonic_ns(), self._awake_since_ns
        cells = self._world.present_cells
        ages_ns = [
            known_ns - (max(awake_ns, since_ns))
            for known_ns, since_ns in zip(
                self._world.known_ns(now_ns), cells(Cell.PHASE_SINCE_NS), strict=True
            )
        ]
        if max(ages_ns) / 1e9 > IN_TIME_SHARE * shortest_deadline_s(self._pace(), self._settings):
            return None
        is_open = {*self._first_steps.open_ranks, *self._long_phases.open_ranks}
        few = [
            (handle, self._look_at(handle))
            for handle, age_ns, steps, counted_ns in zip(
                handles, ages_ns, cells(Cell.OWN_STEPS), cells(Cell.COMPARISON_NS), strict=True
            )
            if age_ns > YOUNG_NS
            or steps - handle.steps_before < STEPS_TO_SETTLE
            or handle.rank in is_open
            or self._comparisons.counted_ns(handle.rank) != counted_ns
        ]
        return None if any(look.stopped for _, look in few) else few

    def _observe(self, looks: list[tuple[RankHandle, RankLook]]) -> None:
        for handle, look in looks:
            self._first_steps.observe(look, process=handle.processes)
            self._comparisons.observe(handle.rank, handle.slot.get(Cell.COMPARISON_NS))
            self._long_phases.observe(
                look,
                process=handle.processes,
                since_ns=handle.slot.get(Cell.PHASE_SINCE_NS),
                step=handle.slot.get(Cell.STEP),
            )

    def _look_at_all(self, training: list[RankHandle]) -> HangVerdict | None:
        looks = [self._look_at(handle) for handle in training]
        self._observe(list(zip(training, looks, strict=True)))
        late = late_ranks(looks, self._pace(), self._settings)
        self._long_phases.excuse(late)
        left = self._pauses.observe(late)
        if left is not None:
            self._counted_since_ns[left] = self._clock.monotonic_ns()
            looks = [self._look_at(handle) for handle in training]
        verdict = find_hung(looks, self._pace(), self._settings)
        if verdict is not None:
            self._verdicts_in_a_row += 1
            for look in looks:
                if look.rank in verdict.ranks and not look.stopped:
                    self._long_phases.doubt(look)
        return verdict

    def forget_pace(self) -> None:
        """Forget all learnt times: what is trained from now on may have another pace."""
        self._step_s.clear()
        self._seen_step = self._best_step = -1
        self._verdicts_in_a_row = 0
        self._long_phases, self._first_steps = LongPhases(), FirstSteps()
        self._comparisons.forget()
        self._straggler_watch = StragglerWatch()

    def stragglers(self, handles: list[RankHandle]) -> dict[int, float]:
        """Ranks found persistently slow just now: rank -> factor over the others."""
        cells = self._world.present_cells
        own = zip(cells(Cell.OWN_NS), cells(Cell.OWN_STEPS), strict=True)
        looks = {handle.rank: each for handle, each in zip(handles, own, strict=True)}
        before = self._own
        if before.keys() != looks.keys():
            self._own = looks
            return {}
        steps = {rank: looks[rank][1] - before[rank][1] for rank in looks}
        if min(steps.values()) < STRAGGLER_STEPS:
            return {}
        self._own = looks
        return self._straggler_watch.observe(
            {rank: (looks[rank][0] - before[rank][0]) / 1e9 / steps[rank] for rank in looks}
        )

    def is_overdue(self, handle: RankHandle) -> bool:
        """Return True if a rank that must leave its generation has exceeded its phase's time."""
        look = self._look_at(handle)
        if look.phase in (Phase.REDUCE, Phase.FORMING) or look.stopped:
            return True
        return look.age_s > phase_deadline_s(look, self._pace(), self._settings)

    def is_getting_on(self, handle: RankHandle, *, generation: int) -> bool:
        """Return True if a rank that forms ``generation`` is at work: on a first batch, a save, a transfer."""
        look = self._look_at(handle)
        if look.stopped or handle.slot.get(Cell.GENERATION) != generation:
            return False
        if look.phase is Phase.FORMING:
            return look.age_s < WORK_SIGN_S
        deadline_s = phase_deadline_s(look, self._pace(), self._settings)
        return look.phase is not Phase.REDUCE and look.age_s < deadline_s

    def _look_at(self, handle: RankHandle) -> RankLook:
        counted_since_ns = self._counted_since_ns.get(handle.rank, 0)
        phase_since_ns = handle.slot.get(Cell.PHASE_SINCE_NS)
        since_ns = max(phase_since_ns, self._awake_since_ns, counted_since_ns)
        now_ns = self._clock.monotonic_ns()
        age_s = (now_ns - since_ns) / 1e9
        if not self._world.is_here(handle):  # what its node has not said yet is nobody's fault
            age_s = max(0.0, age_s - self._world.unheard_of_s(handle, now_ns / 1e9))
        is_stopped = age_s > STOPS_UNSEEN_S and self._world.is_stopped(handle)
        return RankLook(
            rank=handle.rank,
            phase=Phase(handle.slot.get(Cell.PHASE)),
            age_s=age_s,
            steps_here=handle.slot.get(Cell.OWN_STEPS) - handle.steps_before,
            stopped=is_stopped,
            device_sums=handle.slot.get(Cell.DEVICE_SUMS),
            stopped_s=self._world.stopped_s(handle, now_ns / 1e9) if is_stopped else 0.0,
            step=handle.slot.get(Cell.STEP),
            sample=handle.slot.get(Cell.SAMPLE),
        )

    def _notice_pauses(self) -> None:
        """Hold nothing against the ranks that happened while this process did not run itself.

        The whole job, container or machine may have been paused; nobody was hung then.
        """
        now_ns = self._clock.monotonic_ns()
        pause_s = max(LOOKS_APART_S, min(PAUSE_S, self._settings.hang_min_s / 2))
        # What is known of another machine is as old as its newest look.
        is_old = self._world.unheard_s(now_ns / 1e9) > OLD_NEWS_S
        if is_old or now_ns - self._looked_at_ns > pause_s * 1e9:
            self._awake_since_ns = now_ns
        self._looked_at_ns = now_ns

    def _notice_finished(self, finished: int) -> None:
        """Restart the clock when a rank has finished: the others then wait for it no longer.

        They may have waited for its last save, for longer than a step may take; they only have to wake up.
        """
        if finished != self._finished:
            self._awake_since_ns = self._clock.monotonic_ns()
        self._finished = finished

    def _pace(self) -> Pace:
        return Pace(
            slowest_step_s=max(self._step_s, default=0.0),
            verdicts_in_a_row=self._verdicts_in_a_row,
            longest_phase_s=self._long_phases.longest_s(self._seen_step),
            first_s=self._first_steps.longest_s,
            comparison_s=self._comparisons.longest_s,
            loading_s=self._loading_s,
            doubted=self._long_phases.doubted_places,
        )

    def _keep_pace(self) -> None:
        cells = self._world.present_cells
        step = max(cells(Cell.COMMITTED_STEP))
        self._seen_step = min(self._seen_step, step)  # back to a checkpoint
        if step > self._best_step:  # what is redone is no progress: it may hang again where it did
            if self._best_step >= 0:
                self._verdicts_in_a_row = 0
            self._best_step = step
        if step > self._seen_step:
            self._seen_step = step
            # Without anybody's data: a wait for those is no pace to expect.
            took_ns = max(cells(Cell.BUSY_NS)) + min(cells(Cell.REDUCE_NS))
            self._step_s.append(took_ns / 1e9)


# Which rank is persistently slower than the others. Reports, and never decides anything else.

FACTOR = 1.5  # over the median of all ranks
WINDOWS = 3  # in a row, so that slowness that wanders is nobody's


class StragglerWatch:
    """Fed once a window with each rank's own seconds per step, collectives left out."""

    def __init__(self) -> None:
        self._row: dict[int, int] = {}
        self._reported: set[int] = set()

    def observe(self, own_s: Mapping[int, float]) -> dict[int, float]:
        """The ranks that are found persistently slow by this window: rank -> factor, each once."""
        if len(own_s) < 2:
            return {}
        usual_s = median(own_s.values()) if len(own_s) > 2 else min(own_s.values())
        found = {}
        for rank, seconds in own_s.items():
            factor = seconds / usual_s if usual_s > 0 else 1.0
            self._row[rank] = self._row.get(rank, 0) + 1 if factor >= FACTOR else 0
            if self._row[rank] >= WINDOWS and rank not in self._reported:
                self._reported.add(rank)
                found[rank] = factor
        return found
