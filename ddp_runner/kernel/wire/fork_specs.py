"""Kinds of process that the zygote forks, and what each gets to know, as values with a wire form. Forks nothing."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class ForkKind(enum.Enum):
    """The kinds of processes that the zygote forks."""

    RANK = "rank"
    LOOP = "loop"  # a rank that is a program of the user's own, whose loop attaches
    PROGRAM = "program"  # a rank that is a program of the user's own, which knows nothing of us
    STORE = "store"
    SPARE = "spare"
    STANDBY = "standby"  # the next zygote
    DRILL = "drill"
    SAVER = "saver"
    IMPORTS = "imports"  # no fork: what the zygote imports beside torch, sent first of all


PROGRAMS = (ForkKind.LOOP, ForkKind.PROGRAM)  # whose ``run()`` is called at the bottom of the stack


class SpareKind(enum.Enum):
    """The work that a spare does in advance for the rank that it may replace."""

    CPU = "cpu"  # a first step, on the CPU
    MODEL = (
        "model"  # also the task's data and model, with room for the optimizer's state, on the CPU
    )
    LIBRARIES = "libraries"  # CUDA's driver and libraries are there; nothing is held on any GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The surroundings of user code in any process that runs it.

    ``settings``: of the run, as a record. ``local_world_size``: ranks of this machine. ``node``: its number;
    ``log_folder``: that of the machine whose folder has the logs. ``local_addr``: its address among several;
    ``term``: of :class:`~ddp_runner.kernel.system.folder_owner.FolderOwner`. The last five describe what the ranks of a
    machine share.
    """

    settings: dict[str, object]
    device: str
    other_devices: tuple[str, ...] = ()
    mode: str = ""
    code: str = ""
    world_size: int
    local_world_size: int
    threads: int
    detect_anomaly: bool = False
    node: int = 0
    log_folder: int = 0
    term: str = ""
    local_addr: str = ""
    store_host: str
    store_port: int
    preload: tuple[str, ...] = ()
    memory_slots: tuple[str, ...] = ()
    local_slots: tuple[str, ...] = ()
    has_saver: bool = False
    saver_trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A user's program whose loop attaches. ``source``: the path of what it held at launch; empty: of no file.

    ``in_place``: its imports of transformers' Trainer give the one that attaches.
    """

    path: str
    module: str
    arguments: tuple[str, ...]
    source: str
    in_place: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec(Surroundings):
    """The specification of a rank. ``loads``: it reads the checkpoint ``resume``, as no other rank has a state for it.

    ``short_of_memory_in``: the phase in which its predecessor had too little memory. ``device_free_bytes``: when
    the first process of the rank came; 0: not known. ``injections_left``: number -> times. ``not_after``: the newest
    step with which the rank may begin; below 0: any.
    """

    loads: bool = False
    resume: str = "none"
    not_after: int = -1
    short_of_memory_in: str = ""
    device_free_bytes: int = 0
    injections_left: dict[int, int] = field(default_factory=dict)
    log_seal: str = field(default="", repr=False)
    program: Program | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec(Surroundings):
    """The specification of a rank that is a program of the user's own. ``call``: what that needs to know besides, as a record.

    ``log_file``: where it writes, on its machine.
    """

    call: dict[str, object]
    log_file: str
    log_seal: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareSpec(Surroundings):
    """The specification of a process that waits to become a rank, and what it prepares."""

    kind: SpareKind


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillSpec(Surroundings):
    """Specifies a process that computes the share of ``rank`` in ``step``, from the files in ``folder``.

    ``program``: the program of an attached loop; None: a task.
    """

    rank: int
    step: int
    folder: str
    program: Program | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverSpec:
    """The specification of the process that writes checkpoints into ``folder``."""

    folder: str
    memory_slots: tuple[str, ...]
    saver_trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportsSpec:
    """The request to the zygote to import modules."""

    wanted: str


@dataclass(frozen=True, slots=True)
class NothingMore:
    """The specification of a process that needs only its descriptors: a store, a standby."""


Spec = RankSpec | ProgramSpec | SpareSpec | DrillSpec | SaverSpec | ImportsSpec | NothingMore
