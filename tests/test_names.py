"""Names that are not ours: accepted where they mean the same, answered, or held against whole words."""

from __future__ import annotations

import pytest

from ddp_runner.cli.parser import parse_train
from ddp_runner.config import from_flat, from_record, resolve, to_record
from ddp_runner.config.fields import (
    ALIASES,
    SWITCHES,
    ForeignNameError,
    find_key,
    known_fields,
    sections,
)
from ddp_runner.config.foreign import ALWAYS, ANSWERS, FACTS, REMOVED, WORDS
from ddp_runner.config.suggest import nearest
from ddp_runner.kernel.rules.errors import BadInputError

KNOWN = list(known_fields())
LAST_NAMES = {key.rpartition(".")[2] for key in KNOWN}


def test_every_name_of_others_leads_to_a_setting_or_to_an_answer():
    """To one that exists; never to both, and no name of our own is taken away."""
    assert set(ALIASES.values()) <= set(KNOWN)
    assert not set(ALIASES) & LAST_NAMES
    assert not set(ANSWERS) & (LAST_NAMES | set(ALIASES))
    assert set(FACTS) <= set(ANSWERS)
    assert not set(ALWAYS) & (LAST_NAMES | set(ALIASES) | set(ANSWERS))
    assert set(SWITCHES) <= set(ALIASES)
    assert set(WORDS) <= {*ALIASES, *KNOWN, *LAST_NAMES}
    for name in ALIASES:
        assert find_key(name, name, KNOWN) == ALIASES[name]
    for name in ANSWERS:
        with pytest.raises(ForeignNameError):
            find_key(name, name, KNOWN)


def test_answers_are_one_short_line_and_name_what_exists():
    """What they say to write is a setting or an option."""
    for answer in [*ANSWERS.values(), *(answer for _, answer in REMOVED.values())]:
        assert "\n" not in answer
        assert len(answer) < 100
        named = [word.partition("=")[0] for word in answer.split() if "=" in word]
        for name in named:
            assert name in LAST_NAMES, answer


@pytest.mark.parametrize("name", ["save_dir", "strategy", "optim"])
def test_a_file_of_settings_is_answered_as_well(name, tmp_path):
    """With the file and the name as it stands there."""
    file = tmp_path / "run.yaml"
    file.write_text(f"{name}: something\n")
    with pytest.raises(BadInputError) as caught:
        resolve(files=[file])
    expected = "is a section" if name in sections() else ANSWERS[name]
    assert str(caught.value).startswith(f"{file}: {name}")
    assert expected in str(caught.value)


@pytest.mark.parametrize("key", REMOVED)
def test_a_setting_that_is_gone_is_passed_over_or_answered(key, tmp_path):
    """Its usual value stands in each config.yaml of an earlier version; any other one is one line."""
    section, _, name = key.partition(".")
    assert key not in KNOWN
    usual, answer = REMOVED[key]
    file = tmp_path / "config.yaml"
    file.write_text(f"{section}:\n  {name}: {usual}\n")
    resolve(files=[file], command_line=[(name, usual)])
    file.write_text(f"{section}:\n  {name}: other\n")
    with pytest.raises(BadInputError) as caught:
        resolve(files=[file])
    assert str(caught.value) == f"{file}: {key}: is no longer a setting; {answer}"
    record = to_record(from_flat({"task": "synthetic"}))
    record[section][name] = "other"
    assert from_record(record) == from_flat({"task": "synthetic"})


