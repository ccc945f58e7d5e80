"""The journal of ten scripted runs, byte for byte: its names, fields and their order are a public contract.

``python -m tests.supervisor.test_golden_journal`` writes ``golden_journal.jsonl`` again. A change of that file is a
change of what readers of events.jsonl depend on. What varies (times of day, ids of runs, this host) is normalised.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from ddp_runner.kernel.rules.exits import StopReason
from ddp_runner.kernel.rules.faults import FaultKind
from ddp_runner.kernel.wire import events, messages
from ddp_runner.observe.journal import Journal
from tests.features.machines.simulated_nodes import NodesSimulation
from tests.supervisor.simulated import DRILL, SPARE, Simulation

GOLDEN = Path(__file__).with_name("golden_journal.jsonl")
SUMMARY = (
    "faults",
    "tolerated",
    "injected",
    "exact",
    "inexact_reasons",
    "exact_proof",
    "checkpoint",
)
_VARIES = (
    (re.compile(r'"utc":\s*"[^"]*"'), '"utc":"UTC"'),
    (re.compile(r'"mono_s":\s*[\d.]+'), '"mono_s":0'),
    (re.compile(r'"run_id":\s*"[^"]*"'), '"run_id":"RUN"'),
    (re.compile(re.escape(socket.gethostname())), "HOST"),
)


def calm(run):
    """Nothing happens."""


def killed(run):
    """One of three, and the zygote and the spare with it later on."""
    run.to_step(12)
    run.kill(1)
    run.to_step(40)
    run.kill(-2)
    run.run_until(lambda: run.rank(SPARE))
    run.kill(SPARE)


def raised(run):
    """A rank raises, with a traceback that names a secret; another hangs."""
    run.to_step(12)
    run.fail(2)
    run.to_step(30)
    run.freeze(0)


def reported(run):
    """All that a rank reports of itself while it trains."""
    run.to_step(5)
    rank, other = run.rank(0), run.rank(1)
    fault = run.fault(other, FaultKind.BAD_SAMPLE, "sample 7 cannot be read")
    disk = run.fault(rank, FaultKind.STORAGE_FAILED, "no space left")
    lost = run.fault(other, FaultKind.COLLECTIVE_FAILED, "peer closed")
    reports = [
        (rank, events.Proved(rank=0, step=0, what="repeated")),
        (rank, events.TuningChanged(rank=0, step=5, action="smaller buckets", inexact_reason="",
                                      fault_free=True, tuning={"micro_batches": 2})),
        (other, events.TuningChanged(rank=1, step=5, action="", inexact_reason="kernels by timing")),
        (rank, events.FaultTolerated(rank=0, fault=disk, action="training continues")),
        (other, events.FaultTolerated(rank=1, fault=lost, action="it is there again")),
        (other, events.RepairedInPlace(rank=1, fault=fault, action="another sample", seconds=0.123456,
                                         steps_lost=2, inexact_reason="a sample was replaced")),
        (other, messages.Built(rank=1, stage=2, seconds=0.25)),
        (other, messages.Metrics(rank=1, step=5, values={"loss": 1.5, "step_s": 0.1})),
        (other, messages.LoaderWorkers(rank=1, pids=(7, 8))),
    ]  # fmt: skip
    for process, message in reports:
        run.send(process, message)
        run.pass_time(0.2)


def injected(run):
    """A rank says what is injected into it, and dies of that."""
    run.to_step(8)
    announced = events.Injected(rank=1, number=0, kind="kill", step=8, phase="forward")
    run.send(run.rank(1), announced)
    run.pass_time(0.1)
    run.kill(1)


def drilled(run):
    """One drill passes, one finds a difference, one has a problem, one cannot begin, and one is cut short."""
    for step, answer in (
        (10, {}),
        (30, {"differs": "layer.weight"}),
        (50, {"text": "it could not read its part"}),
        (70, None),
        (90, {"cut": True}),
    ):
        run.to_step(step)
        problem = "memory is short" if answer is None else ""
        part = messages.DrillPart(rank=0, step=step, part="state", problem=problem)
        run.send(run.rank(0), part)
        run.send(run.rank(1), messages.DrillPart(rank=1, step=step, part="share"))
        if answer is None:
            continue
        run.run_until(lambda: run.rank(DRILL))
        if "cut" in answer:
            run.kill(2)
            continue
        process = run.rank(DRILL)
        kind = events.DrillSkipped if "text" in answer else events.Drill
        run.send(process, kind(rank=1, step=step, **answer))
        run._end(process, exit_code=0)


def stopped(run):
    """A checkpoint is asked for, and then a rank alone gets the signal that stops the run."""
    run.to_step(7)
    run.supervisor.ask_save()
    run.to_step(15)
    asked = events.StopSignalAtRank(rank=1, reason=StopReason.PREEMPTED)
    run.send(run.rank(1), asked)


def given_up(run):
    """The budget is spent: who is left saves alone; one could not."""
    run.to_step(12)
    run.kill(1)
    run.to_step(17)
    run.alone_refusal = ("a full disk", True)
    run.kill(2)


def cut(run):
    """Collectives that end in silence: an abort in two phases; all die, and a checkpoint is read."""
    run.to_step(12)
    run.kill(2)
    run.to_step(33)
    run.kill(0, 1, 2, 3)


def on_machines(run):
    """Reports and losses on another machine: of a rank, and of all of it."""
    run.to_step(10)
    fault = run.fault(run.rank(3), FaultKind.NON_FINITE, "loss is nan")
    run.send(run.rank(3), events.FaultTolerated(rank=3, fault=fault, action="skipped"))
    run.send(run.rank(2), events.RepairedInPlace(rank=2, fault=fault, action="again", seconds=0.5))
    run.pass_time(0.5)
    run.fail(3)
    run.to_step(30)
    machine = run.followers[0]
    machine.kill()
    run.start(machine)


RUNS = {
    "calm": (calm, {"stage_ends": (15, 30)}),
    "killed": (killed, {"steps": 100}),
    "raised": (raised, {"hang_min_s": 0.5}),
    "reported": (reported, {"steps": 40}),
    "injected": (
        injected,
        {
            "steps": 30,
            "run_options": {
                "inject": (
                    "kill:rank=1,step=8",
                    "random:mtbf_s=0.3,kinds=kill,times=1",
                )
            },
        },
    ),
    "drilled": (drilled, {"steps": 120}),
    "stopped": (stopped, {}),
    "given_up": (given_up, {"max_restarts": 1}),
    "cut": (cut, {"silent": True, "ranks": 4, "steps": 60}),
    "on_machines": (on_machines, {"steps": 60}),
}


@contextmanager
def simulated(name, folder):
    script, options = RUNS[name]
    run = NodesSimulation(folder, **options) if name == "on_machines" else Simulation(**options)
    try:
        script(run)
        yield run, run.run_to_end()
    finally:
        run.close()


def journal_of(name, folder):
    """The lines of a run: its journal as the file has it, and what summary and console have."""
    path = folder / "events.jsonl"
    with simulated(name, folder) as (run, ending):
        journal = Journal(path)
        for record in run.outputs.written:
            event, cause, fields = record["event"], record["cause"], dict(record)
            del fields["event"], fields["cause"]
            # The simulated outputs count from 1.
            journal.write(event, cause=None if cause in (None, -1) else cause - 1, **fields)
        journal.close()
        said = [f"{level} {text}" for level, text in run.outputs.said]
        summary = asdict(run.summary(ending))
    lines = path.read_text().splitlines()
    kept = {key: summary[key] for key in SUMMARY}
    lines += [json.dumps({"summary": kept}, default=str), json.dumps({"said": said})]
    for pattern, instead in _VARIES:
        lines = [pattern.sub(instead, line) for line in lines]
    return lines


def written():
    """What the golden file has of each run."""
    found = {}
    for line in GOLDEN.read_text().splitlines():
        if line.startswith("run "):
            found[line.removeprefix("run ")] = lines = []
        else:
            lines.append(line)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_the_journal_of_a_scripted_run_is_as_it_was(name, tmp_path):
    """Names, fields and order of each line, and what summary and console make of the same events."""
    assert journal_of(name, tmp_path) == written()[name]


def main():
    """Write the golden file again."""
    with GOLDEN.open("w") as golden:
        for name in RUNS:
            with tempfile.TemporaryDirectory() as folder:
                golden.write("\n".join([f"run {name}", *journal_of(name, Path(folder)), ""]))


if __name__ == "__main__":
    sys.exit(main())
