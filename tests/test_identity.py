"""What a changed setting means to a run that is resumed: every one is sorted, and behaves as sorted."""

from __future__ import annotations

import pytest
import yaml

from ddp_runner.config import (
    Surroundings,
    aligned,
    difference,
    digest,
    from_flat,
    identity,
    recipe,
    resolve,
    resume_key,
    task_resume_key,
    to_record,
    to_yaml,
)
from ddp_runner.config.fields import known_fields
from ddp_runner.core.settings.declaration import DURATION, STEPS, SWITCH, TEXT, WHOLE, OnResume
from ddp_runner.kernel.rules.errors import BadInputError

OTHER_VALUES = {
    "recovery.on_wrong_gradient": "stop",
    "log.trackers": "csv", "log.profile": "steps=1",
    "run.compile_mode": "max-autotune", "ddp.gradient_dtype": "bf16", "memory.activation_checkpointing": "all",
    "run.task": "m:T", "run.max_steps": "90", "run.device": "cuda", "run.resume": "none",
    "run.gpus": "1", "recovery.drill_at": "3", "run.nproc_per_node": "3", "run.inject": "kill", "data.on_bad_sample": "substitute",
    "data.compare_samples": "tell", "data.stream_end": "drop", "data.shares": "3,2",
    "run.target_loss": "1", "run.mode": "data_parallel", "optim.schedule": "linear", "ddp.backend": "nccl", "log.display": "none", "log.console": "quiet",
    "checkpoint.monitor": "train_loss", "checkpoint.mode": "max", "checkpoint.save_every_steps": "7", "memory.max_memory_gb": "3", "data.workers_total": "3",
    "optim.max_grad_norm": "off", "optim.ema_decay": "0.5", "optim.optimizer": "sgd", "optim.momentum": "0.5",
    "recovery.explosion_loss_max": "9", "recovery.explosion_rate_factor": "0.5", "optim.ema_device": "cpu", "optim.precision": "fp16", "run.matmul_precision": "high", "optim.epsilon": "1e-3", "optim.max_grad_value": "2",
}  # fmt: skip


def other_value(key):
    """A legal value of the setting that is not its default, as text."""
    spec = known_fields()[key]
    if key in OTHER_VALUES:
        return OTHER_VALUES[key]
    if spec.written is SWITCH:
        return "false" if spec.default is True else "true"
    if spec.written is TEXT:
        return f"{spec.default}x"
    if spec.written is WHOLE:
        return "7" if spec.default in spec.words else str(int(spec.default) + 1)
    if spec.written in (STEPS, DURATION):
        return "0.25"
    has_a_top = any(limit.startswith(("at most", "below")) for limit in spec.limits)
    return str(spec.default / 2 if has_a_top else spec.default * 2 + 1)


def recipe_of(settings):
    """As of a machine on which each setting that could count does."""
    run = settings.run
    found = Surroundings(
        total_steps=run.max_steps or run.epochs * 10,
        ranks=2 if run.nproc_per_node == "auto" else run.nproc_per_node,
        device=run.device,
        precision=settings.optim.precision,
        backend=settings.ddp.backend,
        threads=run.threads_per_rank,
        torch="2",
        own_task_reads_model=False,
        devices=2 if run.mode == "data_parallel" else 1,
    )
    return recipe(settings, found)


def test_every_setting_is_sorted_by_what_a_resume_makes_of_a_change():
    """Its field says so, and says it once."""
    for key, spec in known_fields().items():
        assert len(spec.notes_of(OnResume)) == 1, key


def test_a_change_is_refused_reported_or_without_consequence_as_sorted():
    """What is refused is in the resume key, what is reported in the recipe, and the rest in neither."""
    for key in sorted(known_fields()):
        tasks = ("synthetic", "bytes") if key.startswith("model.") else ("bytes",)
        refused, reported = False, False
        for task in tasks:
            old = resolve(command_line=[("run.task", task)]).settings
            words = [("run.task", task), (key, other_value(key))]
            new = resolve(command_line=words).settings
            section, _, name = key.partition(".")
            assert getattr(getattr(old, section), name) != getattr(getattr(new, section), name)
            refused |= resume_key(old, world_size=2) != resume_key(new, world_size=2)
            reported |= recipe_of(old) != recipe_of(new)
        match known_fields()[key].on_resume:
            case OnResume.REFUSED:
                assert refused, key
            case OnResume.REPORTED:
                assert (refused, reported) == (False, True), key
            case OnResume.CANNOT_MATTER:
                assert (refused, reported) == (False, False), key


@pytest.mark.parametrize("word", [("evaluate_every_steps", "3"), ("evaluate_batches", "2")])
def test_evaluations_are_compared_where_the_best_is_loaded_at_end(word):
    """They choose the weights of final.pt."""
    for is_used in (True, False):
        words = [("run.task", "bytes"), ("load_best_at_end", str(is_used).lower())]
        old, new = (resolve(command_line=[*words, *more]).settings for more in ([], [word]))
        assert (recipe_of(old) != recipe_of(new)) is is_used


def test_a_choice_that_there_was_not_yet_is_none():
    """A file from before a setting was made with what its default means; another value is refused."""
    now = resume_key(resolve(command_line=[("run.task", "bytes")]).settings, world_size=2)
    old = {key: value for key, value in now.items() if key != "optim.optimizer"}
    assert difference(old, aligned(old, now)) == []
    words = [("run.task", "bytes"), ("optimizer", "sgd")]
    other = resume_key(resolve(command_line=words).settings, world_size=2)
    assert difference(old, aligned(old, other)) == ["optim.optimizer: (not set) -> sgd"]
    assert difference(now, aligned(now, other)) == ["optim.optimizer: adamw -> sgd"]


