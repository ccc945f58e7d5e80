"""What of Accelerator's options is refused in place, and in what words; without the library."""

from __future__ import annotations

from types import SimpleNamespace as Namespace

import pytest

from ddp_runner.integrations.accelerate_limits import (
    why_not,
    why_not_loader,
    why_not_made,
    why_not_prepared,
    why_not_version,
)


def accelerator(data=None, plugin=None, backend="NO", **more):
    """What an Accelerator is by default, as far as it is looked at."""
    plain = {"split_batches": False, "dispatch_batches": None, "use_stateful_dataloader": False}
    return Namespace(
        dataloader_config=Namespace(**{**plain, **(data or {})}),
        gradient_state=Namespace(plugin_kwargs=plugin or {}),
        state=Namespace(dynamo_plugin=Namespace(backend=backend)),
        **{"mixed_precision": "no", "rng_types": ["generator"], **more},
    )


def test_the_defaults_and_half_precisions_are_supported():
    assert why_not(accelerator()) is None
    assert why_not(accelerator(mixed_precision="bf16", plugin={"num_steps": 4})) is None
    assert why_not(accelerator(mixed_precision="fp16")) is None


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("mixed_precision", {"mixed_precision": "fp8"}),
        ("dynamo_backend", {"backend": "INDUCTOR"}),
        ("split_batches", {"data": {"split_batches": True}}),
        ("dispatch_batches", {"data": {"dispatch_batches": True}}),
        ("use_stateful_dataloader", {"data": {"use_stateful_dataloader": True}}),
        ("sync_each_batch", {"plugin": {"sync_each_batch": True}}),
        ("sync_with_dataloader", {"plugin": {"sync_with_dataloader": False}}),
        ("rng_types", {"rng_types": ["torch", "generator"]}),
    ],
)
def test_each_of_these_is_refused_by_its_name(name, how):
    found, _, expected = why_not(accelerator(**how))
    assert found == name
    assert "not supported" in expected


def test_what_shards_is_refused_before_it_is_made():
    """As an argument, or by what `accelerate config` has put into the environment."""
    assert why_not_made({"cpu": True, "fsdp_plugin": None}, {}) is None
    assert why_not_made({"deepspeed_plugin": object()}, {})[0] == "deepspeed_plugin"
    assert why_not_made({}, {"ACCELERATE_USE_FSDP": "true"})[0] == "fsdp_plugin"
    assert why_not_made({}, {"ACCELERATE_USE_FSDP": "false"}) is None


def test_a_step_has_one_model_and_one_optimizer():
    assert why_not_prepared({"model": 1, "optimizer": 1}) is None
    assert "2 optimizers" in why_not_prepared({"model": 1, "optimizer": 2})[2]
    assert "no DataLoader" in why_not_prepared({"model": 1, "DataLoader": 0})[2]


class _Known:
    generator = None


@pytest.mark.parametrize("version", ["0.34.2", "1.14.0", "2.0.0", "junk"])
def test_another_version_is_refused_with_those_that_work(version):
    _, shown, expected = why_not_version(version, [])
    assert (shown, ">=1.15,<2" in expected) == (version, True)


def test_a_version_that_lacks_a_method_is_named_with_it():
    assert why_not_version("1.15.0", []) is None
    assert "accumulate" in why_not_version("1.20.0", ["accumulate"])[2]


def test_a_loader_must_give_all_ranks_one_order():
    """By its kind of sampler, or by a generator that all ranks seed alike."""
    loader = Namespace(dataset=[1, 2])
    assert why_not_loader(loader, _Known(), samplers=(_Known,)) is None
    assert why_not_loader(loader, Namespace(generator=1), samplers=()) is None
    assert "differ from rank to rank" in why_not_loader(loader, _Known(), samplers=())[2]
    endless = Namespace(dataset=iter(()))
    assert "__len__" in why_not_loader(endless, _Known(), samplers=(_Known,))[2]
