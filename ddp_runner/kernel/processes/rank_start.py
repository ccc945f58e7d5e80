"""Values that say how the process of a rank begins, and where it comes from."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class StartedBy(enum.Enum):
    """The origin of a rank's process."""

    ZYGOTE = "zygote"  # a fork, which is owed until the zygote answers
    SPARE = "spare"  # one that waited; it is there
    NOBODY = "nobody"  # the spare has just ended, and no zygote is ready


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """The instructions that the process of a rank begins with."""

    # Whether it reads the checkpoint, because no other rank has a state to give it; and which one.
    loads: bool = False
    resume: str = "none"
    not_after: int = -1  # states of later steps are set aside first; below 0: none are
    # Number -> times, of the injections that are still to happen to it.
    injections_left: Mapping[int, int] = field(default_factory=dict)
    # The phase in which its predecessor had too little memory, so that this one halves the micro-batch,
    # or what it evaluates at a time; empty where it did not.
    short_of_memory_in: str = ""
    # Free on its device when the first process of the rank came; 0: not known.
    device_free_bytes: int = 0
    # One that is tried again may take its time: it leaves the spare to those that are missed.
    may_take_spare: bool = False
    # Of an opaque program: what the rank is given beside its surroundings, and the name of its log file in this
    # attempt, within the folder of logs of its machine.
    call: Mapping[str, object] | None = None
    log_name: str = ""
    reads_stdin: bool = False  # it has the standard input of this command
