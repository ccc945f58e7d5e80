"""What of Trainer's options is refused in place, and in what words; without the library."""

from __future__ import annotations

from types import SimpleNamespace as Namespace

import pytest

from ddp_runner.integrations.transformers_limits import (
    why_not,
    why_not_loader,
    why_not_made,
    why_not_version,
)


def trainer(config=None, of_trainer=None, **of_args):
    """What a Trainer is by default, as far as it is looked at."""
    plain = {
        "split_batches": False,
        "dispatch_batches": None,
        "use_seedable_sampler": True,
        "gradient_accumulation_kwargs": None,
    }
    args = {
        "accelerator_config": Namespace(**{**plain, **(config or {})}),
        "auto_find_batch_size": False,
        "dataloader_in_order": True,
        "deepspeed": None,
        "enable_jit_checkpoint": False,
        "fsdp": None,
        "include_num_input_tokens_seen": "no",
        "optim": "adamw_torch",
        "push_to_hub": False,
        "torch_compile": False,
        "train_sampling_strategy": "random",
    }
    own = {
        "accelerator": Namespace(parallelism_config=None),
        "is_deepspeed_enabled": False,
        "is_distributed_loading_by_transformers": False,
        "is_fsdp_enabled": False,
        "is_model_parallel": False,
        "model": None,
        "train_dataset": [1, 2],
    }
    return Namespace(args=Namespace(**{**args, **of_args}), **{**own, **(of_trainer or {})})


def test_an_ordinary_trainer_is_taken():
    assert why_not(trainer()) is None


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("deepspeed", {"of_trainer": {"is_deepspeed_enabled": True}}),
        ("fsdp", {"fsdp": "full_shard"}),
        ("model", {"of_trainer": {"is_model_parallel": True}}),
        ("parallelism_config", {"of_trainer": {"accelerator": Namespace(parallelism_config=1)}}),
        ("torch_compile", {"torch_compile": True}),
        ("auto_find_batch_size", {"auto_find_batch_size": True}),
        ("push_to_hub", {"push_to_hub": True}),
        ("enable_jit_checkpoint", {"enable_jit_checkpoint": True}),
        ("include_num_input_tokens_seen", {"include_num_input_tokens_seen": "all"}),
        ("optim", {"optim": Namespace(value="adalomo")}),
        ("optim", {"optim": "galore_adamw_layerwise"}),
        ("train_sampling_strategy", {"train_sampling_strategy": "batch_rebalance"}),
        ("train_dataset", {"of_trainer": {"train_dataset": iter([1])}}),
        ("accelerator_config.split_batches", {"config": {"split_batches": True}}),
        ("accelerator_config.dispatch_batches", {"config": {"dispatch_batches": True}}),
        ("accelerator_config.use_seedable_sampler", {"config": {"use_seedable_sampler": False}}),
        (
            "gradient_accumulation_kwargs",
            {"config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
        ),
        ("dataloader_in_order", {"dataloader_in_order": False}),
    ],
)
def test_each_of_these_is_refused_by_its_name(name, how):
    found, _, expected = why_not(trainer(**how))
    assert found == name
    assert "not supported" in expected


def test_what_the_constructor_would_refuse_in_other_words_is_refused_first():
    assert why_not_made(Namespace(deepspeed=None, fsdp=[])) is None
    assert why_not_made(Namespace(deepspeed="zero.json", fsdp=None))[:2] == (
        "deepspeed",
        "zero.json",
    )
    assert why_not_made(Namespace(deepspeed=None, fsdp="full_shard"))[0] == "fsdp"


def test_a_checkpoint_of_trainer_has_a_place_in_the_data():
    ordinary = trainer(ignore_data_skip=False)
    assert why_not(ordinary, resumes=True) is None
    assert why_not(ordinary, resumes=True, is_stream=True)[0] == "resume_from_checkpoint"
    assert why_not(trainer(ignore_data_skip=True), resumes=True)[0] == "ignore_data_skip"
    assert why_not(ordinary, searches=True)[0] == "hyperparameter_search()"


@pytest.mark.parametrize("version", ["4.57.3", "5.23.1", "6.0", "junk"])
def test_another_version_is_refused_with_those_that_work(version):
    _, shown, expected = why_not_version(version, [])
    assert (shown, ">=5.24,<6" in expected) == (version, True)


def test_a_version_that_has_moved_a_method_is_named_with_it():
    assert why_not_version("5.24.0", []) is None
    assert why_not_version("5.31.0.dev0", []) is None
    assert "_run_epoch" in why_not_version("5.31.0", ["_run_epoch"])[2]


class _Known:
    pass


def test_a_loader_that_is_not_shared_out_is_refused():
    """Of one rank it is all the same; a sampler of another kind may give each rank another order."""
    own = Namespace(batch_sampler=Namespace(sampler=_Known()))
    shared = Namespace(
        batch_sampler=Namespace(
            num_processes=2, batch_sampler=Namespace(sampler=_Known()), sampler=None
        )
    )
    assert why_not_loader(own, (_Known,), world_size=1) is None
    assert why_not_loader(shared, (_Known,), world_size=2) is None
    stream = Namespace(dataset=_Known())
    stream.dataset.num_processes = 2
    assert why_not_loader(stream, (_Known,), world_size=2) is None
    assert "all samples" in why_not_loader(stream, (), world_size=2)[2]
    assert "all samples" in why_not_loader(own, (_Known,), world_size=2)[2]
    assert "differ from rank to rank" in why_not_loader(own, (), world_size=1)[2]
