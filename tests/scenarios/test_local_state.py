"""What each rank has of its own, in whole runs: through kills, errors, a stop and a resume, with the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.scenarios.conftest import WITHOUT_WORKERS
from tests.scenarios.harness import ROOT, Run
from tests.scenarios.test_attached import KILL, LOOPS, RAISE, _hashed, plant, run_loop
from tests.test_documented import blocks_of

PLAYING = LOOPS / "playing.py"
STOP = "import os, signal; os.kill(os.getppid(), signal.SIGTERM)"
PLAY = "import sys; sys._getframe(2).f_locals['cart'].push(1.0)"
WAIT = """
import pathlib, time
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""
TALLIED = """
import os, signal, torch, ddp_runner


class Tally:
    loss = 0.0

    def state_dict(self):
        return {"loss": self.loss}

    def load_state_dict(self, state):
        self.loss = state["loss"]


run = ddp_runner.attach()
model, tally = torch.nn.Linear(4, 1), Tally()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
net = run.ddp(model)
run.keep(model=model, optimizer=optimizer, tally=tally)
data = torch.utils.data.TensorDataset(torch.randn(40, 4))
for (x,) in run.steps(run.loader(data, batch_size=2), max_steps=8):
    with run.step():
        loss = net(x).square().mean()
        loss.backward()
        if run.step_number == 4 and run.rank == 0 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        tally.loss += LOSS
"""
DOCUMENTS = "test_the_documents_loop_that_plays_is_exact"


def finals(folder):
    """What each rank's program has saved behind its loop."""
    paths = [Path(folder) / f"final_{rank}.pt" for rank in (0, 1)]
    return [_hashed(_as_lists(torch.load(path, weights_only=False))) for path in paths]


