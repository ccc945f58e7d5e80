"""Chooses the arithmetic of forward and backward, once, and holds the loss scaler. Casts nothing.

bf16 needs no scaling and is taken where the hardware has it; fp16 with a GradScaler is for older
GPUs. On a CPU bf16 pays only with bf16 instructions: a 3-million-parameter Transformer step on one
thread takes 190 ms instead of 442 with AVX512-BF16; without them the casts make it slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

SCALE_MIN = 1.0  # of the loss: a gradient that overflows unscaled is no matter of the scale

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Precision:
    """``fp32``, ``bf16`` or ``fp16`` on ``device``; the same on every rank of equal hardware.

    ``name`` is for people and files; ``notes`` says, in whole sentences, what was chosen otherwise
    than asked.
    """

    def __init__(self, use_amp: bool, device: torch.device) -> None:
        self._device_type = device.type
        self.notes: tuple[str, ...] = ()
        self._dtype = torch.float32
        if use_amp:
            self._dtype, self.notes = _choose(device)
        self.name = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[
            self._dtype
        ]
        self.scaler = torch.amp.GradScaler(device.type, enabled=self._dtype is torch.float16)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for one forward, loss included; backward runs outside of it."""
        return torch.autocast(
            self._device_type,
            dtype=torch.bfloat16 if self._dtype is torch.float32 else self._dtype,
            enabled=self._dtype is not torch.float32,
        )

    def drop_unfinished_step(self) -> None:
        """Forget an update that was begun: a scaler that has unscaled does not unscale again before it ends."""
        if self.scaler.is_enabled():
            known = self.scaler.state_dict()
            self.scaler = torch.amp.GradScaler(self._device_type)
            self.scaler.load_state_dict(known)

    def has_lowered(self, scale: float) -> bool:
        """Whether the scaler has found an overflow at this loss scale, and is not at its end."""
        return self.scaler.is_enabled() and SCALE_MIN < scale > self.scaler.get_scale()

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; empty unless the precision is fp16."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the scaler of ``state``.

        An empty state (saved with bf16 or fp32) leaves an fp16 scaler at its start: it finds its
        scale within a few skipped steps. Without fp16 there is nothing to load.
        """
        if state and self.scaler.is_enabled():
            self.scaler.load_state_dict(state)


def _choose(device: torch.device) -> tuple[torch.dtype, tuple[str, ...]]:
    """The reduced type for ``device``, and what is worth a note."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        if native:
            return torch.bfloat16, ()
        return torch.float16, ("The GPU has no bf16; using fp16 with loss scaling.",)
    if device.type == "cpu" and cpu_has_fast_bf16():
        return torch.bfloat16, ()
    return torch.float32, (f"This {device.type} has no fast bf16; use_amp=true is ignored.",)


def cpu_has_fast_bf16() -> bool:
    """Whether the processor has bf16 multiply instructions (AVX512-BF16 or AMX) that torch uses.

    False where the installed torch does not know.
    """
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, check, bool)()) for check in checks)
