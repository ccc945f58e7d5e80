"""Turns an exception that left a step into a Fault. The only place that reads exceptions."""

from __future__ import annotations

import time
import traceback

from ddp_runner.kernel.rules.classify import classify_error
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.kernel.system.user_errors import traceback_text, user_place


def _cause(kind: FaultKind, name: str, text: str) -> str:
    """One line for people; torch's preamble of a failed allocation says nothing to them."""
    first_line, *more = text.strip().splitlines() or [""]
    if kind is FaultKind.OUT_OF_MEMORY:
        return f"out of memory: {first_line.rpartition('DefaultCPUAllocator: ')[2] or name}"
    frames = [at for at, line in enumerate(more) if line.startswith("  File ")]
    if frames:  # the traceback of another process, such as a DataLoader's worker
        error = next((line for line in more[frames[-1] :] if line[:1].strip()), name)
        return f"{error} ({first_line.strip('-. ')})"
    return f"{name}: {first_line}" if first_line else name


def fault_of(error: BaseException, *, rank: int, step: int, phase: str, aborted: bool) -> Fault:
    """The fault that ``error`` stands for, with its traceback as text and no reference to it."""
    detail = traceback_text(error)
    at_ns = time.monotonic_ns()
    if isinstance(error, FaultError):
        known = error.fault
        return Fault(
            kind=known.kind,
            rank=rank,
            step=step,
            cause=known.cause,
            phase=phase,
            detail=known.detail or detail,
            at_ns=known.at_ns or at_ns,
            may_retry=known.may_retry,
            origin=known.origin,
        ).bounded()
    if isinstance(error, BadInputError):
        kind, cause = FaultKind.BAD_INPUT, str(error)
    else:
        name = type(error).__name__
        text = str(error)
        kind = classify_error(type_name=name, text=text, aborted=aborted)
        cause = _cause(kind, name, text)
        if kind is FaultKind.RANK_RAISED and (place := user_place(error)):
            cause = f"{cause} ({place})"
    return Fault(
        kind=kind, rank=rank, step=step, cause=cause, phase=phase, detail=detail, at_ns=at_ns
    ).bounded()


def drop_frames(error: BaseException) -> None:
    """Let go of what the frames that ``error`` has left hold, and those of the errors that it came from.

    Tensors of a step stay alive as long as its error does; after a lack of memory those are wanted back.
    """
    left, seen = [error], set()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)  # what still runs keeps what it has
        left += [other for other in (one.__cause__, one.__context__) if other is not None]