def _as_lists(value):
    if isinstance(value, (list, tuple)):
        return [_as_lists(one) for one in value]
    if isinstance(value, dict):
        return {key: _as_lists(one) for key, one in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def folders(tmp_path):
    for name in ("calm", "harmed"):
        (tmp_path / name).mkdir()
    return tmp_path / "calm", tmp_path / "harmed"


def test_the_documents_loop_that_plays_is_exact(tmp_path):
    """Each rank is killed, and one raises: environment, buffer and mean of each rank are as without."""
    mark = f"run by tests/scenarios/test_local_state.py::{DOCUMENTS}"
    (block,) = [one for one in blocks_of(ROOT / "docs" / "own-loop.md") if one.mark == mark]
    harm = [
        ("--inject", f"{what}:rank={rank},step={step}")
        for what, rank, step in (("kill", 1, 3), ("kill", 0, 8), ("raise", 1, 12))
    ]
    for folder, options in zip(folders(tmp_path), ((), sum(harm, ())), strict=True):
        (folder / "play.py").write_text(block.text, encoding="utf-8")
        with run_loop(folder, loop=folder / "play.py", options=options) as run:
            assert run.wait() == 0, run.console
        summary = run.summary()
        assert summary["exact"], summary["inexact_reasons"]
        assert len(summary["faults"]) == len(options) // 2
    calm, harmed = map(finals, (tmp_path / "calm", tmp_path / "harmed"))
    assert calm == harmed
    assert calm[0]["replay"] != calm[1]["replay"]


def test_a_loop_that_plays_is_exact_over_a_stop_and_kills(tmp_path):
    """Lost behind its update too; rank 0 raises in the body, where rank 1 has played its part already."""
    calm, harmed = folders(tmp_path)
    with run_loop(calm, loop=PLAYING) as run:
        assert run.wait() == 0, run.console
    plant(harmed, r1_s2_update=KILL, r0_s5_forward=RAISE, r1_s8_forward=STOP, r0_s11_backward=KILL)
    for code in (75, 0):
        with run_loop(harmed, loop=PLAYING) as run:
            assert run.wait() == code, run.console
        assert run.summary()["exact"], run.summary()["inexact_reasons"]
    assert finals(harmed) == finals(calm)


def test_a_drill_begins_with_what_its_rank_changes_late(tmp_path):
    """Rank 0 is at the drilled step already, and writes the state, while rank 1 is behind its update."""
    pause = "import time; time.sleep(0.5)"
    plant(
        tmp_path, **{f"r1_s{number}_update": pause for number in range(1, 7)}, r0_s20_between=WAIT
    )
    options = ("drill_at=3,5", "recovery.proof_share=0")
    with run_loop(tmp_path, "--plays-late", loop=PLAYING, options=options) as run:
        run.wait_for_event("drill")
        (tmp_path / "go").touch()
        assert run.wait() == 0, run.console
    assert {(one["rank"], one["differs"]) for one in run.events("drill")} == {(1, "")}
    assert run.summary()["exact"], run.summary()["inexact_reasons"]


@pytest.mark.slow
def test_a_first_late_change_in_a_later_launch_makes_the_run_inexact(tmp_path):
    """Rank 1 is lost behind its update; rank 0 is the first that changes something there, after a resume."""
    plant(tmp_path, r1_s5_update=KILL, r0_s8_forward=STOP, r0_s12_update=PLAY)
    with run_loop(tmp_path, loop=PLAYING) as run:
        assert run.wait() == 75, run.console
    assert run.summary()["exact"], run.summary()["inexact_reasons"]
    with run_loop(tmp_path, loop=PLAYING) as run:
        assert run.wait() == 0, run.console
    (reason,) = run.summary()["inexact_reasons"]
    assert reason.startswith("cart, replay, rng, returns of rank 1: the process was lost")
    assert "after optimizer.step() of step 6, where the loop may change kept objects" in reason


def test_a_loop_that_forgets_what_it_plays_is_inexact_and_named(tmp_path):
    """The same loop, without keep_local."""
    plant(tmp_path, r1_s8_forward=KILL)
    with run_loop(tmp_path, "--forget", loop=PLAYING) as run:
        assert run.wait() == 0, run.console
    (reason,) = run.summary()["inexact_reasons"]
    assert "`cart.at` (playing.py:" in reason
    assert "could not be kept over a repair" in reason


@pytest.mark.parametrize(("added", "is_own"), [("loss.item()", True), ("1.0", False)])
def test_state_of_each_rank_is_lost_before_any_save(tmp_path, added, is_own):
    """It is kept, and no save has compared it; right after the repair both ranks have that of rank 1."""
    (tmp_path / "loop.py").write_text(TALLIED.replace("LOSS", added), encoding="utf-8")
    with run_loop(tmp_path, loop=tmp_path / "loop.py") as run:
        assert run.wait() == 0, run.console
    assert [one["kind"] for one in run.summary()["faults"]] == ["rank_killed"]
    reasons = run.summary()["inexact_reasons"]
    assert len(reasons) == is_own, reasons
    assert all("each rank had its own kept.tally: since a" in one for one in reasons)


def test_a_task_that_plays_is_exact_and_drilled(tmp_path):
    """A drill of rank 0 has what that rank has of its own; a kill, an error, a stop and a resume."""
    schedule = ("optim.schedule=constant", "optim.warmup_steps=0")  # of no length
    settings = (*WITHOUT_WORKERS, *schedule, "max_steps=16", "save_every_steps=5", "drill_at=2,5")
    task = f"{PLAYING}:Players"
    harm = ("--inject", "kill:rank=1,step=4", "--inject", "raise:rank=0,step=6")
    digests = []
    for folder, launches in zip(
        folders(tmp_path), (((),), (harm, ("--inject", "kill:rank=0,step=12"))), strict=True
    ):
        for number, options in enumerate(launches):
            end = ("max_steps=9",) if len(launches) > number + 1 else ()
            with Run(folder, *settings, *end, *options, task=task) as run:
                assert run.wait() == 0, run.console
            assert run.summary()["exact"], run.summary()["inexact_reasons"]
        digests.append(run.digest)
    assert digests[0] == digests[1]
