"""Ranks whose drills fail: how that is diagnosed, and what follows where one is proved wrong."""

from __future__ import annotations

import itertools
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
from ddp_runner.kernel.rules.faults import Fault, FaultKind
from ddp_runner.kernel.wire.events import Diagnosed, DrillSkipped, RepairedInPlace
from tests.features.proof.test_parent import answer, asked, give, keeper_of, proof, reasons
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
    return Case(**{**known, "since": "", "repeats": True, "process": 1, **changes})


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


def test_other_samples_are_never_a_wrong_gradient():
    """They are compared before anything is computed from them."""
    samples = "the samples"
    for found in (ONCE, LASTING, STATE, UNSTEADY, dict.fromkeys(LASTING, samples)):
        for is_another in (False, True):
            message = Diagnosed(rank=1, step=50, **found)
            cause = cause_of(case(differs=samples, is_another=is_another), message)
            assert cause in (Cause.DATA, Cause.UNSTEADY, Cause.STATE, Cause.PROCESS)
    line = diagnosis_line(case(differs=samples), Diagnosed(rank=1, step=50), Cause.UNSTEADY)
    assert "now and then does not depend on the index alone" in line


def orders(run):
    """The steps at which ranks were asked for more."""
    return {one.step for one, _ in asked(run) if one.diagnoses}


def drill(run, step, rank=1, **found):
    """A drill of that step, which the ranks have committed, and its result."""
    run.run_until(lambda: run.supervisor.facts.committed_step >= step)
    give(run, step, rank=rank)
    run.run_until(lambda: run.rank(DRILL))
    answer(run, step, rank, **found)
    run.pass_time(0.05)


def see_right(run):
    """All have gone back: the suspect is drilled, at the step that was wrong, and is right."""
    run.run_until(lambda: not asked(run)[-1][0].diagnoses)
    order = asked(run)[-1][0]
    assert (order.rank, order.step) == (1, 20)
    drill(run, order.step)


DRILLS = ((10, {}), (20, {"differs": WEIGHT}))  # step, and what it has found


def diagnosing(simulate, monkeypatch, *, saved=(5,), steps=900, drills=DRILLS, rank=1, **changes):
    """A run whose rank 1 has passed a drill at step 10 and failed one at 20, and is diagnosed."""
    entries = [SimpleNamespace(step=step) for step in saved]
    spared = []
    catalog = SimpleNamespace(entries=lambda: entries, spare=spared.append, spare_none=spared.clear)
    monkeypatch.setattr(suspects, "Catalog", lambda _: catalog)
    run = simulate(steps=steps, proof_share=0, **changes)
    run.spared = spared
    for step, found in drills:
        run.to_step(step)
        give(run, step, rank=rank)
        run.run_until(lambda: run.rank(DRILL))
        answer(run, step, rank, **found)
        run.run_until(lambda: run.rank(DRILL) is None)
    return run


def diagnose(run, **found):
    """The ranks are asked for more, and it shows this."""
    answered = {one["step"] for one in run.events("diagnosed")}
    run.run_until(lambda: orders(run) - answered)
    order = next(one for one, _ in reversed(asked(run)) if one.diagnoses)
    run.run_until(lambda: run.supervisor.facts.committed_step >= order.step)
    give(run, order.step, rank=order.rank)
    run.run_until(lambda: run.rank(DRILL))
    process = run.rank(DRILL)
    run.send(process, Diagnosed(rank=order.rank, step=order.step, **found))
    run._end(process, exit_code=0)
    run.pass_time(0.05)
    return order


@pytest.mark.parametrize("wanted", ["rollback", "continue"])
def test_the_checkpoint_to_go_back_to_is_kept(simulate, monkeypatch, wanted):
    """From before the last good drill of each rank that has one; control: not where nobody would go back."""
    run = diagnosing(simulate, monkeypatch, on_wrong_gradient=wanted, drills=())
    for step, rank in ((10, 1), (20, 2), (30, 1)):
        drill(run, step, rank)
    assert run.spared == [11, 11, 21] * (wanted == "rollback")
    keeper_of(run).tidies_up()
    assert run.spared == []


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
    assert order.step in proof(run)
    see_right(run)
    [undone] = run.events("undone")
    assert (undone["of_step"], undone["step"]) == (20, 5)
    assert reasons(run) == []
    assert_done(run)
    assert reasons(run) == []


