"""Settings from presets, files, environment and command line; what is refused, and in which words."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from ddp_runner.config import (
    PRESETS,
    SettingsError,
    check_relations,
    difference,
    digest,
    from_flat,
    from_record,
    init_from_path,
    is_usual,
    refuse_for_loops,
    refuse_without_supervisor,
    resolve,
    resume_key,
    to_record,
    to_yaml,
)
from ddp_runner.config.fields import find_key, known_fields
from ddp_runner.config.presets import RECIPES
from ddp_runner.core.settings import OptimSettings, Settings
from ddp_runner.kernel.rules.errors import BadInputError

_DEVICES = ("cpu", "gpu")
MODES = "one of auto, single, data_parallel, distributed"


def words_of(*pairs: tuple[str, str], **rest: object) -> str:
    with pytest.raises(BadInputError) as caught:
        resolve(command_line=pairs, **rest)
    return str(caught.value)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def _bomb(line: str) -> str:
    """Nine lines, each of which has the one before it ten times: a billion values."""
    lines = ["a0: &a0 {k: 1}" if "<<" in line else "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [line.format(n, ", ".join([f"*a{n - 1}"] * 10)) for n in range(1, 10)]
    return "\n".join(lines) + "\n"


def test_a_file_reads_numbers_as_the_command_line_does(tmp_path):
    """010 is ten, not the eight of YAML 1.1; 1:30 is no number; an alias and a merge still work."""
    text = "batch_size: 010\ntask: {a: 010, b: 09, c: 1:30, d: 0x10, e: 1_0, f: -07, g: &g {h: 1}"
    text += ", i: *g, j: {<<: *g}}\n"
    settings = resolve(files=[written(tmp_path, text)]).settings
    assert settings.data.batch_size == 10
    assert dict(settings.task) == {
        "a": 10,
        "b": 9,
        "c": "1:30",
        "d": 16,
        "e": 10,
        "f": -7,
        "g": {"h": 1},
        "i": {"h": 1},
        "j": {"h": 1},
    }
    given = [("task.a", "010"), ("--batch-size", "010")]
    from_line = resolve(command_line=given).settings
    assert (from_line.task["a"], from_line.data.batch_size) == (10, 10)


def test_each_source_overrides_the_one_before_it(tmp_path):
    """Default < preset < file < environment < command line, and the origin says which won."""
    file = written(tmp_path, "data: {batch_size: 3, num_workers: 3, prefetch_factor: 3}\n")
    resolved = resolve(
        preset="cpu",
        files=[file],
        environment={"DDP_RUNNER_DATA__NUM_WORKERS": "4", "ddp_runner_prefetch_factor": "4"},
        command_line=[("--prefetch-factor", "5")],
    )
    data = resolved.settings.data
    assert (data.batch_size, data.num_workers, data.prefetch_factor) == (3, 4, 5)
    assert resolved.settings.model.hidden_size == RECIPES["cpu"]["bytes"]["model.hidden_size"]
    assert [
        resolved.origin[key]
        for key in (
            "data.pin_memory",
            "model.hidden_size",
            "data.batch_size",
            "data.num_workers",
            "data.prefetch_factor",
        )
    ] == ["default", "preset", "file", "environment", "command line"]


def test_a_users_task_has_one_recipe_on_all_devices():
    """What a device changes are waits and who loads data, nothing that a task would learn otherwise by."""
    asked = [("--task", "m:T")]
    on_cpu, on_gpu = (to_record(resolve(preset=p, command_line=asked).settings) for p in _DEVICES)
    differing = {
        f"{section}.{key}"
        for section, values in on_cpu.items()
        for key, value in values.items()
        if value != on_gpu[section][key]
    }
    waits = {key for key in differing if key.startswith("recovery.") and key.endswith("_s")}
    assert differing - waits == {"data.num_workers", "optim.precision"}


def test_a_users_program_has_no_recipe_of_a_built_in_task():
    """Its word for a task is that of bytes, which it does not train."""
    settings = resolve(preset="cpu_program", command_line=[("task", "bytes")]).settings
    assert (settings.checkpoint.save_interval, settings.checkpoint.save_every_steps) == (1, "auto")
    assert (settings.log.log_interval, settings.run.max_steps) == (10, 0)


@pytest.mark.parametrize(
    ("given", "cadence"),
    [
        ({}, (0, 200, 0, 500)),  # of the recipe of bytes
        ({"task": "m:T"}, (1, "auto", 1, 0)),
        ({"task": "m:T", "save_every_steps": "5", "evaluate_every_steps": "7"}, (0, 5, 0, 7)),
        ({"save_every_epochs": "2", "evaluate_every_epochs": "3"}, (2, "auto", 3, 0)),
        ({"task": "m:T", "save_every_steps": "0", "save_interval": "0"}, (0, 0, 1, 0)),
    ],
)
def test_evaluations_and_saves_come_by_steps_or_by_epochs(given, cadence):
    """The later choice has the word, whether of the recipe, a file or the command line."""
    settings = resolve(preset="cpu", command_line=list(given.items())).settings
    checkpoint, log = settings.checkpoint, settings.log
    saves = (checkpoint.save_interval, checkpoint.save_every_steps)
    assert (*saves, log.evaluate_interval, log.evaluate_every_steps) == cadence


def test_steps_and_epochs_from_one_source_are_both_in_force_and_said(tmp_path, monkeypatch):
    """A file's choice gives way to the command line; a run's own config.yaml is no second choice."""
    monkeypatch.chdir(tmp_path)
    both = resolve(
        command_line=[("evaluate_interval", "2"), ("evaluate_every_steps", "9")]
    ).settings
    assert (both.log.evaluate_interval, both.log.evaluate_every_steps) == (2, 9)
    (note,) = check_relations(both)
    assert note.startswith("log.evaluate_every_steps=9 and log.evaluate_interval=2 are both in f")
    file = written(tmp_path, to_yaml(resolve(command_line=[("save_every_steps", "9")]).settings))
    again = resolve(files=[file], command_line=[("save_interval", "2")]).settings.checkpoint
    assert (again.save_interval, again.save_every_steps) == (2, "auto")


def test_a_recipe_lies_below_whatever_is_set(tmp_path):
    """A built-in task's own values give way to every source, and are of no other task."""
    file = written(tmp_path, "learning_rate: 0.5\n")
    resolved = resolve(preset="cpu", files=[file], command_line=[("batch_size", "9")])
    optim, data = resolved.settings.optim, resolved.settings.data
    assert (optim.learning_rate, optim.beta2, data.batch_size) == (0.5, 0.98, 9)
    other = resolve(preset="cpu", command_line=[("--task", "synthetic")]).settings
    assert (other.optim.beta2, other.log.evaluate_batches) == (0.98, 0)


