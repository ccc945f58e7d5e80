"""Faults on request: reads ``--inject`` specs and draws random plans. Never harms anything itself.

``KIND:key=value,...`` with ``rank`` (or ``all``), ``step``, ``phase``, ``times``, ``seconds``, ``bit``; or
``random:mtbf_s=5,seed=7,kinds=kill+stop``, a plan that the same seed draws again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import FaultKind
from ddp_runner.kernel.rules.phases import Moment, Phase

OPTION = "--inject"
EVERY_RANK = -1  # written ``rank=all``
PHASES = (
    *(phase.label for phase in Phase if phase not in (Phase.IDLE, Phase.FINISHED)),
    *(moment.value for moment in Moment),
)


class InjectKind(Enum):
    """The kinds of injected faults. The system sends the signals; all others happen in the rank's code."""

    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP
    EXIT = "exit"  # os._exit(0): gone without an error
    RAISE = "raise"  # an exception in the middle of the step
    HANG = "hang"  # sleeps for ever, the GIL released
    SPIN = "spin"  # a livelock in Python
    GIL = "gil"  # blocks inside C code with the GIL held
    SLOW = "slow"  # sleeps ``seconds`` at that phase
    LOADER_KILL = "loader_kill"  # SIGKILL to one of the rank's loader workers
    LOADER_STOP = "loader_stop"  # SIGSTOP to one of them
    OOM = "oom"  # an allocation that the system refuses; what is asked for next fits again
    UNUSED = "unused"  # the step's loss leaves the last module's parameters out
    NAN = "nan"  # the step's loss is not a number
    SPIKE = "spike"  # the step's loss is 10,000 times what it was
    DIVERGE = "diverge"  # one bit of one weight flips
    WRONG_GRADIENT = "wrong_gradient"  # one bit of the rank's own gradient flips
    HIDDEN_STATE = "hidden_state"  # from then on its loss depends on state of this process alone
    BAD_SAMPLE = "bad_sample"  # a sample that the rank takes at that step raises, now and for ever
    DISK_FULL = "disk_full"  # for ``seconds`` the system refuses to write checkpoints
    DISK_ERROR = "disk_error"  # the next checkpoint meets an I/O error when it is synced
    SLOW_DISK = "slow_disk"  # the next write of a checkpoint takes ``seconds`` longer
    CORRUPT_CHECKPOINT = "corrupt_checkpoint"  # a byte of the newest checkpoint turns over


# What each kind is noticed as. What is not here needs nobody's notice: it is waited for.
SHOWS_AS: Mapping[InjectKind, tuple[FaultKind, ...]] = {
    InjectKind.KILL: (FaultKind.RANK_KILLED,),
    InjectKind.EXIT: (FaultKind.RANK_EXITED,),
    InjectKind.RAISE: (FaultKind.RANK_RAISED,),
    **dict.fromkeys(
        (InjectKind.STOP, InjectKind.HANG, InjectKind.SPIN, InjectKind.GIL),
        (FaultKind.RANK_HUNG, FaultKind.COLLECTIVE_STUCK),
    ),
    InjectKind.LOADER_KILL: (FaultKind.LOADER_WORKER_DIED,),
    InjectKind.LOADER_STOP: (FaultKind.LOADER_TIMEOUT,),
    InjectKind.OOM: (FaultKind.OUT_OF_MEMORY,),
    InjectKind.UNUSED: (FaultKind.REDUCTION_UNFINISHED,),
    InjectKind.NAN: (FaultKind.NON_FINITE,),
    InjectKind.SPIKE: (FaultKind.LOSS_EXPLODED,),
    InjectKind.DIVERGE: (FaultKind.REPLICA_DIVERGED,),
    InjectKind.BAD_SAMPLE: (FaultKind.BAD_SAMPLE,),
    InjectKind.DISK_FULL: (FaultKind.STORAGE_FAILED,),
    InjectKind.DISK_ERROR: (FaultKind.STORAGE_FAILED,),
    InjectKind.CORRUPT_CHECKPOINT: (FaultKind.CHECKPOINT_BAD,),
}

# These change what a step computes, so they happen where its loss is computed.
KINDS_IN_LOSS = frozenset(
    {
        *(InjectKind.UNUSED, InjectKind.NAN, InjectKind.SPIKE, InjectKind.DIVERGE),
        *(InjectKind.WRONG_GRADIENT, InjectKind.HIDDEN_STATE),
    }
)
# Of these, the kinds that only drills can find, by computing the step elsewhere.
FOR_DRILLS = frozenset({InjectKind.WRONG_GRADIENT, InjectKind.HIDDEN_STATE})

# What meets a write of a checkpoint meets rank 0, which writes them: at another rank it would be nothing.
_OF_SAVES = frozenset(
    {
        *(InjectKind.DISK_FULL, InjectKind.DISK_ERROR),
        *(InjectKind.SLOW_DISK, InjectKind.CORRUPT_CHECKPOINT),
    }
)
_WRITER = 0

