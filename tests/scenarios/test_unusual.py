"""Tasks as people have them: nothing of it needs a setting, and a fault changes no bit."""

from __future__ import annotations

from pathlib import Path

from .conftest import NO_SPARE, PATIENT
from .harness import Run
from .unusual import LATE_STEP

UNUSUAL = f"{Path(__file__).with_name('unusual.py')}:UnusualTask"
STEPS = (
    "--cpu",
    "--max-steps",
    40,
    "num_workers=1",
    "save_every_steps=10",
    "evaluate_every_steps=15",
    "--limit-batches",
    2,
    *PATIENT,
)


def ends(folder, *settings):
    with Run(folder, *STEPS, *settings, task=UNUSUAL, world=2) as run:
        assert run.wait() == 0, run.console
    return run


def noted(run):
    """The epochs that each rank's hook has noted."""
    texts = [(run.folder / f"epochs_{rank}").read_text() for rank in (0, 1)]
    return [[int(word) for word in text.split()] for text in texts]


def test_a_target_network_checkpoints_a_collate_and_an_own_optimizer(tmp_path):
    """What forward changes of a step that is done again is taken back; DDP's search is turned off.

    Also in the first step, which shows that there is a target, and in that which shows another one. A rank that dies
    in the hook at the end of an epoch has both call it again, and the loss goes on with the step and epoch.
    """
    calm = ends(tmp_path / "calm", "num_workers=0", NO_SPARE)
    epochs = [*range(20)]  # of two steps
    assert noted(calm) == [epochs, epochs]
    assert "find_unused_parameters=False from here on" in calm.console
    kills = (
        "kill:rank=1,step=0,phase=backward",
        f"kill:rank=0,step={LATE_STEP},phase=backward",
    )
    words = (word for spec in kills for word in ("--inject", spec))
    run = ends(tmp_path / "run", *words, "task.killed_in=9")
    called = sorted([*epochs, 9])
    assert noted(run) == [called, called]
    assert run.digest == calm.digest
    for summary in (calm.summary(), run.summary()):
        assert (summary["status"], summary["exact"]) == ("completed", True)
    assert " optimizer     AdamW, learning rate" in calm.console
    kinds = [[fault["kind"] for fault in each.summary()["faults"]] for each in (calm, run)]
    # The first kill and what the other rank finds in the same backward may be one incident.
    assert kinds[0] == ["reduction_unfinished"]
    assert {"rank_killed"} <= {*kinds[1]} <= {"rank_killed", "reduction_unfinished"}
