"""Checkpoints without frozen weights: what they lack comes from the same begin, or the run is refused."""

from __future__ import annotations

import signal
from pathlib import Path

import torch

from tests.scenarios.conftest import NO_SPARE, PATIENT
from tests.scenarios.harness import Run
from tests.scenarios.padded import Stacked
from tests.scenarios.test_refusals import contents
from tests.scenarios.test_training import same_bits_at_ends

TASK = f"{Path(__file__).with_name('padded.py')}:United"
SETTINGS = (
    *("-b", 6, "num_workers=0", "ema_decay=0.9", "--max-steps", 30, "--audit", *PATIENT),
    *("train_layers=top", "save_every_steps=7", "save_interval=0"),
)
KILLS = ("kill:rank=0,step=6", "kill:rank=1,step=10")


def start(folder, *words):
    return Run(folder, *SETTINGS, *words, task=TASK)


def test_a_run_of_frozen_weights_needs_its_begin_again(tmp_path):
    """An average, at that; killed whole, stopped and resumed, it ends with the bits of one with whole files."""
    model = Stacked()
    begun = {"model": model.state_dict(), "ema": {"parameters": dict(model.named_parameters())}}
    for mean in begun["ema"]["parameters"].values():
        torch.nn.init.normal_(mean.data)
    begun["model"] = {name: torch.zeros_like(one) for name, one in begun["model"].items()}
    torch.save(begun, tmp_path / "base.pt")
    begin = ("--init-from", f"{tmp_path / 'base.pt'}:ema")
    with start(tmp_path / "calm", *begin, NO_SPARE) as calm:
        assert calm.wait() == 0, calm.console
    only = ("only_trained=true", "task.pace_s=0.03", "recovery.drill_at=2")
    kills = [word for kill in KILLS for word in ("--inject", kill)]
    with start(tmp_path / "run", *begin, *only, *kills) as run:
        run.wait_for_step(16)
        run.signals_at_once(*((signal.SIGKILL, run.rank_pid(rank)) for rank in (0, 1)))
        run.wait_for_step(20)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    assert "frozen parameters: a resume needs the same" in run.console
    assert any(fault["all_ranks_dead"] for fault in run.summary()["faults"])
    before = contents(run.logs) | contents(run.checkpoints)
    for other in ((), ("--init-from", tmp_path / "base.pt")):
        with start(tmp_path / "run", *other, *only) as refused:
            assert refused.wait() == 2, refused.console
        (line,) = [one for one in refused.console.splitlines() if "error" in one]
        assert "leaves out the 3 start weights of its run, which it" in line
        assert f"--init-from {begin[1]}" in line
    assert contents(run.logs) | contents(run.checkpoints) == before, "nothing is touched"
    with start(tmp_path / "run", *begin, *only) as run:
        assert run.wait() == 0, run.console
    assert (run.summary()["exact"], run.digest) == (True, calm.digest)
    assert same_bits_at_ends(run, calm) == ("final.pt", "final_ema.pt")
    files = [one.checkpoints / "step_00000030.pt" for one in (run, calm)]
    models = [torch.load(file, weights_only=True)["model"].keys() for file in files]
    assert models[1] - models[0] == {"embed.weight", "mix.weight", "mix.bias"}
