"""What makes a run smaller or faster: faults and a stop in its middle change no bit of it."""

from __future__ import annotations

from pathlib import Path

from tests.scenarios.harness import Run
from tests.scenarios.test_training import QUICK, STEPS, with_faults_and_a_stop

LAYERED = f"{Path(__file__).with_name('layered.py')}:LayeredTask"


def test_checkpointed_activations_end_with_the_bits_of_kept_ones(tmp_path):
    """Under every kind of fault, a stop and a resume; a name that is none is one line, exit 2."""
    with Run(tmp_path / "kept", *QUICK, "task.pace_s=0", task=LAYERED) as kept:
        assert kept.wait() == 0, kept.console
    settings = ("gradient_checkpointing=true", "recovery.drill_at=2")
    with Run(tmp_path / "calm", *QUICK, *settings, "task.pace_s=0", task=LAYERED) as calm:
        assert calm.wait() == 0, calm.console
    run = with_faults_and_a_stop(
        tmp_path / "faults", *settings, "activation_checkpointing=layers.*", task=LAYERED
    )
    summary = run.summary()
    assert (summary["exact"], summary["steps"]) == (True, STEPS), summary["inexact_reasons"]
    assert run.digest == calm.digest == kept.digest
    with Run(tmp_path / "bad", *QUICK, "activation_checkpointing=layer.*", task=LAYERED) as bad:
        assert bad.wait() == 2, bad.console
    assert "=layer.*: matches no module; the nearest names are layers.*" in bad.console
