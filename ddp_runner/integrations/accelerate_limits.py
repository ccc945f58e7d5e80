"""Refuses, in words and before the first step, what our Accelerator does not repair in place. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

VERSIONS = "accelerate>=1.15,<2"  # as of the extra in pyproject.toml
_LOWEST = (1, 15)
_BY_ENVIRONMENT = {
    "ACCELERATE_USE_DEEPSPEED": "deepspeed_plugin",
    "ACCELERATE_USE_FSDP": "fsdp_plugin",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_plugin",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}
_SHARDING = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "torch_tp_plugin",
    "parallelism_config",
)
_PRECISIONS = ("no", "bf16", "fp16")
Refused = tuple[str, object, str]  # the name, its value, what is expected


def why_not_version(version: str, lacking: list[str]) -> Refused | None:
    """Return what is wrong with a version of accelerate that lacks these names; None if nothing is."""
    parts = [int(one) for one in version.split(".")[:2] if one.isdecimal()]
    if tuple(parts) >= _LOWEST and parts[0] == 1 and not lacking:
        return None
    lacks = f"; its Accelerator lacks {', '.join(lacking)}" if lacking else ""
    return "accelerate", version, f"Accelerator is repaired in place with {VERSIONS}{lacks}"


def why_not_made(given: Mapping[str, Any], environment: Mapping[str, str]) -> Refused | None:
    """Return the first argument of Accelerator that shards what each rank has whole; None where there is none."""
    named = {**given}
    for variable, name in _BY_ENVIRONMENT.items():
        if environment.get(variable, "false").lower() == "true":
            named[name] = named.get(name) or variable
    for name in _SHARDING:
        if named.get(name):
            shown = type(named[name]).__name__ if name not in environment else ""
            return name, shown, "shards the model or its state; in place it is not supported"
    return None


def why_not(accelerator: Any) -> Refused | None:
    """Return the first option of an Accelerator that is not supported in place; None where all are."""
    for name, value, is_refused, expected in _options(accelerator):
        if is_refused:
            return name, value, f"{expected}; in place it is not supported"
    return None


def _options(accelerator: Any) -> Iterator[tuple[str, object, bool, str]]:
    """Yield (argument, value, whether it is refused, why)."""
    precision, data = str(accelerator.mixed_precision), accelerator.dataloader_config
    plugin = accelerator.gradient_state.plugin_kwargs
    backend = accelerator.state.dynamo_plugin.backend
    backend = str(getattr(backend, "value", backend))
    rng_types = [str(getattr(one, "value", one)) for one in accelerator.rng_types]
    yield "mixed_precision", precision, precision not in _PRECISIONS, "take bf16 or fp16"
    is_compiled = backend.upper() != "NO"
    yield "dynamo_backend", backend, is_compiled, "compile the model before prepare()"
    yield "split_batches", True, data.split_batches, "cuts batches up"
    yield "dispatch_batches", True, bool(data.dispatch_batches), "rank 0 sends the batches"
    is_stateful = data.use_stateful_dataloader
    yield "use_stateful_dataloader", True, is_stateful, "the run keeps the position in the data"
    syncs = bool(plugin.get("sync_each_batch", False))
    yield "sync_each_batch", True, syncs, "sums the gradients of each batch"
    crosses = not plugin.get("sync_with_dataloader", True)
    yield "sync_with_dataloader", False, crosses, "a step would have batches of two epochs"
    synced = [one for one in rng_types if one != "generator"]
    yield "rng_types", rng_types, bool(synced), "the run seeds each step"


def why_not_prepared(kinds: Mapping[str, int]) -> Refused | None:
    """Return what is wrong with how many models and optimizers were prepared; None if there is one of each."""
    for kind, count in kinds.items():
        if count > 1:
            return "prepare()", "", f"was given {count} {kind}s: in place a step has one {kind}"
        if count < 1:
            return "prepare()", "", f"was given no {kind} before accelerator.epochs()"
    return None


def why_not_loader(loader: Any, sampler: Any, *, samplers: tuple[type, ...]) -> Refused | None:
    """Return what is wrong with a prepared loader to train on; ``samplers``: alike on every rank if it has no generator."""
    if not (hasattr(loader.dataset, "__len__") and hasattr(loader.dataset, "__getitem__")):
        kind = type(loader.dataset).__name__
        return "prepare()", kind, "has no __len__ and __getitem__; in place it is not supported"
    if not isinstance(sampler, samplers) and getattr(sampler, "generator", None) is None:
        kind = type(sampler).__name__
        return "prepare()", kind, "is a sampler whose order may differ from rank to rank"
    return None
