"""Refuses, before the first step, arguments of a Trainer that ``in_place`` does not support. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

VERSIONS = "transformers>=5.24,<6"  # as of the extra in pyproject.toml
_LOWEST = (5, 24)
_SAMPLING = ("random", "sequential", "group_by_length")
Refused = tuple[str, object, str]  # the name, its value, what is expected


def why_not_version(version: str, lacking: Iterable[str]) -> Refused | None:
    """Return what is wrong with a version of transformers whose Trainer lacks these methods; None if nothing is."""
    parts = [int(one) for one in version.split(".")[:2] if one.isdecimal()]
    absent = ", ".join(lacking)
    if tuple(parts) >= _LOWEST and parts[0] == 5 and not absent:
        return None
    lacks = f"; its Trainer lacks {absent}" if absent else ""
    return "transformers", version, f"Trainer is repaired in place with {VERSIONS}{lacks}"


def why_not(
    trainer: Any, *, resumes: bool = False, is_stream: bool = False, searches: bool = False
) -> Refused | None:
    """Return the first of a Trainer's arguments that is not supported in place; None if all are.

    ``resumes``: it is given one of Trainer's checkpoints. ``is_stream``: its data has no length. ``searches``: a
    trial of a search.
    """
    for name, value, is_refused, expected in (*_of_training(trainer), *_of_data(trainer)):
        if is_refused:
            return name, value, f"{expected}; in place it is not supported"
    if resumes and is_stream:
        expected = "the place in data without a length is not in it: `run --resume` resumes the run"
        return "resume_from_checkpoint", "", expected
    if resumes and trainer.args.ignore_data_skip:
        expected = (
            "a run that resumes at a step takes the data of that step; in place it is not supported"
        )
        return "ignore_data_skip", True, expected
    if searches:
        return "hyperparameter_search()", "", "trains several times, and one run is one training"
    return None


def why_not_made(args: Any) -> Refused | None:
    """The same of arguments with which Trainer's constructor would already raise, as it sees one process."""
    for name in ("deepspeed", "fsdp"):
        value = getattr(args, name)
        if value:
            return name, value, "shards the model or its state; in place it is not supported"
    return None


def _of_training(trainer: Any) -> Iterator[tuple[str, object, Any, str]]:
    """Yield (argument, value, whether it is refused, why)."""
    args = trainer.args
    yield "deepspeed", args.deepspeed, trainer.is_deepspeed_enabled, "shards the model's state"
    yield "fsdp", args.fsdp, args.fsdp or trainer.is_fsdp_enabled, "shards the model"
    is_parallel = trainer.is_model_parallel or trainer.is_distributed_loading_by_transformers
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    yield "model", type(trainer.model).__name__, is_parallel, "lies on several devices"
    yield "parallelism_config", "", parallelism is not None, "cuts the model or its sequences up"
    yield "torch_compile", True, args.torch_compile, "the model is compiled as it is wrapped"
    yield "auto_find_batch_size", True, args.auto_find_batch_size, "begins the training again"
    yield "push_to_hub", True, args.push_to_hub, "a replaced rank would begin it again"
    yield (
        "enable_jit_checkpoint",
        True,
        args.enable_jit_checkpoint,
        "the run saves when it is stopped",
    )
    counted = args.include_num_input_tokens_seen
    yield (
        "include_num_input_tokens_seen",
        counted,
        counted != "no",
        "the tokens of other ranks are not known",
    )
    optim = str(getattr(args.optim, "value", args.optim))
    yield "optim", optim, "lomo" in optim or "layerwise" in optim, "updates within backward"


def _of_data(trainer: Any) -> Iterator[tuple[str, object, Any, str]]:
    """The same, of the batches and how their gradients are summed."""
    args, data = trainer.args, trainer.train_dataset
    config = args.accelerator_config
    plugin = config.gradient_accumulation_kwargs or {}
    sampling = args.train_sampling_strategy
    yield (
        "train_sampling_strategy",
        sampling,
        sampling not in _SAMPLING,
        f"take {' or '.join(_SAMPLING)}",
    )
    yield "train_dataset", type(data).__name__, hasattr(data, "__next__"), "gives its samples once"
    yield "accelerator_config.split_batches", True, config.split_batches, "cuts batches up"
    yield (
        "accelerator_config.dispatch_batches",
        True,
        config.dispatch_batches,
        "rank 0 sends the batches",
    )
    is_seedable = config.use_seedable_sampler
    yield (
        "accelerator_config.use_seedable_sampler",
        False,
        not is_seedable,
        "the order of samples would be unknown",
    )
    syncs = plugin.get("sync_each_batch", False)
    yield "gradient_accumulation_kwargs", plugin, syncs, "sums the gradients of each batch"
    yield (
        "dataloader_in_order",
        False,
        not args.dataloader_in_order,
        "batches would come in any order",
    )


def why_not_loader(loader: Any, samplers: tuple[type, ...], *, world_size: int) -> Refused | None:
    """Return what is wrong with the loader of ``get_train_dataloader()``, of which each rank must get its own share.

    ``samplers``: kinds that give the same order on every rank.
    """
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, samplers) and getattr(dataset, "num_processes", 1) == world_size:
        return None  # a stream, of which each rank takes its share
    batches = getattr(loader, "batch_sampler", None)
    inner = getattr(batches, "batch_sampler", batches)
    shared_out = world_size == 1 or getattr(batches, "num_processes", 1) == world_size
    if not shared_out:
        expected = (
            "gives every rank all samples: leave get_train_dataloader() to Trainer, or return what"
        )
        return (
            "get_train_dataloader()",
            "",
            f"{expected} accelerator.prepare() makes of a DataLoader",
        )
    sampler = getattr(inner, "sampler", None)
    if not isinstance(sampler, samplers):
        kind = type(sampler).__name__
        return (
            "get_train_dataloader()",
            "",
            f"has a {kind}, whose order may differ from rank to rank",
        )
    return None
