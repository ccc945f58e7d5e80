"""A spare as a real process: what it leaves as it was, what it holds, and how it ends."""

from __future__ import annotations

import os
import random
import signal
import threading

import psutil
import pytest

from ddp_runner.features.spare.rules import SPARE
from ddp_runner.kernel.wire.events import SpareReady
from ddp_runner.kernel.wire.fork_specs import SpareKind
from ddp_runner.kernel.wire.messages import Ready
from tests.processes import run_ranks
from tests.rank.supervising import PlayedSupervisor, plan_for, threads_of

OWN_BYTES_MAX = 64 * 2**20


def _draws():
    import numpy as np
    import torch

    return random.random(), float(np.random.random()), float(torch.rand(()))  # noqa: NPY002


def _warm_up(me, folder):
    import torch

    from ddp_runner.features.spare.child import warm_up

    def seed():
        import numpy as np

        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)

    seed()
    before = _draws()
    seed()
    descriptors = psutil.Process().num_fds()
    settings = plan_for(folder, world_size=2).settings
    warm_up(settings)
    return {
        "same_numbers": _draws() == before,
        "threads": threading.active_count(),
        "descriptors": psutil.Process().num_fds() - descriptors,
        "initialized": torch.distributed.is_initialized(),
        "cuda": torch.cuda.is_initialized(),
        "rank": os.environ.get("RANK"),
    }


def test_warming_up_changes_no_random_number(tmp_path):
    """A task that seeds nothing draws in a spare what it draws in a fork; nothing is left open."""
    (facts,) = run_ranks(_warm_up, 1, tmp_path)
    assert facts == {
        "same_numbers": True,
        "threads": 1,
        "descriptors": 0,
        "initialized": False,
        "cuda": False,
        "rank": None,
    }


def _spares_one_after_the_other(me, folder):
    """Of one real zygote; the last one ends with all."""
    played = PlayedSupervisor(folder, 2)
    played.until(lambda: played.world.can_fork)
    return {how: _what_becomes_of_one(played, how) for how in HOW}


def _what_becomes_of_one(played, how):
    """It is made rank 1, killed, or its supervisor hangs up."""
    ready = played.count(SpareReady)
    played.spawn_spare(SpareKind.CPU)
    played.until(lambda: played.count(SpareReady) > ready and played.node.helper(SPARE).pid)
    spare = played.node.helper(SPARE)
    process = psutil.Process(spare.pid)
    facts = {
        "name": process.name(),
        "threads": threads_of(spare.pid),
        "own_bytes": process.memory_full_info().uss,
        "is_child": process.ppid() == os.getpid(),
    }
    pid = spare.pid
    if how == "rank":
        played.spawn_store()
        handle = played.world.ranks[1]
        played.spawn_rank(handle, loads=False)
        facts["is_it"] = handle.pid == pid and handle.was_spare
        played.until(lambda: played.count(Ready) == 1)
        facts["has_begun"] = handle.has_begun
        facts["name_after"] = process.name()
        facts["said"] = played.node.processes[handle.rank].what_it_wrote().before_log
        facts["spares"] = played.node.helper(SPARE)
    elif how == "killed":
        os.kill(pid, signal.SIGKILL)
        played.until(lambda: any(ended[0] == pid for ended in played.ended))
        facts["gone"] = played.node.helper(SPARE) is None
    elif how == "unasked":
        played.node.close()
        played.until(lambda: any(ended[0] == pid for ended in played.ended))
        facts["exit"] = [code for ended, code, _ in played.ended if ended == pid]
    elif how == "stopped":
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)
        facts["becomes"] = played.node.has_spare
        os.kill(pid, signal.SIGKILL)
        played.until(lambda: played.node.helper(SPARE) is None)
    return facts


HOW = ("stopped", "killed", "rank", "unasked")


@pytest.fixture(scope="module")
def spares(tmp_path_factory):
    return run_ranks(_spares_one_after_the_other, 1, tmp_path_factory.mktemp("spares"))[0]


@pytest.mark.xdist_group("spares")  # one test process has them all
@pytest.mark.parametrize("how", HOW)
def test_a_spare_waits_warm_and_small_for_what_becomes_of_it(spares, how):
    """One thread, little memory of its own, our child; then rank 1, or gone, or passed over."""
    facts = spares[how]
    assert (facts["name"], facts["threads"], facts["is_child"]) == ("ddp:spare", 1, True)
    assert facts["own_bytes"] < OWN_BYTES_MAX
    if how == "rank":
        assert facts["is_it"]
        assert facts["has_begun"]
        assert facts["name_after"] == "ddp:rank1"
        assert "said before the log exists" in facts["said"]
        assert facts["spares"] is None
    elif how == "killed":
        assert facts["gone"]
    elif how == "unasked":
        assert facts["exit"] == [0]
    else:
        assert facts["becomes"] is False


@pytest.mark.parametrize(("hip", "starts"), [("6.4.43484", False), (None, True)])
def test_on_rocm_a_spare_starts_no_driver_of_cuda(monkeypatch, hip, starts):
    """Its libraries come with torch; a driver that is not there would end each spare at once."""
    import torch

    from ddp_runner.features.spare import child as spare

    started = []

    class Driver:
        def __init__(self):
            started.append(self)

        def opened(self):
            return []

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(spare, "CudaDriver", Driver)
    monkeypatch.setattr(spare, "load_libraries", list)
    assert spare.start_libraries() is (started[0] if starts else None)
    assert bool(started) is starts
