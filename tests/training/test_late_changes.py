"""What ranks know of changes after an update: a replacement that may lack some is never called exact."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from ddp_runner.training.local_state.local_state import LOCAL
from tests.training.test_local_state import Env, local_of, shared, step

__all__ = ["shared"]  # a fixture
SLOT = SimpleNamespace(get=lambda _: 0, stamp=lambda *_: None)


def agree(ranks, at):
    """Have all of them form a generation: each hears what all say."""
    said = [one._said() for one in ranks]
    for number, one in enumerate(ranks):
        group = SimpleNamespace(exchange=lambda *_: said, rank=number)
        assert one.agree(group, SLOT, places=range(len(ranks)), step=at) == ""


def pair(shared):
    """Two ranks that have made a step with nothing behind its update."""
    envs = [Env(seed) for seed in (0, 1)]
    ranks = [local_of({"env": env}, shared, rank=rank) for rank, env in enumerate(envs)]
    agree(ranks, 0)
    for one, env in zip(ranks, envs, strict=True):
        step(one, 1, env.play)
    return ranks, envs


def lost_behind_the_update(ranks, envs, shared, *, number=2, late=None):
    """Rank 1 dies with ``number`` sealed, which rank 0 commits; its replacement joins."""
    envs[1].play()
    ranks[1].seal(number)
    step(ranks[0], number, envs[0].play, late=late)
    envs[1] = Env()
    ranks[1] = local_of({"env": envs[1]}, shared, rank=1)
    ranks[1].go_to(number, None, is_begin=False)
    agree(ranks, number)


def lost(ranks):
    return [line.partition(" of step ")[::2] for one in ranks for line in one.take_lost()]


def test_what_one_rank_changes_late_is_known_of_all(shared):
    """The lost rank never changed anything late; the other one does, for the first time, in that very step."""
    ranks, envs = pair(shared)
    lost_behind_the_update(ranks, envs, shared, late=envs[0].play)
    ((begin, end),) = lost(ranks)
    assert begin.startswith("env of rank 1: the process was lost")
    assert end.startswith("2, where the loop may change kept objects")
    # From then on both know; nothing is said twice.
    agree(ranks, 2)
    assert [one.known() for one in ranks] == [[True, []], [True, []]]
    assert lost(ranks) == []


@pytest.mark.parametrize("finder", [0, 1])
@pytest.mark.parametrize("is_replaced", [False, True], ids=["in place", "replaced"])
def test_a_late_change_long_after_the_loss_is_named(shared, finder, is_replaced):
    """Nothing was known when rank 1 was replaced. What is found later holds for then, over replacements too."""
    ranks, envs = pair(shared)
    lost_behind_the_update(ranks, envs, shared)
    assert lost(ranks) == []
    for number in (3, 4):
        for one, env in zip(ranks, envs, strict=True):
            step(one, number, env.play)
    if is_replaced:
        for rank in (1, 0):  # at last nobody is left who was there
            envs[rank] = Env()
            ranks[rank] = local_of({"env": envs[rank]}, shared, rank=rank)
            ranks[rank].go_to(4, None, is_begin=False)
        agree(ranks, 4)
    assert lost(ranks) == []
    step(ranks[finder], 5, envs[finder].play, late=envs[finder].play)
    ((begin, end),) = lost(ranks)
    assert begin.startswith("env of rank 1: ")
    assert end.startswith("2, ")


def test_without_late_changes_nothing_is_named(shared):
    """Ten losses behind an update."""
    ranks, envs = pair(shared)
    for number in range(2, 12):
        lost_behind_the_update(ranks, envs, shared, number=number)
    assert lost(ranks) == []
    assert [env.games for env in envs] == [11, 11]


def test_what_a_launch_knew_the_next_one_knows(shared):
    """A file says what was known as it was written."""
    ranks, envs = pair(shared)
    lost_behind_the_update(ranks, envs, shared)
    kept = ranks[0].known()
    assert kept == [False, [(1, 2)]]
    file = json.loads(json.dumps(kept)), ranks[0].of_ranks(2)[LOCAL]
    resumed = local_of({"env": Env()}, None, rank=0)
    resumed.go_to(2, file[1], is_begin=False)
    resumed.learn([file[0]], says=True)
    assert lost([resumed]) == []
    env = resumed.inner()[0]
    step(resumed, 3, env.play, late=env.play)
    ((begin, _),) = lost([resumed])
    assert begin.startswith("env of rank 1: ")
