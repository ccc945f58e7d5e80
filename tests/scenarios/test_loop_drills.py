"""Drills of attached loops: the program runs once more, as a replacement, up to the update of the step."""

from __future__ import annotations

import signal

import pytest

from tests.scenarios.conftest import filled_once
from tests.scenarios.harness import poll
from tests.scenarios.test_attached import LOOPS, final, run_loop

DRILLED = LOOPS / "drilled.py"


WAITS = ("--waits-at-4", "--waits-at", 8)


def run_drilled(folder, *words, drills="2,5", options=()):
    """The loop of this test, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    settings = (f"drill_at={drills}", "recovery.proof_share=0", *options)
    return run_loop(folder, *words, loop=DRILLED, options=settings)


@pytest.fixture(scope="session")
def without_drills(tmp_path_factory, worker_id):
    """What the loop has saved at its end where nothing was drilled, and no rank lost."""

    def make(folder):
        with run_drilled(folder, drills="off") as run:
            assert run.wait() == 0, run.console
        assert run.summary()["exact_proof"]["repeated"] == 1, "the first body is compared"

    return final(filled_once(tmp_path_factory, worker_id, make, "a loop without drills"))


def both_drills(run, event="drill"):
    """Wait for the drills of steps 2 and 5. The loop waits between them: of two that are ready only the newer one is made."""
    run.wait_for_event(event, step=2)
    (run.folder / "first").touch()
    run.wait_for_event(event, step=5)


def go(run):
    """Let the loop pass the step at which it waits."""
    (run.folder / "go").touch()


def test_what_a_loop_does_on_rank_0_is_done_once(tmp_path, without_drills):
    """Each drill is of another rank, has its number, ends inside the body, and changes no bit of the run."""
    with run_drilled(tmp_path, *WAITS) as run:
        both_drills(run)
        go(run)
        assert run.wait() == 0, run.console
    assert final(tmp_path) == without_drills
    proof = run.summary()["exact_proof"]
    assert (run.summary()["exact"], proof["drilled"]) == (True, [2, 5]), run.console
    assert [(one["rank"], one["differs"]) for one in run.events("drill")] == [(1, "")] * 2
    assert (tmp_path / "begun").read_text() == "x"
    assert not (tmp_path / "unwound").exists()
    log = (run.logs / "drill.log").read_text(encoding="utf-8")
    assert log.count("begun as rank 1 another one") == 2
    assert not (run.checkpoints / ".drill").exists()


def test_whoever_is_killed_around_a_drill_no_step_is_lost(tmp_path, without_drills):
    """Its process, then the rank that is drilled, then rank 0 as soon as it writes the state: each repair is proved."""
    with run_drilled(
        tmp_path, "--waits-at", 7, "--waits-s", 0.4, "--lingers", 2, drills="2,6"
    ) as run:
        for number in (0, 1):
            mark = tmp_path / f"lingers_{number}"
            poll(lambda file=mark: file.exists() and file.read_text(), what=f"a drill: {number}")
            victim = int(mark.read_text()) if number == 0 else run.rank_pid(1)
            run.signal(signal.SIGKILL, victim)
        folder = run.checkpoints / ".drill"
        old = {"step_00000002", "step_00000006"}
        poll(
            lambda: {one.parent.name for one in folder.glob("step_*/state")} - old,
            what="the state of a drill of the repaired run",
        )
        run.signal(signal.SIGKILL, run.rank_pid(0))
        go(run)
        assert run.wait() == 0, run.console
    assert final(tmp_path) == without_drills
    summary = run.summary()
    assert summary["exact"], run.console
    assert [(one["kind"], one["steps_lost"]) for one in summary["faults"]] == [
        ("rank_killed", 0)
    ] * 2
    assert summary["exact_proof"]["repairs_proved"] == "2 of 2", run.console
    assert "drill at step 2 of rank 1 skipped: its process ended (signal 9)" in run.console


def test_a_drill_gets_what_its_rank_got_from_the_others(tmp_path):
    """A sum before the first backward, asked for by the run: the repair is proved."""
    with run_drilled(tmp_path, *WAITS, "--asks", "the run", drills="2,5,8") as run:
        both_drills(run)
        run.signal(signal.SIGKILL, run.rank_pid(1))
        go(run)
        assert run.wait() == 0, run.console
    assert run.summary()["exact"], run.console
    assert {one["differs"] for one in run.events("drill")} == {""}
    assert run.summary()["exact_proof"]["repairs_proved"] == "1 of 1", run.console


@pytest.mark.parametrize(
    ("flag", "said", "reason"),
    [
        ("--hidden", "", "a replacement of rank 1 would not compute the same at step 2: first in"),
        ("--asks=itself", "the loop asks the other ranks for something (allreduce)", ""),
    ],
)
def test_hidden_state_is_found_and_what_cannot_be_drilled_is_said(tmp_path, flag, said, reason):
    """A counter of the program's: with a parameter's name. A sum over ranks before the first backward is no finding."""
    with run_drilled(tmp_path, *WAITS, flag) as run:
        both_drills(run, "drill_skipped" if said else "drill")
        go(run)
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["exact"] is not bool(reason), summary["inexact_reasons"]
    assert summary["exact_proof"]["drilled"] == []
    assert len(summary["inexact_reasons"]) == bool(reason)
    assert all(f"{reason} model.0.weight" in one for one in summary["inexact_reasons"]), summary
    assert run.console.count("of rank 1 skipped: ") == bool(said)
    assert said in run.console
    assert not (tmp_path / "unwound").exists()


def test_a_rate_that_follows_a_hidden_count_is_found(tmp_path):
    """All ranks are killed: they agree with each other, and not with the run without faults, which is said."""
    with run_drilled(tmp_path, *WAITS, "--rate", "iterator") as run:
        both_drills(run)
        assert run.console.count("would not compute the same update at step 2: first in lr of") == 1
        assert "would not compute the same update at step 5" not in run.console
        for rank in (0, 1):
            run.signal(signal.SIGKILL, run.rank_pid(rank))
        go(run)
        assert run.wait() == 0, run.console
    summary = run.summary()
    [reason] = summary["inexact_reasons"]
    assert "state that an update uses (in a global, a closure, the environment" in reason
    first = run.events("drill")[0]
    assert (first["differs"], first["updated"]) == ("lr of the optimizer's group 0", True)
    assert not summary["exact"]
    assert not (tmp_path / "unwound").exists()


def test_a_rate_that_follows_a_kept_count_is_exact_through_a_repair(tmp_path):
    """Its drills make the update, and pass, before a repair and after it."""
    with run_drilled(tmp_path, *WAITS, "--rate", "kept", drills="2,5,8") as run:
        both_drills(run)
        run.signal(signal.SIGKILL, run.rank_pid(1))
        go(run)
        assert run.wait() == 0, run.console
    summary = run.summary()
    assert summary["exact"], run.console
    assert {(one["differs"], one["updated"]) for one in run.events("drill")} == {("", True)}
    assert summary["exact_proof"]["repairs_proved"] == "1 of 1", run.console


def test_what_a_drill_has_found_makes_a_resume_inexact(tmp_path):
    """The finding is in the checkpoint; without another process the run itself is exact."""
    words = (*WAITS, "--rate", "environment")
    with run_drilled(tmp_path, *words) as run:
        both_drills(run)
        run.signal(signal.SIGTERM)
        go(run)
        assert run.wait() == 75, run.console
    assert run.summary()["exact"], run.console
    with run_drilled(tmp_path, *words, drills="off") as run:
        assert run.wait() == 0, run.console
    [reason] = run.summary()["inexact_reasons"]
    assert "state that an update uses" in reason
    assert "could not be kept over a resume" in reason


@pytest.mark.parametrize(
    ("words", "options"),
    [((), ("--inject", "kill:rank=1,step=0,phase=forward")), (("--loses",), ())],
    ids=["rehearsed", "made"],
)
def test_a_first_body_that_is_interrupted_is_rehearsed_again(tmp_path, words, options):
    """A rank is lost while the ranks rehearse it, or make the step: they compare both after the repair."""
    with run_drilled(tmp_path, "--hidden", *words, drills="off", options=options) as run:
        assert run.wait() == 0, run.console
    assert len(run.summary()["faults"]) == 1
    assert "the first step cannot be repeated" in "; ".join(run.summary()["inexact_reasons"])