@pytest.mark.parametrize("preset", ["gpu", "cpu", "cpu_test"])
@pytest.mark.parametrize("task", ["bytes", "synthetic", "my.py"])
def test_only_what_was_set_is_listed_of_a_run(preset, task):
    """Neither what devices or a built-in task make of a setting, nor the folders that follow from a name."""
    is_test = [("--test", "true")] if preset.endswith("_test") else []
    asked = [("--task", task), ("batch_size", "7"), ("device", "cpu"), *is_test]
    settings = resolve(preset=preset, command_line=asked).settings
    assert [key for key in _set(settings) if key not in ("run.task", "run.test")] == [
        "run.device",
        "data.batch_size",
    ]
    named = resolve(preset=preset, command_line=[*asked, ("--name", "other")]).settings
    assert "run.name" in _set(named)
    assert "run.log_dir" not in _set(named)


def _set(settings):
    flat = {
        f"{section}.{key}": value
        for section, values in to_record(settings).items()
        for key, value in values.items()
    }
    return [key for key in flat if not is_usual(key, flat)]


def test_the_recipe_of_bytes_is_the_one_whose_figures_are_published():
    """The default run on a CPU: its length, batch and rate were measured together."""
    settings = resolve(preset="cpu").settings
    model, optim, log = settings.model, settings.optim, settings.log
    assert (model.seq_len, model.hidden_size, model.num_layers, model.num_heads) == (128, 128, 2, 4)
    assert (optim.learning_rate, optim.beta2, optim.warmup_steps) == (6e-3, 0.98, "auto")
    assert (settings.run.max_steps, settings.data.batch_size) == (3000, 8)
    assert settings.data.num_workers == 0
    assert (log.log_interval, log.evaluate_every_steps, log.evaluate_batches) == (20, 500, 25)
    assert (optim.precision, model.dropout, optim.schedule) == ("fp32", 0.0, "cosine")
    assert settings.checkpoint.save_every_steps == 200


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_every_preset_is_legal(preset, tmp_path, monkeypatch):
    """A preset passes the same checks as a user's settings."""
    monkeypatch.chdir(tmp_path)
    assert check_relations(resolve(preset=preset).settings) == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("num_workers", "2", "data.num_workers", 2),
        ("num_workers", "auto", "data.num_workers", "auto"),
        ("data.num_workers", "2", "data.num_workers", 2),
        ("--num-workers", "2", "data.num_workers", 2),
        ("hidden_size", "64", "model.hidden_size", 64),
        ("save_every_steps", "10", "checkpoint.save_every_steps", 10),
        ("num_epochs", "3", "run.epochs", 3),
        ("lr", "1e-3", "optim.learning_rate", 1e-3),
        ("max_steps", "1e4", "run.max_steps", 10_000),
        ("max_grad_norm", "off", "optim.max_grad_norm", None),
        ("ema_decay", "none", "optim.ema_decay", None),
        ("use_amp", "no", "optim.precision", "fp32"),
        ("optim.use_amp", "1", "optim.precision", "auto"),
        ("precision", "BF16", "optim.precision", "bf16"),
        ("amp_init_scale", "1024", "optim.amp_init_scale", 1024.0),
        ("gpus", "0,2", "run.gpus", (0, 2)),
        ("gpus", "", "run.gpus", ()),
        ("drill_at", "2, 50,1000", "recovery.drill_at", (2, 50, 1000)),
        ("drill_at", "off", "recovery.drill_at", None),
        ("require_exact", "yes", "recovery.require_exact", True),
        ("nproc_per_node", "auto", "run.nproc_per_node", "auto"),
        ("nproc_per_node", "3", "run.nproc_per_node", 3),
        ("schedule", "Linear", "optim.schedule", "linear"),
        ("warmup_steps", "0.05", "optim.warmup_steps", 0.05),
        ("warmup_steps", "1e3", "optim.warmup_steps", 1000),
        ("decay_steps", "0", "optim.decay_steps", 0),
        ("resume", "none", "run.resume", "none"),
        ("task", "my.py:Mine", "run.task", "my.py:Mine"),
        ("data", "/some/where", "data.path", "/some/where"),
    ],
)
def test_a_value_given_as_text_is_parsed_by_its_setting(name, text, key, value):
    """A name needs its section only where it is ambiguous, and dashes work as underscores."""
    settings = resolve(command_line=[(name, text)]).settings
    section, _, field = key.partition(".")
    found = getattr(getattr(settings, section), field)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("--batch-size", "0", "--batch-size=0: must be a whole number, 1 or more"),
        ("data.batch_size", "8.5", "data.batch_size=8.5: must be a whole number, 1 or more"),
        ("data.batch_size", "eight", "data.batch_size=eight: must be a whole number, 1 or more"),
        ("data.batch_size", "", "data.batch_size='': must be a whole number, 1 or more"),
        ("lr", "0", "lr=0: must be a number, above 0"),
        ("lr", "nan", "lr=nan: must be a number, above 0"),
        ("lr", "inf", "lr=inf: must be a number, above 0"),
        ("dropout", "1", "dropout=1: must be a number, 0 or more and below 1"),
        ("use_amp", "2", "use_amp=2: must be true or false"),
        ("precision", "fp8", "precision=fp8: must be one of auto, fp32, bf16, fp16"),
        ("amp_init_scale", "0", "amp_init_scale=0: must be a number, above 0"),
        (
            "warm_spare",
            "devices",
            "warm_spare=devices: must be true or false, or process, or model",
        ),
        ("ema_decay", "1", "ema_decay=1: must be a number, above 0 and below 1, or none"),
        (
            "schedule",
            "cosin",
            "schedule=cosin: must be one of constant, cosine, linear, wsd, inverse_sqrt, range_test",
        ),
        (
            "warmup_steps",
            "1.5",
            "warmup_steps=1.5: must be a whole number, 0 or more, or a share between 0 and 1, or auto",
        ),
        (
            "decay_steps",
            "-0.1",
            "decay_steps=-0.1: must be a whole number, 0 or more, or a share between 0 and 1",
        ),
        (
            "drill_at",
            "0",
            "drill_at=0: must be whole numbers separated by commas, 1 or more, or none",
        ),
        ("gpus", "0;1", "gpus=0;1: must be whole numbers separated by commas, 0 or more"),
        *(
            (
                "shares",
                wrong,
                f"shares={wrong}: must be whole numbers separated by commas, 1 or more, or auto",
            )
            for wrong in ("3,0", "3,-1", "3,x", "1.5,1")
        ),
        ("nproc_per_node", "0", "nproc_per_node=0: must be a whole number, 1 or more, or auto"),
        ("seed", str(2**63), f"seed={2**63}: must be a whole number, 0 or more and below 2**63"),
        ("port", "70000", "port=70000: must be a whole number, 0 or more and at most 65535"),
        (
            *("mode", "max"),
            f"mode=max: must be {MODES}; checkpoint.mode=max is another setting",
        ),
        ("run.mode", "max", f"run.mode=max: must be {MODES}"),
        ("mode", "most", f"mode=most: must be {MODES}"),
        ("batchsize", "8", "batchsize: unknown setting; did you mean data.batch_size?"),
        ("data.batch", "8", "data.batch: unknown setting; did you mean data.batch_size?"),
        ("optim.lr", "1", "optim.lr: unknown setting; did you mean optim.learning_rate?"),
        ("qqqq", "1", "qqqq: unknown setting"),
        ("model.lr", "1", "model.lr: unknown setting; did you mean optim.learning_rate?"),
        ("task.", "1", "task.: unknown setting"),
    ],
)
def test_a_wrong_value_is_reported_with_what_would_be_right(name, text, message):
    """The message names the option as written, the value and the legal range."""
    assert words_of((name, text)) == message