TYPED = [
    ("out_dir", "out", "run.checkpoint_dir", "out"),
    ("pretrained_path", "w.pt", "run.init_from", "w.pt"),
    ("experiment_name", "one", "run.name", "one"),
    ("device_ids", "0,1", "run.gpus", (0, 1)),
    ("training_mode", "dataparallel", "run.mode", "data_parallel"),
    ("training_mode", "distributed", "run.mode", "distributed"),
    ("training_mode", "single", "run.mode", "single"),
    ("context_size", "64", "model.seq_len", 64),
    ("report_to", "wandb", "log.trackers", ("wandb",)),
    ("report_to", "mlflow", "log.trackers", ("mlflow",)),
    ("report_to", "none", "log.trackers", ()),
    ("report_to", "null", "log.trackers", ()),
    ("enable_gpu_monitoring", "false", "log.gpu_watch_s", 0.0),
    ("enable_gpu_monitoring", "true", "log.gpu_watch_s", 5.0),
    ("enable_gradient_as_bucket_view", "true", "ddp.gradient_as_bucket_view", True),
    ("enable_gradient_as_bucket_view", "false", "ddp.gradient_as_bucket_view", False),
    ("device_ids", "null", "run.gpus", ()),
    ("gpu_ids", "all", "run.gpus", ()),
    ("train_batch_size", "4", "data.batch_size", 4),
    ("data_workers", "3", "data.num_workers", 3),
    ("max_norm", "0.5", "optim.max_grad_norm", 0.5),
    ("warmup_iters", "7", "optim.warmup_steps", 7),
    ("lr_decay_iters", "700", "optim.schedule_steps", 700),
    ("lr_scheduler_type", "warmup_stable_decay", "optim.schedule", "wsd"),
    ("lr_scheduler_type", "linear", "optim.schedule", "linear"),
    ("lr_scheduler", "constant_with_warmup", "optim.schedule", "constant"),
    ("decay_lr", "false", "optim.schedule", "constant"),
    ("decay_lr", "true", "optim.schedule", "cosine"),
    ("use_mixed_precision", "false", "optim.precision", "fp32"),
    ("use_amp", "true", "optim.precision", "auto"),
    ("mixed_precision", "bf16", "optim.precision", "bf16"),
    ("mixed_precision", "no", "optim.precision", "fp32"),
    ("precision", "16-mixed", "optim.precision", "fp16"),
    ("precision", "bf16-mixed", "optim.precision", "bf16"),
    ("precision", "32-true", "optim.precision", "fp32"),
    ("precision", "32", "optim.precision", "fp32"),
    ("dtype", "float16", "optim.precision", "fp16"),
    ("dtype", "bfloat16", "optim.precision", "bf16"),
    ("dtype", "float32", "optim.precision", "fp32"),
    ("fp16", "true", "optim.precision", "fp16"),
    ("bf16", "true", "optim.precision", "bf16"),
    ("bf16", "false", "optim.precision", "auto"),
    ("tf32", "true", "run.matmul_precision", "high"),
    ("allow_tf32", "false", "run.matmul_precision", "highest"),
    ("ddp_timeout", "90", "ddp.collective_timeout_s", 90.0),
    ("gpus", "all", "run.gpus", ()),
    ("save_interval_steps", "50", "checkpoint.save_every_steps", 50),
    ("save_total_limit", "2", "checkpoint.keep_last", 2),
    ("eval_interval", "20", "log.evaluate_every_steps", 20),
    ("eval_batches", "5", "log.evaluate_batches", 5),
    ("save_steps", "50", "checkpoint.save_every_steps", 50),
    ("valid_interval_steps", "20", "log.evaluate_every_steps", 20),
    *(
        (name, "true", "optim.precision", "auto")
        for name in ("use_mixed_precision", "enable_mixed_precision")
    ),
    *(
        (name, text, "run.compile", text == "true")
        for name in ("compile", "torch_compile", "use_torch_compile")
        for text in ("true", "false")
    ),
    *(
        (name, text, "memory.activation_checkpointing", "all" if text == "true" else "off")
        for name in (
            *("use_gradient_checkpointing", "gradient_checkpointing"),
            "enable_gradient_checkpointing",
        )
        for text in ("true", "false")
    ),
    ("gradient_accumulation_steps", "4", "data.accumulation", 4),
    ("accumulate_grad_batches", "4", "data.accumulation", 4),
    ("max_iters", "700", "run.max_steps", 700),
    ("grad_clip", "0.5", "optim.max_grad_norm", 0.5),
    ("lr_scheduler", "linear", "optim.schedule", "linear"),
    ("per_device_train_batch_size", "4", "data.batch_size", 4),
    *(
        (name, "16", "data.evaluation_batch_size", 16)
        for name in ("test_batch_size", "eval_batch_size", "per_device_eval_batch_size")
    ),
    ("sync_bn", "true", "ddp.sync_batchnorm", True),
    ("early_stopping_patience", "3", "run.early_stopping_patience", 3),
    ("num_processes", "2", "run.nproc_per_node", 2),
    ("preload_data_to_ram", "true", "data.preload", True),
    ("patience", "3", "run.early_stopping_patience", 3),
    ("scheduler", "linear", "optim.schedule", "linear"),
    ("clip_grad_norm", "0.5", "optim.max_grad_norm", 0.5),
    ("grad_accum", "4", "data.accumulation", 4),
    ("val_batch_size", "16", "data.evaluation_batch_size", 16),
    ("eval_every", "20", "log.evaluate_every_steps", 20),
    ("save_every", "50", "checkpoint.save_every_steps", 50),
    ("random_seed", "3", "run.seed", 3),
    ("experiment", "second", "run.name", "second"),
]
PEOPLE_TYPE = [
    "mixed_precision",
    "use_mixed_precision",
    "enable_mixed_precision",
    "dtype",
    "fp16",
    "bf16",
    "gradient_accumulation_steps",
    "accumulate_grad_batches",
    "use_torch_compile",
    "torch_compile",
    "compile",
    "use_gradient_checkpointing",
    "gradient_checkpointing",
    "enable_gradient_checkpointing",
    "max_iters",
    "grad_clip",
    "max_norm",
    "warmup_iters",
    "lr_scheduler",
    "lr_scheduler_type",
    "lr_decay_iters",
    "decay_lr",
    "data_workers",
    "train_batch_size",
    "per_device_train_batch_size",
    "test_batch_size",
    "eval_batch_size",
    "per_device_eval_batch_size",
    "save_steps",
    "save_interval_steps",
    "eval_interval",
    "valid_interval_steps",
    "eval_batches",
    "save_total_limit",
    "out_dir",
    "pretrained_path",
    "device_ids",
    "sync_bn",
    "early_stopping_patience",
    "experiment_name",
    "ddp_timeout",
    "training_mode",
    "enable_gpu_monitoring",
    "num_processes",
    "preload_data_to_ram",
]


