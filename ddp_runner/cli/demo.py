"""``demo``: trains twice, once in peace and once under faults, and compares the weights.

The faults are those of ``--inject``, so they come from the operating system or from inside a real
rank; everything told afterwards is read from the journal of the run.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_runner.cli.arguments import parse_small
from ddp_runner.cli.repairs import read_journal, read_repairs, show_table
from ddp_runner.core.exits import ExitCode
from ddp_runner.core.faults import BadInputError
from ddp_runner.launcher import RunResult, launch

if TYPE_CHECKING:
    from types import FrameType

NPROC = ("--nproc-per-node", "-n")
KEEP = "--keep"
RANKS_MIN, RANKS_MAX = 2, 8
HELP = f"""Usage:  ./launch_training.sh demo [-n N] [--keep]

Trains a small model twice on the CPU, in a temporary folder: once in peace,
and once while ranks are killed, stopped and crashed, and loader workers are
killed and stopped. Ends with a table of the faults, and says whether both runs
ended with the same weights, bit for bit: exit 0 if so, 1 if not. Takes about
half a minute on two cores. Ctrl-C ends it and removes the folder.

  -n, --nproc-per-node N    ranks, {RANKS_MIN} to {RANKS_MAX} [2]
      --keep                keep the folder: logs and checkpoints of both runs"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the demo does. ``faults``: (kind, phase) in order, ``fault_interval_steps`` apart."""

    world_size: int = 2
    steps: int = 320
    fault_interval_steps: int = 40
    faults: tuple[tuple[str, str], ...] = (
        ("kill", "reduce"),
        ("kill", "commit"),
        ("raise", "forward"),
        ("exit", "backward"),
        ("loader_kill", "data"),
        ("loader_stop", "data"),
        ("stop", "forward"),
    )

    @property
    def injections(self) -> list[str]:
        """The faults as specs of ``--inject``, on one rank after the other."""
        return [
            f"{kind}:rank={number % self.world_size},step={number * self.fault_interval_steps},"
            f"phase={phase}"
            for number, (kind, phase) in enumerate(self.faults, start=1)
        ]


def run(words: Sequence[str]) -> int:
    """Show it; 0 if the weights are identical. Raises BadInputError."""
    arguments = parse_small(words, valued=(NPROC,), switches=(KEEP,))
    if arguments.wants_help:
        print(HELP)
        return ExitCode.DONE
    text = arguments.values.get(NPROC[0], str(RANKS_MIN))
    if not (text.isdecimal() and RANKS_MIN <= int(text) <= RANKS_MAX):
        raise BadInputError(
            NPROC[0],
            text,
            f"must be {RANKS_MIN} to {RANKS_MAX}: what is left of a world repairs it",
        )
    return perform(Script(world_size=int(text)), keep=KEEP in arguments.switches)


def perform(script: Script, *, keep: bool) -> int:
    """Train twice in a temporary folder and compare; the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="ddp_runner_demo_"))
    kept = keep
    try:
        with _ended_by_signals():
            exit_code = _train_twice(script, folder)
        kept = keep or exit_code is ExitCode.FAILED
    except KeyboardInterrupt:
        exit_code = ExitCode.INTERRUPTED
    finally:
        if not kept:
            shutil.rmtree(folder)
    if exit_code is ExitCode.INTERRUPTED:
        _say("\ndemo: interrupted; everything it started has ended")
    if kept:
        _say(f"logs and checkpoints of both runs: {folder}")
    return exit_code


def _train_twice(script: Script, folder: Path) -> ExitCode:
    count = len(script.faults)
    _say(f"demo: {script.world_size} ranks train the same small model twice, {script.steps} steps")
    _say("\n1 of 2: in peace\n")
    peace = _train(script, folder / "peace", injections=[])
    if peace.summary is None or peace.exit_code != ExitCode.DONE:
        return _unfinished(peace)
    _say(f"\n2 of 2: {count} faults, one every {script.fault_interval_steps} steps\n")
    storm = _train(script, folder / "faults", injections=script.injections)
    if storm.summary is None or storm.exit_code != ExitCode.DONE:
        return _unfinished(storm)
    repairs = read_repairs(read_journal(storm.log_dir))
    show_table(repairs)
    identical = peace.summary["weights_sha256"] == storm.summary["weights_sha256"]
    complete = len([repair for repair in repairs if repair.noticed_s is not None]) == count
    for name, run_summary in (("in peace", peace.summary), ("under faults", storm.summary)):
        print(f" {name:<13} {run_summary['wall_s']:5.1f} s   weights {_digest(run_summary)}")
    if not complete:
        print(f" only {len(repairs)} of {count} faults are in the journal")
    _say(f" identical weights: {'yes' if identical else 'no'}")
    return ExitCode.DONE if identical and complete else ExitCode.FAILED


def _train(script: Script, folder: Path, *, injections: Sequence[str]) -> RunResult:
    """One run as a child process; its output, live on a terminal, goes to ours."""
    arguments = [
        "--cpu",
        f"--log-dir={folder / 'logs'}",
        f"--checkpoint-dir={folder / 'checkpoints'}",
        f"--max-steps={script.steps}",
        "--resume=none",
        *("model.vocab_size=64", "model.dataset_size=20000", "model.seq_len=64"),
        *("model.hidden_size=64", "model.num_layers=2", "model.num_heads=2", "model.dropout=0.1"),
        *("data.batch_size=16", "data.num_workers=1"),
        *("optim.learning_rate=3e-3", "optim.warmup_steps=20"),
        *("checkpoint.save_every_steps=100", "log.evaluate_every_steps=0", "log.log_interval=10"),
        *(f"--inject={spec}" for spec in injections),
    ]
    return launch("synthetic", nproc=script.world_size, arguments=arguments)


def _unfinished(result: RunResult) -> ExitCode:
    """A run that did not train to its end: stopped by a signal, or failed, which it has told."""
    if result.exit_code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED):
        return ExitCode.INTERRUPTED
    _say(f"demo: that run ended with exit code {result.exit_code}")
    return ExitCode.FAILED


def _digest(summary: Mapping[str, Any]) -> str:
    return str(summary["weights_sha256"])[:16]


def _say(text: str) -> None:
    print(text)
    sys.stdout.flush()  # what follows is often a child's, on the same descriptor


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the block as Ctrl-C does; an ignored SIGHUP stays ignored."""
    numbers = [signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt
