"""What a task's ``loss()`` may give, and one line that says what is wrong where it gives something else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ddp_runner.core.faults import Fault, FaultError, FaultKind

Loss = Callable[[nn.Module, Any], Tensor]
EXPECTED = "a scalar tensor, the mean loss of the batch"


def checked_loss(value: object) -> Tensor:
    """``value`` as a float scalar. Raises FaultError, which no retry repairs, for anything else."""
    if isinstance(value, Tensor):
        wrong = _wrong_tensor(value)
        if not wrong:
            return value.float().reshape(())
    else:
        wrong = _wrong_object(value)
    raise _user_error(f"loss() gave {wrong}, not {EXPECTED}")


def no_graph() -> FaultError:
    """The error of a loss that leads to no parameter.

    One rank's batch may hold nothing to learn from; but where that is so on all of them at the very
    first step, the run would train nothing.
    """
    return _user_error(
        "loss() gave a tensor without a graph to the parameters: nothing would be trained; "
        "leave out .detach(), .item() and torch.no_grad()"
    )


def _user_error(cause: str) -> FaultError:
    return FaultError(
        Fault(
            kind=FaultKind.RANK_RAISED,
            rank=-1,
            step=0,
            cause=cause,
            at_ns=time.monotonic_ns(),
            may_retry=False,
        )
    )


def _wrong_tensor(value: Tensor) -> str:
    """What is wrong with it, and the cure; empty if nothing is."""
    if value.numel() != 1:
        return f"a tensor of shape {tuple(value.shape)} (.mean() makes one number of it)"
    if not value.is_floating_point():
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    return ""


def _wrong_object(value: object) -> str:
    if value is None:
        return "None (is a return missing?)"
    name = type(value).__name__
    kind = f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
    if isinstance(value, Mapping):
        names = ", ".join(str(key) for key in list(value)[:5])
        return f"{kind} of {names or 'nothing'} (return the loss of it)"
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return f"{kind} of {len(value)} (return the loss of it)"
    if isinstance(value, (int, float)):
        return f"a plain {name} (leave out .item() or float())"
    return kind
