"""Whether a batch itself holds NaN or inf, and in which samples. Looked at only where a step has failed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_runner.data.loader import MicroBatch
from ddp_runner.training.batch_copy import tensors_of

NAN, INF = "NaN", "inf"


def not_finite_in(micro_batches: Sequence[MicroBatch]) -> dict[str, list[int]]:
    """Samples by what a tensor of theirs holds, ``NAN`` or ``INF``; where no row is theirs, all of the batch."""
    found: dict[str, dict[int, None]] = {}
    for micro in micro_batches:
        for tensor in tensors_of(micro.batch):
            if not _has_numbers(tensor):
                continue
            is_by_sample = tensor.dim() > 0 and len(tensor) == len(micro.indices)
            parts: list[tuple[tuple[int, ...], Tensor]] = [(micro.indices, tensor)]
            if is_by_sample:
                parts = [((index,), tensor[at]) for at, index in enumerate(micro.indices)]
            for indices, part in parts:  # one after the other: no second batch has to fit in memory
                if kind := _kind(part):
                    found.setdefault(kind, {}).update(dict.fromkeys(indices))
    return {kind: list(indices) for kind, indices in found.items()}


def _has_numbers(tensor: Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    return is_plain and (tensor.is_floating_point() or tensor.is_complex())


def _kind(part: Tensor) -> str:
    if bool(torch.isfinite(part).all()):
        return ""
    return NAN if bool(torch.isnan(part).any()) else INF