def test_a_reason_stays_until_the_suspect_was_seen_right(simulate, monkeypatch):
    """That all have gone back shows nothing, nor does another rank, nor an earlier step: three tries, then it stays."""
    run = diagnosing(simulate, monkeypatch, steps=3000)
    diagnose(run, **ONCE)
    run.run_until(lambda: run.events("repaired"))
    assert keeper_of(run).owes().rank == 1
    for step, rank in ((7, 1), (30, 2)):
        drill(run, step, rank)
    assert len(reasons(run)) == 1
    run.run_until(lambda: any("the run stays not exact" in line for _, line in run.outputs.said))
    tries = {one.step for one, _ in asked(run) if not one.diagnoses}
    assert len(tries) == 3
    assert min(tries) == 20, "the same step"
    assert_done(run)
    assert run.events("undone") == []
    assert len(reasons(run)) == 1


def test_a_drill_from_before_going_back_shows_nothing_behind_it(simulate, monkeypatch):
    """Its share was computed on what all have left."""
    run = diagnosing(simulate, monkeypatch)
    monkeypatch.setattr(keeper_of(run), "_pending_steps", lambda: {25})
    diagnose(run, **ONCE)
    run.run_until(lambda: run.events("repaired"))
    keeper_of(run)._has_passed(1, 25)
    assert run.events("undone") == []


@pytest.mark.parametrize("is_gpu", [False, True])
def test_a_second_time_is_a_device_only_on_its_own_gpu(simulate, monkeypatch, is_gpu):
    """All ranks share the processor: what acts now and then in one of them is not that."""
    gpus = {"devices": (0, 1, 2), "run_options": {"deterministic": True}} if is_gpu else {}
    run = diagnosing(simulate, monkeypatch, **gpus)
    diagnose(run, **ONCE)
    run.run_until(lambda: run.events("repaired"))
    see_right(run)
    drill(run, 60, differs=WEIGHT)
    diagnose(run, **ONCE)
    if is_gpu:
        run.run_until(lambda: len(run.events("repaired")) == 2)
    else:
        assert_done(run)
    assert [cause for cause, *_ in causes(run)] == ["once", "once" if is_gpu else "recurs"]
    assert [kind for _, kind, _ in plans(run)] == ["wrong_gradient", "device_lost"][: 1 + is_gpu]
    assert len(reasons(run)) == 1


def test_without_a_good_drill_nothing_is_undone(simulate, monkeypatch):
    """Nothing is known of the rank's steps: all of them are not given up for that."""
    run = diagnosing(simulate, monkeypatch, drills=((20, {"differs": WEIGHT}),))
    diagnose(run, **ONCE)
    assert_done(run)
    assert plans(run) == []
    assert any("no step is known to be right" in line for _, line in run.outputs.said)
    assert len(reasons(run)) == 1


@pytest.mark.parametrize("by_processes", [False, True])
def test_what_was_gone_back_from_is_not_trusted(simulate, monkeypatch, by_processes):
    """A drill passed at 30; all went back to 15; one fails at 30: what was saved at 25 has the wrong step in it, perhaps."""
    run = diagnosing(simulate, monkeypatch, saved=(5, 25), drills=((10, {}), (30, {})))
    if by_processes:
        run.checkpoint = 15
        run.kill(0, 1, 2)
        run.run_until(lambda: run.events("repaired"))
    else:
        fault = Fault(kind=FaultKind.NON_FINITE, rank=0, step=40, cause="x")
        message = RepairedInPlace(rank=0, fault=fault, action="", seconds=0.1, steps_lost=25)
        run.send(run.rank(0), message)
        run.pass_time(0.1)
    drill(run, 30, differs=WEIGHT)
    diagnose(run, **ONCE)
    [doubt] = run.events("in_doubt")
    assert doubt["first"] == 16
    assert keeper_of(run)._suspects._standing[1].left.back_at == 5