def test_each_name_people_type_is_tried_everywhere():
    """Below; the others are always done, or mean nothing here and are answered."""
    assert set(PEOPLE_TYPE) <= {name for name, *_ in TYPED}
    assert {"persistent_workers", "drop_last", "broadcast_buffers", "headless"} <= ALWAYS.keys()
    assert {"eval_steps", "timeout", "init_method", "enable_distributed"} <= ANSWERS.keys()


HEADINGS = [
    ("training: {batch_size: 4, epochs: 2}", {"data.batch_size": 4, "run.epochs": 2}),
    ("train: {lr: 0.5}", {"optim.learning_rate": 0.5}),
    ("optimizer: {type: sgd, lr: 0.5}", {"optim.optimizer": "sgd", "optim.learning_rate": 0.5}),
    (
        "scheduler: {name: linear, warmup_steps: 3}",
        {"optim.schedule": "linear", "optim.warmup_steps": 3},
    ),
    ("system: {num_workers: 2, seed: 7}", {"data.num_workers": 2, "run.seed": 7}),
    ("lr: {min_lr: 0.1}", {"optim.min_learning_rate": 0.1}),
    ("model: {hidden_size: 32}", {"model.hidden_size": 32}),
]


@pytest.mark.parametrize(("text", "expected"), HEADINGS, ids=[text for text, _ in HEADINGS])
def test_headings_of_other_trainers_stand_over_settings_of_ours(text, expected, tmp_path):
    """As their guides write files."""
    file = tmp_path / "run.yaml"
    file.write_text(text)
    found = resolve(files=[file])
    chosen = {key for key, origin in found.origin.items() if origin == "file"}
    assert chosen == set(expected)
    for key, value in expected.items():
        section, _, name = key.partition(".")
        assert getattr(getattr(found.settings, section), name) == value


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("training: {name: x}", "training.name=x: belongs to the section run: run.name"),
        ("lr: {base: 0.1}", "lr.base: unknown setting"),
        ("timeout: 30", "collective_timeout_s=N for collectives, or loader_timeout_s=N"),
    ],
)
def test_a_word_that_may_mean_two_things_is_answered(text, answer, tmp_path):
    """Never a guess."""
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(BadInputError) as caught:
        resolve(files=[file])
    assert answer in str(caught.value)