def test_all_wrong_values_are_reported_at_once(tmp_path):
    """A person corrects every mistake in one go; each has its own line and names its source."""
    file = written(tmp_path, "run: {epochs: 0}\nbogus_setting: 1\n")
    with pytest.raises(SettingsError) as caught:
        resolve(
            files=[file],
            environment={"DDP_RUNNER_SEED": "x"},
            command_line=[("lr", "-1")],
        )
    assert str(caught.value).splitlines() == [
        f"{file}: run.epochs=0: must be a whole number, 1 or more",
        f"{file}: bogus_setting: unknown setting",
        "DDP_RUNNER_SEED=x: must be a whole number, 0 or more and below 2**63",
        "lr=-1: must be a number, above 0",
    ]
    assert len(caught.value.problems) == 4


def test_an_ambiguous_name_lists_the_candidates():
    """A last name that two sections have needs its section."""
    with pytest.raises(BadInputError, match=r"--rate: could be a\.rate or b\.rate; write"):
        find_key("--rate", "rate", ["a.rate", "b.rate", "b.size"])
    assert find_key("--size", "size", ["a.rate", "b.rate", "b.size"]) == "b.size"


def test_no_two_sections_share_a_last_name():
    """Every setting can be given without its section, as the help promises; but for the one that says so."""
    last_names = [key.partition(".")[2] for key in known_fields() if key != "checkpoint.mode"]
    assert len(last_names) == len(set(last_names))
    known = list(known_fields())
    assert find_key("mode", "mode", known) == "run.mode"
    assert find_key("mode", "checkpoint.mode", known) == "checkpoint.mode"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n- 2\n", "is not a mapping; write lines such as 'batch_size: 16'"),
        ("just words\n", "is not a mapping; write lines such as 'batch_size: 16'"),
        ("a: 1\nb: [1\n", "is not valid YAML in line 3: expected ',' or ']', but got"),
        ("epochs: 1\nepochs: 2\n", "is not valid YAML in line 2: 'epochs' is given twice"),
        ("a:\n\t- b\n", "is not valid YAML in line 2: found character"),
        (f"epochs: {'9' * 5000}\n", f"is not valid YAML in line 1: '{'9' * 40}' is not an integer"),
        ("epochs: 0x_\n", "is not valid YAML in line 1: '0x' is not an integer"),
        ("epochs: !!bool 3\n", "is not valid YAML: a tag does not fit its value"),
        ("task: {a: &a [*a]}\n", "is not valid YAML in line 1: a value holds itself"),
        (_bomb("a{0}: &a{0} [{1}]"), "is not valid YAML in line 5: it has more than 100,000"),
        (_bomb("a{0}: &a{0} {{<<: [{1}]}}"), "is not valid YAML in line 6: it has more than"),
    ],
)
def test_a_file_that_is_not_a_mapping_is_refused_with_its_line(tmp_path, text, message):
    """What is wrong with a configuration file is one line that names the file."""
    file = written(tmp_path, text)
    said = words_of(files=[file])
    assert said.startswith(f"--config={file}: {message}")
    assert "\n" not in said


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    """A missing file, a folder, a binary file and a device without an end are distinguished."""
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    assert words_of(files=[tmp_path / "no.yaml"]).endswith("no.yaml: no such file")
    assert words_of(files=[tmp_path]).endswith("is a folder; give a YAML file")
    assert words_of(files=[binary]).endswith("is not text; give a YAML file in UTF-8")
    assert words_of(files=[Path("/dev/zero")]).endswith("/dev/zero: has more than 10,000,000 bytes")


