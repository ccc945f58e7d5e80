"""Diagnoses the end of a rank's process by its exit status, the board and its last output. Decides nothing."""

from __future__ import annotations

from pathlib import Path

from ddp_runner.kernel.processes.children import Ended
from ddp_runner.kernel.processes.rank_process import WhatItWrote
from ddp_runner.kernel.rules.classify import RankExit, signal_name
from ddp_runner.kernel.rules.crash_output import (
    SELF_MADE_SIGNALS,
    read_crash_output,
    read_stack,
    user_frame,
)
from ddp_runner.kernel.rules.faults import Fault, FaultKind, Origin
from ddp_runner.kernel.wire.board import SlotReading

_PACKAGE = str(Path(__file__).resolve().parents[2])


def place_in(text: str) -> str:
    """Return the place in the user's code, by a traceback or stack."""
    return user_frame(text, own=_PACKAGE)


def exit_of(
    ended: Ended,
    wrote: WhatItWrote,
    *,
    rank: int,
    reading: SlotReading,
    killed_for_memory: bool,
    was_asked: bool,
    keeps_all: bool,
) -> RankExit:
    """Return everything that is known of the end of a rank's process; ``reading`` is that of its slot.

    ``was_asked``: it was made to say where it hangs; ``keeps_all``: what it said is in no file.
    """
    crash, words = None, ""
    if ended.signal_number is not None and (was_asked or is_self_made(ended.signal_number)):
        crash = read_crash_output(wrote.last, signal_name=signal_name(ended.signal_number))
        words = read_stack(wrote.when_asked) if crash is None and was_asked else ""
    return RankExit(
        rank=rank,
        step=reading.step,
        phase=reading.phase.label,
        at_ns=ended.at_ns,
        exit_code=ended.exit_code,
        signal_number=ended.signal_number,
        killed_for_memory=killed_for_memory,
        last_output=wrote.before_log if keeps_all else words,
        crash=crash,
        place="" if crash is None else place_in(crash.text),
    )


def store_died(ended: Ended, *, output: str, step: int) -> Fault:
    """The end of the store host, as a fault of nobody; ``output`` is what it said last."""
    how = (
        f"exit code {ended.exit_code}"
        if ended.signal_number is None
        else signal_name(ended.signal_number)
    )
    return Fault(
        kind=FaultKind.STORE_DIED,
        rank=-1,
        step=step,
        cause=f"the store process died ({how})",
        at_ns=ended.at_ns,
        detail=output,
        origin=Origin.OUTSIDE,  # no code of the user's runs there
    )


def is_self_made(signal_number: int) -> bool:
    """Return True if a process causes this signal itself, for example by reading invalid memory."""
    return signal_name(signal_number) in SELF_MADE_SIGNALS
