"""Chooses the points that a tracker gets: each step once, even if it was repeated. Reads nothing.

``metrics.jsonl`` has every logged step in the order in which it was made. After a roll-back or a resume
steps come again: the earlier points of these steps, and of all later ones, are undone first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddp_runner.core.monitor import is_of_evaluation, parts_of
from ddp_runner.kernel.rules.phases import PHASE_NAMES

Values = Mapping[str, float | None]
_TRAIN, _EVALUATION, _SPEED, _MEMORY = "train", "validation", "speed", "memory"
_GPU, _OF_GPU = "gpu", "gpu_"
_OF_SPEED = frozenset(
    (
        *PHASE_NAMES,
        *("steps_per_s", "samples_per_s", "tokens_per_s", "step_s", "data_wait_share"),
        *("flops_utilization", "cpu_share"),
    )
)


def grouped(name: str) -> str:
    """Return the name of a metric below its group: ``train/loss``, ``speed/step_s``, ``validation/bach/loss``."""
    if is_of_evaluation(name):
        return "/".join(part for part in (_EVALUATION, *parts_of(name)) if part)
    if name.startswith(_OF_GPU):
        return f"{_GPU}/{name}"
    if name.endswith("_bytes") or name == "memory_efficiency":
        return f"{_MEMORY}/{name}"
    return f"{_SPEED if name in _OF_SPEED else _TRAIN}/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The change that a line makes: drop all points after ``undo_after`` (None: drop none), then add ``values``."""

    undo_after: int | None
    values: Values


@dataclass(slots=True, kw_only=True)
class Course:
    """The steps of one rank as they stand. ``newest`` is the last of them, -1 for none."""

    newest: int = -1
    # What was evaluated at which step: the same evaluation is done again after a resume, to the same bits.
    evaluated: dict[int, set[str]] = field(default_factory=dict)

    def take(self, step: int, values: Values) -> Change:
        """One line of ``metrics.jsonl``."""
        undo: int | None = None
        is_evaluation = all(map(is_of_evaluation, values))
        if is_evaluation:
            undo = step if step < self.newest else None
        elif step <= self.newest:
            undo = step - 1
        self.undo(undo)
        self.newest = max(self.newest, step)
        known = self.evaluated.get(step, set())
        fresh = {name: value for name, value in values.items() if name not in known}
        if is_evaluation and fresh:
            self.evaluated.setdefault(step, set()).update(fresh)
        return Change(undo_after=undo, values=fresh)

    def begin(self, step: int) -> int | None:
        """Undo all points after ``step``, where a launch resumes; return that step, or None if there are none."""
        undo = step if step < self.newest else None
        self.undo(undo)
        return undo

    def undo(self, after: int | None) -> None:
        """Forget all points behind that step."""
        if after is not None:
            self.newest = min(self.newest, after)
            self.evaluated = {step: seen for step, seen in self.evaluated.items() if step <= after}


@dataclass(slots=True, kw_only=True)
class Settled:
    """Points that wait until nothing can undo them, for a tracker that takes nothing back.

    ``written``: the newest step that was handed out. ``safe``: the newest that is in a checkpoint.
    """

    written: int = -1
    safe: int = -1
    waiting: dict[int, dict[str, float | None]] = field(default_factory=dict)

    def take(self, step: int, change: Change, *, is_new: bool) -> bool:
        """Keep a point. Returns False if it undoes a point that was handed out: then another place must be written to.

        Without ``is_new`` an earlier process has taken care of that.
        """
        is_whole = self.undo(change.undo_after, is_new=is_new)
        if step > self.written:
            self.waiting.setdefault(step, {}).update(change.values)
        return is_whole

    def undo(self, after: int | None, *, is_new: bool) -> bool:
        """Forget all points behind that step. Returns False as :meth:`take` does."""
        if after is None:
            return True
        self.waiting = {step: values for step, values in self.waiting.items() if step <= after}
        self.safe = min(self.safe, after)
        if not is_new or after >= self.written:
            return True
        self.written = after
        return False

    def saved(self, step: int) -> None:
        """A checkpoint of that step is on disk."""
        self.safe = max(self.safe, step)

    def due(self) -> list[tuple[int, dict[str, float | None]]]:
        """The points that nothing undoes any more, in order; they count as written from now on.

        Not that of the newest safe step itself, unless a later one is there: it may be evaluated still.
        """
        last = self.safe if any(step > self.safe for step in self.waiting) else self.safe - 1
        return self._hand_out(last)

    def rest(self) -> list[tuple[int, dict[str, float | None]]]:
        """Return the remaining points, as :meth:`due`, at the end of a run; its newest checkpoint is final."""
        return self._hand_out(self.safe)

    def _hand_out(self, last: int) -> list[tuple[int, dict[str, float | None]]]:
        steps = sorted(step for step in self.waiting if step <= last)
        self.written = max([self.written, *steps])
        return [(step, self.waiting.pop(step)) for step in steps]


@dataclass(slots=True, kw_only=True)
class Lead:
    """The rank whose figures stand for the run where there is room for one: the first that is not given up."""

    given_up: set[int] = field(default_factory=set)

    def is_it(self, rank: int) -> bool:
        """Return whether a line of this rank, which has just arrived, is the run's."""
        self.given_up.discard(rank)  # it is back
        return all(other in self.given_up for other in range(rank))