@pytest.mark.parametrize("text", ["", "# nothing\n", "data:\n", "---\n"])
def test_an_empty_file_or_section_changes_nothing(tmp_path, text):
    """The control: a file may say nothing."""
    assert resolve(files=[written(tmp_path, text)]).settings == Settings()


def test_numbers_given_as_text_in_yaml_are_taken_only_if_exact(tmp_path):
    """`"8"` is 8 and `1e-4`, text to YAML 1.1, is a number; `true` and `8.5` are no batch size."""
    good = resolve(files=[written(tmp_path, 'batch_size: "8"\nlr: 1e-4\nepochs: 2.0\n')]).settings
    assert (good.data.batch_size, good.optim.learning_rate, good.run.epochs) == (8, 1e-4, 2)
    for text in ("true", "8.5", "null", "[8]", "{a: 1}", '"8 apples"'):
        said = words_of(files=[written(tmp_path, f"batch_size: {text}\n")])
        assert said.endswith("must be a whole number, 1 or more")


def test_yaml_words_for_off_switch_an_optional_setting_off(tmp_path):
    """YAML reads `off` and `no` as false; for a setting that can be off that means off."""
    settings = resolve(files=[written(tmp_path, "optim: {max_grad_norm: off}\n")]).settings
    assert settings.optim.max_grad_norm is None


def test_a_section_given_a_plain_value_is_refused(tmp_path):
    """`optim: 5` is a mistake, not a setting."""
    said = words_of(files=[written(tmp_path, "optim: 5\n")])
    assert said.endswith("optim=5: is a section; write optim.NAME: VALUE")


def test_task_is_a_setting_as_text_and_a_section_as_a_mapping(tmp_path):
    """`task: synthetic` names the task; `task: {...}` holds the arguments of a user's own."""
    named = resolve(files=[written(tmp_path, "task: synthetic\n")]).settings
    assert (named.run.task, named.task) == ("synthetic", {})
    given = resolve(files=[written(tmp_path, "task: {width: 3, Name: [1, a]}\n")]).settings
    assert (given.run.task, given.task) == ("bytes", {"width": 3, "Name": [1, "a"]})


def test_arguments_of_a_users_own_task_keep_their_names_and_yaml_types():
    """`task.X=…` is free-form: parsed as YAML, not judged, names kept in their case."""
    settings = resolve(
        command_line=[
            ("task.Width", "3"),
            ("task.rate", "1e-3"),
            ("task.day", "2024-01-01"),
            ("task.on", "true"),
            ("task.sizes", "[1, 2]"),
        ]
    ).settings
    assert settings.task == {
        "Width": 3,
        "rate": 1e-3,
        "day": "2024-01-01",
        "on": True,
        "sizes": [1, 2],
    }
    assert words_of(("task.x", "[1")).startswith("task.x=[1: is not valid YAML")
    assert "must be text, a finite number" in words_of(("task.x", ".nan"))


