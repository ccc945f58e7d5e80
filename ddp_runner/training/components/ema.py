"""Keeps an exponential moving average of the weights beside a model. Never changes training."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ddp_runner.checkpoint.entry_names import bare_name, read_as
from ddp_runner.training.components.buffers import persistent_buffers
from ddp_runner.training.components.layout import laid_out_as

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from torch import Tensor, nn

    from ddp_runner.core.settings import OptimSettings


class Ema:
    """Averages the floating-point parameters of ``model``; copies its persistent buffers.

    Buffers are copied, not averaged: batch statistics are averages already, and masks hold
    infinities. The average of half-precision weights is kept in float32. The first update copies
    the weights; update ``n`` after it uses ``min(decay, (1 + n) / (10 + n))``, so that a short run
    is not held back by its random start. Whoever updates it asks :meth:`is_due` first. Pass the bare module, never the
    DDP wrapper.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float,
        *,
        every: int = 1,
        start_step: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """``every``, ``start_step``: which steps :meth:`is_due` names. ``device``: None is each weight's own."""
        if not 0 < decay < 1:
            raise ValueError(f"decay={decay}: must be between 0 and 1")
        self.decay = decay
        self._every = every
        self._start_step = start_step
        self._device = device
        self.updates = 0
        self._parameters: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._bind(model)

    def _bind(self, model: nn.Module) -> None:
        """Walk the modules of ``model`` once: doing so at every step takes longer than averaging."""
        self._model = model
        self._live_parameters = _float_parameters(model)
        self._buffer_owners = persistent_buffers(model)

    def _live_buffers(self) -> dict[str, Tensor]:
        """The buffers as they are now: a module may assign a new tensor at any time, or fill one late."""
        found = {name: getattr(owner, key) for name, (owner, key) in self._buffer_owners.items()}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    @property
    def started(self) -> bool:
        """True if there is an average; before, the model's own weights are used instead."""
        return bool(self._parameters or self._buffers)

    def is_due(self, step: int) -> bool:
        """Return True if the weights after optimizer step number ``step``, counted from 1, enter the average."""
        begun = step - self._start_step
        return begun >= 0 and begun % self._every == 0

    def bytes_to_come(self, *, but: Container[str] = ()) -> int:
        """Return the bytes that the average will take once started, except for the parameters ``but``."""
        live = [one for name, one in self._live_parameters.items() if name not in but]
        kept = sum(one.numel() * _average_dtype(one).itemsize for one in live)
        return kept + sum(one.numel() * one.element_size() for one in self._live_buffers().values())

    @torch.no_grad()
    def start(self, model: nn.Module) -> None:
        """Copy the weights of ``model`` as the first average."""
        self._bind(model)
        self._parameters = {
            name: live.detach().to(self._place_of(live), _average_dtype(live), copy=True)
            for name, live in self._live_parameters.items()
        }
        self._buffers = self._buffer_copies()

    def _place_of(self, live: Tensor) -> torch.device:
        return self._device or live.device

    def _buffer_copies(self) -> dict[str, Tensor]:
        live = self._live_buffers()
        return {name: one.detach().to(self._place_of(one), copy=True) for name, one in live.items()}

    def _has_their_layout(self, live: Mapping[str, Tensor]) -> bool:
        kept = self._buffers
        return kept.keys() == live.keys() and all(
            kept[name].shape == one.shape and kept[name].dtype == one.dtype
            for name, one in live.items()
        )

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights after one optimizer step."""
        if not self.started:
            self.start(model)
            return
        if model is self._model and not self._has_their_layout(self._live_buffers()):
            self._buffers = self._buffer_copies()  # one was filled, has grown, or has another type
        self._attach(model)
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        averages = list(self._parameters.values())
        live = [
            parameter.detach().to(average.device, average.dtype)
            for parameter, average in zip(self._live_parameters.values(), averages, strict=True)
        ]
        if averages:
            torch._foreach_lerp_(averages, live, 1.0 - decay)
        if self._buffers:
            torch._foreach_copy_(list(self._buffers.values()), list(self._live_buffers().values()))

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[None]:
        """Within the block ``model`` computes with the average; afterwards with its own weights.

        Only storage changes hands: no weight is copied or rounded. Nothing before the first update.
        The model must not be trained, saved or sent to other ranks inside the block.
        """
        # INVARIANT weights-stay: the training weights' own memory is not written.
        # Broken if: the average is copied into the parameters while a background writer reads them.
        # Guarded by: test_swapping_in_leaves_the_training_weights_untouched.
        if not self.started:
            yield
            return
        self._attach(model)
        pairs = [
            (live[name], average)
            for live, kept in (
                (self._live_parameters, self._parameters),
                (self._live_buffers(), self._buffers),
            )
            for name, average in kept.items()
        ]
        own = [tensor.data for tensor, _ in pairs]
        try:
            for tensor, average in pairs:
                tensor.data = average.to(tensor.device, tensor.dtype)
            yield
        finally:
            for (tensor, _), data in zip(pairs, own, strict=True):
                tensor.data = data

    def _attach(self, model: nn.Module) -> None:
        """Make the average match ``model``: same names and shapes, and the devices that it has to be on."""
        if model is not self._model:
            self._bind(model)
        for kept, live in (
            (self._parameters, self._live_parameters),
            (self._buffers, self._live_buffers()),
        ):
            if kept.keys() != live.keys():
                names = ", ".join(sorted(kept.keys() ^ live.keys())[:3])
                raise ValueError(f"the average and the model have different weights: {names}")
            for name, tensor in live.items():
                if kept[name].device != self._place_of(tensor):
                    kept[name] = kept[name].to(self._place_of(tensor))

    def averages(self) -> list[Tensor]:
        """The tensors of the average, which only :meth:`update` and a load write."""
        return [*self._parameters.values(), *self._buffers.values()]

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors (not copies); ``parameters`` is empty before the first update."""
        return {
            "decay": self.decay,
            "updates": self.updates,
            "parameters": dict(self._parameters),
            "buffers": dict(self._buffers),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from copies of ``state``, which may be on another device.

        ``decay`` stays that of the settings. Raises ValueError when ``state`` is of another model.
        """
        if not state["parameters"] and not state["buffers"]:
            parameters, buffers = {}, {}
        else:
            live, kept = self._live_parameters, self._live_buffers()
            types = {name: _average_dtype(parameter) for name, parameter in live.items()}
            parameters = self._ordered_copy(state["parameters"], live, types=types)
            types = {name: buffer.dtype for name, buffer in kept.items()}
            buffers = self._ordered_copy(state["buffers"], kept, types=types)
        self.updates = int(state["updates"])
        self._parameters, self._buffers = parameters, buffers

    def _ordered_copy(
        self,
        saved: Mapping[str, Tensor],
        live: Mapping[str, Tensor],
        *,
        types: Mapping[str, torch.dtype],
    ) -> dict[str, Tensor]:
        """Copies of ``saved``, which must be of these ``types``, where they belong, in the order of ``live``."""
        saved = read_as(saved, live)
        wrong = saved.keys() ^ live.keys()
        for name in saved.keys() & live.keys():
            if saved[name].shape != live[name].shape or saved[name].dtype != types[name]:
                wrong.add(name)
        if wrong:
            names = ", ".join(sorted(wrong)[:3])
            raise ValueError(f"the saved average is of another model; it differs in: {names}")
        copies = {
            name: saved[name].detach().to(self._place_of(tensor), copy=True)
            for name, tensor in live.items()
        }
        return {name: laid_out_as(copies[name], tensor) for name, tensor in live.items()}


def build_ema(model: nn.Module, settings: OptimSettings) -> Ema | None:
    """The average that ``settings`` ask for; None without one."""
    if settings.ema_decay is None:
        return None
    return Ema(
        model,
        settings.ema_decay,
        every=settings.ema_every,
        start_step=settings.ema_start_step,
        device=torch.device("cpu") if settings.ema_device == "cpu" else None,
    )


def _float_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Floating-point parameters, tied ones once, in the model's order, under their bare names."""
    return {
        bare_name(model, name): parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
    }


def _average_dtype(tensor: Tensor) -> torch.dtype:
    """Return float32 for half types: at a decay of 0.999 an update is below their resolution."""
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
