"""Ranks that are killed, that leave, or that raise once: the run ends as if nothing had happened."""

from __future__ import annotations

import random
import re
import signal

import pytest

from tests.scenarios.conftest import SETTINGS, STEPS
from tests.scenarios.harness import Run, poll
from tests.scenarios.workload import TROUBLE_NAME


def check_recovered(run, *, rank, kind, digest, least_step=0):
    """Exit 0, the weights of peace, and one fault record that says what happened."""
    assert run.wait() == 0, run.console
    assert run.digest == digest
    summary = run.summary()
    assert len(summary["faults"]) == 1, summary["faults"]
    fault = summary["faults"][0]
    assert (fault["kind"], fault["rank"]) == (kind, rank)
    assert least_step <= fault["step"] < STEPS
    assert fault["recovered_s"] > fault["detected_s"] > 0
    assert fault["steps_lost"] >= 0
    assert fault["generation"] == 1
    assert (summary["exact"], summary["steps"]) == (True, STEPS)
    assert summary["time_s"]["recovery"] > 0
    return fault


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_killed_rank_costs_no_weight(peace, tmp_path, rank):
    """SIGKILL any rank at any step: it is replaced and the digest is that of peace."""
    step = random.Random(rank).randrange(3, STEPS - 25)
    with Run(tmp_path, *SETTINGS, world=3) as run:
        run.wait_for_step(step)
        run.signal(signal.SIGKILL, run.rank_pid(rank))
        fault = check_recovered(
            run, rank=rank, kind="rank_killed", digest=peace(3).digest, least_step=step
        )
    assert "SIGKILL" in fault["cause"]


def test_the_only_rank_is_killed_and_comes_back_from_its_checkpoint(peace, tmp_path):
    """With no replica left the newest checkpoint is the source, and the lost steps are counted."""
    with Run(tmp_path, *SETTINGS, world=1) as run:
        run.wait_for_step(26)
        run.signal(signal.SIGKILL, run.rank_pid(0))
        fault = check_recovered(
            run, rank=0, kind="rank_killed", digest=peace(1).digest, least_step=26
        )
    assert fault["steps_lost"] <= 10  # save_every_steps


@pytest.mark.parametrize("code", [0, 7])
def test_a_rank_that_leaves_before_the_end_is_replaced(peace, tmp_path, code):
    """os._exit in user code is a fault whatever the code: the peers wait for that rank."""
    with Run(tmp_path, *SETTINGS) as run:
        run.wait_for_step(14)
        (tmp_path / TROUBLE_NAME).write_text(f"loss 1 exit{code}")
        fault = check_recovered(run, rank=1, kind="rank_exited", digest=peace(2).digest)
    assert f"code {code}" in fault["cause"]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_that_comes_once_is_told_once_and_survived(peace, tmp_path, rank):
    """User code that raises is retried; its traceback stands once on the console and in its log."""
    with Run(tmp_path, *SETTINGS) as run:
        run.wait_for_step(14)
        (tmp_path / TROUBLE_NAME).write_text(f"loss {rank} raise")
        fault = check_recovered(run, rank=rank, kind="rank_raised", digest=peace(2).digest)
    assert "trouble was asked for" in fault["cause"]
    log = (run.logs / f"rank_{rank}.log").read_text(encoding="utf-8")
    for text in (run.console, log):
        assert text.count("Traceback (most recent call last)") == 1, text
        assert text.count('raise RuntimeError("trouble was asked for")') == 1
    peer_log = (run.logs / f"rank_{1 - rank}.log").read_text(encoding="utf-8")
    assert "trouble was asked for" not in peer_log


def test_a_fault_is_told_when_it_happens_and_when_it_is_repaired(tmp_path):
    """One line each, with culprit, cause and cost; the record names who merely lost a peer."""
    harm = (
        *("--inject", "kill:rank=1,step=10,phase=reduce"),
        *("--inject", "raise:rank=0,step=16,phase=backward"),
    )
    settings = (*SETTINGS, "--max-steps", 24, "log.display=plain", "task.pace_s=0")
    with Run(tmp_path, *settings, *harm, world=2) as run:
        assert run.wait() == 0, run.console
    for told, replaced in (
        (r"rank 1 killed \(SIGKILL\) at step 10 in reduce", "rank 1"),
        (r"rank 0: InjectedError: an injected exception at step 16 in backward", "rank 0"),
    ):
        assert len(re.findall(f"{told}; replacing {replaced}\n", run.console)) == 1, run.console
        repaired = rf"{told} -> respawned, 0 steps lost, \d+\.\d\d s\n"
        assert len(re.findall(repaired, run.console)) == 1, run.console
    killed, raised = run.summary()["faults"]
    assert (killed["rank"], killed["victims"], killed["detail"]) == (1, [0], "")
    assert (raised["rank"], raised["victims"]) == (0, [1])
    assert raised["detail"].rstrip().endswith("InjectedError: an injected exception")
    assert "Traceback (most recent call last)" in raised["detail"]


def test_two_ranks_killed_at_once_are_both_replaced(peace, tmp_path):
    """One survivor is enough: it holds everything that was committed."""
    with Run(tmp_path, *SETTINGS, world=3) as run:
        run.wait_for_step(20)
        for rank in (0, 2):
            run.signal(signal.SIGKILL, run.rank_pid(rank))
        assert run.wait() == 0, run.console
    assert run.digest == peace(3).digest
    assert run.summary()["exact"] is True


def test_ranks_killed_again_and_again_cost_no_weight(peace, tmp_path):
    """Each repair leaves a world that can be repaired again."""
    with Run(tmp_path, *SETTINGS) as run:
        for number, rank in enumerate((1, 0, 1)):
            run.wait_for_step(12 + 14 * number)
            run.signal(signal.SIGKILL, run.rank_pid(rank))
            poll(lambda: len(run.events("repaired")) > number, what="the repair")  # noqa: B023
        assert run.wait() == 0, run.console
    assert run.digest == peace(2).digest
    assert [fault["rank"] for fault in run.summary()["faults"]] == [1, 0, 1]
