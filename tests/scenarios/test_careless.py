"""A task in which nothing is seeded and whose helpers break: its run is as exact as any other."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.hashed_names import NAME_SEED
from tests.scenarios.harness import Run

CARELESS = f"{Path(__file__).with_name('careless.py')}:CarelessTask"
SETTINGS = ("-b", 8, "--max-steps", 24, "num_workers=1", "evaluate_interval=1", "--audit")


def test_a_model_made_from_a_set_resumes_with_its_moments(tmp_path, made_once):
    """Launched again with sets in another order, as in any two processes whose hash seed is not set."""
    fault_free = made_once(*SETTINGS, task=CARELESS)
    here = (*SETTINGS, "num_workers=0")  # the other test has workers, too
    slow = (
        "--inject",
        "slow:rank=all,step=14,seconds=0.5",
    )  # somebody has the time to ask for a stop
    with Run(tmp_path / "run", *here, *slow, task=CARELESS) as run:
        run.wait_for_step(14)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    with Run(tmp_path / "run", *here, task=CARELESS, variables={NAME_SEED: "2"}) as run:
        assert run.wait() == 0, run.console
    weights = [
        torch.load(one.checkpoints / "step_00000024.pt", weights_only=True)["model"]
        for one in (fault_free, run)
    ]
    assert list(weights[0]) != list(weights[1])
    # The norm of all gradients is a sum in the model's order: the last bit may be another.
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-6)


def test_data_that_is_shuffled_where_it_is_made_is_the_same_everywhere(tmp_path, made_once):
    """On both ranks, in a replacement, at the next launch. Figures and sample that raise are a warning each."""
    fault_free = made_once(*SETTINGS, task=CARELESS)
    kill = ("--inject", "kill:rank=1,step=10")
    with Run(tmp_path / "killed", *SETTINGS, *kill, task=CARELESS) as run:
        assert run.wait() == 0, run.console
    assert run.digest == fault_free.digest
    assert run.summary()["exact"] is True
    assert (
        run.summary()["figures"]["validation_loss"]
        == fault_free.summary()["figures"]["validation_loss"]
    )
    console = (fault_free.folder / "console.txt").read_text()
    for line in (
        "the task's figures() raised OverflowError: math range error (careless.py:64); left out",
        "the task's sample() raised IndexError: list index out of range (careless.py:69); left out",
    ):
        assert console.count(line) == 1, console
    assert fault_free.summary()["checkpoint"].endswith("step_00000024.pt")


UNKEPT = CARELESS.replace(":CarelessTask", ":UnkeptTask")
LEVEL = "`data.level` changes during training and is not kept: compute what depends on the step"
CACHE = "a cache of random draws in the dataset changes during training and is not kept"


@pytest.mark.parametrize(
    ("kind", "fault", "line"),
    [
        ("harder", "kill:rank=1,step=22", LEVEL),
        ("scaled", "kill:rank=1,step=22", ""),
        ("sampled", "kill:rank=1,step=25", ""),
        ("caching", "kill:rank=all,step=22", CACHE),
        ("caching", "loader_kill:rank=1,step=22", CACHE),
        ("drawing", "kill:rank=all,step=22", ""),
    ],
)
def test_what_a_new_process_of_the_data_lacks_is_named(tmp_path, made_once, kind, fault, line):
    """A repaired run has other weights: the data is as it was made. Exact is what uses the epoch's draws or the task's state."""
    settings = (
        "-b",
        12,
        "--epochs",
        3,
        f"num_workers={int(kind in ('caching', 'drawing'))}",
        f"task.kind={kind}",
    )
    fault_free = made_once(*settings, task=UNKEPT)
    with Run(tmp_path / "killed", *settings, "--inject", fault, task=UNKEPT) as run:
        assert run.wait() == 0, run.console
    reasons = " ".join(run.summary()["inexact_reasons"])
    assert (run.digest == fault_free.digest) == (not line)
    assert run.summary()["exact"] is (not line), reasons
    assert (line.partition(" changes")[0].strip("`") in reasons) or not line
    assert fault_free.summary()["exact"] is True
    console = (fault_free.folder / "console.txt").read_text()
    assert console.count("is not kept") == console.count(line or "-" * 200) == int(bool(line))


def test_samples_that_use_what_steps_change_end_no_run(tmp_path):
    """Loader workers have the task as it was when they began, so a replacement's load other samples: it is said."""
    settings = ("-b", 12, "--epochs", 3, "num_workers=1", "task.kind=scaled")
    with Run(tmp_path, *settings, "--inject", "kill:rank=1,step=22", task=UNKEPT) as run:
        assert run.wait() == 0, run.console
    assert run.summary()["exact"] is False
    assert "rank 1 has other data than the other ranks" in " ".join(
        run.summary()["inexact_reasons"]
    )
