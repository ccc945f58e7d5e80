"""State in odd places: the same weights whoever is killed, or a reason that names it; nothing that is odd ends a run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.scenarios.harness import Run
from tests.scenarios.test_attached import run_loop

TASKS = Path(__file__).with_name("odd_state.py")
SETTINGS = (
    "-b",
    8,
    "--audit",
    "--max-steps",
    60,
    "save_every_steps=20",
    "save_interval=0",
    "num_workers=0",
)


@pytest.fixture
def calm(made_once):
    """``calm(task)``: the digest without a fault."""

    def of(task):
        run = made_once(*SETTINGS, "warm_spare=false", task=f"{TASKS}:{task}")
        assert run.summary()["exact"] is True, run.summary()["inexact_reasons"]
        return run.digest

    return of


def _killed(folder, task, *words, stopped_at=None):
    """Each rank once, by a signal, at whatever point it is; then, where asked for, stopped and started again."""
    with Run(folder / "killed", *SETTINGS, *words, task=f"{TASKS}:{task}") as run:
        for rank, step in ((1, 8), (0, 24)):
            run.wait_for_step(step)
            run.signal(signal.SIGKILL, run.rank_pid(rank))
        if stopped_at is not None:
            run.wait_for_step(stopped_at)
            run.signal(signal.SIGTERM)
        assert run.wait() == (0 if stopped_at is None else 75), run.console
    assert run.summary()["faults"], run.console
    if stopped_at is not None:
        with Run(folder / "killed", *SETTINGS, *words, task=f"{TASKS}:{task}") as run:
            assert run.wait() == 0, run.console
    return run


@pytest.mark.parametrize(("task", "stopped_at"), [("Odd", 38), ("Rude", None)])
def test_odd_state_is_the_same_whoever_is_killed(tmp_path, calm, task, stopped_at):
    """Followed, or, where nobody changes it, let be; by way of a peer, and of the file."""
    run = _killed(tmp_path, task, stopped_at=stopped_at)
    assert (run.digest, run.summary()["inexact_reasons"]) == (calm(task), [])


def test_a_table_too_long_to_keep_is_named_after_a_kill(tmp_path):
    """One that steps change."""
    summary = _killed(tmp_path, "Table").summary()
    assert summary["exact"] is False
    assert "task.table" in " ".join(summary["inexact_reasons"])


def test_what_ranks_come_to_hold_differently_is_named_after_a_kill(tmp_path):
    """Compared now and then, not only when it is first followed: of two ranks one is left to ask."""
    words = ("recovery.replica_check_steps=10", "save_every_steps=0")
    with Run(tmp_path, *SETTINGS, *words, task=f"{TASKS}:Parting") as run:
        run.wait_for_step(32)
        run.signal(signal.SIGKILL, run.rank_pid(1))
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["exact"] is False
    assert "task.count" in " ".join(summary["inexact_reasons"])


def test_a_dataset_that_counts_its_reads_is_named_after_a_kill(tmp_path):
    """Its copies in loader workers have counted other reads than without the kill."""
    summary = _killed(tmp_path, "Reads", "num_workers=1").summary()
    assert summary["exact"] is False
    assert "data.reads" in " ".join(summary["inexact_reasons"])


def test_a_dataset_that_keeps_what_it_reads_is_not_named(tmp_path, calm):
    """Control, in the rank itself: its attributes change in every read, and none of them is counted up."""
    run = _killed(tmp_path, "ReadsCached")
    assert (run.digest, run.summary()["exact"]) == (calm("ReadsCached"), True)


COUNTING = """
import time
import torch
import ddp_runner
class Reads(torch.utils.data.Dataset):
    reads = 0
    def __len__(self):
        return 64
    def __getitem__(self, index):
        self.reads += 1
        return torch.ones(4) * (index + self.reads)
run = ddp_runner.attach()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
net = run.ddp(model)
run.keep(model=model, optimizer=optimizer)
for batch in run.steps(run.loader(Reads(), batch_size=2), max_steps=40):
    with run.step():
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_s_dataset_that_counts_its_reads_is_named(tmp_path, workers):
    """By the loader of the run, as a task's."""
    (own := tmp_path / "counting.py").write_text(COUNTING, encoding="utf-8")
    options = (f"num_workers={workers}", "--inject", "kill:rank=1,step=25")
    with run_loop(tmp_path, loop=own, options=options) as run:
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["exact"] is False
    assert "data.reads" in " ".join(summary["inexact_reasons"])