# These belong to one step: another one, which a resume begins with, has none of them.
_OF_A_STEP = frozenset({InjectKind.NAN, InjectKind.SPIKE, InjectKind.WRONG_GRADIENT})
_BIT_OF = {InjectKind.WRONG_GRADIENT: ", bit"}
BIT, BITS = 12, 64  # the bit that flips unless one is named, and the bits of the widest number

# What a program with a loop of its own does is seen where it calls us: its backward lies between.
_PHASES_OF_TASKS = frozenset(one.label for one in (Phase.BACKWARD, Phase.COMPILE, Phase.PROFILE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One fault at one place. ``step`` is the index of the step in progress, from 0.

    ``times`` is for each rank; ``rank`` may be :data:`EVERY_RANK`. ``last_step``: it happens to no later one;
    None: whenever one is met. ``bit``: the bit that flips in a number, counted from the lowest.
    """

    kind: InjectKind
    rank: int
    step: int
    phase: str
    times: int
    seconds: float
    last_step: int | None = None
    bit: int = BIT

    def is_at(self, step: int) -> bool:
        """Return whether it may happen at ``step``."""
        return self.step <= step and (self.last_step is None or step <= self.last_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPlan:
    """Faults at random moments, ``mtbf_s`` apart on average."""

    mtbf_s: float
    seed: int
    kinds: tuple[InjectKind, ...]
    times: int  # at most; 0: no bound


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomInjection:
    """One fault that a random plan has drawn; ``wait_s`` after the one before it."""

    wait_s: float
    kind: InjectKind
    rank: int


def parse_injection(text: str, *, world_size: int) -> Injection | RandomPlan:
    """Read one spec. Raises BadInputError naming what is wrong and what would be right."""
    name, _, rest = text.partition(":")
    values = _key_values(text, rest)
    if name == "random":
        return _random_plan(text, values)
    kind = _kind(text, name)
    injection = Injection(
        kind=kind,
        rank=_rank(text, values, world_size),
        step=_integer(text, values, "step", 10),
        phase=values.pop("phase", Phase.FORWARD.label),
        times=_integer(text, values, "times", 1),
        seconds=_number(text, values, "seconds", 1.0),
    )
    if kind in _OF_SAVES:
        injection = replace(injection, rank=_WRITER)
    if kind in _OF_A_STEP:
        injection = replace(injection, last_step=injection.step + injection.times - 1)
    if kind is InjectKind.WRONG_GRADIENT:
        injection = replace(injection, bit=_integer(text, values, "bit", BIT))
        if injection.bit >= BITS:
            raise BadInputError(OPTION, text, f"bit is 0 to {BITS - 1}")
    _refuse_unknown(text, values, f"rank, step, phase, times, seconds{_BIT_OF.get(kind, '')}")
    if injection.phase not in PHASES:
        raise BadInputError(OPTION, text, f"phase is one of {', '.join(PHASES)}")
    if kind in KINDS_IN_LOSS and injection.phase != Phase.FORWARD.label:
        raise BadInputError(OPTION, text, f"{name} happens in phase forward only")
    return injection


def refuse_of_loops(texts: Sequence[str], *, world_size: int) -> None:
    """Raise BadInputError for a kind or phase that an attached loop does not have: it would never come."""
    for text in texts:
        one = parse_injection(text, world_size=world_size)
        kinds = set(one.kinds if isinstance(one, RandomPlan) else (one.kind,)) & KINDS_IN_LOSS
        if kinds:
            name = min(kind.value for kind in kinds)
            raise BadInputError(
                OPTION, text, f"{name} is for a task: the loop computes its own loss"
            )
        if isinstance(one, Injection) and one.phase in _PHASES_OF_TASKS:
            phases = ", ".join(phase for phase in PHASES if phase not in _PHASES_OF_TASKS)
            raise BadInputError(OPTION, text, f"an attached loop has the phases {phases}")


def refuse_of_tasks(
    texts: Sequence[str], *, world_size: int, total_steps: int, never: Mapping[str, str]
) -> None:
    """Raise BadInputError for a fault that no run with these settings can meet.

    ``total_steps``: of the run; 0: not known yet. ``never``: kinds and phases that do not come, each with the reason.
    """
    for text in texts:
        one = parse_injection(text, world_size=world_size)
        kinds = one.kinds if isinstance(one, RandomPlan) else (one.kind,)
        phases = [one.phase] if isinstance(one, Injection) else []
        for name in (*(kind.value for kind in kinds), *phases):
            if name in never:
                raise BadInputError(OPTION, text, f"{name} never comes: {never[name]}")
        if isinstance(one, Injection) and 0 < total_steps < one.step:
            expected = f"step {one.step} never comes: run.max_steps={total_steps}"
            raise BadInputError(OPTION, text, expected)


def changes_loss(texts: Sequence[str], *, world_size: int) -> bool:
    """Return whether any of these specs may change the result of a step, except the kinds that drills find."""
    return not (KINDS_IN_LOSS - FOR_DRILLS).isdisjoint(_kinds_in(texts, world_size=world_size))


def flips_bits(texts: Sequence[str], *, world_size: int) -> bool:
    """Return whether any of these specs makes replicas differ by a bit, as faulty hardware does."""
    return InjectKind.DIVERGE in _kinds_in(texts, world_size=world_size)


def _kinds_in(texts: Sequence[str], *, world_size: int) -> set[InjectKind]:
    parsed = [parse_injection(text, world_size=world_size) for text in texts]
    kinds = {kind for one in parsed for kind in getattr(one, "kinds", ())}
    return kinds | {one.kind for one in parsed if isinstance(one, Injection)}


def bad_sample_places(
    specs: Sequence[str], *, world_size: int, total_steps: int
) -> tuple[tuple[int, int], ...]:
    """Return ``(rank, step)`` of each injected bad sample; every process of the run knows them all."""
    places: list[tuple[int, int]] = []
    for text in specs:
        one = parse_injection(text, world_size=world_size)
        if isinstance(one, RandomPlan):
            places += _drawn_places(one, world_size=world_size, total_steps=total_steps)
        elif one.kind is InjectKind.BAD_SAMPLE:
            ranks = range(world_size) if one.rank == EVERY_RANK else (one.rank,)
            places += [(rank, one.step) for rank in ranks]
    return tuple(places)


def _drawn_places(plan: RandomPlan, *, world_size: int, total_steps: int) -> list[tuple[int, int]]:
    """A place anywhere in the run for each of the plan's injections that is a bad sample.

    Bad in every process from the start, so that it depends on no moment.
    """
    injections = [
        (draw_injection(plan, number, world_size=world_size), _uniform(plan.seed, number)[3])
        for number in range(plan.times if InjectKind.BAD_SAMPLE in plan.kinds else 0)
    ]
    return [
        (injection.rank, int(place * total_steps))
        for injection, place in injections
        if injection.kind is InjectKind.BAD_SAMPLE
    ]


def draw_injection(plan: RandomPlan, number: int, *, world_size: int) -> RandomInjection:
    """Fault ``number`` of the plan, from 0: a pure function of the plan and the world size."""
    first, second, third, _ = _uniform(plan.seed, number)
    kind = plan.kinds[int(second * len(plan.kinds))]
    return RandomInjection(
        wait_s=-plan.mtbf_s * math.log(1.0 - first),
        kind=kind,
        rank=_WRITER if kind in _OF_SAVES else int(third * world_size),
    )


def _uniform(seed: int, number: int) -> tuple[float, float, float, float]:
    """Four numbers in [0, 1), the same on every machine and Python."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    parts = [digest[start : start + 8] for start in (0, 8, 16, 24)]
    below = [min(int.from_bytes(part, "little") / 2**64, 1 - 2**-53) for part in parts]
    return below[0], below[1], below[2], below[3]


def _random_plan(text: str, values: dict[str, str]) -> RandomPlan:
    kinds = tuple(_kind(text, name) for name in values.pop("kinds", "kill+stop+raise").split("+"))
    plan = RandomPlan(
        mtbf_s=_number(text, values, "mtbf_s", 10.0),
        seed=_integer(text, values, "seed", 0),
        kinds=kinds,
        times=_integer(text, values, "times", 0),
    )
    _refuse_unknown(text, values, "mtbf_s, seed, kinds, times")
    if InjectKind.BAD_SAMPLE in kinds and not plan.times:
        expected = "bad_sample needs times=N: the samples are drawn before the run begins"
        raise BadInputError(OPTION, text, expected)
    if plan.mtbf_s <= 0:
        raise BadInputError(OPTION, text, "mtbf_s is above 0")
    return plan


def _kind(text: str, name: str) -> InjectKind:
    try:
        return InjectKind(name)
    except ValueError:
        known = ", ".join(kind.value for kind in InjectKind)
        raise BadInputError(OPTION, text, f"the kind is one of {known}, random") from None


def _key_values(text: str, rest: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise BadInputError(OPTION, text, "write KIND:key=value,key=value")
        if key.strip() in values:
            raise BadInputError(
                OPTION, text, f"has {key.strip()} twice; a second fault has an {OPTION} itself"
            )
        values[key.strip()] = value.strip()
    return values


def _rank(text: str, values: dict[str, str], world_size: int) -> int:
    if values.get("rank") == "all":
        del values["rank"]
        return EVERY_RANK
    rank = _integer(text, values, "rank", world_size - 1)
    if rank >= world_size:
        raise BadInputError(OPTION, text, f"rank is 0 to {world_size - 1} here, or all")
    return rank


def _integer(text: str, values: dict[str, str], key: str, default: int) -> int:
    raw = values.pop(key, str(default))
    if not raw.isdecimal():
        raise BadInputError(OPTION, text, f"{key} is a whole number, 0 or more")
    return int(raw)


def _number(text: str, values: dict[str, str], key: str, default: float) -> float:
    raw = values.pop(key, str(default))
    try:
        number = float(raw)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise BadInputError(OPTION, text, f"{key} is a number of seconds, 0 or more")
    return number


def _refuse_unknown(text: str, values: Mapping[str, str], known: str) -> None:
    if values:
        raise BadInputError(OPTION, text, f"{', '.join(values)} is unknown; known: {known}")
