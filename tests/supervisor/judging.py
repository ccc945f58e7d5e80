"""What scripts on simulated processes ask of a run."""

from __future__ import annotations

from collections import Counter

from ddp_runner.kernel.rules.exits import ExitCode, RunStatus


def plans(run):
    return [(plan["culprit"], plan["kind"], tuple(plan["replaced"])) for plan in run.events("plan")]


def assert_done(run):
    ending = run.run_to_end()
    assert (ending.status, ending.exit_code) == (RunStatus.COMPLETED, ExitCode.DONE), ending
    assert run.best == run.steps


def lost(run):
    return [fault.steps_lost for fault in run.supervisor.recorder.accounting.faults]


def assert_generations_grow(run):
    """Each has the next number, each rank of it is one process, and no process goes back to an old one."""
    generations = [record["generation"] for record in run.events("forming")]
    assert generations == list(range(1, len(generations) + 1))
    ranks = [process for process in run.processes.values() if process.rank >= 0]
    joined = Counter((number, process.rank) for process in ranks for number in process.seen)
    assert set(joined.values()) == {1}
    assert {number for number, _ in joined} == set(generations)
    for process in ranks:
        assert process.seen == sorted(set(process.seen)), process
