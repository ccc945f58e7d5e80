"""``checkpoints show``, ``export`` and ``prune`` on checkpoints as a run has made them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from ddp_runner import config, start
from ddp_runner.__main__ import main
from ddp_runner.checkpoint.catalog import Catalog
from ddp_runner.checkpoint.left_out import START
from ddp_runner.checkpoint.store import CheckpointStore
from ddp_runner.checkpoint.weights import load_weights
from ddp_runner.cli import checkpoints
from ddp_runner.cli.checkpoints import DECLARATION, perform_pruning, plan_pruning
from ddp_runner.config import from_flat
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.rank import export
from ddp_runner.training.components.start_weights import record_of
from tests.checkpoint.states import facts_of, save, steps_in
from tests.processes import run_ranks

TASK = """
import torch
from torch import nn
from ddp_runner import Datasets


class Model(nn.Linear):
    def __init__(self):
        super().__init__(2, 1)


class Saves(Model):
    def save_pretrained(self, folder, safe_serialization=True):
        import json, pathlib
        what = {"weight": self.weight.tolist(), "dtype": str(self.weight.dtype), "safe": safe_serialization}
        pathlib.Path(folder, "config.json").write_text(json.dumps(what))


class Plain:
    model = Model

    def build_model(self):
        return self.model()

    def build_datasets(self):
        raise RuntimeError("an export needs no data")

    def loss(self, model, batch):
        return model(batch).mean()


class Pretrained(Plain):
    model = Saves
