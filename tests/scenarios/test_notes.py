"""What data, precision and loader have to say before training is said: once, and in the log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ddp_runner.training.components.precision import Precision
from tests import ready
from tests.scenarios.harness import Run
from tests.scenarios.test_outside import TORCHRUN

NOTED = f"{Path(__file__).with_name('mistaken.py')}:NotedData"
SETTINGS = ("-b", 8, "--max-steps", 2, "use_amp=true", "num_workers=3", "warmup_steps=100")
PRECISION = Precision("auto", device=torch.device("cpu"))  # as the processor has it
WORKERS = re.compile(r"\b3 loader workers per rank, .* only help", re.MULTILINE)
BLOCK = (  # of the start, in its order
    " ranks         2 on the CPU, gloo, ",
    f" precision     {PRECISION.name}",
    " model         5 parameters, all trained\n",
    " data          64 samples, 3 loader workers per rank\n",
    " global batch  16 = 8 x 2 ranks\n",
    " length        2 steps of an epoch of 4\n",
    " optimizer     adamw, ",
    " schedule      cosine to 0 at step 2, after 1 step of warm-up\n",
    " checkpoints   about ",
)


def check(text):
    """Each note once, whichever of the ranks had it."""
    short = "optim.warmup_steps=100 is not below run.max_steps=2"
    for note in (short, "64 rows of nothing in particular", *PRECISION.notes):
        assert text.count(note) == 1, text
    assert len(WORKERS.findall(text)) == 1, text  # more than the cores that two ranks can have
    assert re.search(rf"\b{PRECISION.name}\b", text)


def check_block(text):
    """Every row is there, in order."""
    places = [text.find(row) for row in BLOCK]
    assert -1 not in places, text
    assert places == sorted(places)


def test_notes_stand_in_the_start_lines_and_in_the_supervisors_log(tmp_path):
    """Amp that has no effect, more workers than cores, what a task says of its data."""
    unread = f"the task {NOTED} does not read model.dropout: it has no effect"
    with Run(tmp_path, *SETTINGS, "model.dropout=0.2", task=NOTED) as run:
        assert run.wait() == 0, run.console
    before_training = run.console.partition("saved ")[0]
    check(before_training)
    check_block(before_training)
    check((run.logs / "supervisor.log").read_text(encoding="utf-8"))
    assert unread in before_training
    log = (run.logs / "supervisor.log").read_text(encoding="utf-8")
    assert re.search(rf"WARNING +supervisor \| {re.escape(unread)}", log)
    check_block((run.logs / "supervisor.log").read_text(encoding="utf-8"))


@pytest.mark.timeout(300)
def test_under_an_outside_launcher_rank_0_says_them(tmp_path):
    """On the console, and in the log of each rank."""
    how = {"command": TORCHRUN, "environment": ready.environment(programs=True)}
    with Run(tmp_path, *SETTINGS, task=NOTED, **how) as run:
        assert run.wait() == 0, run.console
    check(run.console)
    check_block(run.console)
    check((run.logs / "rank_1.log").read_text(encoding="utf-8"))
