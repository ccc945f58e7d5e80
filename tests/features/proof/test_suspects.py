"""Ranks whose drills fail: how that is diagnosed, and what follows where one is proved wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddp_runner.features.proof import suspects
from ddp_runner.features.proof.rules import (
    Case,
    Cause,
    GoBack,
    cause_of,
    diagnosis_line,
    where_to_go_back,
)
from ddp_runner.kernel.rules.exits import ExitCode, RunStatus
from ddp_runner.kernel.wire.events import Diagnosed
from tests.features.proof.test_parent import answer, asked, give, proof, reasons
from tests.supervisor.judging import assert_done, plans
from tests.supervisor.simulated import DRILL

WEIGHT = "layer.weight"
# What a diagnosis has found, by what it comes from.
ONCE = {}
STATE = {"plain": WEIGHT, "places": ("task.queue",)}
DATA = {"plain": "the samples", "with_state": "the samples"}
LASTING = {"plain": WEIGHT, "with_state": WEIGHT, "with_data": WEIGHT}
LASTING |= {"had_state": True, "had_data": True, "agrees": True}
UNSTEADY = {**LASTING, "itself": WEIGHT}


def case(**changes):
    known = {"rank": 1, "step": 40, "differs": WEIGHT, "trusted": 21, "is_proved": True}
    return Case(**{**known, "repeats": True, "process": 1, "reason": "", **changes})


@pytest.mark.parametrize(
    ("found", "changes", "cause"),
    [
        (ONCE, {}, Cause.ONCE),
        (ONCE, {"repeats": False}, Cause.UNSTEADY),
        (ONCE, {"is_another": True}, Cause.PROCESS),
        (STATE, {}, Cause.STATE),
        (DATA, {}, Cause.DATA),
        (LASTING, {}, Cause.LASTING),
        (LASTING, {"is_another": True}, Cause.DEVICE),
        (UNSTEADY, {}, Cause.UNSTEADY),
        ({"itself": WEIGHT}, {}, Cause.UNSTEADY),
    ],
)
def test_a_difference_has_one_cause(found, changes, cause):
    """What is given of the rank decides: the first after which nothing differs any more."""
    message = Diagnosed(rank=1, step=50, **found)
    assert cause_of(case(**changes), message) is cause
    line = diagnosis_line(case(**changes), message, cause)
    assert line.startswith(f"the difference of rank 1 at step 40, first in {WEIGHT}: ")
    assert ("task.queue" in line) == (cause is Cause.STATE)


@pytest.mark.parametrize(
    ("saved", "trusted", "begun", "place"),
    [
        ([10, 20, 30, 45], 25, 0, GoBack(step=20, is_sound=True)),
        ([30, 45], 25, 0, GoBack(step=30, is_sound=False)),  # retention has removed the others
        ([45], 25, 0, None),
        ([], 25, 0, GoBack(step=0, is_sound=True)),
        ([30, 45], 0, 0, GoBack(step=0, is_sound=True)),
        ([10, 30], 10, 10, GoBack(step=10, is_sound=True)),  # resumed from there
        ([], 10, 10, None),  # from elsewhere
    ],
)
def test_ranks_go_back_to_before_the_last_good_drill(saved, trusted, begun, place):
    """Else to before the wrong step, which is said; never past what there is."""
    assert where_to_go_back(saved, trusted=trusted, failed=40, begun=begun) == place


def diagnosing(simulate, monkeypatch, *, saved=(5,), steps=900, **changes):
    """A run whose rank 1 has passed a drill at step 10 and failed one at 20, and is diagnosed."""
    entries = [SimpleNamespace(step=step) for step in saved]
    monkeypatch.setattr(suspects, "Catalog", lambda _: SimpleNamespace(entries=lambda: entries))
    run = simulate(steps=steps, proof_share=0, **changes)
    for step, found in ((10, {}), (20, {"differs": WEIGHT})):
        run.to_step(step)
        give(run, step)
        run.run_until(lambda: run.rank(DRILL))
        answer(run, step, **found)
        run.run_until(lambda: run.rank(DRILL) is None)
    return run


def diagnose(run, **found):
    """The ranks are asked for more, and it shows this."""
    known = len(asked(run))
    run.run_until(lambda: len(asked(run)) > known or asked(run))
    order = asked(run)[-1][0]
    assert order.diagnoses
    run.to_step(order.step)
    give(run, order.step, rank=order.rank)
    run.run_until(lambda: run.rank(DRILL))
    process = run.rank(DRILL)
    run.send(process, Diagnosed(rank=order.rank, step=order.step, **found))
    run._end(process, exit_code=0)
    run.run_until(lambda: run.rank(DRILL) is None)
    return order


def causes(run):
    return [(one["source"], one["of_step"], one["first_in"]) for one in run.events("diagnosed")]


def test_all_ranks_go_back_and_what_is_later_is_set_aside(simulate, monkeypatch):
    """Of one wrong gradient: then nothing of it is left, and the run is exact."""
    run = diagnosing(simulate, monkeypatch)
    run.checkpoint = 15
    run.run_until(lambda: len(reasons(run)) == 1)
    order = diagnose(run, **ONCE)
    run.run_until(lambda: run.events("repaired"))
    assert plans(run) == [(1, "wrong_gradient", (0, 1, 2))]
    assert run.checkpoint == 5, "what all began with"
    assert causes(run) == [("once", 20, WEIGHT)]
    [doubt] = run.events("in_doubt")
    assert (doubt["first"], doubt["rank"]) == (12, 1)
    [undone] = run.events("undone")
    assert (undone["of_step"], undone["step"]) == (20, 5)
    assert reasons(run) == []
    assert order.step in proof(run)
    give(run, run.best, rank=2)
    run.run_until(lambda: run.rank(DRILL))
    answer(run, *run.drills_asked[-1])
    assert_done(run)
    assert reasons(run) == []


@pytest.mark.parametrize("found", [STATE, DATA, UNSTEADY])
def test_what_is_no_device_is_said_and_no_rank_repaired(simulate, monkeypatch, found):
    """Once: a later drill that fails is not diagnosed again."""
    run = diagnosing(simulate, monkeypatch)
    diagnose(run, **found)
    orders = len(asked(run))
    give(run, run.best)
    run.run_until(lambda: run.rank(DRILL))
    answer(run, *run.drills_asked[-1], differs=WEIGHT)
    assert_done(run)
    assert (len(asked(run)), plans(run), run.events("in_doubt")) == (orders, [], [])
    assert len(reasons(run)) == 1


@pytest.mark.parametrize(("min_ranks", "replaced"), [(0, (0, 1, 2)), (1, (0, 2))])
def test_a_device_that_is_wrong_in_two_processes_is_lost(
    simulate, monkeypatch, min_ranks, replaced
):
    """The rank's process is replaced first, to find out; then its place is given up where the run may go on without."""
    run = diagnosing(simulate, monkeypatch, min_ranks=min_ranks)
    diagnose(run, **LASTING)
    run.run_until(lambda: run.events("repaired"))
    assert plans(run) == [(1, "wrong_gradient", (1,))]
    orders = len(asked(run))
    run.run_until(lambda: len(asked(run)) > orders)
    diagnose(run, **LASTING)
    run.run_until(lambda: len(run.events("repaired")) == 2)
    assert plans(run)[1] == (1, "device_lost", replaced)
    assert [cause for cause, *_ in causes(run)] == ["lasting", "device"]


