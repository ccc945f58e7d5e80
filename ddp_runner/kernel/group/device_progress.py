"""Counts the sums over ranks that a rank's device has reached; the device itself writes it on the board.

The host only enqueues work, and all ranks then wait in the same place for the sums. A device whose
kernel never ends differs from those that wait for it by the count that each has written. Judges nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ddp_runner.kernel.wire.board import Cell, Slot

COUNT_BITS = 32  # of the cell: the sums of a generation; above them its number
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class DeviceProgress(Protocol):
    """The device progress of one rank, in all its generations."""

    def begin(self, generation: int) -> None:
        """The device has come to no sum of ``generation`` yet."""
        ...

    def come_to_sum(self) -> None:
        """The device is about to enter the next sum, or broadcast, in which it may wait for others.

        All ranks of a generation must call it for the same ones.
        """
        ...

    def close(self) -> None:
        """Let go of the board. Only after a run without an end by a fault: it may wait for the device."""
        ...


class NoDeviceProgress:
    """Does nothing: host and device are one, so that the phase on the board says it, or nobody checks."""

    def begin(self, generation: int) -> None:
        """Do nothing."""

    def come_to_sum(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class WrittenByDevice:
    """The count lies on the device, and is copied to the board on the stream that computes.

    The host never waits for that where the board's memory is pinned (torch copies by
    ``cudaMemcpyAsync``, whoever has pinned it: ATen/native/cuda/Copy.cu).
    """

    def __init__(
        self, slot: Slot, device: torch.device, *, unpin: Callable[[], None] = lambda: None
    ) -> None:
        self._cell = cell_of(slot)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._unpin = unpin

    def begin(self, generation: int) -> None:
        """Start the count of ``generation``, on the device: its remaining writes of an older one come first."""
        self._count.fill_(generation << COUNT_BITS)
        self._write()

    def come_to_sum(self) -> None:
        """Count one more sum."""
        self._count.add_(1)
        self._write()

    def _write(self) -> None:
        self._cell.copy_(self._count, non_blocking=True)

    def close(self) -> None:
        """Unpin the board's memory."""
        self._unpin()


def device_progress(
    slot: Slot, device: torch.device, *, warn: Callable[[str], None]
) -> DeviceProgress:
    """Return the progress of ``device``; if its memory cannot be pinned, warn once and count nothing."""
    slot.set(Cell.DEVICE_SUMS, 0)  # of the process before this one
    if device.type != "cuda":
        return NoDeviceProgress()
    try:
        return WrittenByDevice(slot, device, unpin=_pinned(cell_of(slot), device))
    except (AssertionError, RuntimeError) as error:  # torch's, without CUDA, is the former
        why = str(error).splitlines()[0]
        warn(f"the progress board cannot be pinned ({why}): a device that hangs is found later")
        return NoDeviceProgress()


def cell_of(slot: Slot) -> Tensor:
    """The board's cell, as a tensor over its very memory."""
    return torch.frombuffer(slot.memory(Cell.DEVICE_SUMS), dtype=torch.int64)


def _pinned(cell: Tensor, device: torch.device) -> Callable[[], None]:
    """Pin the memory of ``cell`` for ``device``; what undoes that. Raises RuntimeError or AssertionError."""
    runtime, at = torch.cuda.cudart(), cell.data_ptr()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        error = int(runtime.cudaHostRegister(at, cell.nbytes, _PORTABLE))
        if error:
            _forget_error(device)
    torch.cuda.check_error(error)

    def unpin() -> None:
        if int(runtime.cudaHostUnregister(at)):
            _forget_error(device)

    return unpin


def _forget_error(device: torch.device) -> None:
    """CUDA keeps the error of a call until somebody asks, as torch does after its next kernel."""
    try:
        torch.ones(1, device=device)
    except RuntimeError:
        return
