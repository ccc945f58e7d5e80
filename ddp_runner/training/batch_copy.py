"""Takes a step's batches to the device: at once, or ahead of the step on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_runner.data.loader import Loader, MicroBatch


def to_device(batch: Any, device: torch.device, *, asks_objects: bool = True) -> Any:
    """``batch`` with every tensor in it on ``device``; other leaves are left alone.

    An object with a method ``to``, such as a tokenizer's BatchEncoding, a PackedSequence or a graph,
    knows best itself: it is asked with ``asks_objects``, else left where it is.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        return batch.to(device) if asks_objects else batch
    return _with_parts(batch, partial(to_device, device=device, asks_objects=asks_objects))


def _with_parts(batch: Any, moved: Callable[[Any], Any]) -> Any:
    if isinstance(batch, Mapping):
        return {key: moved(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(moved, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(moved, batch))
    if is_dataclass(batch) and not isinstance(batch, type):
        parts = {one.name: getattr(batch, one.name) for one in fields(batch) if one.init}
        return replace(batch, **{name: moved(part) for name, part in parts.items()})
    return batch


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
        """To be called before ``batches`` are used, whether they were sent ahead or not."""
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
    """What copies ahead; None on the CPU, and for a stream, whose position is that of its last batch."""
    if device.type != "cuda" or not loader.runs_ahead:
        return None
    return CopyAhead(device, loader)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in a batch."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from tensors_of(getattr(value, one.name))