@pytest.mark.parametrize(("name", "text", "key", "value"), TYPED)
def test_a_name_people_type_means_the_same_everywhere(name, text, key, value, tmp_path):
    """In a file, the environment, on the command line, as an option, and in Python."""
    file = tmp_path / "run.yaml"
    file.write_text(f"{name}: {f'[{text}]' if ',' in text else text}\n")
    option = parse_train([f"--{name.replace('_', '-')}", text]).assignments
    for settings in (
        resolve(files=[file]).settings,
        resolve(environment={f"DDP_RUNNER_{name.upper()}": text}).settings,
        resolve(command_line=[(name, text)]).settings,
        resolve(command_line=option).settings,
        from_flat({name: text}),
    ):
        section, _, field = key.partition(".")
        assert getattr(getattr(settings, section), field) == value


@pytest.mark.parametrize(
    ("value", "trackers"),
    [(["none"], ()), (["wandb"], ("wandb",)), (["csv", "wandb"], ("csv", "wandb")), (None, ())],
)
def test_a_list_of_one_word_is_that_word(value, trackers):
    """As trainers write where to report to."""
    assert from_flat({"report_to": value}).log.trackers == trackers


@pytest.mark.parametrize("name", ALWAYS)
def test_what_is_always_done_may_be_asked_for_and_not_refused(name):
    """True changes nothing; false is refused with the reason; other words are no switch's."""
    option = f"--{name.replace('_', '-')}"
    assert resolve(command_line=[(name, "true")]).settings == resolve().settings
    assert resolve(command_line=parse_train([option]).assignments).settings == resolve().settings
    for value, reason in ((False, f"cannot be turned off: {ALWAYS[name]}"), ("x", "true or false")):
        with pytest.raises(BadInputError) as caught:
            from_flat({name: value})
        assert reason in str(caught.value)
        assert str(caught.value).startswith(name)


def test_headless_says_that_every_run_is():
    """A person who asks for it learns that nothing had to be asked for; the others are silent."""
    (note,) = resolve(command_line=parse_train(["--headless"]).assignments).notes
    assert note.startswith("--headless: every run is")
    assert resolve(command_line=[("drop_last", "yes")]).notes == ()


def test_the_schedule_is_last_ones_word():
    """A switch that leaves its setting as it is does not undo what was said before."""
    given = [("schedule", "linear"), ("decay_lr", "true")]
    assert resolve(command_line=given).settings.optim.schedule == "linear"
    assert resolve(command_line=given[::-1]).settings.optim.schedule == "linear"
    off = [("schedule", "linear"), ("decay_lr", "no")]
    assert resolve(command_line=off).settings.optim.schedule == "constant"


def test_eval_steps_is_refused_with_both_names():
    """Elsewhere it is how often, or how many batches: nobody guesses."""
    with pytest.raises(BadInputError) as caught:
        resolve(command_line=[("eval_steps", "10")])
    assert "evaluate_every_steps" in str(caught.value)
    assert "evaluate_batches" in str(caught.value)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *(("batchsize", "data.batch_size"), ("batch_sze", "data.batch_size")),
        *(("data.batch", "data.batch_size"), ("epoch", "run.epochs"), ("epohcs", "run.epochs")),
        *(("num_worker", "data.num_workers"), ("checkpoint_dirs", "run.checkpoint_dir")),
        *(("warmup", "optim.warmup_steps"), ("learning", "optim.learning_rate")),
        *(
            ("weight-decay-rate", "optim.weight_decay"),
            ("find_unused", "ddp.find_unused_parameters"),
        ),
        *(("num_things", ""), ("max_things", ""), ("processes", ""), ("qqqq", ""), ("", "")),
        *(("num", ""), ("data_format", ""), ("task.", ""), ("the", ""), ("--", "")),
    ],
)
def test_a_suggestion_has_the_letters_or_the_words_of_what_was_written(written, meant):
    """A common `num_` or `max_`, or some letters in the same order, is no likeness."""
    assert nearest(written, KNOWN) == meant
