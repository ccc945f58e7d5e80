"""Drills of ranks on another machine: a wrong gradient there is found there, and undone."""

from __future__ import annotations

from tests.scenarios.harness import ended

# Of two ranks the second, which is the other machine's, is drilled at the second of each pair of steps.
PAIRS = ("drill_at=2,3,14,15", "recovery.proof_share=0", "task.pace_s=0.2", "keep_last=50")
WRONG = "wrong_gradient:rank=1,step=15,bit=12"


def test_a_wrong_gradient_on_another_machine_is_found_and_undone(nodes, one_machine):
    """Each machine has folders of its own. Control: the drills of steps without a wrong bit pass."""
    settings = (*PAIRS, "save_every_steps=3", "--inject", WRONG)
    first, other = (nodes.start(number, *settings, ranks=1) for number in (0, 1))
    first.wait_for_event("in_doubt")  # the steps leave drills the time until then
    assert ended(first, other) == (0, 0), first.console
    summary, drills = first.summary(), first.events("drill")
    assert {3, 14} <= set(summary["exact_proof"]["drilled"]), first.console
    assert all(one["host"] for one in drills), drills
    found = summary["exact_proof"]["differences"]
    shown = [(one["rank"], one["step"], one["cause"], one["undone"]) for one in found]
    assert shown == [(1, 15, "once", True)], first.console
    assert all(one["host"] == summary["faults"][0]["host"] != "" for one in found)
    assert "node 1: a replacement of rank 1 would not" in first.console
    assert summary["exact"], first.console
    assert first.digest == one_machine(2)
    assert not list(nodes.folder.glob("node*/**/.drill"))
