"""What a run trains with beside model and data: faults and a stop in its middle change no bit of it."""

from __future__ import annotations

import json
import signal

import torch

from tests.scenarios.conftest import PATIENT
from tests.scenarios.harness import Run

STEPS = 44
QUICK = (
    *("-b", 8, "--max-steps", STEPS, "num_workers=0", "save_every_steps=10", "--audit"),
    *("evaluate_interval=3", *PATIENT),
)
SETTINGS = (
    *("optimizer=sgd", "momentum=0.8", "learning_rate=0.01", "warmup_steps=0.2"),
    *("precision=bf16", "matmul_precision=high", "channels_last=true"),
    *("ema_decay=0.9", "ema_every=3", "ema_start_step=5"),
    *("explosion_window=10", "explosion_rate_factor=0.5", "explosion_recover_steps=30"),
)
# An explosion whose lowered rate is still coming back when the run is stopped, and resumed.
SPIKE = ("--inject", "spike:rank=1,step=24")
# SIGKILL of rank 0, of the last rank, and of both; a replica that changes, which the save at 20 finds, so
# that all go back to step 10; and an exception. The second launch ends the run.
FAULTS = (
    *("--inject", "kill:step=7,phase=backward,rank=0"),
    *("--inject", "kill:step=14,phase=optimizer,rank=1"),
    *("--inject", "diverge:step=16,rank=0"),
    *("--inject", "raise:step=21,phase=backward,rank=0"),
    *("--inject", "kill:step=23,phase=optimizer,rank=all"),
)
KINDS = ["rank_killed", "rank_killed", "replica_diverged", "rank_raised", "rank_killed"]


def with_faults_and_a_stop(folder, *settings, first=(), **how):
    """The run with all of that, and ``first``, stopped about its middle and resumed; the second launch."""
    with Run(folder, *QUICK, *settings, *FAULTS, *first, "task.pace_s=0.03", **how) as run:
        run.wait_for_step(27)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
        summary = run.summary()
        assert 0 < summary["steps"] < STEPS
        assert summary["exact"], summary["inexact_reasons"]
        if first:
            (action,) = [one["action"] for one in summary["tolerated"]]
            lowered = "learning rate x 0.5, back in full at step 54"
            assert action == f"step skipped on all ranks, {lowered}"
        kinds = [fault["kind"] for fault in summary["faults"]]
        assert kinds[: len(KINDS)] == KINDS, kinds
    with Run(folder, *QUICK, *settings, "task.pace_s=0.03", **how) as run:
        assert run.wait() == 0, run.console
    return run


def figure_of(run, name):
    """By step, as metrics.jsonl has it; of a step that was done again the last."""
    text = (run.logs / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def same_bits_at_ends(run, calm):
    """The names of the files of weights at both ends, which have the same bits."""
    names = tuple(sorted(path.name for path in run.checkpoints.glob("final*")))
    assert names == tuple(sorted(path.name for path in calm.checkpoints.glob("final*")))
    for name in names:
        ours, theirs = (
            torch.load(one.checkpoints / name, weights_only=True) for one in (run, calm)
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    return names


def same_ends(run, calm):
    """The same, of files that have what the last checkpoint has."""
    names = same_bits_at_ends(run, calm)
    saved = torch.load(run.checkpoints / f"step_{STEPS:08d}.pt", weights_only=True)
    for name in names:
        end = torch.load(run.checkpoints / name, weights_only=True)
        means = {**saved["ema"]["parameters"], **saved["ema"]["buffers"]} if "ema" in name else {}
        expected = {**saved["model"], **means}
        assert end.keys() == expected.keys()
        assert all(torch.equal(end[key], expected[key]) for key in end)
    return names


def test_no_fault_and_no_stop_shows_in_the_weights(tmp_path):
    """Those of the run without faults, bit for bit; another optimizer is refused at a resume."""
    with Run(tmp_path / "fault_free", *QUICK, *SETTINGS, *SPIKE, "task.pace_s=0") as calm:
        assert calm.wait() == 0, calm.console
    run = with_faults_and_a_stop(tmp_path / "faults", *SETTINGS, first=SPIKE)
    summary = run.summary()
    assert (summary["exact"], summary["steps"]) == (True, STEPS), summary["inexact_reasons"]
    assert run.digest == calm.digest
    assert same_ends(run, calm) == ("final.pt", "final_ema.pt")
    with Run(tmp_path / "faults", *QUICK, "optimizer=adam", "task.pace_s=0.03") as other:
        assert other.wait() == 2, other.console
    assert "optim.optimizer: sgd -> adam" in other.console


def halvings(run):
    """The steps at which a plateau has lowered the rate, as the journal has them, once each."""
    return sorted(
        {
            event["step"]
            for event in run.events("tuning_changed")
            if "learning rate x" in event["action"]
        }
    )
