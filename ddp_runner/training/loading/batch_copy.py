"""Takes a step's batches to the device: at once, or ahead of the step on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_runner.data.loader import Loader, MicroBatch
from ddp_runner.kernel.values.nested import IN_BATCH, OF_BATCH, rebuilt, tensors_in


def to_device(batch: Any, device: torch.device, *, asks_objects: bool = True) -> Any:
    """``batch`` with every tensor in it on ``device``; other leaves are left alone.

    An object with a method ``to``, such as a tokenizer's BatchEncoding, a PackedSequence or a graph,
    knows best itself: it is asked with ``asks_objects``, else left where it is.
    """
    if device.type == "cpu":
        return batch

    def moved(one: Any) -> Any:
        if isinstance(one, Tensor):
            return one.to(device, non_blocking=True)
        return one.to(device) if asks_objects and _moves_itself(one) else one

    return rebuilt(batch, moved, OF_BATCH, is_leaf=_moves_itself)


def _moves_itself(one: Any) -> bool:
    return callable(getattr(one, "to", None))


class CopyAhead:
    """Copies the next step's batches while the host waits for the device to end this step.

    The copy runs on a stream of its own, beside the computation; :meth:`arrive` makes the
    computation wait for it. A batch that does not fit on the device stays on the host, and is
    copied in its step; so does an object whose tensors are not known, as its memory could be used again too early.
    """

    def __init__(self, device: torch.device, loader: Loader) -> None:
        self._device = device
        self._loader = loader
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, step: int) -> None:
        """Take ``step`` from the loader if its batches are there, and begin to copy them."""
        self._loader.take_ahead(step, self._copy)

    def arrive(self, batches: Sequence[MicroBatch]) -> None:
        """Wait for the copies of ``batches``; call it before they are used, whether they were sent ahead or not."""
        computation = torch.cuda.current_stream(self._device)
        computation.wait_stream(self._stream)
        for batch in batches:
            for tensor in tensors_of(batch.batch):
                if tensor.device.type == "cuda":
                    tensor.record_stream(computation)  # its memory is this step's until that ends

    def _copy(self, batch: Any) -> Any:
        with torch.cuda.stream(self._stream):
            try:
                return to_device(batch, self._device, asks_objects=False)
            except torch.OutOfMemoryError:
                return batch


def copy_ahead(device: torch.device, loader: Loader) -> CopyAhead | None:
    """Return a copier; None on the CPU, and for a stream, whose position is that of its last batch."""
    if device.type != "cuda" or not loader.runs_ahead:
        return None
    return CopyAhead(device, loader)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in a batch."""
    return tensors_in(value, IN_BATCH)
