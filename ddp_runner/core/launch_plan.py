"""The launch plan: the single value with every decision of the command line, for the supervisor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddp_runner.kernel.rules.stopping import TimeLimit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddp_runner.core.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """The device on which one rank computes.

    ``device`` is torch's name for it in that process (``cpu``, ``cuda:1``); ``visible_index``
    counts within CUDA_VISIBLE_DEVICES as the command found it, None for the CPU. ``others``: further devices
    of this rank, which compute parts of its batches.
    """

    device: str
    name: str
    visible_index: int | None
    others: tuple[str, ...] = ()


def names_a_gpu_twice(gpus: Sequence[int]) -> bool:
    """Return whether ranks share a GPU, which NCCL refuses."""
    return len(set(gpus)) < len(gpus)


# The module that is each rank: with our trainer, or with a loop that attaches.
TRAINED, ATTACHED = "ddp_runner.rank.trained", "ddp_runner.rank.attached"
NNODES = (
    "PET_NNODES",
    "NNODES",
)  # variables that have the number of machines, the first that is set
NO_ID = "none"  # of a run on several machines that is given no name
NCCL_BACKENDS = ("nccl", "nccl2")  # two classes of torch's for one library
MARGIN_SHARE_MAX = 0.1  # of what is left of a job, for its last save


def group_backend(settings: Settings, *, is_on_gpu: bool) -> str:
    """Return the process group's backend; NCCL groups keep gloo too, for tensors on the CPU."""
    wanted = settings.ddp.backend
    is_shared = wanted == "auto" and names_a_gpu_twice(settings.run.gpus)
    if wanted == "gloo" or is_shared or not is_on_gpu:
        return "gloo"
    return f"cpu:gloo,cuda:{'nccl2' if wanted == 'nccl2' else 'nccl'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPlan:
    """A program of the user's whose loop calls ``ddp_runner.attach()``.

    ``path`` of a file is absolute; exactly one of ``path`` and ``module`` is not empty. ``source`` is what the file held
    at launch: a replaced rank runs that. Of a module it is empty. ``preload``: what the zygote imports ahead.
    ``in_place``: by the name of transformers' Trainer it finds the one that attaches.
    """

    path: str
    module: str
    arguments: tuple[str, ...]
    source: bytes = b""
    preload: tuple[str, ...] = ()
    in_place: bool = False

    @property
    def name(self) -> str:
        """The name that people see: that of the file or of the module."""
        return self.module or self.path.rpartition("/")[2]

    @property
    def code(self) -> str:
        """Its file, or its module as in ``module:``."""
        return self.path or f"{self.module}:"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueProgram:
    """A program of the user's whose state, data and checkpoints are its own, as of a script.

    Nothing is saved for it, and no epochs are known; an agent of its own decides in such a run. ``name`` is the one
    that people see. ``module``: of the package, whose ``run()`` is each of its ranks. ``preload``: what the zygote imports ahead.
    ``code``: its file, or its module as in ``module:``; empty: it is no Python. ``arguments``: those that it is given.
    ``may_restart``: all its ranks may restart if one is lost.
    """

    name: str
    module: str
    may_restart: bool = False
    preload: tuple[str, ...] = ()
    code: str = ""
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """A run on several machines, as it was asked for on this one.

    ``node_rank``: the number of this machine; None: by the order of joining. ``host`` and ``port``:
    where the coordinator listens; ``is_host``: whether that is this machine; None: the one that has
    the address. ``join_timeout_s``: for ``least`` machines to come; ``last_call_s``: for more of
    them, once so many are there. ``local_addr``: the address of this machine for the others; empty:
    the one that leads to the coordinator. ``local_name``: the name that it was given as, which others look up each time
    that they connect; empty: none. ``moving_fd``: a descriptor that says where the coordinator now is.
    """

    least: int
    most: int
    host: str
    port: int
    node_rank: int | None = None
    run_id: str = NO_ID
    is_host: bool | None = None
    join_timeout_s: float = 600.0
    last_call_s: float = 30.0
    local_addr: str = ""
    local_name: str = ""
    moving_fd: int | None = None


