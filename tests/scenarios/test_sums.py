"""Sums over three ranks, where their order shows: the same whether DDP searches or not, and whenever ranks form."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import PATIENT
from .harness import Run

TASK = f"{Path(__file__).with_name('rotating.py')}:RotatingTask"
SETTINGS = (
    *("--cpu", "-b", 4, "--max-steps", 26, "num_workers=0", "bucket_cap_mb=1", *PATIENT),
    *("max_grad_norm=none", "drill_at=off"),
)
MODES = {
    "auto": ("find_unused_parameters=auto", "relax_after_steps=5"),
    "no_search": ("find_unused_parameters=false",),
    "static": ("static_graph=true",),
}
STOP = "task.stop_at=12"


def trained(folder, *words, code=0):
    with Run(folder, *SETTINGS, *words, task=TASK, world=3) as run:
        assert run.wait() == code, run.console
    return run


@pytest.mark.parametrize(
    "mode", ["auto", "static", pytest.param("no_search", marks=pytest.mark.slow)]
)
def test_neither_the_search_nor_a_later_forming_changes_a_bit(made_once, tmp_path, mode):
    """Killed in three phases, stopped and resumed; then some ranks leave a layer out, which turns the search on."""
    calm = made_once(*SETTINGS, "find_unused_parameters=true", task=TASK, world=3)
    kills = ("kill:rank=1,step=3,phase=forward", "kill:rank=0,step=7,phase=backward")
    words = (*MODES[mode], STOP, *(word for kill in kills for word in ("--inject", kill)))
    stopped = trained(tmp_path, *words, code=75)
    assert len(stopped.summary()["injected"]) == 2
    if mode == "auto":  # at the step that it is relaxed at without a kill
        assert [event["step"] for event in stopped.events("tuning_changed")] == [5]
    run = trained(tmp_path, *MODES[mode], STOP, "--inject", "kill:rank=2,step=21,phase=reduce")
    kinds = [fault["kind"] for fault in run.summary()["faults"]]
    # In one step: on busy cores the kill is what ended the sum, and the other fault its consequence.
    assert "rank_killed" in kinds
    assert set(kinds) <= {"rank_killed", "reduction_unfinished"}
    assert run.digest == calm.digest
    assert (calm.summary()["exact"], run.summary()["exact"]) == (True, True)