"""
WEIGHTS = {"weight": torch.tensor([[1.5, -2.0]]), "bias": torch.tensor([0.25])}


def made(folder, step=5, *, task="", ema=None, content=None, **facts):
    settings = from_flat({"hidden_size": 64, **({"task": task} if task else {})})
    about = {"settings": config.record_to_show(settings), "loss": 2.5, "tokens": 1280.0}
    state = {"model": dict(WEIGHTS), **({} if ema is None else {"ema": ema})}
    store = CheckpointStore(folder, keep_last=9)
    meaning = {config.described_key("tokenizer"): "bpe-8k", "run.seed": 7}
    given = {"monitored": 2.0, "meaning": meaning, "about": about, **facts}
    return store.save(content or state, facts_of(step, **given))


def test_show_names_what_a_checkpoint_holds(tmp_path, capsys):
    """Step, losses, best, settings that differ, what the task described; verified."""
    about = {"figures": {"validation_loss": 3.25}, "settings": {"run": {"seed": 99}}, "loss": 2.5}
    about["trackers"] = {"wandb": {"id": "r1", "link": "https://wandb.example/r1"}}
    made(tmp_path, 4, monitored=1.75)
    made(tmp_path, 5, about=about)
    assert main(["checkpoints", "show", "-c", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for part in (
        "5, 0 complete epochs, 40 samples",
        "yes, SHA-256",
        "training loss 2.5000, monitored 2.0000, validation_loss 3.2500",
        "1.7500 at step 4",
        "run.seed=99",
        "tokenizer=bpe-8k",
        "wandb r1 https://wandb.example/r1",
    ):
        assert part in said
    assert main(["checkpoints", "show", "best", "--json", "-c", str(tmp_path)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["step"], record["best"], record["tokens"]) == (4, True, 1280.0)
    assert record["settings"]["model.hidden_size"] == 64
    assert record["best_so_far"] == {"step": 4, "value": 1.75}


def test_show_names_the_figure_that_counts(tmp_path, capsys):
    """Once; the best by it is the highest where that is better, and may be of a file that is gone."""
    figures = {"all/loss": 1.5, "bach/hits": 0.25}
    for step, hits in ((3, 0.75), (4, 0.25)):
        about = {"figures": {**figures, "bach/hits": hits}, "tokens": 640.0, "loss": 2.5}
        made(tmp_path, step, about=about, monitored=hits, monitor="bach/hits", mode="max")
    (tmp_path / "step_00000003.pt").unlink()
    (tmp_path / "step_00000003.json").unlink()
    assert main(["checkpoints", "show", "-c", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "training loss 2.5000, all/loss 1.5000, bach/hits 0.2500\n" in said
    assert "bach/hits 0.7500 at step 3" in said
    assert "640 tokens" in said
    assert main(["checkpoints", "show", "--json", "-c", str(tmp_path)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["monitor"], record["mode"], record["monitored"]) == ("bach/hits", "max", 0.25)
    assert record["figures"] == figures
    assert record["best_so_far"] == {"step": 3, "value": 0.75}


def test_show_of_a_damaged_or_older_checkpoint_says_so(tmp_path, capsys):
    """What an earlier version did not write is left out; a flipped bit is exit code 1."""
    path = save(tmp_path, 7).path
    assert main(["checkpoints", "show", "7", "-c", str(tmp_path)]) == 0
    assert "settings" not in capsys.readouterr().out
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert main(["checkpoints", "show", str(path), "-c", str(tmp_path)]) == 1
    assert "BAD: its SHA-256" in capsys.readouterr().out


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_line(tmp_path, capsys):
    """``show``, ``export``, ``evaluate`` and ``predict`` take the one before it. Control: a whole one is taken in silence."""
    save(tmp_path, 6)
    newest = save(tmp_path, 7).path
    assert main(["checkpoints", "show", "-c", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""
    newest.with_suffix(".json").write_text("{}")
    assert main(["checkpoints", "show", "-c", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"ddp_runner: {newest} is passed over: its manifest is damaged: ")
    assert "step_00000006.pt" in said.out


def test_list_has_its_times_in_one_column(tmp_path, capsys):
    """Whether or not a checkpoint was evaluated, and however long the figure's name is."""
    made(tmp_path, 1, monitor="bach/accuracy", created_utc="2030-01-01T00:00:00Z")
    made(tmp_path, 2, monitored=None, created_utc="2030-01-01T00:00:00Z")
    assert main(["checkpoints", "list", "-c", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len({line.index("2030") for line in lines}) == 1, lines


def test_list_condemns_no_checkpoint_that_verify_accepts(tmp_path, capsys):
    """A damaged manifest says nothing of the file. Control: one that is cut short is bad for both."""
    path = save(tmp_path, 7).path
    path.with_suffix(".json").write_text("")
    assert main(["checkpoints", "verify", "-c", str(tmp_path)]) == 0
    assert "ok" in capsys.readouterr().out
    assert main(["checkpoints", "list", "-c", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "BAD" not in said
    assert "its manifest is damaged" in said
    assert "`checkpoints verify` reads its archive" in said
    os.truncate(save(tmp_path, 8).path, 100)
    for action in ("list", "verify"):
        main(["checkpoints", action, "-c", str(tmp_path)])
        assert "BAD: 100 bytes" in capsys.readouterr().out


def _exported(me, spec):
    """In a fork that has imported torch: what the process of an export answers."""
    reader, writer = os.pipe()
    sys.stdin = io.StringIO(spec.decode())
    export.main([str(writer), str(os.getppid())])
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read()


class _Fork:
    """Stands for the process of an export."""

    returncode = 0

    def __init__(self, words, *, stdin, pass_fds, env):
        assert words[1:3] == [start.__file__, "ddp_runner.rank.export"]
        self._pipe = os.dup(*pass_fds)

    def communicate(self, spec):
        (answer,) = run_ranks(_exported, 1, spec)
        with os.fdopen(self._pipe, "wb") as file:
            file.write(answer)


@pytest.fixture
def forks(monkeypatch):
    """Exports that import nothing."""
    process = types.SimpleNamespace(Popen=_Fork, PIPE=subprocess.PIPE)
    monkeypatch.setattr(checkpoints, "subprocess", process)


@pytest.mark.parametrize("form", ["safetensors", "pt"])
def test_export_writes_weights_that_a_run_can_begin_with(tmp_path, capsys, request, form):
    """Of a task without ``save_pretrained``, in the type that is asked for; its data is not made."""
    if form == "pt":  # the other as a process of its own, as for a person
        request.getfixturevalue("forks")
    task = tmp_path / "task.py"
    task.write_text(TASK)
    made(tmp_path / "c", task=f"{task}:Plain")
    to = tmp_path / "out"
    words = ["--to", str(to), "--format", form, "--dtype", "bf16", "-c", str(tmp_path / "c")]
    assert main(["checkpoints", "export", *words]) == 0
    said = capsys.readouterr().out
    assert "the model's state dict" in said
    assert "without save_pretrained" not in said
    found = load_weights(to / f"model.{form}")
    assert {name: one.dtype for name, one in found.items()} == dict.fromkeys(
        WEIGHTS, torch.bfloat16
    )
    assert all(torch.equal(found[name].float(), one) for name, one in WEIGHTS.items())
    with pytest.raises(BadInputError, match="must be a new or an empty folder"):
        DECLARATION.run(["export", *words])


@pytest.mark.usefixtures("forks")
def test_export_has_the_model_save_itself_with_the_average(tmp_path, capsys):
    """By its own ``save_pretrained``; of a task that is gone, the bare weights, and why."""
    task = tmp_path / "task.py"
    task.write_text(TASK)
    means = {"weight": torch.tensor([[7.0, 8.0]])}
    made(tmp_path / "c", task=f"{task}:Pretrained", ema={"parameters": means, "buffers": {}})
    to = tmp_path / "out"
    where = ["--ema", "-c", str(tmp_path / "c")]
    assert main(["checkpoints", "export", "5", "--to", str(to), *where]) == 0
    assert "save_pretrained" in capsys.readouterr().out
    assert json.loads((to / "config.json").read_text()) == {
        "weight": [[7.0, 8.0]],
        "dtype": "torch.float32",
        "safe": True,
    }
    task.unlink()
    assert main(["checkpoints", "export", "--to", str(tmp_path / "bare"), *where]) == 0
    assert "without save_pretrained: its task's model could not be built" in capsys.readouterr().out
    found = load_weights(tmp_path / "bare" / "model.safetensors")
    assert torch.equal(found["weight"], means["weight"])


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("averages", [True, False])
def test_export_as_a_dict_has_weights_average_and_counts(tmp_path, capsys, averages):
    """As readers of other trainers expect it; plain ``torch.load`` reads it, and a run can begin with it."""
    task = tmp_path / "task.py"
    task.write_text(TASK)  # its save_pretrained is not asked: it would write other files
    means = {"weight": torch.tensor([[7.0, 8.0]])}
    kept = {"parameters": means, "buffers": {}} if averages else None
    made(tmp_path / "c", task=f"{task}:Pretrained", ema=kept)
    words = ["checkpoints", "export", "--layout", "state_dict", "-c", str(tmp_path / "c"), "--to"]
    assert main([*words, str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    file = tmp_path / "out" / "checkpoint.pt"
    assert f"{file} " in capsys.readouterr().out
    found = torch.load(file)
    model = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
    model.load_state_dict(found["state_dict"])
    assert torch.equal(model.weight.float(), WEIGHTS["weight"])
    assert ("ema" in found) is averages
    if averages:
        model.load_state_dict(found["ema"])
        assert torch.equal(model.weight.float(), means["weight"])
        assert torch.equal(model.bias.float(), WEIGHTS["bias"])
    counts = {"step": 5, "global_step": 5, "epoch": 0, "samples": 40, "tokens": 1280.0, "loss": 2.5}
    assert {name: found[name] for name in found if name not in ("state_dict", "ema")} == counts
    assert load_weights(file).keys() == WEIGHTS.keys()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--layout", "lightning"], "--layout=lightning: must be weights or state_dict"),
        (["--layout", "state_dict", "--format", "safetensors"], "--format=safetensors: "),
        (["--layout", "state_dict", "--ema"], "--ema: "),
    ],
)
def test_export_refuses_options_that_do_not_go_together(tmp_path, capsys, more, said):
    """In one line; nothing is written."""
    made(tmp_path / "c")
    to = tmp_path / "out"
    assert main(["checkpoints", "export", "--to", str(to), "-c", str(tmp_path / "c"), *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not to.exists()


@pytest.mark.usefixtures("forks")
def test_export_of_a_file_without_its_frozen_weights_is_whole_or_refused(tmp_path, capsys):
    """They are in what its run has begun with; where that is gone nothing is written."""
    begun = tmp_path / "begun.pt"
    left_out = {"weight": WEIGHTS["weight"]}
    torch.save(left_out, begun)
    content = {"model": {"bias": WEIGHTS["bias"]}, START: record_of(left_out, init_from=str(begun))}
    made(tmp_path / "c", content=content)
    words = ["checkpoints", "export", "-c", str(tmp_path / "c"), "--to"]
    assert main([*words, str(tmp_path / "out")]) == 0
    assert f"leaves out, from --init-from {begun}" in capsys.readouterr().out
    found = load_weights(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], one) for name, one in (left_out | content["model"]).items())
    begun.unlink()
    assert main([*words, str(tmp_path / "none")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "leaves out 1 start weights of the run" in line
    assert "--init-from PATH, or use the run's final.pt" in line
    assert not (tmp_path / "none").exists()


def test_a_newest_run_whose_folder_is_gone_is_named(tmp_path, monkeypatch, capsys):
    """Not that no run has saved there: other runs may have, and the newest one may yet."""
    monkeypatch.chdir(tmp_path)
    Path("logs", "tuned").mkdir(parents=True)
    Path("logs", "latest").symlink_to("tuned")
    assert main(["checkpoints"]) == 2
    folder = "--checkpoint-dir=checkpoints/tuned: no such folder: run tuned saves there;"
    assert capsys.readouterr().err.startswith(f"ddp_runner: error: {folder} give another folder")


def test_prune_keeps_the_newest_the_best_and_those_for_good(tmp_path, capsys):
    """It says what it removed; a dry run removes nothing."""
    settings = {"settings": {"checkpoint": {"keep_every": 4}}}
    for step in range(1, 9):
        made(tmp_path, step, monitored=1.0 if step == 2 else 2.0, about=settings)
    where = ["-c", str(tmp_path)]
    assert main(["checkpoints", "prune", "--keep", "2", "--dry-run", *where]) == 0
    assert capsys.readouterr().out.count("would remove") == 4
    assert len(steps_in(tmp_path)) == 8
    assert main(["checkpoints", "prune", "--keep", "2", *where]) == 0
    said = capsys.readouterr().out
    assert steps_in(tmp_path) == [2, 4, 7, 8]
    assert said.count("removed ") == 4
    assert "(the best)" in said
    assert "(for good: keep_every=4)" in said
    assert len(list(tmp_path.glob("step_*.json"))) == 4
    assert main(["checkpoints", "prune", "--keep", "1", "--all", *where]) == 0
    assert steps_in(tmp_path) == [8]


def test_pruning_counts_only_what_was_read_whole(tmp_path, capsys):
    """The newest sound one is never deleted, whatever stands before it in the folder."""
    for step in (1, 2, 3):
        saved = made(tmp_path, step, monitored=None)
    content = bytearray(saved.path.read_bytes())
    content[len(content) // 2] ^= 1
    saved.path.write_bytes(content)
    catalog = Catalog(tmp_path)

    def plan(keep):
        return plan_pruning(catalog.entries(), keep=keep, verify=catalog.verify, best_step=None)

    assert [entry.step for entry in plan(1).removed] == [1]
    assert plan(3).removed == ()
    assert plan(3).sound == 2
    perform_pruning(catalog, plan(1))
    assert steps_in(tmp_path) == [2, 3]


def test_an_empty_word_is_shown_as_one(tmp_path, capsys):
    """As a script gives it whose variable is not set."""
    made(tmp_path / "c", content={"model": WEIGHTS})
    assert main(["checkpoints", "show", "", "-c", str(tmp_path / "c")]) == 2
    said = capsys.readouterr().err
    assert said == "ddp_runner: error: '': must be last, best, a step or a path\n"
