"""A loss that counts tokens and has named parts: as exact as any, under kills, and across a stop and resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.scenarios.conftest import NO_SPARE
from tests.scenarios.harness import Run

TASKS = Path(__file__).with_name("padded.py")
SETTINGS = ("-b", 6, "micro_batch_size=4", "--max-steps", 30, "log_interval=5", "num_workers=0")
SETTINGS = (*SETTINGS, "save_every_steps=7", "save_interval=0", "evaluate_every_steps=10")


def start(folder, *words, task="Padded"):
    return Run(folder, *SETTINGS, *words, task=f"{TASKS}:{task}")


@pytest.fixture
def calm(made_once):
    """The run to which nothing happens."""
    return made_once(*SETTINGS, task=f"{TASKS}:Padded")


def metrics(run):
    lines = (run.logs / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_tokens_and_parts_are_exact_whoever_is_lost(tmp_path, calm):
    """Rank 0 too, in the step that shows the parts first, where a loss raises, and both at once."""
    faults = (
        *("kill:rank=1,step=0,phase=reduce", "kill:rank=0,step=6,phase=forward"),
        *("raise:rank=1,step=11", "kill:rank=1,step=17,phase=optimizer"),
        *("kill:rank=0,step=24", "kill:rank=1,step=24"),
    )
    words = [word for fault in faults for word in ("--inject", fault)]
    with start(tmp_path, *words) as run:
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["exact"], summary["inexact_reasons"]
    assert len(summary["faults"]) >= 5
    for name in ("weights_sha256", "tokens", "figures", "final_loss"):
        assert summary[name] == calm.summary()[name], name


def test_parts_are_logged_by_name(calm):
    """In training and evaluation; the loss is that of all tokens, and so its parts together."""
    trained = [line for line in metrics(calm) if "grad_norm" in line and line["rank"] == 0]
    assert {"tagging", "penalty", "long", "tokens"} <= trained[-1].keys()
    assert trained[-1]["tokens"] == calm.summary()["tokens"]
    assert calm.summary()["tokens"] % 1 == 0
    assert 0 < trained[-1]["long"] < 1
    figures = calm.summary()["figures"]
    assert {"validation_loss", "validation_tagging", "validation_penalty"} <= figures.keys()
    console = (calm.folder / "console.txt").read_text(encoding="utf-8")
    assert "tagging 1." in console or "tagging 0." in console


def test_a_weight_below_zero_ends_the_run_once(tmp_path):
    """As the user's error: nobody is started again for it."""
    with start(tmp_path, task="Negative") as run:
        assert run.wait() == 1, run.console
    assert "a Weighted whose weight is -" in run.console
    assert "for samples " in run.console
    assert len(run.events("forming")) == 1


def _trained(folder, *words, exact=True, code=0):
    with start(folder, *words) as run:
        assert run.wait() == code, run.console
    assert run.summary()["exact"] is exact, run.summary()["inexact_reasons"]
    return run


def test_accumulated_batches_are_one_batch_cut_so(tmp_path):
    """However it is said; in the first with a rank killed between two of them."""
    sizes = (
        ("batch_size=6", "accumulation=2", "micro_batch_size=0"),
        ("batch_size=6", "global_batch_size=24", "micro_batch_size=0"),
        ("batch_size=12", "micro_batch_size=6"),
    )
    kill = ("--inject", "kill:rank=0,step=2,phase=backward")
    words = [(*sizes[0], *kill), *((*size, NO_SPARE) for size in sizes[1:])]
    runs = [_trained(tmp_path / str(n), *each, "--max-steps", 18) for n, each in enumerate(words)]
    assert [len(run.summary()["faults"]) for run in runs] == [1, 0, 0]
    assert len({run.digest for run in runs}) == 1
    assert [run.summary()["samples"] for run in runs] == [18 * 24] * 3
    assert "global batch  24 = 6 x 2 accumulated x 2 ranks" in runs[0].console


def test_a_global_batch_of_its_own_goes_on_with_other_ranks(tmp_path):
    """Each rank has a larger part then; the sums have other last bits, and the run says so."""
    sizes = ("global_batch_size=12", "micro_batch_size=0")
    _trained(tmp_path, *sizes, "--max-steps", 10)
    with Run(tmp_path, *SETTINGS, *sizes, world=1, task=f"{TASKS}:Padded") as run:
        assert run.wait() == 0, run.console
    assert run.summary()["steps"] == 30
    assert run.summary()["exact"] is False
    assert "ranks 2 -> 1 at step 10" in run.summary()["inexact_reasons"]


def test_drawn_samples_come_back_after_kills_and_stops(tmp_path):
    """By weight and length, over more than two epochs; other weights make another run."""
    calm = _trained_on_drawn(tmp_path / "calm", NO_SPARE)
    kills = ("--inject", "kill:rank=0,step=5", "--inject", "kill:rank=1,step=19,phase=reduce")
    half = _trained_on_drawn(tmp_path / "half", "max_steps=14")
    half = _trained_on_drawn(tmp_path / "half", *kills)
    assert half.digest == calm.digest
    with start(tmp_path / "half", "task.heavy=4", "max_steps=40", task="Drawn") as run:
        assert run.wait() == 2, run.console
    assert "is of a run with other settings" in run.console
    with start(tmp_path / "wrong", "task.heavy=-1", task="Drawn") as run:
        assert run.wait() == 2, run.console
    assert "the weight of sample 0 is -1: it must be 0 or more" in run.console


def _trained_on_drawn(folder, *words):
    with start(folder, "optim.schedule=constant", "warmup_steps=0", *words, task="Drawn") as run:
        assert run.wait() == 0, run.console
    return run


UNFREEZES = ("train_layers=head", "optim.unfreeze=recur@8,encoder@0.5", "ema_decay=0.9")


def _unfrozen(folder, *words, steps=30):
    words = (*UNFREEZES, "optim.schedule=constant", "max_steps=30", *words)
    with start(folder, *words, f"max_steps={steps}", task="Grouped") as run:
        assert run.wait() == 0, run.console
    return run


def test_layers_unfrozen_in_steps_are_exact(tmp_path):
    """Killed before, at and after a change, rank 0 too; and where a loss raises in it."""
    find = "find_unused_parameters=false"
    calm = _unfrozen(tmp_path / "calm", find, NO_SPARE)
    assert "recur trained from step 8 on: " in calm.console
    assert "encoder trained from step 15 on: 1,765 of 1,765 parameters" in calm.console
    kills = ("kill:rank=1,step=6,phase=optimizer", "kill:rank=0,step=8,phase=forward")
    kills = (*kills, "raise:rank=1,step=15", "kill:rank=0,step=16,phase=reduce")
    words = [word for kill in kills for word in ("--inject", kill)]
    harmed = _unfrozen(tmp_path / "harmed", find, *words)
    assert harmed.summary()["exact"], harmed.summary()["inexact_reasons"]
    assert len(harmed.summary()["injected"]) == 4
    assert harmed.digest == calm.digest
