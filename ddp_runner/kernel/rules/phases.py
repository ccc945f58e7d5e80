"""The phases of a rank, as numbers on the progress board and as words in status.json."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Phase(IntEnum):
    """The numbers are the board's wire format: add at the end, never renumber."""

    IDLE = 0
    STARTUP = 1
    FORMING = 2
    DATA = 3
    FORWARD = 4
    BACKWARD = 5
    REDUCE = 6
    OPTIMIZER = 7
    CHECKPOINT = 8
    EVALUATE = 9
    FINISHED = 10
    COMPARE = 11  # what the ranks have, their replicas or what must be made up for
    COMPILE = 12  # a model's code, within forward or backward
    PROFILE = 13  # a profiler begins, or writes
    DATA_BEGIN = (
        14  # a pass over data: workers start, a buffer of a shuffle fills; or many samples at once
    )

    @property
    def label(self) -> str:
        """The lower-case name that people and files see."""
        return self.name.lower()


# The metrics of the phases that are timed, in milliseconds a step, in the order of a step.
NAME_OF_PHASE = {
    Phase.DATA: "data_ms",
    Phase.FORWARD: "forward_ms",
    Phase.BACKWARD: "backward_ms",
    Phase.REDUCE: "communication_ms",
    Phase.OPTIMIZER: "optimizer_ms",
}
PHASE_NAMES = tuple(NAME_OF_PHASE.values())


class Stage(IntEnum):
    """The part that a rank builds while its phase is ``startup``. Numbers are a wire format, as :class:`Phase`'s."""

    NONE = 0
    DATA = 1  # the task itself, and its data
    MODEL = 2
    CHECKPOINT = 3
    PRELOAD = 4  # before CHECKPOINT; only with data.preload

    @property
    def label(self) -> str:
        """The activity as people read it; empty if nothing is being built."""
        return _STAGE_LABELS[self]


_STAGE_LABELS = {
    Stage.NONE: "",
    Stage.DATA: "building data",
    Stage.MODEL: "building model",
    Stage.CHECKPOINT: "reading checkpoint",
    Stage.PRELOAD: "preloading data",
}


class Moment(Enum):
    """Places inside a phase where ``--inject`` may act. They do not stand on the board."""

    REDUCING = "reducing"  # in ``reduce``: this rank's last all-reduce of the step is under way
    REDUCED = "reduced"  # in ``reduce``: the sums are there, rank 0's buffers are not
    COMMIT = "commit"  # in ``optimizer``: the board says dirty


@dataclass(frozen=True, slots=True, kw_only=True)
class DueActions:
    """The actions of every rank at a boundary, in this order."""

    compare: bool
    log: bool
    evaluate: bool
    save: bool
    end_epoch: bool = False  # after the evaluation
