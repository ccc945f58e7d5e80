"""Decides how an engine's machines are used, and what follows a loss or an end there; a driver performs it.

An engine, such as Ray, owns the machines: it places a supervisor on each, and restarts it elsewhere when its
machine dies.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddp_runner.cli.hardware.machine import AUTO_CPU_RANKS
from ddp_runner.core.launch_plan import NodeOptions
from ddp_runner.features.machines.rules.node_options import ENGINE, node_options
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.exits import ExitCode

RAY = "ray"
# What the driver decides itself.
_DECIDED = (
    *("--rdzv-endpoint", "--node-rank", "--rdzv-backend", "--local-addr", "--token-file"),
    "--master-addr",
)
_NOBODY = "engine"  # an endpoint for those who check that there is one
RESTARTS_MAX, WINDOW_S = 3, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine of the engine's, and what of it may be asked for."""

    key: str
    name: str
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The resources that a run needs on each machine: one of ``kind`` per rank."""

    kind: str  # the engine's name for it: GPU or CPU
    ranks: int

    def fits(self, machine: Machine) -> bool:
        """Return whether ``machine`` has these resources."""
        return (machine.gpus if self.kind == "GPU" else machine.cpus) >= self.ranks


def engine_options(options: Mapping[str, str], environment: Mapping[str, str]) -> NodeOptions:
    """Return the machines that the options ask for. Raises BadInputError for an option that the engine decides."""
    engine = options[ENGINE]
    decides = f"is decided by {ENGINE} {engine}: leave it out"
    for name in _DECIDED:
        if name in options:
            raise BadInputError(name, options[name], decides)
    for name in ("PET_NODE_RANK", "NODE_RANK"):
        if environment.get(name):
            raise BadInputError(name, environment[name], decides)
    environment = {**environment, "PET_RDZV_ENDPOINT": _NOBODY}
    found = node_options(options, environment)
    if found is None:  # one machine, which is waited for as several are
        found = node_options({**options, "--nnodes": "1:2"}, environment)
        assert found is not None
        found = replace(found, most=1)
    if found.is_host is not None:
        raise BadInputError("--rdzv-conf", "is_host", decides)
    return found


def share_of_a_machine(
    machines: Sequence[Machine], *, asked: NodeOptions, ranks: int | str, device: str
) -> Share:
    """Return the share in GPUs if enough machines have them, else in cores. ``ranks`` may be "auto".

    Raises BadInputError if fewer machines than ``asked`` have that many.
    """
    count = 1 if ranks == "auto" else int(ranks)
    on_gpus = device != "cpu" and _enough(machines, Share(kind="GPU", ranks=count), asked)
    share = Share(kind="GPU" if on_gpus or device == "cuda" else "CPU", ranks=count)
    there = [machine for machine in machines if share.fits(machine)]
    if ranks == "auto" and there:
        have = sorted((int(one.gpus if on_gpus else one.cpus) for one in there), reverse=True)
        most = have[: asked.most][-1]  # of those that are used the one with fewest
        share = replace(share, ranks=most if on_gpus else min(most, AUTO_CPU_RANKS))
        there = [machine for machine in machines if share.fits(machine)]
    if len(there) < asked.least:
        wanted = f"{asked.least} with {share.ranks} {share.kind}{'s' if share.ranks > 1 else ''}"
        raise BadInputError(
            "--nnodes",
            _range(asked),
            f"needs {wanted} each, and the cluster has {_listed(machines)}",
        )
    return share


def _enough(machines: Sequence[Machine], share: Share, asked: NodeOptions) -> bool:
    return sum(share.fits(machine) for machine in machines) >= asked.least


def _range(asked: NodeOptions) -> str:
    return str(asked.least) if asked.least == asked.most else f"{asked.least}:{asked.most}"


def _listed(machines: Sequence[Machine]) -> str:
    return ", ".join(f"{one.name} ({one.cpus:g} CPUs, {one.gpus:g} GPUs)" for one in machines) or (
        "no machine"
    )


def words_for_machine(
    words: Sequence[str],
    asked: NodeOptions,
    *,
    host: str,
    port: int,
    number: int,
    share: Share,
    program: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the command-line words of machine ``number``, of which 0 is the coordinator, from those of the driver.

    ``program``: the script with its own arguments, which come last.
    """
    kept, behind = without_engine(words)
    nodes: tuple[str, ...] = ()
    if asked.most > 1:
        conf = f"join_timeout={asked.join_timeout_s:g},last_call_timeout={asked.last_call_s:g}"
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        nodes = ("--nnodes", _range(asked), "--rdzv-endpoint", where, "--rdzv-id", asked.run_id)
        nodes += ("--rdzv-conf", f"{conf},is_host={int(number == 0)}")
    device = "cuda" if share.kind == "GPU" else "cpu"
    settings = (f"run.nproc_per_node={share.ranks}", f"run.device={device}")
    return (*kept, *nodes, *behind, *settings, *program)


