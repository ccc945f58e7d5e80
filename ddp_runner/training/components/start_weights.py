"""Frozen weights that stay as the run has begun with them: known by hash, left out of a state, put in again.

Moves no file. Whether files leave them out at all is the settings' choice.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddp_runner.checkpoint.codec import weights_sha256
from ddp_runner.checkpoint.entry_names import bare_name
from ddp_runner.checkpoint.left_out import left_out, start_record
from ddp_runner.training.components.tensor_hash import state_hashes, tensor_hash


def frozen_entries(
    model: nn.Module, weights: Mapping[str, Any], *, but: Container[str]
) -> dict[str, Tensor]:
    """The entries of ``weights``, the model's state, that are frozen parameters; tied ones by all their names.

    ``but``: those that are trained later on.
    """
    frozen = {
        place
        for name, one in model.named_parameters()
        if not one.requires_grad
        and bare_name(model, name) not in but
        and (place := place_of(one)) is not None
    }
    return {name: one for name, one in weights.items() if place_of(one) in frozen}


def record_of(weights: Mapping[str, Tensor], *, init_from: str) -> dict[str, Any]:
    """Return the record of the weights that the run begins with; empty if there are none."""
    if not weights:
        return {}
    return {
        "sha256": weights_sha256(weights),
        "hashes": state_hashes(weights),
        "init_from": init_from,
    }


# INVARIANT left-out-as-begun: a file lacks only what is, at that very save, bit for bit what the run began
# with, and is completed only with weights of the SHA-256 that it names.
# Broken if: a frozen parameter is left out that forward has written, or a file is completed unasked.
# Guarded by: test_a_frozen_weight_that_is_written_is_in_the_file_again.
def unchanged(captured: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the weights of a state that are what the run began with. Reads all of these."""
    hashes, weights = start_record(captured).get("hashes", {}), captured["model"]
    now = state_hashes({name: weights[name] for name in hashes if name in weights})
    return tuple(name for name, one in now.items() if one == hashes[name])


def without(captured: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """``captured`` without these weights, and without their averages, which stay what they are as well."""
    weights, dropped = captured["model"], dict.fromkeys(names)
    kept = copy.copy(weights)  # with what torch hangs on a state dict
    for name in dropped:
        del kept[name]
    found = {**captured, "model": kept}
    if means := captured.get("ema", {}).get("parameters"):
        gone = [n for n in means if n in dropped and _is_mean(means[n], weights[n])]
        stay = {name: one for name, one in means.items() if name not in gone}
        found["ema"] = {**captured["ema"], "parameters": stay, "left_out": gone}
    return found


def completed(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any] | None:
    """``saved`` with what it leaves out, from ``own``; None where that is not what its run began with."""
    if not left_out(saved):
        return dict(saved)
    weights = filled(saved["model"], start_record(saved), own)
    if weights is None:
        return None
    found, kept = {**saved, "model": weights}, saved.get("ema")
    means = kept.get("parameters") if isinstance(kept, Mapping) else None
    if isinstance(kept, Mapping) and isinstance(means, Mapping):
        named = kept.get("left_out")
        gone = [n for n in left_out(saved) if isinstance(named, list) and n in named]
        stay = {name: _mean_of(weights[name]) for name in gone}
        found["ema"] = {**kept, "parameters": {**stay, **means}}
    return found


def filled(
    weights: Mapping[str, Any], record: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any] | None:
    """``weights`` with those of ``record`` from ``own``; None where these have another SHA-256."""
    begun = {name: own[name] for name in record["hashes"] if isinstance(own.get(name), Tensor)}
    if len(begun) < len(record["hashes"]) or weights_sha256(begun) != record["sha256"]:
        return None
    return {**begun, **weights}


def _is_mean(mean: Tensor, weight: Tensor) -> bool:
    """Return True if the bits are equal: averaging turns -0.0 into 0.0."""
    return tensor_hash(mean) == tensor_hash(_mean_of(weight))


def _mean_of(weight: Tensor) -> Tensor:
    """Return the average of a weight that never changes: itself, in the type in which averages are kept."""
    is_half = weight.dtype in (torch.float16, torch.bfloat16)
    return weight.detach().to(torch.float32) if is_half else weight.detach()


def place_of(value: object) -> object:
    """Return the place of a tensor's numbers; None if it has none, or not one by one."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or not value.numel():
        return None
    return value.data_ptr(), tuple(value.shape), value.stride()