def test_what_an_earlier_version_could_choose_is_no_difference_unless_chosen():
    """Its checkpoints go on; what it chose is refused."""
    now = resume_key(resolve(command_line=[("run.task", "bytes")]).settings, world_size=2)
    old = {**now, "data.largest_samples": False}
    assert difference(old, aligned(old, now)) == []
    old["data.largest_samples"] = True
    assert difference(old, aligned(old, now)) == ["data.largest_samples: true -> false"]


def test_a_task_that_is_given_all_settings_may_read_the_model():
    """Then a change of it is reported; a task that is not given them cannot notice."""
    words = [("task", "m:T")]
    old, new = (resolve(command_line=[*words, ("dropout", text)]).settings for text in ("0", "0.5"))
    kinds = {"device": "cpu", "precision": "", "backend": "", "torch": ""}
    sizes = {"total_steps": 1, "ranks": 1, "threads": 1}
    for reads in (True, False):
        found = Surroundings(**kinds, **sizes, own_task_reads_model=reads)
        assert (recipe(old, found) != recipe(new, found)) is reads
    assert resume_key(old, world_size=1) == resume_key(new, world_size=1)


def secretive(**arguments):
    return resolve(command_line={"task": arguments}).settings


def test_of_a_secret_there_is_a_salted_hash_to_compare():
    """Equal secrets of two runs look different; with the salt of the one they are distinguished or not."""
    old = resume_key(secretive(api_key="hunter2", width=3), world_size=1)
    assert "hunter2" not in str(old)
    assert old["task.width"] == 3
    assert resume_key(secretive(api_key="hunter2", width=3), world_size=1) != old
    kept = {key: value for key, value in old.items() if key.startswith("task.")}
    same = task_resume_key(secretive(api_key="hunter2", width=3), like=old)
    assert difference(kept, same) == []
    other = task_resume_key(secretive(api_key="hunter3", width=3), like=old)
    assert difference(kept, other) == ["task.api_key: *** -> ***"]
    gone = task_resume_key(secretive(width=3), like=old)
    assert difference(kept, gone) == ["task.api_key: *** -> (not set)"]


@pytest.mark.parametrize("key", ["api_key", "login"])
def test_a_secret_written_by_an_older_version_is_never_shown(key):
    """It stands in the file as it is; also one inside a mapping."""
    value, changed = (
        ("hunter2", "hunter3") if key == "api_key" else ({"password": "a"}, {"password": "b"})
    )
    old = {f"task.{key}": value}
    assert difference(old, task_resume_key(secretive(**{key: value}), like=old)) == []
    reported = difference(old, task_resume_key(secretive(**{key: changed}), like=old))
    assert reported == [f"task.{key}: *** -> ***"]


def test_written_settings_and_their_digest_have_no_secret_and_need_it_again():
    """A digest of known settings and a short secret could be guessed."""
    one, two = secretive(api_key="hunter2"), secretive(api_key="hunter3")
    assert digest(one) == digest(two)
    assert "hunter2" not in to_yaml(one)
    assert to_record(one)["task"] == {"api_key": "hunter2"}, "as the ranks are given it"
    read = yaml.safe_load(to_yaml(one))
    with pytest.raises(BadInputError, match=r"task\.api_key: is hidden in that file \(\*\*\*\)"):
        from_flat(read)
    read["task"]["api_key"] = "hunter2"
    assert from_flat(read) == one


ODD_VALUES = (
    "word " * 60,
    "é " * 60,
    "two\nlines\n",
    "on",
    "1e-3",
    "01:20",
    " a: #b ",
    "\x07",
    [0.1, {"a": None}],
)


def test_settings_are_written_alike_where_pyyaml_has_no_libyaml(monkeypatch):
    """And are read again as they were."""
    asked = from_flat({f"task.value_{number}": one for number, one in enumerate(ODD_VALUES)})
    text = to_yaml(asked)
    assert from_flat(yaml.safe_load(text)) == asked
    monkeypatch.setattr(identity, "_DUMPER", yaml.SafeDumper)
    assert to_yaml(asked) == text


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("my_task.py", "./my_task.py", True),
        ("my_task.py:Mine", "{here}/my_task.py:Mine", True),
        ("my_task.py:Mine", "my_task.py:Other", False),
        ("my_task.py", "elsewhere/my_task.py", False),
        ("package.module:Mine", "package.other:Mine", False),
        ("bytes", "{here}/bytes", False),
    ],
)
def test_a_file_has_many_names(old, new, is_same, tmp_path, monkeypatch):
    """A run is not another one because its task is written with the folder this time."""
    monkeypatch.chdir(tmp_path)
    old, new = ({"run.task": word.format(here=tmp_path)} for word in (old, new))
    assert (difference(old, aligned(old, new)) == []) == is_same


def test_shares_that_cut_alike_are_the_same_recipe():
    """Equal ones are none, and a common factor changes nothing."""
    made = {text: recipe_of(from_flat({"data.shares": text})) for text in ("", "2,2", "3,2", "6,4")}
    assert made[""] == made["2,2"]
    assert made["3,2"] == made["6,4"] != made[""]
