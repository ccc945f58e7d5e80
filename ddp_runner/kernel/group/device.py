"""Checks that a device works after an abort, and waits for a dead process's memory. Changes no state of the CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from ddp_runner.kernel.rules.faults import Fault, FaultError, FaultKind

PROOF_TIMEOUT_S = 30.0
FREE_TIMEOUT_S = 30.0  # for the driver to give back what a process held that was killed
STILL_S = 3.0  # without any more of it: somebody else has the rest
FIRST_S = 10.0  # without any of it
_FREE_LOOK_S = 0.1
_AS_FREE_AS = 0.98  # of what was free before


def visible_gpu(local_rank: int, visible: int) -> str:
    """The GPU of a rank that an outside launcher has started, of the ``visible`` ones.

    Where each rank is shown its own GPU alone (``srun --gpus-per-task=1``), that is number 0 for all.
    """
    return f"cuda:{local_rank % visible if visible else local_rank}"


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU's memory that no process holds; 0 on the CPU."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def await_free(
    device: torch.device,
    wanted_bytes: int,
    *,
    look: Callable[[torch.device], int] = free_bytes,
    timeout_s: float = FREE_TIMEOUT_S,
    still_s: float = STILL_S,
    first_s: float = FIRST_S,
) -> int:
    """Return what is free once that is about ``wanted_bytes``, stops growing, or the time is up.

    A process that was killed holds its GPU's memory until the driver has taken its context down,
    while the process that replaces it is there already. What other processes have taken meanwhile
    does not come back: nothing more is awaited ``still_s`` after some got free, or ``first_s`` if none does.
    """
    begun_s = grown_s = time.monotonic()
    most: int | None = None
    patience_s = first_s
    while True:
        free, now_s = look(device), time.monotonic()
        if most is None or free > most:
            patience_s = first_s if most is None else still_s
            most, grown_s = free, now_s
        if free >= _AS_FREE_AS * wanted_bytes:
            return free
        if now_s - grown_s > patience_s or now_s - begun_s > timeout_s:
            return free
        time.sleep(_FREE_LOOK_S)


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
