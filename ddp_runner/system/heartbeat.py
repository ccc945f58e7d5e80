"""The sign of life that a script gives by itself, where it shows no other for long."""

from __future__ import annotations

from ddp_runner.kernel.wire.board import Cell, Slot

_counted_on: list[Slot] = []  # this rank's, once it is one


def heartbeat() -> None:
    """Say that this rank is at work, for ``run --hang-timeout``; takes less than a microsecond.

    For what lasts longer than that timeout without an optimizer step, a collective or a line of output, such as an
    evaluation on one rank. From any thread. Outside of ``run`` it does nothing.
    """
    for slot in _counted_on:
        slot.add(Cell.SCRIPT_HEARTBEATS, 1)


def are_counted() -> bool:
    """Return whether this process is a rank of a script under ``run``."""
    return bool(_counted_on)


def count_heartbeats(slot: Slot) -> None:
    """Count heartbeats on the board from now on."""
    _counted_on[:] = [slot]
