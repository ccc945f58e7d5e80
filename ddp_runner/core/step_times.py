"""Rules of ``bench``: the parts of a step's time, its bottleneck and what to try. Values only."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_runner.core.phases import PHASE_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddp_runner.core.settings import Settings

STEP = "step_ms"
_DATA_SHARE, _COMMUNICATION_SHARE, _OPTIMIZER_SHARE = 0.15, 0.25, 0.3
_UNEQUAL = 1.25  # slowest rank's own time to that of the fastest


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a step over many steps: its median, and from where to where the middle half of them is."""

    name: str
    median_ms: float
    low_ms: float
    high_ms: float
    share: float  # of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``bound``: what a step mostly waits for, in a word; ``why``: in a sentence; ``tries``: words to try, each why."""

    bound: str
    why: str
    tries: tuple[tuple[str, str], ...]


def parts_of(records: Sequence[Mapping[str, float]]) -> tuple[Part, ...]:
    """The parts of a step, in their order, of records of all ranks; the whole step is the last one."""
    columns: dict[str, list[float]] = {
        name: [one.get(name, 0.0) for one in records] for name in PHASE_NAMES
    }
    wholes = [one["step_s"] * 1e3 for one in records]
    columns[STEP] = wholes
    step_ms = statistics.median(wholes)
    return tuple(_part(name, values, step_ms=step_ms) for name, values in columns.items())


def _part(name: str, values: Sequence[float], *, step_ms: float) -> Part:
    low, median, high = _quartiles(values)
    share = median / step_ms if step_ms else 0.0
    return Part(name=name, median_ms=median, low_ms=low, high_ms=high, share=share)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def slowness(records: Iterable[Mapping[str, float]]) -> tuple[int, float]:
    """The rank that takes longest for its own part of a step, and how many times the fastest one's that is."""
    own: dict[int, list[float]] = {}
    for one in records:
        took = one.get("data_ms", 0.0) + one.get("forward_ms", 0.0) + one.get("backward_ms", 0.0)
        own.setdefault(int(one["rank"]), []).append(took)
    medians = {rank: statistics.median(values) for rank, values in own.items()}
    if not medians:
        return 0, 1.0
    slowest = max(medians, key=lambda rank: (medians[rank], -rank))
    fastest = min(medians.values())
    return slowest, medians[slowest] / fastest if fastest else 1.0


def judge(
    parts: Sequence[Part],
    settings: Settings,
    *,
    ranks: int,
    is_on_gpu: bool,
    slow: tuple[int, float] = (0, 1.0),
) -> Verdict:
    """Return the bottleneck of a step, and what to try first. ``slow``: as :func:`slowness` returns it."""
    share = {part.name: part.share for part in parts}
    if share["data_ms"] >= _DATA_SHARE:
        why = f"a rank waits for its data for {share['data_ms']:.0%} of a step"
        return Verdict(bound="data", why=why, tries=_tries_of_data(settings))
    if ranks > 1 and share["communication_ms"] >= _COMMUNICATION_SHARE:
        return _of_communication(settings, share["communication_ms"], slow, is_on_gpu=is_on_gpu)
    if share["optimizer_ms"] >= _OPTIMIZER_SHARE:
        why = f"the update takes {share['optimizer_ms']:.0%} of a step"
        return Verdict(bound="optimizer", why=why, tries=_tries_of_optimizer(settings))
    computed = share["forward_ms"] + share["backward_ms"]
    why = f"forward and backward are {computed:.0%} of a step"
    return Verdict(bound="computation", why=why, tries=_tries_of_computation(settings, is_on_gpu))


_SEE = ("--profile steps=10:15", "shows which operations take the time")


def _of_communication(
    settings: Settings, share: float, slow: tuple[int, float], *, is_on_gpu: bool
) -> Verdict:
    rank, times = slow
    if times >= _UNEQUAL:
        why = f"ranks wait for {share:.0%} of a step, most of all for rank {rank}: it takes {times:.2g} times as long"
        tries = [("data.shares=...", f"fewer samples for rank {rank}, if its device is slower")]
        if not settings.data.shares:
            tries.append(("lengths in Datasets(...)", "batches of like length, if samples differ"))
        return Verdict(bound="a slow rank", why=why, tries=tuple(tries))
    tries = [(_four_times(settings), "one sum for four times the samples")]
    if settings.ddp.gradient_dtype == "auto" and is_on_gpu:
        tries.append(("ddp.gradient_dtype=bf16", "halves what is sent where gradients are fp32"))
    tries.append(
        ("ddp.bucket_cap_mb=100", "fewer, larger sums; or smaller ones, which begin earlier")
    )
    if not is_on_gpu:
        tries.append(("-n 1", "on few cores one rank with all of them may be faster"))
    why = f"sums over ranks that nothing hides are {share:.0%} of a step"
    return Verdict(bound="communication", why=why, tries=tuple(tries))


def _four_times(settings: Settings) -> str:
    """A step of four times the samples, in the words that its size was given in."""
    data = settings.data
    if data.global_batch_size:
        return f"global_batch_size={4 * data.global_batch_size}"
    if data.accumulation_total:
        return f"accumulation_total={4 * data.accumulation_total}"
    return f"accumulation={4 * data.accumulation}"


def _tries_of_data(settings: Settings) -> tuple[tuple[str, str], ...]:
    data = settings.data
    more = 4 if data.num_workers == "auto" else 2 * max(1, data.num_workers)
    asked = f"num_workers={more}"
    if data.workers_total is not None:
        asked = f"workers_total={2 * max(1, data.workers_total)}"
    tries = [(asked, "more processes that load, where there are cores for them")]
    if not data.preload:
        tries.append(("data.preload=true", "samples that are always the same are read once"))
    tries.append((f"prefetch_factor={2 * data.prefetch_factor}", "for loading times that vary"))
    return tuple(tries)


def _tries_of_optimizer(settings: Settings) -> tuple[tuple[str, str], ...]:
    tries = [
        ("--find-batch-size", "a larger batch has fewer updates for as many samples"),
        (_four_times(settings), "the same, without more memory"),
    ]
    if settings.optim.ema_decay is not None and settings.optim.ema_every == 1:
        tries.append(("optim.ema_every=10", "the average is a part of the update"))
    return tuple(tries)


def _tries_of_computation(settings: Settings, is_on_gpu: bool) -> tuple[tuple[str, str], ...]:
    tries = []
    if is_on_gpu and settings.optim.precision == "fp32":
        tries.append(("optim.precision=auto", "mixed precision, where the GPU is fast with it"))
    elif is_on_gpu and settings.run.matmul_precision == "highest":
        tries.append(("run.matmul_precision=high", "TF32 for what is left in float32"))
    if not settings.run.compile and settings.run.mode != "data_parallel":
        tries.append(("run.compile=true", "fewer and larger kernels"))
    if settings.memory.activation_checkpointing != "off":
        tries.append(("memory.activation_checkpointing=off", "each block is computed twice"))
    if is_on_gpu:
        tries.append(("--find-batch-size", "a GPU that is not full takes more samples at once"))
    return (*tries, _SEE)
