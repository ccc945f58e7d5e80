"""Proves that a device still works after its generation was aborted. Never touches the CPU's state."""

from __future__ import annotations

import threading

import torch

from ddp_runner.core.faults import Fault, FaultError, FaultKind

PROOF_TIMEOUT_S = 30.0


def visible_gpu(local_rank: int, visible: int) -> str:
    """The GPU of a rank that an outside launcher has started, of the ``visible`` ones.

    Where each rank is shown its own GPU alone (``srun --gpus-per-task=1``), that is number 0 for all.
    """
    return f"cuda:{local_rank % visible if visible else local_rank}"


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