def test_what_is_trusted_ends_before_the_wrong_step(simulate, monkeypatch):
    """Also where a later drill has passed before."""
    run = diagnosing(simulate, monkeypatch, drills=((40, {}), (30, {"differs": WEIGHT})))
    diagnose(run, **ONCE)
    [doubt] = run.events("in_doubt")
    assert doubt["first"] == 31


@pytest.mark.parametrize("is_skipped", [True, False])
def test_a_diagnosis_without_a_verdict_is_given_up(simulate, monkeypatch, is_skipped):
    """After three tries with a pause between, or at once where a drill says that there is no more to say."""
    run = diagnosing(simulate, monkeypatch, steps=3000)
    times = []
    for number in range(3 if is_skipped else 1):
        run.run_until(lambda number=number: len(orders(run)) > number)
        times.append(run.clock.now_s)
        step = max(orders(run))
        run.to_step(step)
        give(run, step)
        run.run_until(lambda: run.rank(DRILL))
        process = run.rank(DRILL)
        if is_skipped:
            run.send(process, DrillSkipped(rank=1, step=step, text="memory is short"))
            run._end(process, exit_code=0)
        else:
            answer(run, step)
        run.run_until(lambda: run.rank(DRILL) is None)
    assert_done(run)
    assert len(orders(run)) == len(times)
    assert all(after - before >= 10 for before, after in itertools.pairwise(times))
    assert any("could not be diagnosed" in line for _, line in run.outputs.said)
    assert (plans(run), len(reasons(run))) == ([], 1)


def test_a_suspect_that_is_gone_is_not_waited_for(simulate, monkeypatch):
    """Other drills go on."""
    run = diagnosing(simulate, monkeypatch)
    suspects = keeper_of(run)._suspects
    assert suspects.wish(run.clock.now_s, [0, 2]) is None
    assert suspects._case is None


def test_ranks_that_differ_are_diagnosed_in_turn(simulate, monkeypatch):
    """Each has a reason of its own, and where several differ no device of one is to blame."""
    run = diagnosing(simulate, monkeypatch)
    drill(run, 22, 2, differs=WEIGHT)
    diagnose(run, **STATE)
    order = diagnose(run, **ONCE)
    assert order.rank == 2
    assert [one["rank"] for one in run.events("diagnosed")] == [1, 2]

    run = diagnosing(simulate, monkeypatch)
    drill(run, 22, 2, differs=WEIGHT)
    diagnose(run, **ONCE)  # on a processor that both share: no device of one rank is to blame
    assert [one["source"] for one in run.events("diagnosed")] == ["recurs"]
    assert plans(run) == []
    assert len(reasons(run)) == 2


def test_a_reason_stays_where_nobody_has_gone_back(simulate, monkeypatch):
    """The verdict has come as all ranks finished: it was dropped, and others form."""
    run = diagnosing(simulate, monkeypatch)
    monkeypatch.setattr(keeper_of(run), "found", lambda: None)
    diagnose(run, **ONCE)
    run.kill(2)
    run.run_until(lambda: run.events("repaired"))
    drill(run, run.best)
    assert run.events("undone") == []
    assert len(reasons(run)) == 1


def test_no_rank_goes_back_behind_its_stage(simulate, monkeypatch):
    """Its checkpoints are another training's."""
    run = diagnosing(
        simulate, monkeypatch, stage_ends=(30, 900), drills=((10, {}), (40, {"differs": WEIGHT}))
    )
    diagnose(run, **ONCE)
    assert_done(run)
    assert plans(run) == []
    assert any("no earlier checkpoint is left" in line for _, line in run.outputs.said)


def test_to_see_is_not_charged_and_needs_another_holder(simulate, monkeypatch):
    """No repair is left; control: a rank that is alone is not replaced."""
    run = diagnosing(simulate, monkeypatch, max_restarts=0)
    diagnose(run, **LASTING)
    run.run_until(lambda: run.events("repaired"))
    assert plans(run) == [(1, "wrong_gradient", (1,))]

    run = diagnosing(simulate, monkeypatch, ranks=1, rank=0)
    diagnose(run, **LASTING)
    assert_done(run)
    assert plans(run) == []


