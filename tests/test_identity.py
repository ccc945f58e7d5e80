"""What a changed setting means to a run that is resumed: every one is sorted, and behaves as sorted."""

from __future__ import annotations

import pytest

from ddp_runner.config import Surroundings, meaning, recipe, resolve
from ddp_runner.config.fields import Kind, known_fields
from ddp_runner.config.identity import ON_RESUME, OnResume

OTHER_VALUES = {
    "run.task": "m:T", "run.max_steps": "90", "run.device": "cuda", "run.resume": "none",
    "run.gpus": "1", "run.nproc_per_node": "3", "run.inject": "kill", "data.on_bad_sample": "substitute",
    "run.target_loss": "1", "optim.schedule": "linear", "ddp.backend": "nccl", "log.display": "none",
    "checkpoint.monitor": "train_loss", "checkpoint.save_every_steps": "7", "memory.max_memory_gb": "3",
    "optim.max_grad_norm": "off", "optim.ema_decay": "0.5",
}  # fmt: skip


def other_value(key):
    """A legal value of the setting that is not its default, as text."""
    spec = known_fields()[key]
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    if spec.kind is Kind.SWITCH:
        return "false" if spec.default is True else "true"
    if spec.kind is Kind.TEXT:
        return f"{spec.default}x"
    if spec.kind is Kind.INTEGER:
        return str(int(spec.default) + 1)
    return str(spec.default / 2 if spec.at_most is not None or spec.below else spec.default * 2 + 1)


def recipe_of(settings):
    """As of a machine on which each setting that could count does."""
    run = settings.run
    found = Surroundings(
        total_steps=run.max_steps or run.epochs * 10,
        ranks=2 if run.nproc_per_node == "auto" else run.nproc_per_node,
        device=run.device,
        precision=f"amp {settings.optim.use_amp}",
        backend=settings.ddp.backend,
        threads=run.threads_per_rank,
        torch="2",
        own_task_reads_model=False,
    )
    return recipe(settings, found)


def test_every_setting_is_sorted_by_what_a_resume_makes_of_a_change():
    """A new setting must be put where it belongs (config/identity.py, ON_RESUME), and only once."""
    assert set(ON_RESUME) == set(known_fields())


@pytest.mark.parametrize("key", sorted(known_fields()))
def test_a_change_is_refused_told_or_of_no_consequence_as_it_was_sorted(key):
    """What is refused is in the meaning, what is told in the recipe, and the rest in neither."""
    tasks = ("synthetic", "bytes") if key.startswith("model.") else ("bytes",)
    refused, told = False, False
    for task in tasks:
        old = resolve(command_line=[("run.task", task)]).settings
        words = [("run.task", task), (key, other_value(key))]
        new = resolve(command_line=words).settings
        section, _, name = key.partition(".")
        assert getattr(getattr(old, section), name) != getattr(getattr(new, section), name)
        refused |= meaning(old, world_size=2) != meaning(new, world_size=2)
        told |= recipe_of(old) != recipe_of(new)
    match ON_RESUME[key]:
        case OnResume.REFUSED:
            assert refused
        case OnResume.TOLD:
            assert (refused, told) == (False, True)
        case OnResume.CANNOT_MATTER:
            assert (refused, told) == (False, False)


def test_a_task_that_is_given_all_settings_may_read_the_model():
    """Then a change of it is told; a task that is not given them cannot notice."""
    words = [("task", "m:T")]
    old, new = (resolve(command_line=[*words, ("dropout", text)]).settings for text in ("0", "0.5"))
    kinds = {"device": "cpu", "precision": "", "backend": "", "torch": ""}
    sizes = {"total_steps": 1, "ranks": 1, "threads": 1}
    for reads in (True, False):
        found = Surroundings(**kinds, **sizes, own_task_reads_model=reads)
        assert (recipe(old, found) != recipe(new, found)) is reads
    assert meaning(old, world_size=1) == meaning(new, world_size=1)
