"""What a spare builds ahead: the same as a rank, which it is not yet."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_runner.core.fork_specs import Surroundings
from ddp_runner.features.spare.building import (
    A_COPY,
    AsksForRankError,
    build,
    first_to_end,
    noticing,
    spare_children,
)
from tests.processes import run_ranks
from tests.rank.supervising import plan_for

WHERE = Surroundings(
    settings={},
    device="",
    world_size=2,
    local_world_size=2,
    threads=1,
    store_host="127.0.0.1",
    store_port=1,
)


def _draws():
    import random

    import numpy as np
    import torch

    return random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002


def _built(me, folder):
    from ddp_runner.training.runtime import RankInfo
    from ddp_runner.training.workload import build_workload

    settings = plan_for(folder, world_size=2).settings
    rank_info = RankInfo(
        rank=me.rank,
        local_rank=me.rank,
        world_size=2,
        local_world_size=2,
        device="cpu",
        loads=False,
    )
    resumed = replace(settings, run=replace(settings.run, resume="none"))
    if me.rank == 0:
        workload, state = build_workload(resumed, rank_info)
        numbers = _draws()
    else:
        built = build(settings, WHERE)
        assert built.took_s > 0
        assert built.held_bytes >= 0
        numbers = _draws()
        workload, state = built.ahead.taken(resumed, rank_info)
        assert state.room
        with pytest.raises(RuntimeError, match="another run"):
            built.ahead.taken(replace(settings, task={"pace_s": 9.0}), rank_info)
        with pytest.raises(RuntimeError, match="another run"):
            built.ahead.taken(resumed, replace(rank_info, world_size=3))
    weights = {name: tensor.tolist() for name, tensor in state.weights().items()}
    captured = state.capture()["optimizer"]["state"]
    return weights, numbers, captured, workload.settings_digest, str(workload.recipe)


def test_what_is_built_ahead_is_what_a_rank_builds(tmp_path):
    """Weights, random numbers, an optimizer that has learnt nothing; for no other run or number of ranks."""
    by_rank, ahead = run_ranks(_built, 2, tmp_path)
    assert ahead == by_rank


def test_who_asks_for_a_rank_is_noticed():
    """In every way in which it may be asked; what else stands there is as it was."""
    os.environ["RANK"] = "5"
    before = type(os.environ)
    for ask in (os.environ.get, os.getenv, os.environ.__contains__):
        with noticing(("RANK", "LOCAL_RANK")) as asked:
            assert os.environ["PATH"]
            assert not asked
            assert not ask("RANK")
            assert asked == {"RANK"}
        assert type(os.environ) is before
        os.environ["RANK"] = "5"
    del os.environ["RANK"]


COPIES = {
    "copy": os.environ.copy,
    "dict": lambda: dict(os.environ),
    "items": lambda: dict(os.environ.items()),
    "keys": lambda: list(os.environ.keys()),
    "with more": lambda: os.environ | {"MORE": "1"},
    "bytes": lambda: dict(os.environb),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_the_environment_counts_as_asking_for_the_rank(how):
    """What is read of it later is not seen."""
    with noticing(("RANK", "LOCAL_RANK")) as asked:
        os.environ["MORE"] = "1"
        del os.environ["MORE"]
        assert not asked
        assert COPIES[how]()
        assert asked == {A_COPY}
    before = set(asked)
    asked.clear()
    assert COPIES[how]()
    assert (before, asked) == ({A_COPY}, set()), "only within the block"


def test_a_rank_that_is_asked_for_in_bytes_is_noticed():
    """The same variables under another name."""
    for ask in (os.environb.get, os.getenvb, os.environb.__contains__):
        with noticing(("RANK", "LOCAL_RANK")) as asked:
            assert os.environb[b"PATH"]
            assert not asked
            assert not ask(b"RANK")
            assert asked == {"RANK"}


ASKS = {"RANK": "os.environ.get('RANK')", A_COPY: "os.environ.copy().get('RANK')"}


def _build_one_that_asks(me, folder, what):
    from ddp_runner.training.workload import build_workload  # noqa: F401 - before the task's module

    task = folder / "asks.py"
    task.write_text(
        "import os\n"
        "from tests.scenarios.workload import PacedTask\n"
        "class Asks(PacedTask):\n"
        "    def build_model(self):\n"
        f"        self.is_first = {ASKS[what]} == '0'\n"
        "        return super().build_model()\n",
        encoding="utf-8",
    )
    settings = plan_for(folder, world_size=2).settings
    with pytest.raises(AsksForRankError, match=f"asks for {what}"):
        build(replace(settings, run=replace(settings.run, task=f"{task}:Asks")), WHERE)
    return True


@pytest.mark.parametrize("what", ASKS)
def test_a_task_that_asks_for_its_rank_is_not_built_ahead(tmp_path, what):
    """Nobody knows it yet, and the ranks' own buildings would differ from it."""
    assert run_ranks(_build_one_that_asks, 1, tmp_path, what) == [True]


def _first_to_end(me):
    def score(pid="self"):
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="ascii"))

    before = score()
    with first_to_end() as known:
        within = score()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        spare_children(known)
    scores = score(), score(child.pid)
    child.kill()
    child.wait()
    return {before} == set(scores), within


def test_a_spare_that_holds_much_is_the_first_to_end():
    """The kernel takes it before anything that trains; what its task has started is no different from a rank's."""
    assert run_ranks(_first_to_end, 1) == [(True, 1000)]
