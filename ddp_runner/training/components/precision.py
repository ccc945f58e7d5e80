"""Chooses the arithmetic of forward and backward, once, and holds the loss scaler. Casts nothing.

bf16 needs no scaling and is taken where the hardware has it; fp16 with a GradScaler is for older
GPUs. On a CPU bf16 pays only with bf16 instructions: a 3-million-parameter Transformer step on one
thread takes 190 ms instead of 442 with AVX512-BF16; without them the casts make it slower.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from ddp_runner.kernel.rules.errors import BadInputError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ddp_runner.core.settings import OptimSettings

SCALE_MIN = 1.0  # of the loss: a gradient that overflows unscaled is no matter of the scale
FALLING_STEPS = 1000  # over which a loss scale that only falls is worth a warning
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """``fp32``, ``bf16`` or ``fp16`` on ``device``; the same on every rank of equal hardware.

    ``name`` is for people and files; ``notes`` says, in whole sentences, what was chosen otherwise
    than asked.
    """

    def __init__(
        self,
        wanted: str,
        device: torch.device,
        *,
        init_scale: float = 65536.0,
        growth_interval: int = 2000,
    ) -> None:
        """``wanted``: a name, or auto. Raises BadInputError where the device does not have what is named."""
        self._device_type = device.type
        self._growth_interval = growth_interval
        self.name, self.notes = _auto(device) if wanted == "auto" else _named(wanted, device)
        self._dtype = _TYPES[self.name]
        self.scaler = torch.amp.GradScaler(
            device.type,
            enabled=self._dtype is torch.float16,
            init_scale=init_scale,
            growth_interval=growth_interval,
        )
        self._fell: tuple[int, float] | None = None  # first, since it last grew: step, scale before
        self._scale: float | None = None  # as it was read last; None: to be read

    @classmethod
    def of(cls, settings: OptimSettings, device: torch.device) -> Precision:
        """Return the precision that the settings ask for. Raises BadInputError as its constructor does."""
        return cls(
            settings.precision,
            device,
            init_scale=settings.amp_init_scale,
            growth_interval=settings.amp_growth_interval,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for one forward, loss included; backward runs outside of it."""
        is_plain = self._dtype is torch.float32
        if is_plain and not torch.is_autocast_enabled(self._device_type):
            # Torch takes ten times as long to change nothing.
            return contextlib.nullcontext()
        return torch.autocast(
            self._device_type,
            dtype=torch.bfloat16 if is_plain else self._dtype,
            enabled=not is_plain,
        )

    def drop_unfinished_step(self) -> None:
        """Forget an update that was begun: a scaler that has unscaled does not unscale again before it ends."""
        if self.scaler.is_enabled():
            known = self.scaler.state_dict()
            self.scaler = torch.amp.GradScaler(self._device_type)
            self.scaler.load_state_dict(known)

    def scale(self) -> float:
        """The loss scale. Read once after each update: on a GPU that waits for the device. Without fp16: 1."""
        if not self.scaler.is_enabled():
            return 1.0
        if self._scale is None:
            self._scale = float(self.scaler.get_scale())
        return self._scale

    def update(self) -> None:
        """End a step of the scaler's, which may change the loss scale."""
        if self.scaler.is_enabled():
            self.scaler.update()
            self._scale = None

    def has_lowered(self, scale: float) -> bool:
        """Return True if the scaler has found an overflow at this loss scale, and can still lower it."""
        return self.scaler.is_enabled() and SCALE_MIN < scale > self.scale()

    def watch(self, *, step: int, before: float) -> str:
        """Take in the loss scale after ``step``, which was ``before``; a line where it has only fallen for long.

        All ranks that watch the same steps say the same.
        """
        now = self.scale()
        if now > before:
            self._fell = None
        elif now < before:
            if self._fell is None:
                self._fell = (step, before)
            first, scale = self._fell
            if step - first >= FALLING_STEPS:
                self._fell = (step, now)  # and again after as many
                return (
                    f"the loss scale of fp16 has only fallen for {step - first:,} steps, from {scale:g} to"
                    f" {now:g}: suspect the learning rate or the data, or train in bf16"
                )
        return ""

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state, and since when it has only fallen; empty unless the precision is fp16."""
        state: dict[str, Any] = self.scaler.state_dict()
        if state and self._fell is not None:
            state["fell_first_at"], state["fell_from"] = self._fell
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the scaler of ``state``; how often it grows is the settings' to say.

        An empty state (saved with bf16 or fp32) leaves an fp16 scaler at its start: it finds its
        scale within a few skipped steps. Without fp16 there is nothing to load.
        """
        if state and self.scaler.is_enabled():
            self._scale = None
            self.scaler.load_state_dict(state)
            self.scaler.set_growth_interval(self._growth_interval)
            has_fallen = "fell_first_at" in state
            self._fell = (
                (int(state["fell_first_at"]), float(state["fell_from"])) if has_fallen else None
            )


def _named(wanted: str, device: torch.device) -> tuple[str, tuple[str, ...]]:
    """Return the precision asked for by name, and notes on it."""
    if wanted == "bf16" and device.type == "cuda" and not _gpu_has_bf16(device):
        name = torch.cuda.get_device_name(device)
        raise BadInputError(
            "optim.precision", wanted, f"{name} has no bf16: take fp16, or auto, which does"
        )
    if wanted == "bf16" and device.type == "cpu" and not cpu_has_fast_bf16():
        return wanted, ("This cpu has no fast bf16: fp32 would be faster.",)
    return wanted, ()


def _auto(device: torch.device) -> tuple[str, tuple[str, ...]]:
    """The reduced type for ``device``, and what is worth a note."""
    if device.type == "cuda":
        if _gpu_has_bf16(device):
            return "bf16", ()
        return "fp16", ("The GPU has no bf16; using fp16 with loss scaling.",)
    if device.type == "cpu" and cpu_has_fast_bf16():
        return "bf16", ()
    return "fp32", (f"This {device.type} has no fast bf16; precision=auto is fp32.",)


def _gpu_has_bf16(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def cpu_has_fast_bf16() -> bool:
    """Return True if the processor has bf16 multiply instructions (AVX512-BF16 or AMX) that torch uses.

    False if the installed torch cannot tell.
    """
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, check, bool)()) for check in checks)
