"""What makes a run smaller or faster: faults and a stop in its middle change no bit of it."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.scenarios.conftest import NO_SPARE
from tests.scenarios.harness import Run
from tests.scenarios.test_training import QUICK, STEPS, with_faults_and_a_stop

LAYERED = f"{Path(__file__).with_name('layered.py')}:LayeredTask"


@pytest.fixture
def plain(made_once):
    """The weights of the layers where nothing is set, and nothing happens."""
    return made_once(*QUICK, "task.pace_s=0", task=LAYERED).digest


def test_checkpointed_activations_end_with_the_bits_of_kept_ones(tmp_path, plain):
    """By either name, and under faults and a resume in the tests of all at once; a name that is none is one line."""
    settings = ("gradient_checkpointing=true", "activation_checkpointing=layers.*", NO_SPARE)
    with Run(tmp_path / "calm", *QUICK, *settings, "task.pace_s=0", task=LAYERED) as calm:
        assert calm.wait() == 0, calm.console
    assert (calm.summary()["exact"], calm.digest) == (True, plain)
    with Run(tmp_path / "bad", *QUICK, "activation_checkpointing=layer.*", task=LAYERED) as bad:
        assert bad.wait() == 2, bad.console
    assert "=layer.*: matches no module; the nearest names are layers.*" in bad.console


NORMS = (
    *("ddp.sync_batchnorm=true", "gradient_dtype=bf16", "static_graph=true"),
    *("data.micro_batch_size=4", "activation_checkpointing=all"),
)


@pytest.mark.slow  # without a static graph: test_united
def test_batch_norm_over_ranks_survives_every_fault_to_the_bit(tmp_path):
    """With gradients in bf16, a static graph and micro-batches."""
    settings = (*NORMS, "recovery.drill_at=2")
    with Run(tmp_path / "calm", *QUICK, *settings, "task.pace_s=0", task=LAYERED) as calm:
        assert calm.wait() == 0, calm.console
    run = with_faults_and_a_stop(tmp_path / "faults", *settings, task=LAYERED)
    summary = run.summary()
    assert (summary["exact"], summary["steps"]) == (True, STEPS), summary["inexact_reasons"]
    assert run.digest == calm.digest


def test_a_rank_that_stops_where_batches_are_normed_over_ranks_is_named(tmp_path):
    """It, and no other one, though all wait in the sums of a layer."""
    quick = ("recovery.hang_min_s=3", "--max-steps", 12, "--inject", "stop:step=8,rank=1")
    with Run(tmp_path, *QUICK, *NORMS, *quick, task=LAYERED) as stopped:
        assert stopped.wait() == 0, stopped.console
    assert [(f["kind"], f["rank"]) for f in stopped.summary()["faults"]] == [("rank_hung", 1)]


def test_unequal_shares_of_layers_over_ranks_are_refused(tmp_path):
    """As one line with the cure, before the first step."""
    uneven = ("ddp.sync_batchnorm=true", "min_ranks=3", "-b", 1, "--max-steps", 5, "num_workers=0")
    with Run(tmp_path, *uneven, task=LAYERED, world=4) as run:
        assert run.wait() == 2, run.console
    assert "4 samples 3 ranks run 2, 1, 1 of 1: take a global batch that 3 divides" in run.console


def test_a_compilation_that_fails_is_off_on_all_ranks_for_good(tmp_path, plain):
    """One rank lacks a compiler: one warning; a replacement and a resume do not try again."""
    lacking = f"{Path(__file__).with_name('lacking.py')}:LacksCompiler"
    words = ("torch_compile=true", "task.pace_s=0.03")
    kill = ("--inject", "kill:step=7,phase=backward,rank=1")
    with Run(tmp_path / "run", *QUICK, *words, *kill, task=lacking) as run:
        run.wait_for_step(20)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    summary = run.summary()
    assert [fault["kind"] for fault in summary["faults"]] == ["compilation_failed", "rank_killed"]
    assert summary["faults"][0]["rank"] == 1
    assert run.console.count("compile is off on all ranks") == 1, run.console
    with Run(tmp_path / "run", *QUICK, *words, NO_SPARE, task=lacking) as resumed:
        assert resumed.wait() == 0, resumed.console
    summary = resumed.summary()
    assert "not compiled: that has failed in this run before" in resumed.console
    assert (summary["exact"], summary["faults"]) == (True, []), summary["inexact_reasons"]
    assert resumed.digest == plain


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [
        ("ema_decay=0.9", "recovery.drill_at=2"),
        ("activation_checkpointing=all", "ddp.sync_batchnorm=true"),
    ],
)
def test_compiled_steps_survive_every_fault_to_the_bit(tmp_path, others):
    """With accumulation and what stands in a graph's way; a replacement starts from the run's cache, survivors from theirs."""
    compiled = f"{Path(__file__).with_name('layered.py')}:CompiledTask"
    settings = ("compile=true", "data.micro_batch_size=4", *others)
    with Run(tmp_path / "calm", *QUICK, *settings, "task.pace_s=0", task=compiled) as calm:
        assert calm.wait(300.0) == 0, calm.console
    (tmp_path / "faults").mkdir()
    kept = calm.logs / "compiled"
    libraries = {file.name for file in kept.rglob("*.so")}
    assert libraries, "the cache is the run's own"
    shutil.copytree(kept, tmp_path / "faults" / "logs" / "compiled")
    run = with_faults_and_a_stop(tmp_path / "faults", *settings, task=compiled)
    summary = run.summary()
    assert (summary["exact"], summary["steps"]) == (True, STEPS), summary["inexact_reasons"]
    assert run.digest == calm.digest
    again = {file.name for file in (run.logs / "compiled").rglob("*.so")}
    assert again == libraries, "nothing was built again"
    first = (tmp_path / "faults" / "console.txt").read_text(encoding="utf-8")
    at = re.findall(r"compiled by (\d+) at (\d+)", first)
    assert max(int(call) for _, call in at) <= 4, (
        "only in the first forward and backward of a process"
    )


@pytest.mark.slow
def test_layers_unfrozen_in_compiled_steps_leave_no_trace(tmp_path):
    """In fp16, with accumulation and files without what is frozen; short of memory, the reason says so."""
    settings = (
        *("compile=true", "-b", 4, "data.accumulation=2", "micro_batch_size=0"),
        *("train_layers=layers,head", "optim.unfreeze=stem@12", "precision=fp16"),
        *("amp_init_scale=8388608", "amp_growth_interval=4", "only_trained=true"),
    )
    with Run(tmp_path / "calm", *QUICK, *settings, "task.pace_s=0", task=LAYERED) as calm:
        assert calm.wait(300.0) == 0, calm.console
    run = with_faults_and_a_stop(tmp_path / "faults", *settings, task=LAYERED)
    assert (run.summary()["exact"], run.digest) == (True, calm.digest)
    short = ("task.pace_s=0", "--inject", "oom:rank=1,step=12,phase=forward")
    with Run(tmp_path / "short", *QUICK, *settings, *short, task=LAYERED) as run:
        assert run.wait(300.0) == 0, run.console
    assert run.summary()["inexact_reasons"] == ["micro-batches of 2 samples from step 12"]