def test_variables_that_are_not_settings_are_left_alone():
    """The control: other variables, empty ones and those of the launcher assign nothing."""
    environment = {"PATH": "/bin", "DDP_RUNNER_EPOCHS": "", "DDP_RUNNER_PYTHON": "python3"}
    assert resolve(environment=environment).settings == Settings()
    with pytest.raises(BadInputError, match=r"DDP_RUNNER_EPOCH: unknown .* mean run\.epochs\?"):
        resolve(environment={"DDP_RUNNER_EPOCH": "1"})


def test_injected_faults_add_up_within_one_source(tmp_path):
    """A repeated option grows the list; a stronger source replaces it."""
    file = written(tmp_path, "inject: [stop:rank=0]\n")
    given = [("--inject", "kill:rank=1,step=2"), ("--inject", "nan:step=3")]
    assert resolve(files=[file]).settings.run.inject == ("stop:rank=0",)
    assert resolve(files=[file], command_line=given).settings.run.inject == (
        "kill:rank=1,step=2",
        "nan:step=3",
    )


def test_asking_for_epochs_lifts_the_step_count_of_a_preset():
    """A preset's max_steps would win over the epochs that somebody asked for."""
    assert resolve(preset="cpu").settings.run.max_steps > 0
    by_epochs = resolve(preset="cpu", command_line=[("--epochs", "3")]).settings.run
    assert (by_epochs.epochs, by_epochs.max_steps) == (3, 0)
    assert resolve(preset="cpu", command_line=[("--task", "m:T")]).settings.run.max_steps == 0
    both = resolve(preset="cpu", command_line=[("epochs", "3"), ("max_steps", "9")])
    assert both.settings.run.max_steps == 9


def test_a_smoke_test_keeps_to_folders_of_its_own(tmp_path):
    """`--test` writes below logs/test and checkpoints/test unless the command line names others."""
    run = resolve(preset="cpu_test", command_line=[("--test", "true")]).settings.run
    assert (run.log_dir, run.checkpoint_dir) == ("logs/test", "checkpoints/test")
    assert run.resume == "none"
    file = written(tmp_path, "log_dir: /data/logs\n")
    named = resolve(
        files=[file], command_line=[("--test", "true"), ("--checkpoint-dir", "mine")]
    ).settings.run
    assert (named.log_dir, named.checkpoint_dir) == ("/data/logs/test", "mine")
    assert named.resume == "auto"


def test_flat_keys_of_the_python_api_are_accepted_together():
    """Every flat key that the Python API promises names a setting; nested sections work too."""
    flat = {
        "vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "dropout": 0.0,
        "batch_size": 4, "learning_rate": 1e-3, "weight_decay": 0, "num_epochs": 2,
        "use_amp": False, "dataset_size": 100, "seq_len": 16, "num_workers": 0,
        "pin_memory": False, "log_interval": 1, "save_interval": 1, "memory_check_interval": 5,
        "cleanup_interval": 10, "max_errors_per_epoch": 3, "max_memory_gb": 4,
        "target_loss": 0.5, "ddp": {"bucket_cap_mb": 1}, "run.task": "synthetic",
        "task": {"a": 1},
    }  # fmt: skip
    settings = from_flat(flat)
    assert settings.run.target_loss == 0.5
    assert settings.run.epochs == 2
    assert settings.memory.max_memory_gb == 4.0
    assert settings.ddp.bucket_cap_mb == 1
    assert (settings.run.task, settings.task) == ("synthetic", {"a": 1})
    with pytest.raises(BadInputError, match=r"hiden_size: unknown.*model\.hidden_size"):
        from_flat({"hiden_size": 3})
    with pytest.raises(BadInputError, match=r"^batch_size=0: must be"):
        from_flat({"batch_size": 0})


