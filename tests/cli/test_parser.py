"""The words of `train`: options, settings, and what is said of words that are not understood."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_runner.cli.parser import OPTIONS, parse_train
from ddp_runner.cli.usage import settings_help, train_help
from ddp_runner.config import resolve
from ddp_runner.config.fields import known_fields
from ddp_runner.config.meanings import meanings
from ddp_runner.core.injection import PHASES, InjectKind, parse_injection
from ddp_runner.kernel.rules.errors import BadInputError


def settings_of(*words: str):
    return resolve(command_line=parse_train(words).assignments).settings


@pytest.mark.parametrize(
    ("words", "section", "field", "value"),
    [
        (["-g", "0,1"], "run", "gpus", (0, 1)),
        (["--gpus=1"], "run", "gpus", (1,)),
        (["--cpu"], "run", "device", "cpu"),
        (["-n", "3"], "run", "nproc_per_node", 3),
        (["-nauto"], "run", "nproc_per_node", "auto"),
        (["--nproc_per_node", "3"], "run", "nproc_per_node", 3),
        (["-b8"], "data", "batch_size", 8),
        (["-b=8"], "data", "batch_size", 8),
        (["--BATCH_size", "8"], "data", "batch_size", 8),
        (["-e", "2"], "run", "epochs", 2),
        (["--max-steps", "5"], "run", "max_steps", 5),
        (["-l", "a b"], "run", "log_dir", "a b"),
        (["-c", "x=y"], "run", "checkpoint_dir", "x=y"),
        (["--task", "m.py:T"], "run", "task", "m.py:T"),
        (["--data", "/x"], "data", "path", "/x"),
        (["--resume", "none"], "run", "resume", "none"),
        (["--init-from", "w.pt"], "run", "init_from", "w.pt"),
        (["--seed", "7"], "run", "seed", 7),
        (["--max-restarts", "0"], "recovery", "max_restarts", 0),
        (["--inject", "a", "--inject", "b"], "run", "inject", ("a", "b")),
        (["--audit"], "run", "audit", True),
        (["--debug"], "run", "debug", True),
        (["--debug=no"], "run", "debug", False),
        (["data.batch_size=4"], "data", "batch_size", 4),
        (["num_workers=1", "--", "num_workers=0"], "data", "num_workers", 0),
        (["--num-workers", "2"], "data", "num_workers", 2),
        (["--data.num_workers=2"], "data", "num_workers", 2),
        (["--lr", "1e-3"], "optim", "learning_rate", 1e-3),
        (["--use-amp"], "optim", "precision", "auto"),
        (["--use-amp", "false"], "optim", "precision", "fp32"),
        (["--mixed_precision", "bf16"], "optim", "precision", "bf16"),
        (["--fp16"], "optim", "precision", "fp16"),
        (["--num-processes", "2"], "run", "nproc_per_node", 2),
        (["--gradient-accumulation-steps=4"], "data", "accumulation", 4),
        (["--eval_batch_size", "64"], "data", "evaluation_batch_size", 64),
        (["--num_gpus=2"], "run", "nproc_per_node", 2),
        (["--gpu_ids", "0,1"], "run", "gpus", (0, 1)),
        (["--max_epochs", "3"], "run", "epochs", 3),
        (["--num_train_epochs=3"], "run", "epochs", 3),
        (["--per_device_train_batch_size", "4"], "data", "batch_size", 4),
        (["--learning_rate", "1e-3"], "optim", "learning_rate", 1e-3),
        (["--max_grad_norm", "0.5"], "optim", "max_grad_norm", 0.5),
        (["--warmup_steps", "7"], "optim", "warmup_steps", 7),
        (["--master_port", "2345"], "ddp", "port", 2345),
        (["--dataloader_num_workers", "3"], "data", "num_workers", 3),
        (["--amp"], "optim", "precision", "auto"),
        (["workers=3"], "data", "num_workers", 3),
        (["--target-loss", "-1.5"], "run", "target_loss", -1.5),
    ],
)
def test_every_way_to_write_an_option_assigns_its_setting(words, section, field, value):
    """Short, long, attached, underscored, dotted, and any setting as an option."""
    assert getattr(getattr(settings_of(*words), section), field) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batchsize", "3"], "--batchsize: unknown option; did you mean --batch-size?"),
        (["--epoch", "3"], "--epoch: unknown option; did you mean --epochs?"),
        (["--num-worker", "3"], "--num-worker: unknown option; did you mean data.num_workers?"),
        (["--standalone"], "--standalone: unknown option; the ranks find each other"),
        (["--hostfile=x"], "--hostfile: unknown option; use the option --nnodes N, with"),
        (["--rdzv-id="], "--rdzv-id='': is empty; give a value, or leave it out"),
        (
            ["--include", "localhost:0"],
            "--include: unknown option; use --nproc-per-node N",
        ),
        (["--devices", "2"], "--devices: unknown option; use --nproc-per-node N for the"),
        (["--accelerator", "gpu"], "--accelerator: unknown option; GPUs are used if"),
        (["--strategy", "ddp"], "--strategy: unknown option; use mode=auto, single"),
        (["--output_dir", "x"], "--output_dir: unknown option; use --checkpoint-dir for"),
        (["--num-things", "2"], "--num-things: unknown option; --help lists the options"),
        (["--max-things", "2"], "--max-things: unknown option; --help lists the options"),
        (["--warmup", "2"], "--warmup: unknown option; did you mean optim.warmup_steps?"),
        (["--learn-rate", "2"], "--learn-rate: unknown option; did you mean optim.learning_rate?"),
        (["--zzz"], "--zzz: unknown option; --help lists the options"),
        (["-x"], "-x: unknown option; --help lists the options"),
        (["-e"], "--epochs: needs a value: --epochs N"),
        (["-e", "--debug"], "--epochs: needs a value: --epochs N"),
        (["--cpu=1"], "--cpu=1: takes no value"),
        (["-b", "4", "extra"], "extra: unexpected word; settings are KEY=VALUE"),
        (["-b", "4", "debug"], "debug: unexpected word; did you mean --debug?; settings are"),
        (["--", "--debug"], "--debug: unexpected word; settings are KEY=VALUE"),
        (["--data", ""], "--data='': is empty; give a value, or leave it out"),
        (["--data="], "--data='': is empty"),
        (["data.path="], "data.path='': is empty"),
        (["--init-from", ""], "--init-from='': is empty"),
        (["--task="], "--task='': is empty"),
        (["--resume", ""], "--resume='': is empty"),
        (["-l", ""], "--log-dir='': is empty"),
        (["--config", ""], "--config='': is empty"),
        ([""], "'': unexpected word; settings are KEY=VALUE"),
    ],
)
def test_a_word_that_is_not_understood_is_named_with_the_nearest(words, message):
    """One line names the word and what may have been meant."""
    with pytest.raises(BadInputError) as caught:
        parse_train(words)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_config_files_are_kept_in_order():
    """The later file wins, so their order is part of the request."""
    parsed = parse_train(["--config", "a.yaml", "lr=1", "--config=b.yaml"])
    assert parsed.files == (Path("a.yaml"), Path("b.yaml"))
    assert parsed.assignments == (("lr", "1"),)


@pytest.mark.parametrize("text", [train_help(), settings_help()])
def test_help_fits_eighty_columns(text):
    """A terminal of 80 columns shows every line whole, without trailing blanks."""
    assert max(len(line) for line in text.splitlines()) < 80
    assert all(line == line.rstrip() for line in text.splitlines())


def test_help_lists_every_option_with_its_default_and_examples():
    """Every option, short and long, each default, each command and exit code."""
    text = train_help()
    for option in OPTIONS.values():
        assert option.long in text
        assert not option.short or f"{option.short}, {option.long}" in text
        spec = known_fields().get(option.key)
        if spec is not None and option.metavar and spec.default not in ("", ()):
            assert (option.default or str(spec.default)) in text
    assert "Examples:\n  ./launch_training.sh" in text
    for command in ("train", "checkpoints", "report", "doctor"):
        assert f"\n  {command} " in text


def test_help_and_documentation_list_what_can_be_injected():
    """Every kind, phase and key, and the default that the parser has; nobody must provoke the error."""
    section = train_help().partition("Faults on request")[2].partition("Settings:")[0]
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    for name in (*(kind.value for kind in InjectKind), *PHASES):
        assert re.search(rf"[ =]{name}[,\n ]", section), name
        assert f"`{name}`" in page
    usual = parse_injection("kill", world_size=2)
    drawn = parse_injection("random", world_size=2)
    for key in ("rank", "step", "phase", "times", "seconds", "mtbf_s", "seed", "kinds"):
        assert re.search(rf"\b{key}=", section), key
        assert f"`{key}" in page
    shown = " ".join(section.split())
    assert f"counted from 0 [{usual.step}]" in shown
    assert f"commit [{usual.phase}]" in shown
    assert f"on each rank [{usual.times}]" in shown
    assert f"slow_disk [{usual.seconds:g}]" in shown
    kinds = "+".join(kind.value for kind in drawn.kinds)
    assert f"[{drawn.mtbf_s:g}], seed=N [{drawn.seed}], kinds=KIND+KIND [{kinds}]" in shown


def test_every_setting_is_in_the_settings_help():
    """Nothing can be set that the help does not show."""
    text = settings_help()
    assert all(f"\n  {key.partition('.')[2]} " in text for key in known_fields())


def test_every_setting_has_a_meaning_in_whole_sentences():
    """Each is explained: a sentence or more, and each sentence ended."""
    assert set(meanings()) == set(known_fields())
    for key, text in meanings().items():
        assert len(text.split()) >= 3, key
        assert re.fullmatch(r"[A-Z].*\.\)?", text), f"{key}: {text}"
    shown = " ".join(settings_help().split())
    assert all(text in shown for text in meanings().values())


def test_every_option_names_a_setting_that_exists():
    """The table of options and the settings cannot drift apart."""
    keys = {option.key for option in OPTIONS.values() if option.key}
    assert keys <= set(known_fields())
