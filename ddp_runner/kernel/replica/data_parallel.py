"""A loss that one rank computes on several devices: each has a copy of the model and a part of the batch.

The gradient is that of the whole batch, each sample with the same weight, and is summed on the first device,
where the model is. Knows of no other rank.

Torch's own scatter, replicate and gather were tried. They take CUDA devices alone, so that no test without two GPUs would
run them. ``scatter`` cuts every tensor in chunks of its own size and hands a list whole to each device; here samples are
counted once for the whole batch. ``replicate`` gives a parameter that no copy uses a gradient of zeros, which an optimizer
applies (momentum, weight decay), and here it stays without one. ``gather`` knows no weights of the parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ddp_runner.kernel.replica.loss import Loss, LossOutput, Weighted, not_shareable, read_loss

_SIMPLE = (str, bytes, bool, int, float, complex, type(None))


def loss_over_devices(
    loss: Loss, model: nn.Module, batch: Any, *, devices: Sequence[torch.device], count: int
) -> Any:
    """Return what ``loss`` would give for all ``count`` samples of ``batch``, which is on the first device.

    Raises FaultError, which no retry repairs, for a batch that cannot be split. The devices are started one
    after the other and then compute at the same time; calls of user code never overlap.
    """
    ends = part_ends(count, pieces=len(devices))
    copies = [model, *copies_of(model, devices[1 : len(ends)])]
    outputs, counts = [], []
    begin = 0
    for number, (end, copy) in enumerate(zip(ends, copies, strict=True)):
        cut = Cut(begin=begin, end=end, count=count, device=devices[number])
        part = cut.part_of(batch)
        if not cut.has_cut:
            raise not_shareable(f"it has no tensor with its {count} samples first")
        with _computing_on(devices[number], number=number):
            outputs.append(read_loss(loss(copy, part)))
        counts.append(end - begin)
        begin = end
    return whole(outputs, counts, device=devices[0])


def part_ends(count: int, *, pieces: int) -> list[int]:
    """Return the end of each part of ``count`` samples; parts are as equal as possible, and none is empty."""
    used = max(1, min(count, pieces))
    return [count * (number + 1) // used for number in range(used)]


def whole(outputs: Sequence[LossOutput], counts: Sequence[int], *, device: torch.device) -> Any:
    """Return one result for the results of all parts, weighted by their numbers of samples."""
    total = sum(counts)
    parts: dict[str, Tensor] = {}
    for output, count in zip(outputs, counts, strict=True):
        for name, number in output.parts.items():
            own = number.to(device) * (count / total)
            parts[name] = parts[name] + own if name in parts else own
    loss: Tensor | Weighted
    if any(output.weight is not None for output in outputs):
        pairs = [_as_total(one, count, device) for one, count in zip(outputs, counts, strict=True)]
        loss = Weighted(
            torch.stack([value for value, _ in pairs]).sum(),
            torch.stack([weight for _, weight in pairs]).sum(),
        )
    else:
        shares = [
            one.value.to(device) * (count / total)
            for one, count in zip(outputs, counts, strict=True)
        ]
        loss = torch.stack(shares).sum()
    return (loss, parts) if parts else loss


def _as_total(output: LossOutput, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A mean is a sum over its samples."""
    if output.weight is not None:
        return output.value.to(device), output.weight.to(device)
    return output.value.to(device) * count, torch.tensor(float(count), device=device)