def resolved(*pairs: tuple[str, str]) -> Settings:
    return resolve(command_line=pairs).settings


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (
            [("hidden_size", "100"), ("num_heads", "8")],
            "model.hidden_size=100: must be a multiple of model.num_heads=8",
        ),
        (
            [("warn_share", "0.95")],
            (
                "memory.warn_share, react_share, limit_share=0.95, 0.9, 0.98: "
                "must increase in this order"
            ),
        ),
        (
            [("accumulation", "4"), ("global_batch_size", "64")],
            "data.accumulation=4: and data.global_batch_size say the same: leave out one of them",
        ),
        (
            [("nproc_per_node", "4"), ("global_batch_size", "3")],
            "data.global_batch_size=3: must be run.nproc_per_node=4 or more: a sample for each rank",
        ),
        (
            [("batch_size", "4"), ("micro_batch_size", "8")],
            "data.micro_batch_size=8: must be data.batch_size=4 or less",
        ),
        (
            [("lr", "1e-4"), ("min_lr", "1e-3")],
            "optim.min_learning_rate=0.001: must be optim.learning_rate=0.0001 or less",
        ),
        (
            [("momentum", "0.5")],
            "optim.momentum=0.5: is for sgd and muon: leave it out with adamw",
        ),
        (
            [("optimizer", "sgd"), ("epsilon", "1e-3")],
            "optim.epsilon=0.001: leave it out with sgd",
        ),
        (
            [("plateau_patience", "2"), ("evaluate_interval", "0")],
            (
                "optim.plateau_patience=2: needs evaluations: "
                "give evaluate_every_steps or evaluate_interval"
            ),
        ),
        (
            [("early_stopping_patience", "2"), ("evaluate_interval", "0")],
            (
                "run.early_stopping_patience=2: needs evaluations: "
                "give evaluate_every_steps or evaluate_interval"
            ),
        ),
        (
            [("checkpoint.mode", "max")],
            (
                "checkpoint.mode=max: the highest loss would be the best: name a figure that is to"
                " rise, as checkpoint.monitor=validation_accuracy, or leave checkpoint.mode out"
            ),
        ),
        (
            [("greater_is_better", "true"), ("metric_for_best_model", "train_loss")],
            (
                "checkpoint.mode=max: the highest train_loss would be the best: name a figure that"
                " is to rise, as checkpoint.monitor=validation_accuracy, or leave checkpoint.mode out"
            ),
        ),
        (
            [("plateau_cooldown", "2")],
            (
                "optim.plateau_cooldown=2: is for optim.plateau_patience: "
                "give that too, or leave it out"
            ),
        ),
        (
            [("early_stopping_min_delta", "0.1")],
            (
                "run.early_stopping_min_delta=0.1: is for run.early_stopping_patience: "
                "give that too, or leave it out"
            ),
        ),
        (
            [("ema_every", "4")],
            (
                "optim.ema_every=4: needs a moving average: "
                "give ema_decay, such as 0.999, or leave it out"
            ),
        ),
        (
            [("ema_decay", "0.9"), ("ema_start_step", "50"), ("max_steps", "40")],
            (
                "optim.ema_start_step=50: must be run.max_steps=40 or less, "
                "or the average never begins"
            ),
        ),
        ([("init_from", "w.pt:ema")], "--init-from=w.pt:ema: no such file or folder"),
        (
            [("schedule", "wsd"), ("decay_steps", "0")],
            "optim.decay_steps=0: must be above 0 with schedule=wsd; constant has no decay",
        ),
        ([("gpus", "0"), ("device", "cpu")], "--gpus=0: contradicts --cpu; give one of them"),
        (
            [("gpus", "0,0"), ("backend", "nccl")],
            (
                "--gpus=0,0: must name each GPU once: NCCL refuses two ranks on one; "
                "ddp.backend=gloo can"
            ),
        ),
        (
            [("gpus", "0,0"), ("nproc", "4")],
            "--nproc-per-node=4: must be 2, as --gpus=0,0 names 2; one of the two is enough",
        ),
        (
            [("gpus", "0,1"), ("nproc", "3")],
            "--nproc-per-node=3: must be 2, as --gpus=0,1 names 2; one of the two is enough",
        ),
        ([("task", "foo")], "--task=foo: must be bytes, synthetic, FILE.py[:NAME] or module:NAME"),
        ([("task", "no.py:X")], "--task=no.py:X: no such file no.py"),
        ([("data", "nowhere")], "--data=nowhere: no such file or folder"),
        ([("init_from", "w.pt")], "--init-from=w.pt: no such file or folder"),
        (
            [("resume", "x.pt")],
            (
                "--resume=x.pt: must be auto, last, best, none or the path of a checkpoint; "
                "no such file"
            ),
        ),
        (
            [("after_save", "upload")],
            "checkpoint.after_save=upload: must have {path} where the checkpoint's path goes",
        ),
        (
            [("init_from", "hf://me")],
            "--init-from=hf://me: must be hf://USER/NAME, or hf://USER/NAME@REVISION",
        ),
        ([("log_dir", "")], "--log-dir: must be the path of a separate folder"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(pairs, message, tmp_path, monkeypatch):
    """Relations are checked before anything starts, and nothing is created on disk."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInputError) as caught:
        check_relations(resolved(*pairs))
    assert str(caught.value) == message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"\n\nx = (\n", "SyntaxError: '(' was never closed (line 3)"),
        (b"if 1:\n\tx = 1\n        y = 1\n", "TabError: inconsistent use of tabs and spaces in"),
        (b"x = '\xff'\n", "SyntaxError: (unicode error) 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_task_that_does_not_compile_is_refused_before_torch_is_imported(tmp_path, source, words):
    """Importing it, in a rank, would say the same seconds later."""
    file = tmp_path / "wrong.py"
    file.write_bytes(source)
    with pytest.raises(BadInputError) as caught:
        check_relations(resolved(("task", f"{file}:X")))
    assert str(caught.value).startswith(f"--task={file}:X: importing it raised {words}")
    file.write_bytes(b"pattern = '\\d'\n")  # a warning only, which is not shown twice
    check_relations(resolved(("task", f"{file}:X")))


def test_start_weights_may_be_gone_where_a_run_goes_on(tmp_path, monkeypatch):
    """It has them; but not where files leave them out, or where all starts fresh."""
    monkeypatch.chdir(tmp_path)
    pairs = [("init_from", "w.pt"), ("checkpoint_dir", "c")]
    gone = "--init-from=w.pt: no such file"
    with pytest.raises(BadInputError, match=gone):
        check_relations(resolved(*pairs))
    Path("c").mkdir()
    Path("c/step_00000005.pt").touch()
    check_relations(resolved(*pairs))
    for more in (("resume", "none"), ("only_trained", "true")):
        with pytest.raises(BadInputError, match=gone):
            check_relations(resolved(*pairs, more))
    assert resolved(("init_from", "scratch")).run.init_from == ""


def test_a_command_after_saves_needs_a_supervisor():
    """Under another launcher nobody would run it."""
    settings = resolved(("after_save", "upload {path}"))
    with pytest.raises(BadInputError, match=r"checkpoint\.after_save=upload .* needs a supervisor"):
        refuse_without_supervisor(settings, world_size=1)
    refuse_without_supervisor(resolved(("after_save", "none")), world_size=2)


def test_the_average_of_a_checkpoint_is_asked_for_behind_its_path(tmp_path, monkeypatch):
    """The path alone must be there; a file of that very name is itself."""
    monkeypatch.chdir(tmp_path)
    Path("w.pt").touch()
    check_relations(resolved(("init_from", "w.pt:ema")))
    assert init_from_path("w.pt:ema") == (Path("w.pt"), True)
    assert init_from_path("w.pt") == (Path("w.pt"), False)
    assert init_from_path("a:b") == (Path("a:b"), False)
    Path("w.pt:ema").touch()
    assert init_from_path("w.pt:ema") == (Path("w.pt:ema"), False)


@pytest.mark.parametrize("name", ["data", "init_from", "resume"])
def test_a_path_that_leads_to_no_file_and_no_folder_is_refused(tmp_path, monkeypatch, name):
    """A pipe would be waited for; a loop of links leads nowhere."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    for path, reason in (
        ("pipe", "is neither a file nor a folder"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
    ):
        with pytest.raises(BadInputError, match=reason):
            check_relations(resolved((name, path)))


@pytest.mark.parametrize(
    "pairs",
    [
        [("task", "m:T"), ("hidden_size", "100"), ("num_heads", "8")],
        [("gpus", "0,1"), ("nproc", "2")],
        [("gpus", "0"), ("nproc", "2"), ("backend", "gloo")],
        [("micro_batch_size", "32")],
        [("optimizer", "sgd"), ("momentum", "0.5")],
        [("plateau_patience", "2"), ("plateau_factor", "0.1"), ("plateau_cooldown", "3")],
        [
            ("early_stopping_patience", "2"),
            ("evaluate_interval", "0"),
            ("evaluate_every_steps", "9"),
        ],
        [("ema_decay", "0.9"), ("ema_start_step", "40"), ("ema_every", "3"), ("max_steps", "40")],
        [("optimizer", "muon"), ("momentum", "0.5"), ("epsilon", "1e-3")],
        [("log_dir", "a/b/c"), ("checkpoint_dir", "a/d")],
    ],
)
def test_settings_that_do_fit_are_not_refused(pairs, tmp_path, monkeypatch):
    """The control of the relations."""
    monkeypatch.chdir(tmp_path)
    check_relations(resolved(*pairs))
    assert list(tmp_path.iterdir()) == []


def test_warm_up_as_long_as_the_run_is_only_a_note():
    """It trains, so it is reported and not refused."""
    notes = check_relations(resolved(("max_steps", "50"), ("warmup_steps", "50")))
    assert len(notes) == 1
    assert "the warm-up is cut to half of the run" in notes[0]
    assert check_relations(resolved(("max_steps", "500"), ("warmup_steps", "50"))) == ()


def test_output_folders_that_cannot_be_made_are_refused_together(tmp_path, monkeypatch):
    """A file where a folder is meant, below a file, a dangling link: reported before anything is made."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("link").symlink_to("nowhere")
    with pytest.raises(SettingsError) as caught:
        check_relations(resolved(("log_dir", "file/logs"), ("checkpoint_dir", "file")))
    assert str(caught.value).splitlines() == [
        f"--log-dir=file/logs: must be a folder, but {tmp_path}/file is a file",
        f"--checkpoint-dir=file: must be a folder, but {tmp_path}/file is a file",
    ]
    with pytest.raises(BadInputError, match="link is a link to nothing"):
        check_relations(resolved(("log_dir", "link")))
    with pytest.raises(BadInputError, match="must have names of at most 255 bytes"):
        check_relations(resolved(("log_dir", f"logs/{'ä' * 128}/mine")))
    check_relations(resolved(("log_dir", f"logs/{'ä' * 127}/mine")))


def test_a_file_system_of_the_kernel_is_refused_also_for_root():
    """It takes no folder, and no permission says so."""
    with pytest.raises(BadInputError, match="must be writable, but /proc is on a"):
        check_relations(resolved(("log_dir", "/proc/logs")))


def test_a_read_only_file_system_is_refused_also_for_root():
    """Root passes every permission check, so the mount itself is asked."""
    read_only = [
        line.split()[1]
        for line in Path("/proc/mounts").read_text().splitlines()
        if "ro" in line.split()[3].split(",") and Path(line.split()[1]).is_dir()
    ]
    if not read_only:
        pytest.skip("this machine has no read-only mount")
    with pytest.raises(BadInputError, match="is on a read-only file system"):
        check_relations(resolved(("log_dir", f"{read_only[0]}/logs")))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_a_locked_folder_is_refused(tmp_path):
    """Permissions are checked on the nearest folder that exists."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(BadInputError, match=f"must be writable, but {locked} is not"):
        check_relations(resolved(("log_dir", str(locked / "a" / "b"))))


AWKWARD = [
    ("task.mixed", "{a: [1, 2.5, true, null, text], b: {c: ''}}"),
    ("ema_decay", "0.999"),
    ("max_grad_norm", "none"),
    ("gpus", "1,0"),
    ("inject", "kill:rank=1,step=2"),
    ("lr", "0.1"),
    ("data", "a folder/é: #x"),
    ("nproc", "2"),
]


def test_settings_survive_the_wire_and_yaml_exactly(tmp_path):
    """Record -> JSON -> record and settings -> YAML -> `--config` give equal settings."""
    settings = resolved(*AWKWARD)
    assert from_record(json.loads(json.dumps(to_record(settings)))) == settings
    assert resolve(files=[written(tmp_path, to_yaml(settings))]).settings == settings
    assert yaml.safe_load(to_yaml(settings))["optim"]["learning_rate"] == 0.1


def test_a_record_that_is_not_settings_is_refused_in_our_words():
    """No wording of the validation library reaches a person."""
    record = to_record(Settings())
    record["data"]["batch_size"] = 0
    record["run"]["bogus"] = 1
    with pytest.raises(SettingsError) as caught:
        from_record(record)
    assert sorted(str(caught.value).splitlines()) == [
        "data.batch_size=0: must be a whole number, 1 or more",
        "run.bogus: unknown setting",
    ]


def test_the_digest_names_the_settings():
    """Equal settings have equal digests, whatever gave them; any change gives another."""
    assert re.fullmatch(r"[0-9a-f]{64}", digest(Settings()))
    assert digest(Settings()) == digest(resolve(command_line=[("epochs", "10")]).settings)
    assert digest(Settings()) != digest(resolved(("epochs", "11")))


def test_only_what_changes_the_run_is_part_of_its_resume_key():
    """Resume is refused for another model, data, global batch or seed, and for nothing else."""
    old = resume_key(resolved(("batch_size", "16")), world_size=2)
    same = resolved(
        ("batch_size", "32"), ("lr", "1"), ("epochs", "99"), ("log_dir", "x"), ("vocab_size", "9")
    )
    assert difference(old, resume_key(same, world_size=1)) == []
    other = resolved(("batch_size", "32"), ("seed", "7"), ("num_layers", "2"), ("task.a", "1"))
    assert difference(old, resume_key(other, world_size=2)) == [
        "data.batch_size x ranks: 32 -> 64",
        "model.num_layers: 6 -> 2",
        "run.seed: 1234 -> 7",
        "task.a: (not set) -> 1",
    ]


def test_a_users_own_task_does_not_depend_on_the_built_in_model():
    """A preset may change `model.*` between machines; a task that never reads it can resume."""
    on_gpu = resolve(preset="gpu", command_line=[("task", "m:T"), ("batch_size", "8")]).settings
    on_cpu = resolve(preset="cpu", command_line=[("task", "m:T"), ("batch_size", "8")]).settings
    assert difference(resume_key(on_gpu, world_size=2), resume_key(on_cpu, world_size=2)) == []


def test_a_share_beyond_the_batch_size_is_noted_with_the_cure():
    """It would take more forward passes than others, which is not why anybody gives it more."""
    (note,) = check_relations(resolved(("shares", "3,3,2"), ("batch_size", "32")))
    assert note == (
        "data.shares: 36 samples of a rank are computed in parts of at most 32;"
        " batch_size=36 global_batch_size=96 computes them at once"
    )
    at_once = (("batch_size", "36"), ("global_batch_size", "96"))
    assert check_relations(resolved(("shares", "3,3,2"), *at_once)) == ()


def test_a_loop_of_ones_own_has_no_shares():
    """Its batches are its own."""
    with pytest.raises(BadInputError, match=r"data\.shares=3,2: is for a task"):
        refuse_for_loops(resolved(("shares", "3,2")))


def test_a_users_task_that_is_tried_out_has_the_usual_rate():
    """It may make its own optimizer, next to which a rate is refused; built-in tasks have one for so few steps."""
    words = [("--test", "true"), ("run.task", "mine.py:Mine")]
    mine = resolve(preset="cpu_test", command_line=words).settings.optim
    assert (mine.learning_rate, mine.warmup_steps) == (
        OptimSettings().learning_rate,
        OptimSettings().warmup_steps,
    )
    built_in = resolve(preset="cpu_test", command_line=[("--test", "true")]).settings.optim
    assert (built_in.learning_rate, built_in.warmup_steps) == (1e-3, 4)