def test_what_is_gone_with_a_process_was_its_state(simulate, monkeypatch):
    """No device is blamed, and no step undone: the run is not exact."""
    run = diagnosing(simulate, monkeypatch)
    diagnose(run, **LASTING)
    run.run_until(lambda: run.events("repaired"))
    orders = len(asked(run))
    run.run_until(lambda: len(asked(run)) > orders)
    diagnose(run, **ONCE)
    assert_done(run)
    assert [cause for cause, *_ in causes(run)] == ["lasting", "process"]
    assert len(plans(run)) == len(reasons(run)) == 1
    assert run.events("in_doubt") == []


def test_a_rank_that_was_replaced_meanwhile_is_not_diagnosed(simulate, monkeypatch):
    """What the former process had, the new one has not: it would pass for a device that was wrong once."""
    run = diagnosing(simulate, monkeypatch)
    run.kill(1)
    run.run_until(lambda: run.events("repaired"))
    orders = len(asked(run))
    assert_done(run)
    assert len(asked(run)) == orders
    assert causes(run) == []


@pytest.mark.parametrize(
    ("changes", "saved", "says"),
    [
        ({"on_wrong_gradient": "continue"}, (5,), "on_wrong_gradient=continue: the run goes on"),
        ({"rollbacks_max": 0}, (5,), "rollbacks_max is used up: the run goes on"),
        ({}, (900,), "no checkpoint from before that is left: the run goes on"),
    ],
)
def test_a_run_that_does_not_go_back_is_not_exact(simulate, monkeypatch, changes, saved, says):
    """Its steps in doubt are named all the same."""
    run = diagnosing(simulate, monkeypatch, saved=saved, **changes)
    diagnose(run, **ONCE)
    assert_done(run)
    [line] = [line for _, line in run.outputs.said if " are in doubt; " in line]
    assert says in line
    assert plans(run) == []
    assert len(reasons(run)) == 1


def test_a_run_may_stop_for_a_wrong_gradient(simulate, monkeypatch):
    """With exit 1: another try would not make its weights right."""
    run = diagnosing(simulate, monkeypatch, on_wrong_gradient="stop")
    diagnose(run, **ONCE)
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.FAILED, ExitCode.FAILED)
    assert "wrong gradient" in ending.error_line + ending.reason


def test_a_gpu_whose_kernels_may_vary_is_not_blamed(simulate, monkeypatch):
    """Control: with run.deterministic its kernels repeat."""
    for is_deterministic in (False, True):
        options = {"deterministic": is_deterministic}
        run = diagnosing(simulate, monkeypatch, devices=(0, 1, 2), run_options=options)
        diagnose(run, **ONCE)
        run.pass_time(1.0)
        assert bool(run.events("in_doubt")) == is_deterministic


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ({"had_state": False}, "state outside the model could not be handed over"),
        ({"had_data": False}, "batch could not be handed over"),
        ({"agrees": False}, "the other process does not repeat its own bits"),
    ],
)
def test_what_could_not_be_tried_blames_nobody(simulate, monkeypatch, lacks, says):
    """No process is replaced to see, and none of its successor: the run is not exact, and goes on."""
    run = diagnosing(simulate, monkeypatch, min_ranks=1)
    diagnose(run, **{**LASTING, **lacks})
    assert_done(run)
    assert [cause for cause, *_ in causes(run)] == ["unknown"]
    assert plans(run) == run.events("in_doubt") == []
    assert says in diagnosis_line(
        case(), Diagnosed(rank=1, step=50, **{**LASTING, **lacks}), Cause.UNKNOWN
    )
    assert len(reasons(run)) == 1


def test_processes_that_never_compute_alike_show_no_device():
    """Where no drill has passed, each process may have something of its own; a second one shows no more."""
    found = Diagnosed(rank=1, step=50, **LASTING)
    for is_another in (False, True):
        one = case(is_another=is_another, are_alike=False)
        assert cause_of(one, found) is Cause.UNKNOWN
        assert "no drill of this launch has passed" in diagnosis_line(one, found, Cause.UNKNOWN)
