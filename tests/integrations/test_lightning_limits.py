"""What of Lightning's options is refused in place, and in what words; without the library."""

from __future__ import annotations

import math
from types import SimpleNamespace as Namespace

import pytest

from ddp_runner.integrations.lightning_limits import (
    why_not,
    why_not_alike,
    why_not_loader,
    why_not_logged,
    why_not_options,
    why_not_version,
)


class Timer:
    """As Lightning's is named."""


def trainer(**own):
    """What a Trainer is by default, as far as it is looked at."""
    plain = {
        "lightning_module": Namespace(automatic_optimization=True, training_step=_training_step),
        "optimizers": [None],
        "ckpt_path": None,
        "reload_dataloaders_every_n_epochs": 0,
        "callbacks": [Namespace(save_last=True, _train_time_interval=None)],
        "val_check_batch": 5,
        "val_check_interval": 1.0,
        "accumulate_grad_batches": 1,
        "check_val_every_n_epoch": 1,
        "enable_validation": True,
    }
    return Namespace(**{**plain, **own})


def _training_step(batch):
    return batch


def _drawing_step(dataloader_iter):
    return next(dataloader_iter)


def fit(batches=5.0, loaders=1, **own):
    """A fit loop that has made its loader."""
    combined = Namespace(flattened=[Namespace(state_dict=None) for _ in range(loaders)])
    return Namespace(trainer=trainer(**own), _combined_loader=combined, max_batches=batches)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("automatic_optimization", {"lightning_module": Namespace(automatic_optimization=False)}),
        ("configure_optimizers()", {"optimizers": [1, 2]}),
        ("ckpt_path", {"ckpt_path": "last"}),
        ("reload_dataloaders_every_n_epochs", {"reload_dataloaders_every_n_epochs": 1}),
        ("callbacks", {"callbacks": [Timer()]}),
        ("save_last", {"callbacks": [Namespace(save_last="link")]}),
        ("train_time_interval", {"callbacks": [Namespace(_train_time_interval=3)]}),
    ],
)
def test_each_of_these_is_refused_by_its_name(name, own):
    assert why_not(trainer()) is None
    found, _, expected = why_not(trainer(**own))
    assert found == name
    assert "not supported" in expected


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("train_dataloader()", {"loaders": 2}),
        ("train_dataloader()", {"batches": math.inf}),
        (
            "training_step(dataloader_iter)",
            {"lightning_module": Namespace(training_step=_drawing_step)},
        ),
        ("val_check_interval", {"val_check_batch": None}),
        ("val_check_interval", {"accumulate_grad_batches": 2, "val_check_batch": 3}),
    ],
)
def test_batches_that_the_run_cannot_draw_are_refused(name, how):
    assert why_not_loader(fit()) is None
    assert why_not_loader(fit(accumulate_grad_batches=2, val_check_batch=2)) is None
    assert why_not_loader(fit(accumulate_grad_batches=2)) is None
    assert why_not_loader(fit(**how))[0] == name


def test_what_differs_from_rank_to_rank_is_refused():
    assert why_not_logged([]) is None
    assert "sync_dist=True" in why_not_logged(["train_loss"])[2]
    assert "other names" in why_not_alike("log()", "")[2]
    assert why_not_alike("Net", "outputs")[1] == "outputs"


@pytest.mark.parametrize("version", ["2.5.6", "2.7.0", "3.0", "junk"])
def test_another_version_is_refused_with_those_that_work(version):
    _, shown, expected = why_not_version(version, [])
    assert (shown, "<2.7" in expected) == (version, True)


def test_a_version_that_has_moved_a_name_is_refused_with_it():
    assert why_not_version("2.6.6", []) is None
    assert "_FitLoop.run" in why_not_version("2.6.7", ["_FitLoop.run"])[2]


def test_options_of_ddp_that_the_run_does_not_take_are_refused():
    assert why_not_options(["find_unused_parameters", "timeout"]) is None
    assert why_not_options(["static_graph"])[0] == "InPlaceDDP(static_graph=...)"
