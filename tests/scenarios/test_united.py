"""What a run may have, all at once: no fault, roll-back, stop or resume changes a bit of it."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path

import torch

from tests.scenarios.conftest import NO_SPARE, PATIENT
from tests.scenarios.harness import Run
from tests.scenarios.test_training import figure_of, halvings, same_bits_at_ends

TASK = f"{Path(__file__).with_name('padded.py')}:United"
OPTIMIZER = "muon" if hasattr(torch.optim, "Muon") else "adamw"  # torch has it from 2.9 on
# Evaluations at 4, 8, ...; after the first none counts as an improvement. `middle` joins at step 12.
SETTINGS = (
    *("-b", 6, "data.accumulation=2", "micro_batch_size=0", "--max-steps", 40, "num_workers=0"),
    *(f"optimizer={OPTIMIZER}", "max_grad_value=0.05", "schedule=wsd", "decay_steps=0.4"),
    *("warmup_steps=3", "--audit"),
    *("precision=fp16", "amp_init_scale=8388608", "amp_growth_interval=4", "log_interval=1"),
    *("ema_decay=0.9", "ema_every=2", "ema_start_step=3", "ema_device=cpu"),
    *("train_layers=top", "optim.unfreeze=middle@12", "activation_checkpointing=blocks.*"),
    *("ddp.sync_batchnorm=true", "gradient_dtype=bf16", "checkpoint.only_trained=true"),
    *(
        "evaluate_every_steps=4",
        "evaluate_interval=0",
        "plateau_patience=2",
        "plateau_min_delta=100",
    ),
    *("early_stopping_patience=7", "early_stopping_min_delta=100"),
    *("save_every_steps=10", "save_interval=0", "keep_every=10", *PATIENT),
)
ENDS_AT, HALVED_AT = 32, [12, 20, 28]
# Rank 0's replica changes at 13, which the save at 20 finds: back to 10, across an unfreezing and a plateau.
FAULTS = (
    *("kill:rank=0,step=5,phase=backward", "kill:rank=1,step=9,phase=optimizer"),
    *("kill:rank=1,step=12,phase=forward", "raise:rank=0,step=12,phase=backward"),
    "diverge:rank=0,step=13",
)


def start(folder, *words):
    return Run(folder, *SETTINGS, *words, task=TASK)


def test_all_at_once_is_exact_through_every_fault(tmp_path):
    """Kills of rank 0, the last and all, an exception, a roll-back, a stop and a resume; then too little memory."""
    with start(tmp_path / "calm", NO_SPARE) as calm:
        assert calm.wait() == 0, calm.console
    fault_free = calm.summary()
    assert fault_free["status"] == "completed"
    assert (fault_free["stop_reason"], fault_free["steps"]) == ("early_stopping", ENDS_AT)
    assert "middle trained from step 12 on: " in calm.console
    assert halvings(calm) == HALVED_AT
    scales = figure_of(calm, "loss_scale")
    changes = {
        later / earlier for earlier, later in pairwise(scales[step] for step in sorted(scales))
    }
    assert {0.5, 2.0} <= changes, "steps were skipped, and the scale has grown"
    faults = [word for fault in FAULTS for word in ("--inject", fault)]
    with start(tmp_path / "faults", *faults, "task.pace_s=0.03") as run:
        run.wait_for_event("repaired_in_place")
        run.wait_for_step(22)
        run.signals_at_once(*((signal.SIGKILL, run.rank_pid(rank)) for rank in (0, 1)))
        run.wait_for_step(26)
        run.signal(signal.SIGTERM)
        assert run.wait() == 75, run.console
    first = run.summary()
    kinds = [fault["kind"] for fault in first["faults"]]
    assert {"rank_killed", "rank_raised", "replica_diverged"} <= set(kinds), kinds
    assert "rolled back to step 10" in run.console
    assert any(fault["all_ranks_dead"] for fault in first["faults"]), first["faults"]
    with start(tmp_path / "faults", "task.pace_s=0.03", NO_SPARE) as run:
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["exact"] is True, summary["inexact_reasons"]
    for name in ("weights_sha256", "tokens", "figures", "steps", "stop_reason", "final_loss"):
        assert summary[name] == fault_free[name], name
    assert halvings(run) == HALVED_AT
    assert (figure_of(run, "loss_scale"), figure_of(run, "learning_rate")) == (
        scales,
        figure_of(calm, "learning_rate"),
    )
    assert same_bits_at_ends(run, calm) == ("final.pt", "final_ema.pt")
    saved = torch.load(run.checkpoints / "step_00000030.pt", weights_only=True)["model"]
    assert {"embed.weight"} == torch.load(run.checkpoints / "final.pt").keys() - saved.keys()
    with start(tmp_path / "faults", "task.pace_s=0.03") as again:  # as it has ended early
        assert again.wait() == 0, again.console
    assert (again.digest, again.summary()["steps"]) == (run.digest, ENDS_AT)
    with start(
        tmp_path / "short", "--inject", "oom:rank=1,step=12,phase=forward", NO_SPARE
    ) as short:
        assert short.wait() == 0, short.console
    summary = short.summary()
    assert summary["inexact_reasons"] == ["micro-batches of 3 samples from step 12"]
    assert [summary[name] == fault_free[name] for name in ("steps", "samples", "stop_reason")] == [
        True
    ] * 3