def without_engine(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """``words`` without --engine, up to a ``--`` and from there on."""
    rest, kept = list(words), []
    while rest and rest[0] != "--":
        word = rest.pop(0)
        written, has_value, _ = word.partition("=")
        if written.replace("_", "-").lower() != ENGINE:
            kept.append(word)
        elif not has_value and rest:
            rest.pop(0)
    return kept, rest


class Next(enum.Enum):
    """The next move after a machine is lost, or its supervisor has ended."""

    WAIT = "wait"  # the coordinator says how the run ends
    AGAIN = "again"  # start it again
    ELSEWHERE = "elsewhere"  # again, where the others are to look for the coordinator now
    LEAVE_OUT = "leave out"  # go on without that machine
    END = "end"  # with its exit code


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a supervisor, with ``code``; None: its machine was lost, and the engine has another one.

    ``has_begun``: whether the run had its folders; ``has_its_state``: whether the new machine has
    them, or another one has ranks that wait with their memory.
    ``starts_again_from_newest``: whether the same command resumes, and begins nothing a second time.
    ``recent``: how often the like has happened within an hour.
    """

    is_coordinator: bool
    code: int | None
    is_stopping: bool
    has_begun: bool
    recent: int
    has_its_state: bool = True
    starts_again_from_newest: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The next move; for the end of the run also its exit code and the reason in words."""

    next: Next
    exit_code: int = 0
    why: str = ""


def after_end(ended: Ended) -> Answer:
    """The coordinator's exit code is the run's; others come back, as often as the rule allows."""
    if ended.is_coordinator:
        return _after_coordinator(ended)
    if ended.is_stopping:
        return Answer(next=Next.WAIT)
    if ended.code == ExitCode.BAD_USAGE:
        if ended.has_begun:
            return Answer(next=Next.LEAVE_OUT)
        return Answer(next=Next.END, exit_code=ExitCode.BAD_USAGE)
    if ended.code is not None and ended.recent >= RESTARTS_MAX:
        return Answer(next=Next.LEAVE_OUT)
    return Answer(next=Next.AGAIN)


def _after_coordinator(ended: Ended) -> Answer:
    if ended.code is not None and ended.code >= 0:
        return Answer(next=Next.END, exit_code=ended.code)
    if ended.is_stopping:
        return _given_up("the coordinator is lost, and with it its last save")
    if ended.recent >= RESTARTS_MAX:
        why = f"the coordinator was lost {ended.recent + 1} times within an hour"
        return replace(_given_up(why), exit_code=ExitCode.GAVE_UP)
    if ended.has_begun and not ended.starts_again_from_newest:
        return _given_up(
            "the coordinator is lost: --resume auto resumes from the newest checkpoint"
        )
    if ended.has_begun and not ended.has_its_state:
        return _given_up("the coordinator is lost, and its machine's checkpoints are not elsewhere")
    return Answer(next=Next.AGAIN if ended.code is not None else Next.ELSEWHERE)


def _given_up(why: str) -> Answer:
    return Answer(next=Next.END, exit_code=ExitCode.PREEMPTED, why=why)