def test_the_last_holder_is_not_replaced_to_see(simulate, monkeypatch):
    """The others have died in the same moment."""
    run = diagnosing(simulate, monkeypatch)
    run.checkpoint = 0
    answers = keeper_of(run).found

    def found():
        it = answers()
        if it is not None:
            run.kill(0, 2)
        return it

    monkeypatch.setattr(keeper_of(run), "found", found)
    diagnose(run, **LASTING)
    run.run_until(lambda: run.events("repaired"))
    [(_, _, replaced)] = plans(run)
    assert replaced == (0, 2)


def test_a_run_that_must_be_exact_goes_back_first(simulate, monkeypatch):
    """And is exact; control: for what is not undone it ends, and says what is in doubt."""
    run = diagnosing(simulate, monkeypatch, require_exact=True)
    diagnose(run, **ONCE)
    run.run_until(lambda: run.events("repaired"))
    see_right(run)
    assert_done(run)

    run = diagnosing(simulate, monkeypatch, require_exact=True, saved=(900,))
    diagnose(run, **ONCE)
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.FAILED, ExitCode.FAILED)
    words = run.supervisor.closing_words()
    assert "the steps from 12 on are in doubt: there is no checkpoint from before them" in words


def test_a_later_repair_without_proof_is_said_once_all_is_undone(simulate, monkeypatch):
    """That a drill had differed explains nothing any more."""
    run = diagnosing(simulate, monkeypatch)
    diagnose(run, **ONCE)
    run.run_until(lambda: run.events("repaired"))
    see_right(run)
    run.kill(2)
    run.run_until(lambda: len(run.events("repaired")) == 2)
    assert_done(run)
    [reason] = reasons(run)
    assert reason.startswith("not proved")


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
        ({"on_wrong_gradient": "continue"}, (5,), "on_wrong_gradient=continue: the run continues"),
        ({"rollbacks_max": 0}, (5,), "rollbacks_max is used up: the run continues"),
        ({}, (900,), "no earlier checkpoint is left: the run continues"),
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


def test_a_rank_that_is_wrong_twice_is_only_reported(simulate, monkeypatch):
    """With on_wrong_gradient=continue no device counts as lost, and nobody is replaced; control: also not to see."""
    gpus = {"devices": (0, 1, 2), "run_options": {"deterministic": True}}
    run = diagnosing(simulate, monkeypatch, on_wrong_gradient="continue", min_ranks=1, **gpus)
    diagnose(run, **ONCE)
    drill(run, 60, differs=WEIGHT)
    diagnose(run, **ONCE)
    drill(run, 90, differs=WEIGHT)
    diagnose(run, **LASTING)
    assert_done(run)
    assert [cause for cause, *_ in causes(run)] == ["once", "once", "lasting"]
    assert plans(run) == []
    assert [one["rank"] for one in run.events("in_doubt")] == [1, 1]
    assert len(reasons(run)) == 1


def test_a_run_may_stop_for_a_wrong_gradient(simulate, monkeypatch):
    """With exit 1: another try would not make its weights right."""
    run = diagnosing(simulate, monkeypatch, on_wrong_gradient="stop")
    diagnose(run, **ONCE)
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.FAILED, ExitCode.FAILED)
    assert "wrong gradient" in ending.error_line + ending.reason


def test_a_run_that_stops_for_it_does_so_at_its_end_too(simulate, monkeypatch):
    """All ranks had finished, and saved, before the diagnosis was there."""
    run = diagnosing(simulate, monkeypatch, on_wrong_gradient="stop")
    monkeypatch.setattr(keeper_of(run), "found", lambda: None)
    diagnose(run, **ONCE)
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.FAILED, ExitCode.FAILED)
    assert ending.reason == (
        "training is complete, but rank 1 has computed a wrong gradient, first in layer.weight"
        " (recovery.on_wrong_gradient=stop)"
    )
    assert run.best == run.steps


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