@dataclasses.dataclass(slots=True, kw_only=True)
class Cut:
    """Takes the samples from ``begin`` to ``end``, of ``count``, out of a batch, to ``device``."""

    begin: int
    end: int
    count: int
    device: torch.device
    has_cut: bool = False  # anything

    def part_of(self, value: Any) -> Any:
        """The part of each tensor in it, and of each list that has a thing for each sample."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, _SIMPLE):
            return value
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, (list, tuple)):
            return self._sequence(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = dataclasses.fields(value)
            changed = {one.name: self.part_of(getattr(value, one.name)) for one in fields}
            return dataclasses.replace(value, **changed)
        raise not_shareable(f"there is no rule to split a {type(value).__name__} in it")

    def _tensor(self, value: Tensor) -> Tensor:
        if value.ndim == 0:
            return value.to(self.device)
        if value.shape[0] != self.count:
            shape = tuple(value.shape)
            raise not_shareable(
                f"its {self.count} samples must come first in each tensor, and one is of shape {shape}"
            )
        self.has_cut = True
        return value[self.begin : self.end].to(self.device, non_blocking=True)

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        changed = {key: self.part_of(one) for key, one in value.items()}
        if type(value) is dict:
            return changed
        try:
            return type(value)(changed)  # type: ignore[call-arg] # as a ModelOutput, or a BatchEncoding
        except TypeError:
            kind = type(value).__name__
            raise not_shareable(f"there is no rule to split a {kind} in it") from None

    def _sequence(self, value: Any) -> Any:
        if len(value) == self.count and self._is_of_samples(value):
            self.has_cut = True
            moved = [_moved(one, self.device) for one in value[self.begin : self.end]]
            return moved if isinstance(value, list) else tuple(moved)
        changed = [self.part_of(one) for one in value]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*changed)
        return changed if isinstance(value, list) else tuple(changed)

    def _is_of_samples(self, value: Any) -> bool:
        """Return True if a list as long as the batch has one item for each sample, not a tensor of all samples."""
        if hasattr(value, "_fields"):
            return False
        tensors = [one for one in value if isinstance(one, Tensor)]
        nested = [one for one in value if not isinstance(one, (*_SIMPLE, Tensor))]
        return not nested and not any(one.ndim and one.shape[0] == self.count for one in tensors)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _computing_on(device: torch.device, *, number: int) -> Iterator[None]:
    """Have user code find ``device`` as the current one, with random numbers of its own."""
    if device.type != "cuda":  # of the CPU there is one generator, which goes on
        yield
        return
    with torch.cuda.device(device):
        if number:  # the first has those of a rank with one device
            index = torch.cuda.current_device()
            seed = torch.default_generator.initial_seed() + number
            torch.cuda.default_generators[index].manual_seed(seed % 2**63)
        yield


class _Copies(torch.autograd.Function):
    """A parameter on other devices; their gradients are added in the order of the devices."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, devices: Sequence[torch.device]) -> Any:
        ctx.home = parameter.device
        ctx.set_materialize_grads(False)
        return tuple(
            parameter.detach().to(device, non_blocking=True, copy=True) for device in devices
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        total: Tensor | None = None
        for gradient in gradients:
            if gradient is not None:
                here = gradient.to(ctx.home)
                total = here if total is None else total + here
        return total, None


def copies_of(model: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """The model on each of ``devices``; what backward gives the copies' parameters is added to its own.

    Each parameter is a node of its own in the graph, so that one that no copy uses stays without a gradient.
    What forward changes in a copy, its buffers say, is lost with it.
    """
    if not devices:
        return []
    memory: dict[int, Sequence[Tensor]] = {}

    def copied(tensor: Tensor) -> Sequence[Tensor]:
        if id(tensor) not in memory:  # shared weights stay shared
            is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
            memory[id(tensor)] = (
                _Copies.apply(tensor, devices)  # type: ignore[no-untyped-call]
                if is_trained
                else [tensor.detach().to(device, copy=True) for device in devices]
            )
        return memory[id(tensor)]

    return [
        _copy_of(model, lambda tensor, at=number: copied(tensor)[at])  # type: ignore[misc]
        for number in range(len(devices))
    ]


def _copy_of(model: nn.Module, on_device: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy made as by torch.nn.parallel.replicate, for any device."""
    made: dict[nn.Module, Any] = {
        one: cast("Any", one)._replicate_for_data_parallel()  # noqa: SLF001 - torch's own use of it
        for one in model.modules()
    }
    for module, copy in made.items():
        own, others = vars(module), vars(copy)
        for name, child in own["_modules"].items():
            others["_modules"][name] = None if child is None else made[child]
        for name, parameter in own["_parameters"].items():
            if parameter is not None:
                setattr(copy, name, on_device(parameter))  # recurrent layers note what is set
            others["_parameters"][name] = None if parameter is None else on_device(parameter)
        for name, buffer in own["_buffers"].items():
            others["_buffers"][name] = None if buffer is None else on_device(buffer)
    result: nn.Module = made[model]
    return result
