"""Ranks that are killed, that leave, or that raise once: the run ends as if nothing had happened."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.processes import poll_settled
from tests.scenarios.conftest import STEPS, WITHOUT_WORKERS
from tests.scenarios.gated import GATE_NAME, LATE_CALL, WAITS_NAME
from tests.scenarios.harness import Run, poll
from tests.scenarios.leftovers import has_lost_a_peer, is_idle, unread_bytes
from tests.scenarios.workload import TROUBLE_NAME

# Each harm comes three seconds before the end, should a test be held up.
SLOWLY = ("task.pace_s=0.2",)


def check_recovered(run, *, kind, digest, ranks, steps=(0,), lost_most=0):
    """Exit 0, the weights of a fault-free run, no step lost that somebody still had, a full record each.

    ``ranks`` in the order of their faults; ``steps``: what rank 0 had committed at least by each.
    """
    assert run.wait() == 0, run.console
    assert run.digest == digest
    summary = run.summary()
    faults = summary["faults"]
    assert [(fault["kind"], fault["rank"]) for fault in faults] == [(kind, one) for one in ranks]
    for generation, (fault, step) in enumerate(zip(faults, steps, strict=True), 1):
        # Another rank may have been about to commit the last of them.
        assert step - (fault["rank"] != 0) <= fault["step"] < STEPS
        assert fault["recovered_s"] > fault["detected_s"] > 0
        assert 0 <= fault["steps_lost"] <= lost_most
        assert fault["generation"] == generation
    assert (summary["exact"], summary["steps"]) == (True, STEPS)
    assert summary["time_s"]["recovery"] > 0
    return faults


def wait_for_repair(run, number):
    """Until the ``number``-th repair is over."""
    poll(lambda: len(run.events("repaired")) >= number, what=f"repair {number}:\n{run.console}")


def test_a_killed_rank_costs_no_weight(fault_free, tmp_path):
    """SIGKILL each rank: it is replaced, the next one can be, and the digest is that of a fault-free run."""
    ranks, steps = (0, 1, 2), (2, 6, 10)
    with Run(tmp_path, *WITHOUT_WORKERS, *SLOWLY, world=3) as run:
        for rank, step in zip(ranks, steps, strict=True):
            run.wait_for_step(step)
            run.signal(signal.SIGKILL, run.rank_pid(rank))
            wait_for_repair(run, rank + 1)
        faults = check_recovered(
            run, kind="rank_killed", digest=fault_free(3).digest, ranks=ranks, steps=steps
        )
    assert all("SIGKILL" in fault["cause"] for fault in faults)


@pytest.mark.parametrize(("call", "search"), [(3, "auto"), (12, False)])
def test_a_rank_stopped_while_its_only_peer_died_loses_no_step(fault_free, tmp_path, call, search):
    """As on a machine that gives it no turn for a moment: gloo forgets whoever waits for it then."""
    (tmp_path / GATE_NAME).write_text(str(call), encoding="utf-8")
    searching = f"ddp.find_unused_parameters={search}".lower()
    task = f"{Path(__file__).with_name('gated.py')}:GatedTask"
    with Run(tmp_path, *WITHOUT_WORKERS, searching, task=task) as run:
        poll((tmp_path / WAITS_NAME).exists, what="rank 1 at the gate")
        waits, comes = run.rank_pid(0), run.rank_pid(1)
        poll_settled(lambda: is_idle(waits), what="rank 0 waiting in the sum of the gradients")
        run.signal(signal.SIGSTOP, waits)
        (tmp_path / GATE_NAME).unlink()
        poll_settled(lambda: unread_bytes(waits), what="what rank 1 has to say in the sum")
        run.signal(signal.SIGSTOP)  # the abort comes when gloo has seen the end by itself
        run.signal(signal.SIGKILL, comes)
        poll(lambda: has_lost_a_peer(waits), what="the end of its connection")
        run.signal(signal.SIGCONT, waits)
        poll_settled(lambda: is_idle(waits), what="rank 0 held or parked")
        run.signal(signal.SIGCONT)
        check_recovered(run, kind="rank_killed", digest=fault_free(2).digest, ranks=(1,))
        formed = {event["pid"] for event in run.events("rank_formed") if event["rank"] == 0}
        assert formed == {waits}  # nobody had to replace it


@pytest.mark.parametrize(
    ("world", "killed", "task"),
    [(3, 2, "gated.py:LateTask"), (2, 0, "silenced.py:LateSilencedTask")],
)
def test_a_step_that_only_the_killed_rank_has_committed_is_not_lost(
    fault_free, tmp_path, world, killed, task
):
    """All sums have ended there and not at the others, of which one is late: with gloo, and as NCCL aborts."""
    kill = f"kill:rank={killed},step={LATE_CALL},phase=data"
    settings = (*WITHOUT_WORKERS, "recovery.drill_at=off", "--inject", kill)
    with Run(tmp_path, *settings, world=world, task=str(Path(__file__).with_name(task))) as run:
        digest = fault_free(world).digest
        check_recovered(run, kind="rank_killed", digest=digest, ranks=(killed,), steps=(LATE_CALL,))


def test_the_only_rank_is_killed_and_comes_back_from_its_checkpoint(fault_free, tmp_path):
    """With no replica left the newest checkpoint is the source, and the lost steps are counted."""
    with Run(tmp_path, *WITHOUT_WORKERS, *SLOWLY, "save_every_steps=5", world=1) as run:
        run.wait_for_step(8)
        run.wait_for_checkpoint(5)
        run.signal(signal.SIGKILL, run.rank_pid(0))
        (fault,) = check_recovered(
            run,
            kind="rank_killed",
            digest=fault_free(1).digest,
            ranks=(0,),
            steps=(8,),
            lost_most=STEPS,
        )
    (formed,) = [one for one in run.events("rank_formed") if one["generation"] == 2]
    (killed,) = run.events("fault")
    reported = [one["step"] for one in run.events("checkpoint_saved") if one["id"] < killed["id"]]
    assert formed["committed_step"] >= max([5, *reported]), "the newest save may still be under way"
    assert fault["steps_lost"] + formed["committed_step"] in (fault["step"], fault["step"] + 1)


def test_a_rank_that_leaves_before_the_end_is_replaced(fault_free, tmp_path):
    """os._exit in user code is a fault whatever the code, and so is sys.exit: the peers wait."""
    with Run(tmp_path, *WITHOUT_WORKERS, *SLOWLY) as run:
        for number, action in enumerate(("exit0", "leave", "exit7")):
            run.wait_for_step(2 + 4 * number)
            (tmp_path / TROUBLE_NAME).write_text(f"loss 1 {action}")
            wait_for_repair(run, number + 1)
        assert run.wait() == 0, run.console
    assert run.digest == fault_free(2).digest
    faults = run.summary()["faults"]
    assert [(fault["kind"], fault["rank"], fault["steps_lost"]) for fault in faults] == [
        ("rank_exited", 1, 0),
        ("rank_raised", 1, 0),
        ("rank_exited", 1, 0),
    ]
    for fault, words in zip(faults, ("code 0", "SystemExit: 0", "code 7"), strict=True):
        assert words in fault["cause"]


def test_a_fault_is_reported_when_it_happens_and_when_it_is_repaired(fault_free, tmp_path):
    """One line each, with culprit, cause and cost; the record names who merely lost a peer.

    A traceback of user code stands once on the console and in its rank's log, and in no other one.
    """
    # Of rank 0, the tenth step is its eleventh call. After the kill it is also its twelfth one, unless rank 1's part of
    # the sum was sent before that: then the step is whole, and the seventeenth call is one step later.
    (tmp_path / TROUBLE_NAME).write_text("loss 0 raise 17", encoding="utf-8")
    kill = ("--inject", "kill:rank=1,step=10,phase=reduce", "log.display=plain", "task.pace_s=0")
    with Run(tmp_path, *WITHOUT_WORKERS, *kill) as run:
        assert run.wait() == 0, run.console
    assert (run.digest, run.summary()["exact"]) == (fault_free(2).digest, True)
    for reported, replaced in (
        (r"rank 1 killed \(SIGKILL\) at step 10 in reduce", "rank 1"),
        (
            r"rank 0: RuntimeError: trouble was asked for \(workload\.py:\d+\) at step 1[56] in forward",
            "rank 0",
        ),
    ):
        assert len(re.findall(f"{reported}; replacing {replaced}\n", run.console)) == 1, run.console
        repaired = rf"{reported} -> replaced, no step lost \(\d+\.\d\d s\)\n"
        assert len(re.findall(repaired, run.console)) == 1, run.console
    killed, raised = run.summary()["faults"]
    assert (killed["kind"], killed["rank"], killed["victims"]) == ("rank_killed", 1, [0])
    assert (raised["kind"], raised["rank"], raised["victims"]) == ("rank_raised", 0, [1])
    assert killed["detail"] == ""
    assert raised["detail"].rstrip().endswith("RuntimeError: trouble was asked for")
    logs = [(run.logs / f"rank_{rank}.log").read_text(encoding="utf-8") for rank in (0, 1)]
    for text in (run.console, raised["detail"]):  # the log has that of the lost peer, too
        assert text.count("Traceback (most recent call last)") == 1, text
    for text in (run.console, raised["detail"], logs[0]):
        assert text.count('raise RuntimeError("trouble was asked for")') == 1, text
    assert "trouble was asked for" not in logs[1]


def test_two_ranks_killed_at_once_are_both_replaced(fault_free, tmp_path):
    """One survivor is enough: it holds everything that was committed. One repair is, too."""
    with Run(tmp_path, *WITHOUT_WORKERS, *SLOWLY, world=3) as run:
        run.wait_for_step(7)
        run.signals_at_once(*((signal.SIGKILL, run.rank_pid(rank)) for rank in (0, 2)))
        assert run.wait() == 0, run.console
    assert run.digest == fault_free(3).digest
    summary = run.summary()
    assert summary["exact"] is True
    assert [(fault["kind"], fault["steps_lost"]) for fault in summary["faults"]] == [
        ("rank_killed", 0)
    ]
    assert [plan["replaced"] for plan in run.events("plan")] == [[0, 2]]
