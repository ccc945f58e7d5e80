"""Refuses, in words and before the first step, what InPlaceDDP does not do for a Trainer of Lightning. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

VERSIONS = "lightning>=2.6,<2.7"  # as of the extra in pyproject.toml
OPTIONS = ("find_unused_parameters", "gradient_as_bucket_view", "bucket_cap_mb")
_IGNORED = ("process_group_backend", "timeout", "start_method")  # the run makes the group
_CHANGING = (
    "StochasticWeightAveraging",
    "GradientAccumulationScheduler",
    "Timer",
    "WeightAveraging",
)
_NOT_SUPPORTED = "; in place it is not supported"
Refused = tuple[str, object, str]  # the name, its value, what is expected


def why_not_version(version: str, lacking: Iterable[str]) -> Refused | None:
    """Return what is wrong with a version of Lightning that has moved these names; None if nothing is."""
    absent = ", ".join(lacking)
    if version.split(".")[:2] == ["2", "6"] and not absent:
        return None
    lacks = f"; it lacks {absent}" if absent else ""
    return "lightning", version, f"InPlaceDDP repairs with {VERSIONS}{lacks}"


def why_not_options(options: Iterable[str]) -> Refused | None:
    """Return the first option of DDPStrategy that the run does not take."""
    for name in options:
        if name not in (*OPTIONS, *_IGNORED):
            return f"InPlaceDDP({name}=...)", "", f"is none of {', '.join(OPTIONS)}"
    return None


def why_not(trainer: Any) -> Refused | None:
    """The first of a Trainer's arguments that is not supported in place; None where all are."""
    for name, value, is_refused, expected in _of_training(trainer):
        if is_refused:
            return name, value, f"{expected}{_NOT_SUPPORTED}"
    return None


def _of_training(trainer: Any) -> Iterator[tuple[str, object, Any, str]]:
    """Yield (argument, value, whether it is refused, why)."""
    module = trainer.lightning_module
    is_manual = not module.automatic_optimization
    yield "automatic_optimization", False, is_manual, "the loop of a manual step is the module's"
    count = len(trainer.optimizers)
    yield "configure_optimizers()", count, count != 1, "needs one optimizer"
    yield "ckpt_path", trainer.ckpt_path, trainer.ckpt_path, "a run resumes by itself"
    every = trainer.reload_dataloaders_every_n_epochs
    yield "reload_dataloaders_every_n_epochs", every, every, "the batches are drawn by the run"
    for one in trainer.callbacks:
        kind = next((k.__name__ for k in type(one).__mro__ if k.__name__ in _CHANGING), "")
        yield "callbacks", type(one).__name__, kind, "decides or averages by state that is not kept"
        yield "save_last", "link", getattr(one, "save_last", None) == "link", "take save_last=True"
        interval = getattr(one, "_train_time_interval", None)
        yield "train_time_interval", interval, interval, "each rank has its own clock"


def why_not_loader(fit: Any) -> Refused | None:
    """Return what is wrong with the batches of a fit loop, whose number must be known."""
    trainer, found = fit.trainer, fit._combined_loader.flattened  # noqa: SLF001 - as in lightning_private
    if len(found) != 1:
        return "train_dataloader()", len(found), f"needs one DataLoader{_NOT_SUPPORTED}"
    if not math.isfinite(fit.max_batches):
        return "train_dataloader()", "", f"has no length{_NOT_SUPPORTED}"
    if callable(getattr(found[0], "state_dict", None)):
        kind = type(found[0]).__name__
        return "train_dataloader()", kind, f"has a state of its own{_NOT_SUPPORTED}"
    if "dataloader_iter" in trainer.lightning_module.training_step.__code__.co_varnames:
        return "training_step(dataloader_iter)", "", f"draws by itself{_NOT_SUPPORTED}"
    if trainer.val_check_batch is None:
        value = trainer.val_check_interval
        return "val_check_interval", value, f"each rank has its own clock{_NOT_SUPPORTED}"
    return _why_not_within(trainer, fit.max_batches)


def _why_not_within(trainer: Any, batches: float) -> Refused | None:
    """Validation is between two steps, not among the batches of one."""
    every, accumulated = trainer.val_check_batch, trainer.accumulate_grad_batches
    is_end = every in (math.inf, batches)
    is_across = trainer.check_val_every_n_epoch is None and batches % accumulated
    if (
        accumulated > 1
        and trainer.enable_validation
        and (every % accumulated or is_across)
        and not is_end
    ):
        expected = f"must be a multiple of accumulate_grad_batches={accumulated}{_NOT_SUPPORTED}"
        return "val_check_interval", every, expected
    return None


def why_not_logged(monitors: Iterable[str]) -> Refused | None:
    """Return what was logged that differs from rank to rank, where that decides."""
    for name in monitors:
        return "monitor", name, "differs from rank to rank: log it with sync_dist=True"
    return None


def why_not_alike(name: str, value: str) -> Refused:
    """Return what differs from rank to rank, and would be lost with a rank. ``value``: names of attributes."""
    if not value:
        return name, "", "is called with other names on other ranks"
    expected = "is changed between two steps, by a hook, and then differs from rank to rank"
    return name, value, f"{expected}{_NOT_SUPPORTED}"
