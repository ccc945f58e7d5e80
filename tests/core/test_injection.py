"""Specs of ``--inject``: what is read, and what is refused with the reason."""

from __future__ import annotations

import pytest

from ddp_runner.core.injection import (
    EVERY_RANK,
    InjectKind,
    bad_sample_places,
    changes_loss,
    draw_injection,
    parse_injection,
    refuse_of_loops,
)
from ddp_runner.kernel.rules.errors import BadInputError


def test_every_kind_can_be_asked_for_at_a_step_and_at_random():
    """One vocabulary for both."""
    for kind in InjectKind:
        assert parse_injection(f"{kind.value}:rank=1,step=3", world_size=2).kind is kind
        plan = parse_injection(f"random:kinds={kind.value},times=3", world_size=2)
        assert plan.kinds == (kind,)


def test_all_ranks_can_be_meant():
    """``rank=all`` stands for each of them; a number must be one of theirs."""
    assert parse_injection("nan:rank=all", world_size=3).rank == EVERY_RANK
    assert parse_injection("nan:rank=2", world_size=3).rank == 2
    with pytest.raises(BadInputError, match="rank is 0 to 2 here, or all"):
        parse_injection("nan:rank=3", world_size=3)


@pytest.mark.parametrize("kind", ["disk_full", "disk_error", "slow_disk", "corrupt_checkpoint"])
@pytest.mark.parametrize("rank", ["", "rank=2", "rank=all"])
def test_a_fault_of_saves_meets_the_rank_that_writes(kind, rank):
    """At another one it would be noted as caused and hurt nothing, or never come."""
    assert parse_injection(f"{kind}:{rank}", world_size=3).rank == 0
    plan = parse_injection(f"random:kinds={kind}", world_size=3)
    assert {draw_injection(plan, number, world_size=3).rank for number in range(20)} == {0}
    with pytest.raises(BadInputError, match="rank is 0 to 2 here, or all"):
        parse_injection(f"{kind}:rank=3", world_size=3)


def test_a_wrong_gradient_has_a_bit():
    """Of no other kind, and not more bits than a number may have; drills look for it, and are not off for it."""
    assert parse_injection("wrong_gradient:rank=1,step=40", world_size=2).bit == 12
    found = parse_injection("wrong_gradient:rank=1,step=40,bit=63,times=3", world_size=2)
    assert (found.bit, found.last_step) == (63, 42)
    with pytest.raises(BadInputError, match="bit is 0 to 63"):
        parse_injection("wrong_gradient:bit=64", world_size=2)
    with pytest.raises(BadInputError, match="bit is unknown; known: rank, step"):
        parse_injection("nan:bit=3", world_size=2)
    for spec, is_off in (("wrong_gradient", False), ("hidden_state", False), ("nan", True)):
        assert changes_loss([spec], world_size=2) == is_off


@pytest.mark.parametrize(
    "kind", ["unused", "nan", "spike", "diverge", "wrong_gradient", "hidden_state"]
)
def test_what_changes_a_loss_has_one_place(kind):
    """It happens where the loss is computed; any other phase would be a silent no-op."""
    with pytest.raises(BadInputError, match="phase forward only"):
        parse_injection(f"{kind}:rank=0,phase=reduce", world_size=1)
    assert parse_injection("oom:rank=0,phase=reduce", world_size=1).phase == "reduce"


@pytest.mark.parametrize("raw", ["x", "-1", "2.5", "²"])
def test_a_step_is_a_whole_number(raw):
    """A superscript is a digit to some, and no number to int()."""
    with pytest.raises(BadInputError, match="step is a whole number, 0 or more"):
        parse_injection(f"kill:step={raw}", world_size=2)
    assert parse_injection("kill:step=2", world_size=2).step == 2


def test_a_key_that_is_given_twice_is_refused():
    """Of two faults in one word only half of each would come."""
    with pytest.raises(BadInputError, match="has step twice"):
        parse_injection("kill:rank=1,step=5;kill:rank=0,step=10", world_size=2)


def places(*specs):
    return bad_sample_places(specs, world_size=2, total_steps=50)


def test_a_bad_sample_has_a_place():
    """It is bad for ever, in every process, so all of them must know it from the start."""
    assert places("bad_sample:rank=1,step=3", "kill:rank=0", "random:mtbf_s=3") == ((1, 3),)
    assert places("bad_sample:rank=all,step=3") == ((0, 3), (1, 3))


def test_bad_samples_of_a_random_plan_are_drawn_before_it_begins():
    """As many as there are injections of that kind, anywhere in the run, the same for the same seed."""
    spec = "random:kinds=kill+bad_sample,times=40,seed=7"
    plan = parse_injection(spec, world_size=2)
    injections = [draw_injection(plan, number, world_size=2) for number in range(40)]
    ranks = [one.rank for one in injections if one.kind is InjectKind.BAD_SAMPLE]
    drawn = places(spec)
    assert [rank for rank, _ in drawn] == ranks
    assert 10 < len(ranks) < 30
    assert all(0 <= step < 50 for _, step in drawn)
    assert len({step for _, step in drawn}) > len(drawn) // 2
    assert drawn == places(spec) != places(spec.replace("seed=7", "seed=8"))
    with pytest.raises(BadInputError, match="bad_sample needs times=N"):
        parse_injection("random:kinds=kill+bad_sample", world_size=2)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("kill:rank=0,phase=backward", "an attached loop has the phases startup, forming, data,"),
        ("kill:rank=0,phase=compile", "an attached loop has the phases"),
        ("nan:rank=0", "nan is for a task"),
        ("wrong_gradient:rank=0", "wrong_gradient is for a task"),
        ("random:kinds=kill+spike", "spike is for a task"),
    ],
)
def test_what_no_loop_has_is_refused_for_one(spec, says):
    """It would never come; control: what a loop has."""
    with pytest.raises(BadInputError, match=says):
        refuse_of_loops([spec], world_size=2)
    has = ["kill:phase=reducing", "stop:phase=commit", "oom:phase=evaluate", "random:kinds=kill"]
    refuse_of_loops(has, world_size=2)