def time_limit(
    *, max_time_s: float | None, job_end: str, now_utc_s: float, stop_timeout_s: float
) -> TimeLimit | None:
    """Return the time limit of a launch that begins now; None if it has none.

    ``job_end``: SLURM_JOB_END_TIME, seconds since 1970; empty or unreadable if no end was
    announced. Time for a save is left before that.
    """
    limits = []
    if max_time_s is not None:
        limits.append(TimeLimit(seconds=max_time_s, why="run.max_time has passed"))
    if job_end.isdecimal() and int(job_end) > now_utc_s:
        left_s = int(job_end) - now_utc_s
        margin_s = min(stop_timeout_s, MARGIN_SHARE_MAX * left_s)
        why = f"SLURM ends the job in {margin_s:.3g} s"
        limits.append(TimeLimit(seconds=left_s - margin_s, why=why))
    return min(limits, key=lambda one: one.seconds, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A checked run, ready to start. ``devices[r]`` is the place of rank ``r``.

    ``origins`` says by dotted key where each setting came from. ``resume_key`` is what a resumed
    checkpoint must agree with. ``notes`` are lines to show people once, before training. ``time_limit``: when the launch
    is to stop. ``mode``: how several devices are used and why, in words. ``opaque`` and
    ``loop``: the program that is run in place of a task, of which one at most is not None. ``nodes``: the
    machines, each with ``ranks_per_node`` of the ranks in order; None: this one alone. ``stages``: the settings
    of each stage, of which ``settings`` are those of the one that is trained; ``written``: what they have in
    common, as it was given. Both are empty without stages.
    """

    settings: Settings
    origins: Mapping[str, str]
    devices: tuple[DevicePlan, ...]
    world_size: int
    threads_per_rank: int
    resume_key: Mapping[str, object]
    settings_digest: str
    command: tuple[str, ...]
    notes: tuple[str, ...]
    time_limit: TimeLimit | None = None
    opaque: OpaqueProgram | None = None
    loop: LoopPlan | None = None
    nodes: NodeOptions | None = None
    mode: str = ""
    code: str = (
        ""  # a digest of what each of several machines runs; empty: they may run different code
    )

    @property
    def computing_devices(self) -> int:
        """Devices that have a part of each step: one a rank, or more."""
        return sum(1 + len(place.others) for place in self.devices)

    stages: tuple[Settings, ...] = ()
    written: Settings | None = None

    @property
    def as_written(self) -> Settings:
        """The settings of the run, as its config.yaml has them."""
        return self.written or self.settings

    @property
    def is_last_stage(self) -> bool:
        """True if the run ends with this stage."""
        return self.settings.stage is None or self.settings.stage.is_last

    def in_stage(self, number: int, *, first_step: int, first_generation: int) -> LaunchPlan:
        """The same with the settings of that stage, as :class:`StagePlace` has it."""
        settings = self.stages[number]
        assert settings.stage is not None, "of a stage"
        place = replace(settings.stage, first_step=first_step, first_generation=first_generation)
        return replace(self, settings=replace(settings, stage=place))

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each machine."""
        return self.world_size // (1 if self.nodes is None else self.nodes.most)

    @property
    def title(self) -> str:
        """The name that people see: that of the task or of the program."""
        program = self.opaque or self.loop
        return self.settings.run.task if program is None else program.name

    @property
    def rank_module(self) -> str:
        """The module that is each rank."""
        if self.opaque is not None:
            return self.opaque.module
        return TRAINED if self.loop is None else ATTACHED

    def has_own_device(self, rank: int) -> bool:
        """Return whether no other rank of its machine uses this rank's device."""
        own, first = self.devices[rank].device, rank - rank % self.ranks_per_node
        there = self.devices[first : first + self.ranks_per_node]
        return sum(place.device == own for place in there) == 1
