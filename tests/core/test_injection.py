"""Specs of ``--inject``: what is read, and what is refused with the reason."""

from __future__ import annotations

import pytest

from ddp_runner.core.faults import BadInputError
from ddp_runner.core.injection import EVERY_RANK, InjectKind, bad_sample_places, parse_injection

AT_RANDOM = [kind for kind in InjectKind if kind is not InjectKind.BAD_SAMPLE]


@pytest.mark.parametrize("kind", AT_RANDOM, ids=lambda kind: kind.value)
def test_every_kind_can_be_asked_for_at_a_step_and_at_random(kind):
    """One vocabulary for both."""
    assert parse_injection(f"{kind.value}:rank=1,step=3", world_size=2).kind is kind
    assert parse_injection(f"random:kinds={kind.value}", world_size=2).kinds == (kind,)


def test_all_ranks_can_be_meant():
    """``rank=all`` stands for each of them; a number must be one of theirs."""
    assert parse_injection("nan:rank=all", world_size=3).rank == EVERY_RANK
    assert parse_injection("nan:rank=2", world_size=3).rank == 2
    with pytest.raises(BadInputError, match="rank is 0 to 2 here, or all"):
        parse_injection("nan:rank=3", world_size=3)


@pytest.mark.parametrize("kind", ["unused", "nan", "spike", "diverge"])
def test_what_changes_a_loss_has_one_place(kind):
    """It happens where the loss is computed; any other phase would be a silent no-op."""
    with pytest.raises(BadInputError, match="phase forward only"):
        parse_injection(f"{kind}:rank=0,phase=reduce", world_size=1)
    assert parse_injection("oom:rank=0,phase=reduce", world_size=1).phase == "reduce"


def test_a_bad_sample_has_a_place_and_is_never_drawn():
    """It is bad for ever, in every process, so it cannot be the outcome of a moment."""
    specs = ("bad_sample:rank=1,step=3", "kill:rank=0,step=2", "random:mtbf_s=3")
    assert bad_sample_places(specs, world_size=2) == ((1, 3),)
    assert bad_sample_places(["bad_sample:rank=all,step=3"], world_size=2) == ((0, 3), (1, 3))
    with pytest.raises(BadInputError, match="needs a step"):
        parse_injection("random:kinds=kill+bad_sample", world_size=2)
