"""Searches for the largest batch size that fits: the next try, a try's outcome, the options for the result. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ddp_runner.core.batch_sizes import accumulated
from ddp_runner.kernel.rules.exits import ExitCode
from ddp_runner.kernel.rules.faults import FaultKind

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ddp_runner.core.settings import DataSettings

SIZE_MAX = 2**20
FINENESS = 8  # the largest size is found to this part of itself


class Outcome(Enum):
    """The outcome of trying one batch size."""

    FITS = "fits"
    TOO_LARGE = "does not fit"
    REFUSED = "is refused"  # by the run, as wrong input
    BROKEN = "failed"  # for a reason that has nothing to do with memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A size that was tried."""

    size: int
    fits: bool


def outcome(
    *, exit_code: int, faults: Collection[str], was_ended: bool, used_share: float, share: float
) -> Outcome:
    """Return the outcome for a batch size, from how a run of a few steps ended.

    ``faults``: the kinds of its faults. ``was_ended``: a rank grew beyond the limit and was ended for it.
    ``used_share``: the largest use of memory by a rank, in the same unit as ``share``.
    """
    if was_ended or FaultKind.OUT_OF_MEMORY.value in faults:
        return Outcome.TOO_LARGE
    if exit_code == ExitCode.BAD_USAGE:
        return Outcome.REFUSED
    if exit_code == ExitCode.DONE:
        return Outcome.FITS if used_share <= share else Outcome.TOO_LARGE
    # The kernel ends who takes too much, and not everywhere can be seen that it was for memory.
    is_killed = FaultKind.RANK_KILLED.value in faults
    return Outcome.TOO_LARGE if is_killed else Outcome.BROKEN


def usable(size: int, *, share: int) -> int:
    """The largest size up to ``size`` that cuts ``share`` samples into like parts; 0: any share."""
    if not share:
        return min(size, SIZE_MAX)
    parts = -(-share // min(size, share))
    return -(-share // parts)


def next_size(tried: Sequence[Tried], *, first: int, share: int = 0) -> int | None:
    """Return the batch size to try next; None once the largest that fits is known, or none fits.

    The size doubles from ``first`` until one does not fit (or is halved until one does); then it is halfway
    between, in steps of a power of two. ``share``: the samples of a rank's step, if that is given.
    """
    fitting = max((one.size for one in tried if one.fits), default=0)
    failing = min((one.size for one in tried if not one.fits), default=0)
    if not tried:
        return usable(first, share=share)
    if not failing:
        doubled = usable(2 * fitting, share=share)
        return doubled if doubled > fitting else None
    if not fitting:
        return usable(failing // 2, share=share) if failing > 1 else None
    grain = 1 << (max(1, fitting // FINENESS).bit_length() - 1)
    middle = (fitting + failing) // 2 // grain * grain
    if middle <= fitting:
        middle = fitting + grain
    middle = usable(middle, share=share)
    return middle if fitting < middle < failing else None


def largest(tried: Sequence[Tried]) -> int:
    """The largest size that fits; 0 where none does."""
    return max((one.size for one in tried if one.fits), default=0)


def share_of_rank(data: DataSettings, *, world_size: int) -> int:
    """Samples of the largest rank's step where the step's size is given, else 0: any."""
    return -(-data.global_batch_size // world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Words for the command line that use a size, and what a step then is."""

    words: str
    step_samples: int


def uses(found: int, asked: DataSettings, *, world_size: int) -> tuple[Use, ...]:
    """Return the ways to use batches of ``found``: the plain one, then one that keeps the step as ``asked``."""
    if asked.global_batch_size:
        words = f"--batch-size {found} global_batch_size={asked.global_batch_size}"
        return (Use(words=words, step_samples=asked.global_batch_size),)
    batches, is_of_all = accumulated(asked, world_size=world_size), bool(asked.accumulation_total)
    step, times = asked.batch_size * batches, batches // world_size
    again = f" accumulation={times}" if times > 1 else ""
    again = f" accumulation_total={batches}" if is_of_all else again
    plain = Use(words=f"--batch-size {found}{again}", step_samples=found * batches)
    if found < asked.batch_size:
        part = usable(found, share=asked.batch_size)
        words = f"--batch-size {asked.batch_size} micro_batch_size={part}{again}"
        return (plain, Use(words=words, step_samples=step))
    if batches % world_size:  # which shares part
        return (plain,)
    whole = asked.batch_size * times
    size = next((n for n in range(min(found, whole), asked.batch_size, -1) if whole % n == 0), 0)
    if not size or plain.step_samples == step:
        return (plain,)
    parts = whole // size
    count = f"accumulation_total={parts * world_size}" if is_of_all else f"accumulation={parts}"
    return (plain, Use(words=f"--batch-size {size} {count}", step_samples=step))
