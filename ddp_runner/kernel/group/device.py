"""Proves that a rank's device works after an abort, counts the sums that it has reached, and times its waits. Judges nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind
from ddp_runner.kernel.wire.board import Cell, Slot

PROOF_TIMEOUT_S = 30.0
COUNT_BITS = 32  # of the cell: the sums of a generation; above them its number
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


def prove_device(device: torch.device, *, rank: int, step: int) -> None:
    """Raise FaultError (DEVICE_LOST) unless ``device`` synchronises, twice, within the limit.

    The first call waits for what was in flight, the second surfaces a sticky error; after one the
    process must end, since a CUDA context cannot be repaired. The wait is in a helper thread: a
    kernel of an aborted communicator may never end. Nothing to prove on the CPU.
    """
    if device.type != "cuda":
        return
    errors: list[str] = []
    helper = threading.Thread(target=_synchronise, args=(device, errors), daemon=True)
    helper.start()
    helper.join(PROOF_TIMEOUT_S)
    if helper.is_alive():
        errors.append(f"no answer within {PROOF_TIMEOUT_S:g} s")
    if errors:
        raise FaultError(
            Fault(
                kind=FaultKind.DEVICE_LOST,
                rank=rank,
                step=step,
                cause=f"{device} is lost: {errors[0]}",
            )
        )


def _synchronise(device: torch.device, errors: list[str]) -> None:
    """Thread: its failure is the answer."""
    try:
        torch.cuda.synchronize(device)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        errors.append(str(error).splitlines()[0])


# The host only enqueues work, and all ranks then wait in the same place for the sums. A device whose
# kernel never ends differs from those that wait for it by the count that each has written.


class DeviceProgress:
    """The device progress of one rank, in all its generations.

    This one counts nothing: host and device are one, so that the phase on the board says it, or nobody checks.
    """

    def begin(self, generation: int) -> None:
        """The device has come to no sum of ``generation`` yet."""

    def come_to_sum(self) -> None:
        """The device is about to enter the next sum, or broadcast, in which it may wait for others.

        All ranks of a generation must call it for the same ones.
        """

    def close(self) -> None:
        """Let go of the board. Only after a run without an end by a fault: it may wait for the device."""


class WrittenByDevice(DeviceProgress):
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
        return DeviceProgress()
    try:
        return WrittenByDevice(slot, device, unpin=_pinned(cell_of(slot), device))
    except (AssertionError, RuntimeError) as error:  # torch's, without CUDA, is the former
        why = str(error).splitlines()[0]
        warn(f"the progress board cannot be pinned ({why}): a device that hangs is found later")
        return DeviceProgress()


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


class WaitClock:
    """Times how long a rank waits for the others in a step's reduction; its three calls come once a step, in this order.

    This one is by the host's clock, for ranks that compute on the CPU.
    """

    def __init__(self) -> None:
        self._own_ns = self._reduced_ns = time.monotonic_ns()

    def own_is_done(self) -> None:
        """Note that the rank's own share of the backward ends here."""
        self._own_ns = time.monotonic_ns()

    def is_reduced(self) -> None:
        """Note that the sums over ranks are there from here on."""
        self._reduced_ns = time.monotonic_ns()

    def waited_ns(self) -> int:
        """Return the time from the one to the other; on a device only once something that comes after them was read."""
        return self._reduced_ns - self._own_ns


class DeviceClock(WaitClock):
    """Where a device computes: the host only gives it work, long before that is done.

    By the host's clock all ranks would take equally long, since each waits for the slowest where it
    reads the sums. Two events on the device's stream show what of that was this rank's own.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._own, self._reduced = make_event(), make_event()
        self._is_whole = False

    def own_is_done(self) -> None:
        """When the device comes here."""
        self._own.record()

    def is_reduced(self) -> None:
        """When the device comes here."""
        self._reduced.record()
        self._is_whole = True

    def waited_ns(self) -> int:
        """By the device's clock; 0 before a step was reduced."""
        return int(self._own.elapsed_time(self._reduced) * 1e6) if self._is_whole else 0


def wait_clock(device: torch.device) -> WaitClock:
    """The clock for ranks that compute on ``device``."""
    if device.type != "cuda":
        return WaitClock()
    return DeviceClock(
        lambda: torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    )
